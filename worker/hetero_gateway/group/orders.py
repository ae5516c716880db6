"""The orders that begin an epoch: which exchange the ranks form, and what they load. Pure functions."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from typing import Final

from hetero_api.sharding import ShardPlan
from hetero_api.spec import ExchangeKind, PlacementMode
from hetero_api.v1 import ranks_pb2
from hetero_gateway.group.errors import EpochEnded
from hetero_gateway.group.recovery import HEARTBEAT_INTERVAL_S
from hetero_gateway.group.roster import Member
from hetero_gateway.group.settings import GroupSettings
from hetero_placement.decision import Streaming

_FIELD: Final = "spec.exchange.kind"
_SEGMENT_RANDOM_BYTES: Final = 4


def form_orders(
    settings: GroupSettings, members: Sequence[Member], *, epoch: int, measures_times: bool
) -> Iterator[ranks_pb2.FormGroup]:
    """Yield each member's order to form the group, in rank order. Raises EpochEnded as `asked_exchange` does."""
    hellos = [member.hello for member in members]
    form = ranks_pb2.FormGroup(
        places=[
            ranks_pb2.RankPlace(
                rank=rank, pool=hello.pool, pod_name=hello.pod_name, host_id=hello.host_id, device=hello.device
            )
            for rank, hello in enumerate(hellos)
        ],
        measure_exchange=measures_times and len(hellos) > 1,
        dtype=settings.dtype if measures_times else "",
        measure_parts=measures_times and parts_decide(settings),
        store_address=hellos[0].store_address,
        exchange=asked_exchange(settings.spec.exchange.kind, hellos),
        segment_name=f"hetero-{settings.name}-{secrets.token_hex(_SEGMENT_RANDOM_BYTES)}-{epoch}",
        timeout_s=settings.spec.recovery.step_timeout_seconds,
        max_num_batched_tokens=settings.spec.engine.max_num_batched_tokens,
        max_num_seqs=settings.spec.engine.max_num_seqs,
        heartbeat_interval_s=HEARTBEAT_INTERVAL_S,
        quantization=settings.quantization,
    )
    for member in members:
        form.rank = member.rank
        yield form


def parts_decide(settings: GroupSettings) -> bool:
    """Return whether the plan depends on how fast each rank is with each part of the model.

    One rank has all of it. Host ranks of one kind get equal shares where the resource has every layer split over all
    ranks; what is left to decide follows from their rates. Experts are dealt, and moved, by what they cost.
    """
    places = settings.places
    alike = len({(place.pool, place.cores, place.is_gpu) for place in places}) == 1 and not places[0].is_gpu
    splits_all = settings.spec.placement.mode == PlacementMode.TENSOR and settings.config.experts is None
    return len(places) > 1 and not (alike and splits_all)


def load_order(
    settings: GroupSettings, plan: ShardPlan, streaming: Streaming | None = None, draft_plan: ShardPlan | None = None
) -> ranks_pb2.LoadModel:
    """Return the order, the same for all ranks, to load their shards of a plan, and share experts to be streamed.

    `draft_plan`: who owns what of the draft model or prediction head; None: there is none.
    """
    follows_states = settings.draft is not None and settings.draft.follows_states
    return ranks_pb2.LoadModel(
        dtype=settings.dtype,
        max_model_len=settings.max_model_len,
        cache_size_is_given=settings.spec.engine.kv_cache_memory_bytes is not None,
        shard_plan=plan.to_proto(),
        plan_key=settings.plan_key,
        device_memory_utilization=settings.spec.engine.gpu_memory_utilization,
        enforce_eager=settings.spec.engine.enforce_eager,
        batch_invariant=settings.spec.engine.batch_invariant,
        quantization=settings.quantization,
        kv_cache_dtype=settings.spec.kv_cache_dtype_in_force,
        expert_deferral=settings.spec.engine.expert_deferral,
        expert_buffer_bytes=0 if streaming is None else streaming.buffer_bytes,
        max_adapters=settings.spec.engine.adapters.max_loaded,
        max_adapter_rank=settings.spec.engine.adapters.max_rank,
        adapts_experts=settings.spec.engine.adapters.experts,
        draft_plan=None if draft_plan is None or follows_states else draft_plan.to_proto(),
        has_prediction_head=follows_states,
    )


def asked_exchange(kind: ExchangeKind, hellos: Sequence[ranks_pb2.Hello]) -> ranks_pb2.ExchangeKind.ValueType:
    """Return the exchange to build, by the resource and by where the ranks are.

    Ranks that see one /dev/shm under one kernel report the same host id; only these can share memory. They may find
    that they cannot, so the exchange that they build may be less. Raises EpochEnded, permanent, where resource and
    hosts contradict each other.
    """
    if kind == ExchangeKind.GLOO:
        return ranks_pb2.EXCHANGE_KIND_GLOO
    if kind == ExchangeKind.TCP:
        return ranks_pb2.EXCHANGE_KIND_TCP
    hosts = {hello.host_id for hello in hellos}
    if len(hosts) == 1 and "" not in hosts:
        return ranks_pb2.EXCHANGE_KIND_SHM
    if kind == ExchangeKind.SHARED_MEMORY:
        places = ", ".join(f"{hello.pod_name} on {hello.host_id or 'none'}" for hello in hellos)
        raise EpochEnded(
            f"{_FIELD}: SharedMemory, but the ranks have no /dev/shm in common ({places}); put them on one node and "
            "give them one with spec.topology.colocate or spec.exchange.hostPath, or use Auto",
            permanent=True,
        )
    return ranks_pb2.EXCHANGE_KIND_TCP


def built_exchange(
    kind: ExchangeKind, formed: Sequence[ranks_pb2.Formed]
) -> tuple[ranks_pb2.ExchangeKind.ValueType, str]:
    """Return the exchange that stands and, if it is not the one asked for, why. Raises EpochEnded if it will not do."""
    kinds = {answer.exchange for answer in formed}
    if len(kinds) != 1:
        names = ", ".join(map(ranks_pb2.ExchangeKind.Name, sorted(kinds)))
        raise EpochEnded(f"the ranks built different exchanges: {names}")
    built, reason = kinds.pop(), next((answer.exchange_reason for answer in formed if answer.exchange_reason), "")
    if kind == ExchangeKind.SHARED_MEMORY and built != ranks_pb2.EXCHANGE_KIND_SHM:
        raise EpochEnded(f"{_FIELD}: SharedMemory, which the ranks could not build: {reason}", permanent=True)
    return built, reason
