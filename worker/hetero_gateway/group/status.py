"""Status of a group for Admin.GetTopology, as its roster and its epoch show it now."""

from __future__ import annotations

from hetero_api.group_state import GroupState
from hetero_api.v1 import admin_pb2, ranks_pb2
from hetero_gateway.group.cache_size import layout_of
from hetero_gateway.group.epoch import Epoch
from hetero_gateway.group.placement import Placement
from hetero_gateway.group.roster import Roster
from hetero_gateway.group.settings import ExpectedPlace, GroupSettings


def describe_ranks(
    settings: GroupSettings, roster: Roster, epoch: Epoch | None, placement: Placement | None
) -> list[admin_pb2.RankStatus]:
    """Return the status of all ranks, in rank order, also of those that have not joined."""
    shards = placement.plan.to_proto().ranks if placement else [ranks_pb2.RankShard()] * len(settings.places)
    ranks = [_describe(place, roster, epoch, shards[place.rank]) for place in settings.places]
    if placement is not None and epoch is not None:
        for status, heard in ((ranks[rank], heard) for rank, heard in sorted(epoch.heartbeats.items())):
            _describe_steps(status, heard, placement)
    return ranks


def _describe_steps(status: admin_pb2.RankStatus, heard: ranks_pb2.Heartbeat, placement: Placement) -> None:
    """Write the steps of a rank's last heartbeat into its status, and what the placement says about them."""
    rank, decode = status.place.rank, heard.decode
    status.decode.CopyFrom(decode)
    status.prefill.CopyFrom(heard.prefill)
    status.memory_bandwidth = placement.hardware.ranks[rank].speeds.memory_bandwidth
    if decode.steps:
        read = placement.cost_model.read_bytes(placement.plan, rank, rows=decode.rows / decode.steps)
        status.decode_read_bytes = read * decode.steps


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
    heard = None if epoch is None else epoch.heartbeats.get(place.rank)
    if heard is not None and heard.HasField("progress"):
        status.progress.CopyFrom(heard.progress)
    if epoch is not None and epoch.phase is not GroupState.FORMING:
        status.shard.CopyFrom(shard)
        status.weight_bytes, status.kv_bytes = epoch.weight_bytes.get(place.rank, 0), epoch.kv_bytes.get(place.rank, 0)
        if epoch.loaded:
            loaded = epoch.loaded[place.rank]
            status.load_s = loaded.load_s
            status.graph_bytes = heard.graph_bytes if heard is not None else 0
            status.graph_reserve_bytes = loaded.graph_reserve_bytes
            status.kernels.extend(loaded.kernels)
            status.weight_formats.extend(loaded.weight_formats)
            status.weight_notes.extend(loaded.weight_notes)
            if loaded.HasField("local_memory_percent"):
                status.local_memory_percent = loaded.local_memory_percent
    return status
