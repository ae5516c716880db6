"""Placement of pods on nodes: selectors, tolerations, scheduler, priority, and the domain that ranks share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from hetero_api.spec import HeteroInferenceSpec, PoolSpec
from hetero_api.spec_cluster import SpreadPolicy, Toleration
from hetero_operator.reconcile.manifests.optional_kinds import rank_scheduler
from hetero_operator.reconcile.manifests.rendering import Rendering, rank_selector

_NODE_TAINTS: Final = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
_NODE_TAINT_SECONDS: Final = 60
"""Kubernetes' own default is 300: too long for a group that stands still without the lost pod."""
_FULL_WEIGHT: Final = 100


def rank_scheduling(rendering: Rendering, pool: PoolSpec) -> dict[str, Any]:
    """Return the scheduling fields of a rank pod's spec."""
    spec = rendering.spec
    fields = _fields(
        spec,
        scheduler=rank_scheduler(spec),
        node_selector={**spec.scheduling.node_selector, **pool.scheduling.node_selector},
        tolerations=[*spec.scheduling.tolerations, *pool.scheduling.tolerations],
    )
    affinity = _shared_domain(rendering)
    return {**fields, "affinity": affinity} if affinity else fields


def gateway_scheduling(spec: HeteroInferenceSpec) -> dict[str, Any]:
    """Return the scheduling fields of the gateway pod's spec; none of those for ranks together."""
    scheduling = spec.scheduling
    return _fields(
        spec,
        scheduler=scheduling.scheduler_name,
        node_selector=scheduling.node_selector,
        tolerations=scheduling.tolerations,
    )


def _fields(
    spec: HeteroInferenceSpec,
    *,
    scheduler: str | None,
    node_selector: dict[str, str],
    tolerations: Sequence[Toleration],
) -> dict[str, Any]:
    optional = {
        "schedulerName": scheduler,
        "priorityClassName": spec.scheduling.priority_class_name,
        "nodeSelector": dict(node_selector),
    }
    present = {key: value for key, value in optional.items() if value}
    return {**present, "tolerations": _with_node_taints(tolerations)}


def _with_node_taints(tolerations: Sequence[Toleration]) -> list[dict[str, Any]]:
    """Return the user's tolerations, and short ones for lost nodes where the user has none for these."""
    own = [item.model_dump(mode="json", by_alias=True, exclude_none=True) for item in tolerations]
    added = [
        {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": _NODE_TAINT_SECONDS}
        for key in _NODE_TAINTS
        if not any(_covers(item, key) for item in tolerations)
    ]
    return [*own, *added]


def _covers(toleration: Toleration, taint: str) -> bool:
    return toleration.key in (None, taint) and toleration.effect in (None, "NoExecute")


def _shared_domain(rendering: Rendering) -> dict[str, Any] | None:
    """Return the affinity of every rank to all ranks of the resource."""
    topology = rendering.spec.scheduling.topology
    if topology is None:
        return None
    term = {"topologyKey": topology.key, "labelSelector": {"matchLabels": rank_selector(rendering)}}
    if topology.policy == SpreadPolicy.REQUIRED:
        return {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
    preferred = {"weight": _FULL_WEIGHT, "podAffinityTerm": term}
    return {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [preferred]}}
