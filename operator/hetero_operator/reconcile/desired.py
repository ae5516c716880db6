"""Everything that a resource owns, in the order that it is made in: what a pod needs is there before the pod."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from hetero_operator.reconcile.inventory import CLAIM_TEMPLATE, CONFIG_MAP, Inventory
from hetero_operator.reconcile.manifests.accounts import accounts
from hetero_operator.reconcile.manifests.claims import claim_templates
from hetero_operator.reconcile.manifests.config import config_map
from hetero_operator.reconcile.manifests.disruption import disruption_budgets
from hetero_operator.reconcile.manifests.gang import pod_groups
from hetero_operator.reconcile.manifests.gateway import deployment
from hetero_operator.reconcile.manifests.monitoring import pod_monitors
from hetero_operator.reconcile.manifests.network import network_policies
from hetero_operator.reconcile.manifests.rendering import Rendering
from hetero_operator.reconcile.manifests.services import services
from hetero_operator.reconcile.manifests.statefulset import statefulset
from hetero_operator.reconcile.templates import templates_in_force


def desired_objects(rendering: Rendering, inventory: Inventory, *, held: Collection[str]) -> list[dict[str, Any]]:
    """All objects but the group's Secret; the pools named in `held` get no pods."""
    templates = templates_in_force(rendering, inventory)
    stored = inventory.named(CONFIG_MAP, rendering.names.config(rendering.revisions.gateway))
    return [
        *accounts(rendering),
        config_map(rendering, templates, stored),
        *network_policies(rendering),
        *services(rendering),
        *disruption_budgets(rendering),
        *claim_templates(rendering, {item["metadata"]["name"]: item for item in inventory.of_kind(CLAIM_TEMPLATE)}),
        *pod_groups(rendering),
        *(
            statefulset(rendering, pool, templates.ranks[pool.name], held=pool.name in held)
            for pool in rendering.spec.pools
        ),
        deployment(rendering, templates.gateway),
        *pod_monitors(rendering),
    ]
