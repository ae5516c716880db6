"""Status of a group for Admin.GetTopology, as its roster and its epoch show it now."""

from __future__ import annotations

from hetero_api.group_state import GroupState
from hetero_api.sharding import ShardPlan
from hetero_api.v1 import admin_pb2, ranks_pb2
from hetero_gateway.group.cache_size import layout_of
from hetero_gateway.group.epoch import Epoch
from hetero_gateway.group.roster import Roster
from hetero_gateway.group.settings import ExpectedPlace, GroupSettings


def describe_ranks(
    settings: GroupSettings, roster: Roster, epoch: Epoch | None, plan: ShardPlan | None
) -> list[admin_pb2.RankStatus]:
    """Return the status of all ranks, in rank order, also of those that have not joined."""
    shards = plan.to_proto().ranks if plan is not None else [ranks_pb2.RankShard()] * len(settings.places)
    return [_describe(place, roster, epoch, shards[place.rank]) for place in settings.places]


def describe_epoch(settings: GroupSettings, epoch: Epoch, answer: admin_pb2.GetTopologyResponse) -> None:
    """Write what the epoch knows of the group as a whole into `answer`."""
    answer.exchange = epoch.exchange
    answer.exchange_reason = epoch.exchange_reason
    answer.asleep.extend(sorted(epoch.asleep))
    cache = epoch.cache
    if cache.num_blocks:
        answer.block_size, answer.num_blocks = cache.block_size, cache.num_blocks - 1
        answer.cache_layout = layout_of(cache, settings)


def _describe(
    place: ExpectedPlace, roster: Roster, epoch: Epoch | None, shard: ranks_pb2.RankShard
) -> admin_pb2.RankStatus:
    status = admin_pb2.RankStatus(place=ranks_pb2.RankPlace(rank=place.rank, pool=place.pool, pod_name=place.pod_name))
    member = roster.holder_of(place.rank)
    if member is not None:
        status.joined = True
        status.place.pod_name = member.hello.pod_name or place.pod_name
        status.place.host_id = member.hello.host_id
        status.place.device.CopyFrom(member.hello.device)
        status.pin_message = member.hello.device.pin_message
    if epoch is not None and epoch.phase is not GroupState.FORMING:
        status.shard.CopyFrom(shard)
        status.weight_bytes, status.kv_bytes = epoch.weight_bytes.get(place.rank, 0), epoch.kv_bytes.get(place.rank, 0)
        if epoch.loaded:
            loaded = epoch.loaded[place.rank]
            status.load_s = loaded.load_s
            status.graph_bytes = epoch.graph_bytes.get(place.rank, 0)
            status.graph_reserve_bytes = loaded.graph_reserve_bytes
            status.kernels.extend(loaded.kernels)
            status.weight_formats.extend(loaded.weight_formats)
            status.weight_notes.extend(loaded.weight_notes)
            if loaded.HasField("local_memory_percent"):
                status.local_memory_percent = loaded.local_memory_percent
    return status
