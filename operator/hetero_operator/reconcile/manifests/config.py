"""The ConfigMap of a gateway revision: the resource as the gateway reads it, and the pod templates of the revision.

It is made once and never changed. The templates are kept, so that a later version of the operator, which would
render them otherwise, leaves running pods alone. The manifest holds the fields that decide about revisions and no
others: what changes while everything runs (Effect.NONE) would make it wrong.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Final

import yaml

from hetero_api.contract import (
    API_VERSION,
    CONFIG_MANIFEST_KEY,
    CONFIG_TEMPLATES_KEY,
    GROUP,
    KIND,
    LABEL_GATEWAY_REVISION,
    LABEL_REVISION,
    ROLE_GATEWAY,
)
from hetero_api.effects import fields_with
from hetero_operator.reconcile.manifests.rendering import Rendering, manifest
from hetero_operator.reconcile.model import Object, RenderOptions
from hetero_operator.reconcile.revision import GATEWAY_EFFECTS

_KIND: Final = ("v1", "ConfigMap")


@dataclass(frozen=True, slots=True)
class PodTemplates:
    """Pod templates of one gateway revision."""

    ranks: Mapping[str, Object]
    """By pool."""
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
    """Return the resource with its defaults filled in, as decoded YAML, without fields of Effect.NONE."""
    spec = rendering.spec.model_dump(mode="json", by_alias=True, exclude_none=True)
    return {
        "apiVersion": f"{GROUP}/{API_VERSION}",
        "kind": KIND,
        "metadata": {"name": rendering.names.resource, "namespace": rendering.namespace},
        "spec": fields_with(spec, GATEWAY_EFFECTS),
    }


def stored_templates(config: Object) -> PodTemplates:
    """Return the pod templates that a ConfigMap holds."""
    kept = json.loads(config["data"][CONFIG_TEMPLATES_KEY])
    known = {field.name for field in fields(RenderOptions)}
    options = {key: value for key, value in kept["options"].items() if key in known}
    return PodTemplates(ranks=kept["ranks"], gateway=kept["gateway"], options=RenderOptions(**options))


def stored_resource(config: Object) -> Object:
    """Return the resource that a ConfigMap holds, decoded."""
    resource: Object = yaml.safe_load(config["data"][CONFIG_MANIFEST_KEY])
    return resource
