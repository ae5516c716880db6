"""The group of ranks: who owns what, how the ranks become a group, and what ends it.

Layer between the gRPC servers and the engine; it knows asyncio and protobuf, not gRPC. A rank is a RankLink here,
whatever carries its messages.

    placement      places and the ShardPlan              roster       which rank holds which place
    apportionment  whole units by largest remainder      epoch        one epoch, from FormGroup to its end
    support        what this version can do              executor     StepPlans and commands over the links
    cache_size     KV blocks from budgets                warm_up      the first plans
    settings       what formation needs from the spec    heartbeats   who has fallen silent
    rank_link      one rank's stream                     formation    epochs, one after another
    topology       what Admin.GetTopology tells          restarts     whether and when the next epoch may begin
    verbs          reset, sleep, wake, drain, profile
"""
