"""Counts, places and speeds: the status without its conditions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from hetero_api.contract import LABEL_NAME
from hetero_api.cpu_list import format_cpu_list
from hetero_api.spec import HeteroInferenceSpec
from hetero_api.status import (
    MAX_OPTION_NAME_LENGTH,
    MAX_OPTIONS,
    PlacedRank,
    PlacementOptionStatus,
    PlacementStatus,
    PoolStatus,
    ShareStatus,
)
from hetero_api.v1.admin_pb2 import PlacementOption, PlacementReport, RankStatus
from hetero_api.v1.ranks_pb2 import EXCHANGE_KIND_GLOO, EXCHANGE_KIND_SHM, EXCHANGE_KIND_TCP, UnitRange
from hetero_operator.reconcile.inventory import ObjectKey
from hetero_operator.reconcile.model import GatewayReport
from hetero_operator.reconcile.status.findings import is_pinned, local_memory_percent
from hetero_operator.reconcile.status.pods import ExpectedPod, node_of
from hetero_operator.reconcile.status.situation import FORMED_STATES, Situation, is_rank_ready
from hetero_operator.reconcile.status.text import bounded, steady

_EXCHANGES: Final = {EXCHANGE_KIND_SHM: "shm", EXCHANGE_KIND_TCP: "tcp", EXCHANGE_KIND_GLOO: "gloo"}
STEADY_WITHIN: Final = 0.1
"""Share by which a speed has to differ from the reported one to be reported again."""


def figures(situation: Situation, *, is_serving: bool) -> dict[str, Any]:
    """Return the fields of HeteroInferenceStatus but its conditions."""
    reported = {
        "observed_generation": situation.generation,
        "replicas": int(bool(situation.live_pods)),
        "ready_replicas": int(is_serving),
        "selector": f"{LABEL_NAME}={situation.names.resource}",
        "restarts": situation.restarts,
        "endpoint": _endpoint(situation),
    }
    if situation.basis is None:
        return reported
    spec, revisions = situation.basis.spec, situation.basis.revisions
    ready = sum(pod.num_ranks for pod in situation.expected if is_rank_ready(situation, pod))
    reported |= {
        "revision": revisions.ranks,
        "gateway_revision": revisions.gateway,
        "world_size": spec.world_size,
        "ranks": f"{ready}/{spec.world_size}",
        "ready_ranks": ready,
        "pools": _pools(situation, spec),
    }
    if situation.runs:
        reported |= situation.from_answer(lambda answer: _of_answer(situation, answer)) or {}
    return reported


def _of_answer(situation: Situation, answer: GatewayReport) -> dict[str, Any]:
    placed = [_placed(situation, pod, rank) for pod in situation.expected for rank in situation.reported(pod)]
    return {
        "epoch": answer.group.epoch,
        "model_source": steady(answer.group.model_source),
        "placements": [item for item in placed if item is not None],
        "placement": _placement(situation, answer),
    }


def _placement(situation: Situation, answer: GatewayReport) -> PlacementStatus:
    if answer.state not in FORMED_STATES:
        return PlacementStatus()
    placement = answer.group.placement
    measured, ratio = _steady_speed(placement, situation.stored.placement)
    return PlacementStatus(
        mode=answer.group.placement_mode,
        exchange=_EXCHANGES.get(answer.group.exchange, ""),
        exchange_reason=steady(answer.group.exchange_reason),
        predicted_tokens_per_second=_rounded(placement.predicted_tokens_per_second),
        measured_tokens_per_second=measured,
        prediction_ratio=ratio,
        speculation_gain=_steady_gain(answer.group.speculation_gain, situation.stored.placement.speculation_gain),
        reason=bounded(" ".join(placement.reason.split())),
        options=[_option(option) for option in _foremost(placement.options)],
    )


def _foremost(options: Sequence[PlacementOption]) -> list[PlacementOption]:
    """Return as many options as the status holds, in their order, the chosen one among them."""
    chosen = [option for option in options if option.chosen][:1]
    others = [option for option in options if not option.chosen][: MAX_OPTIONS - len(chosen)]
    return [option for option in options if option in chosen or option in others][:MAX_OPTIONS]


def _option(option: PlacementOption) -> PlacementOptionStatus:
    return PlacementOptionStatus(
        name=bounded(option.name, MAX_OPTION_NAME_LENGTH),
        chosen=option.chosen,
        predicted_tokens_per_second=_rounded(option.decode_tokens_per_second),
        predicted_prefill_tokens_per_second=_rounded(option.prefill_tokens_per_second),
        why_not=steady(option.why_not),
    )


def _steady_speed(placement: PlacementReport, reported: PlacementStatus) -> tuple[float | None, float | None]:
    """Return the measured speed and its ratio to the prediction: the last ones while they are about right.

    Both at once: a person who divides one figure of the status by the other finds the third.
    """
    measured, ratio = placement.measured_tokens_per_second, placement.step_time_ratio
    if not (measured and ratio):
        return None, None
    known, predicted = reported.measured_tokens_per_second, reported.predicted_tokens_per_second
    is_same = predicted == _rounded(placement.predicted_tokens_per_second)
    if is_same and known and reported.prediction_ratio and abs(measured - known) <= STEADY_WITHIN * known:
        return known, reported.prediction_ratio
    return _rounded(measured), round(ratio, 2)


def _steady_gain(gain: float, reported: float | None) -> float | None:
    """Return the gain by proposed tokens: the last one while it is about right."""
    return reported if reported and abs(gain - reported) <= STEADY_WITHIN * reported else round(gain, 2) or None


def _rounded(speed: float) -> float | None:
    """Round to two digits; a speed of 0 is not known."""
    return float(f"{speed:.2g}") if speed else None


def _pools(situation: Situation, spec: HeteroInferenceSpec) -> list[PoolStatus]:
    return [
        PoolStatus(
            name=pool.name,
            desired=pool.ranks,
            scheduled=sum(pod.num_ranks for pod in pods if _has_node(situation, pod)),
            ready=sum(pod.num_ranks for pod in pods if is_rank_ready(situation, pod)),
            pinned=sum(is_pinned(rank) for pod in pods for rank in situation.reported(pod)),
        )
        for pool in spec.pools
        for pods in [[pod for pod in situation.expected if pod.pool == pool.name]]
    ]


def _has_node(situation: Situation, expected: ExpectedPod) -> bool:
    pod = situation.rank_pods.get(expected.name)
    return pod is not None and not situation.is_outdated(pod) and bool(node_of(pod))


def _placed(situation: Situation, expected: ExpectedPod, rank: RankStatus) -> PlacedRank | None:
    """Return where a rank is, None while the gateway does not talk to it."""
    pod = situation.rank_pods.get(expected.name)
    if not rank.joined or pod is None or rank.place.pod_name != expected.name:
        return None
    shard, device = rank.shard, rank.place.device
    shares = ShareStatus(
        kv_heads=_largest(layer.kv_heads for layer in shard.layers),
        mlp_columns=_largest(layer.mlp_columns for layer in shard.layers),
        experts=_largest(layer.experts for layer in shard.layers),
        expert_columns=_largest(layer.expert_columns for layer in shard.layers),
        vocabulary_rows=_largest([shard.embedding_rows, shard.head_rows]),
        weight_bytes=rank.weight_bytes,
        kv_bytes=rank.kv_bytes,
    )
    return PlacedRank(
        rank=rank.place.rank,
        pool=expected.pool,
        pod=expected.name,
        node=node_of(pod),
        device=device.name[:128],
        numa_nodes=device.numa_nodes[:64] or None,
        cpus=format_cpu_list(device.cpus)[:1024],
        local_memory_percent=local_memory_percent(rank),
        shares=shares,
    )


def _largest(ranges: Iterable[UnitRange]) -> int:
    return max((units.end - units.begin for units in ranges), default=0)


def _endpoint(situation: Situation) -> str:
    """Return the address of the Service that clients dial, once there is one."""
    key = ObjectKey("", "Service", situation.names.resource)
    failed = {failure.ref.name for failure in situation.outcome.failures if failure.ref.kind == key.kind}
    applied = [item for item in situation.plan.apply if item["metadata"]["name"] not in failed]
    written = {ObjectKey.from_object(item): item for item in applied}
    service = written.get(key) or situation.inventory.own.get(key)
    if service is None:
        return ""
    namespace = situation.observed.resource["metadata"]["namespace"]
    domain = situation.observed.options.cluster_domain
    return f"{key.name}.{namespace}.svc.{domain}:{service['spec']['ports'][0]['port']}"
