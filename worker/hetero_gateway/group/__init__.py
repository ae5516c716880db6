"""The group of ranks: who owns what, how the ranks become a group, and what ends it.

Layer between the gRPC servers and the engine; it knows asyncio and protobuf, not gRPC. A rank is a RankLink here,
whatever carries its messages.

    settings       what formation needs from the spec    roster       which rank holds which place
    placement      places, and shares to be checked      rank_link    one rank's stream
    planner        one plan, decided once and kept       heartbeats   who has fallen silent
    decision       what ranks measured, and the plan     epoch        one epoch, from FormGroup to its end
    exchange_kind  what ranks exchange by                executor     StepPlans and commands over the links
    cache_size     KV blocks from budgets                warm_up      the first plans
    support        what this version can do              formation    epochs, one after another
    topology       what Admin.GetTopology tells          restarts     whether and when the next epoch may begin
    placement_report  predicted and measured             verbs        reset, sleep, wake, drain, profile
    experts        which experts to move                 rebalancing  when to move them by itself
"""
