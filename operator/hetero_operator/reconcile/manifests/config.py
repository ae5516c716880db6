"""ServiceAccounts, Secret and ConfigMap of a group, and the pod templates that the ConfigMap keeps.

No pod of a group ever talks to the API server: its ServiceAccounts have no rights. Each revision has tokens of its own,
so a rank of an old revision can never join a new group.

The ConfigMap of a gateway revision holds the resource as the gateway reads it, and the pod templates of the revision.
It is made once and never changed. The manifest holds the fields that decide about revisions and no others: what changes
while everything runs (Effect.NONE) would make it wrong. The templates in force are those that a revision was started
with, not those that this version would render:

    1  the ConfigMap of the wanted gateway revision keeps them
    2  for ranks: any ConfigMap of their revision does (only the gateway's fields changed)
    3  the live StatefulSet or Deployment has them, when it is of the wanted revision (somebody deleted the ConfigMap)
    4  they are rendered: the revision is new

So an upgrade of the operator, with other images and other manifests, restarts no pod; a new revision gets all of it.
Ranks and a gateway of different versions refuse one another: a gateway that is created again beside ranks that stay is
rendered with the options that these were rendered with, its image among them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Any, Final

import yaml

from hetero_api.contract import (
    ANNOTATION_RENEW_AFTER,
    API_VERSION,
    CONFIG_MANIFEST_KEY,
    CONFIG_TEMPLATES_KEY,
    GROUP,
    KIND,
    LABEL_GATEWAY_REVISION,
    LABEL_REVISION,
    ROLE_GATEWAY,
    ROLE_RANK,
    SECRET_ADMIN_TOKEN_KEY,
    SECRET_GROUP_TOKEN_KEY,
)
from hetero_api.effects import fields_with
from hetero_operator.reconcile.inventory import (
    CONFIG_MAP,
    DEPLOYMENT,
    SECRET,
    STATEFUL_SET,
    Inventory,
    template_label_of,
)
from hetero_operator.reconcile.manifests.gateway import gateway_template
from hetero_operator.reconcile.manifests.rank_pod import rank_template
from hetero_operator.reconcile.manifests.rendering import Rendering, manifest
from hetero_operator.reconcile.model import NewSecret, Object, RenderOptions
from hetero_operator.reconcile.rank_sets import RankSet, rank_sets
from hetero_operator.reconcile.revision import GATEWAY_EFFECTS
from hetero_operator.reconcile.status.text import parsed_time, timestamp

_KIND: Final = ("v1", "ConfigMap")
_ACCOUNT: Final = ("v1", "ServiceAccount")
RENEWED_AFTER: Final = timedelta(days=10)
"""Age of certificates at which new ones are made; they last for three times as long."""


@dataclass(frozen=True, slots=True)
class PodTemplates:
    """Pod templates of one gateway revision."""

    ranks: Mapping[str, Object]
    """By the name of their set."""
    gateway: Object
    options: RenderOptions
    """Options that the rank templates were rendered with: a new gateway beside them has to fit to them."""


def config_map(rendering: Rendering, templates: PodTemplates, stored: Object | None) -> dict[str, Any]:
    """Return the ConfigMap; `stored` is the existing one, whose content is kept as it is."""
    data = _data(rendering, templates) if stored is None else dict(stored["data"])
    labels = {LABEL_REVISION: rendering.revisions.ranks, LABEL_GATEWAY_REVISION: rendering.revisions.gateway}
    return manifest(
        rendering, _KIND, rendering.names.config(rendering.revisions.gateway), component=ROLE_GATEWAY, labels=labels,
        immutable=True, data=data,
    )  # fmt: skip


def _data(rendering: Rendering, templates: PodTemplates) -> dict[str, str]:
    kept = {"ranks": dict(templates.ranks), "gateway": templates.gateway, "options": asdict(templates.options)}
    return {
        CONFIG_MANIFEST_KEY: yaml.safe_dump(resolved_resource(rendering), sort_keys=True, width=100),
        CONFIG_TEMPLATES_KEY: json.dumps(kept, sort_keys=True, separators=(",", ":")),
    }


def resolved_resource(rendering: Rendering) -> dict[str, Any]:
    """Return the resource as decoded YAML, without fields of Effect.NONE and without defaults.

    A gateway beside ranks that stay has their image, and knows no field that was added since.
    """
    spec = rendering.spec.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_defaults=True)
    kept = fields_with(spec, GATEWAY_EFFECTS)
    if "endpointPickerRef" in spec.get("router", {}):
        # Of no use to a gateway, but without it type InferencePool is not valid.
        kept["router"]["endpointPickerRef"] = spec["router"]["endpointPickerRef"]
    return {
        "apiVersion": f"{GROUP}/{API_VERSION}",
        "kind": KIND,
        "metadata": {"name": rendering.names.resource, "namespace": rendering.namespace},
        "spec": kept,
    }


def stored_templates(config: Object) -> PodTemplates:
    """Return the pod templates that a ConfigMap holds."""
    kept = json.loads(config["data"][CONFIG_TEMPLATES_KEY])
    known = {field.name for field in fields(RenderOptions)}
    options = {key: value for key, value in kept["options"].items() if key in known}
    return PodTemplates(ranks=kept["ranks"], gateway=kept["gateway"], options=RenderOptions(**options))


def stored_resource(config: Object) -> Object:
    """Return the resource that a ConfigMap holds, decoded."""
    return _decoded(config["data"][CONFIG_MANIFEST_KEY])


@lru_cache(maxsize=256)
def _decoded(text: str) -> Object:
    """Return a manifest, decoded once: replicas have equal ones, which are read at every look of a roll-out."""
    resource: Object = yaml.safe_load(text)
    return resource


def templates_in_force(rendering: Rendering, inventory: Inventory) -> PodTemplates:
    """Return the pod templates of the wanted revisions."""
    names, revisions = rendering.names, rendering.revisions
    config = inventory.named(CONFIG_MAP, names.config(revisions.gateway)) or inventory.config_of_ranks(revisions.ranks)
    if config is None:
        return _without_config(rendering, inventory)
    stored = stored_templates(config)
    if config["metadata"]["name"] == names.config(revisions.gateway):
        return stored
    router_image = stored.options.router_image or rendering.options.router_image
    options = replace(stored.options, router_image=router_image)
    gateway = _live_gateway(rendering, inventory) or gateway_template(replace(rendering, options=options))
    return PodTemplates(ranks=stored.ranks, gateway=gateway, options=options)


def _without_config(rendering: Rendering, inventory: Inventory) -> PodTemplates:
    return PodTemplates(
        ranks={ranks.name: _rank_template(rendering, ranks, inventory) for ranks in rank_sets(rendering.spec)},
        gateway=_live_gateway(rendering, inventory) or gateway_template(rendering),
        options=rendering.options,
    )


def _rank_template(rendering: Rendering, ranks: RankSet, inventory: Inventory) -> Object:
    live = inventory.named(STATEFUL_SET, rendering.names.rank_set(ranks.name), group="apps")
    if live is not None and template_label_of(live, LABEL_REVISION) == rendering.revisions.ranks:
        return _template_of(live)
    return rank_template(rendering, ranks)


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


def accounts(rendering: Rendering) -> list[dict[str, Any]]:
    """Return one ServiceAccount for the ranks, one for the gateways of all replicas."""
    components = {rendering.names.rank_account: ROLE_RANK, rendering.names.gateway_account: ROLE_GATEWAY}
    return [
        manifest(rendering, _ACCOUNT, name, component=component, automountServiceAccountToken=False)
        for name, component in components.items()
    ]


def group_secrets(
    rendering: Rendering, templates: PodTemplates, inventory: Inventory, now: datetime
) -> list[NewSecret]:
    """Return the Secrets of the wanted revision; one with certificates that are due takes its own place."""
    names = rendering.names
    if not templates.options.inside_tls:
        return [_group_secret(rendering)]
    host = f"{names.gateway}.{rendering.namespace}.svc"
    stored = inventory.named(SECRET, names.inside_secret(rendering.revisions.ranks))
    secret = manifest(
        rendering, ("v1", "Secret"), names.inside_secret(rendering.revisions.ranks), component=ROLE_GATEWAY,
        labels={LABEL_REVISION: rendering.revisions.ranks}, type="Opaque",
        annotations={ANNOTATION_RENEW_AFTER: timestamp(now + RENEWED_AFTER)},
    )  # fmt: skip
    certificates = NewSecret(
        secret,
        gateway_names=(host, f"{host}.{templates.options.cluster_domain}", "localhost"),
        renews=stored["metadata"]["uid"] if stored is not None and _is_due(stored, now) else "",
    )
    return [_group_secret(rendering), certificates]


def _is_due(secret: Object, now: datetime) -> bool:
    """Return whether certificates are to be made again; those of which nothing is known are."""
    due = parsed_time((secret["metadata"].get("annotations") or {}).get(ANNOTATION_RENEW_AFTER))
    return due is None or due <= now


def _group_secret(rendering: Rendering) -> NewSecret:
    """Return the Secret of the wanted revision; its values are generated when it is created, and never again."""
    revision = rendering.revisions.ranks
    secret = manifest(
        rendering, ("v1", "Secret"), rendering.names.group_secret(revision), component=ROLE_GATEWAY,
        labels={LABEL_REVISION: revision}, type="Opaque", immutable=True,
    )  # fmt: skip
    return NewSecret(secret, generated_keys=(SECRET_GROUP_TOKEN_KEY, SECRET_ADMIN_TOKEN_KEY))
