"""The PodDisruptionBudget, where it is asked for: no rank may be evicted, because one takes the group with it."""

from __future__ import annotations

from typing import Any, Final

from hetero_api.contract import ROLE_RANK
from hetero_operator.reconcile.manifests.rendering import Rendering, manifest, rank_selector

_KINDS: Final = (("policy/v1", "PodDisruptionBudget"), ("policy/v1beta1", "PodDisruptionBudget"))
"""Newest first; both spell what we use alike."""


def disruption_budgets(rendering: Rendering) -> list[dict[str, Any]]:
    """The budget in the newest version that the cluster has; none when the user wants none."""
    kinds = [kind for kind in _KINDS if rendering.capabilities.has(*kind)]
    if not rendering.spec.disruption_budget.enabled or not kinds:
        return []
    spec = {"maxUnavailable": 0, "selector": {"matchLabels": rank_selector(rendering)}}
    return [manifest(rendering, kinds[0], rendering.names.ranks, component=ROLE_RANK, spec=spec)]
