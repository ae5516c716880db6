"""Pod templates in force: those that a revision was started with, not those that this version would render.

    1  the ConfigMap of the wanted gateway revision keeps them
    2  for ranks: any ConfigMap of their revision does (only the gateway's fields changed)
    3  the live StatefulSet or Deployment has them, when it is of the wanted revision (somebody deleted the ConfigMap)
    4  they are rendered: the revision is new

So an upgrade of the operator, with other images and other manifests, restarts no pod; a new revision gets all of it.
Ranks and a gateway of different versions refuse one another: a gateway that is created again beside ranks that stay is
rendered with the options that these were rendered with, its image among them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hetero_api.contract import LABEL_GATEWAY_REVISION, LABEL_REVISION
from hetero_api.spec import PoolSpec
from hetero_operator.reconcile.inventory import CONFIG_MAP, DEPLOYMENT, STATEFUL_SET, Inventory, template_label_of
from hetero_operator.reconcile.manifests.config import PodTemplates, stored_templates
from hetero_operator.reconcile.manifests.gateway import gateway_template
from hetero_operator.reconcile.manifests.rank_pod import rank_template
from hetero_operator.reconcile.manifests.rendering import Rendering
from hetero_operator.reconcile.model import Object


def templates_in_force(rendering: Rendering, inventory: Inventory) -> PodTemplates:
    """Return the pod templates of the wanted revisions."""
    names, revisions = rendering.names, rendering.revisions
    config = inventory.named(CONFIG_MAP, names.config(revisions.gateway)) or inventory.config_of_ranks(revisions.ranks)
    if config is None:
        return _without_config(rendering, inventory)
    stored = stored_templates(config)
    if config["metadata"]["name"] == names.config(revisions.gateway):
        return stored
    gateway = _live_gateway(rendering, inventory) or gateway_template(replace(rendering, options=stored.options))
    return PodTemplates(ranks=stored.ranks, gateway=gateway, options=stored.options)


def _without_config(rendering: Rendering, inventory: Inventory) -> PodTemplates:
    return PodTemplates(
        ranks={pool.name: _rank_template(rendering, pool, inventory) for pool in rendering.spec.pools},
        gateway=_live_gateway(rendering, inventory) or gateway_template(rendering),
        options=rendering.options,
    )


def _rank_template(rendering: Rendering, pool: PoolSpec, inventory: Inventory) -> Object:
    live = inventory.named(STATEFUL_SET, rendering.names.pool(pool.name), group="apps")
    if live is not None and template_label_of(live, LABEL_REVISION) == rendering.revisions.ranks:
        return _template_of(live)
    return rank_template(rendering, pool)


def _live_gateway(rendering: Rendering, inventory: Inventory) -> Object | None:
    live = inventory.named(DEPLOYMENT, rendering.names.gateway, group="apps")
    if live is not None and template_label_of(live, LABEL_GATEWAY_REVISION) == rendering.revisions.gateway:
        return _template_of(live)
    return None


def _template_of(workload: Object) -> Object:
    """Return the pod template of a live workload, without the empty time that API servers put there."""
    template: dict[str, Any] = dict(workload["spec"]["template"])
    metadata = template["metadata"]
    template["metadata"] = {key: metadata[key] for key in ("labels", "annotations") if key in metadata}
    return template
