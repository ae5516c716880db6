"""Input of every manifest, and the metadata that all share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from hetero_api.contract import LABEL_NAME, LABEL_POOL, LABEL_ROLE, ROLE_GATEWAY, ROLE_RANK
from hetero_api.spec import HeteroInferenceSpec
from hetero_operator.reconcile.inventory import owner_reference
from hetero_operator.reconcile.model import Capabilities, RenderOptions
from hetero_operator.reconcile.names import Names
from hetero_operator.reconcile.revision import Revisions

APPLICATION: Final = "heteroinference"
OPERATOR_APPLICATION: Final = "heteroinference-operator"
"""`app.kubernetes.io/name` of the operator's own pods."""


@dataclass(frozen=True, slots=True)
class Rendering:
    """One resource in one cluster, as one version of the operator renders it."""

    names: Names
    namespace: str
    uid: str
    spec: HeteroInferenceSpec
    revisions: Revisions
    capabilities: Capabilities
    options: RenderOptions

    @property
    def runs(self) -> bool:
        """Whether the user wants pods."""
        return self.spec.replicas > 0 and not self.spec.suspend


def manifest(
    rendering: Rendering,
    kind: tuple[str, str],
    name: str,
    *,
    component: str,
    labels: Mapping[str, str] | None = None,
    annotations: Mapping[str, str] | None = None,
    **body: Any,
) -> dict[str, Any]:
    """Return an owned object of `kind` (apiVersion, kind); `component` is its app.kubernetes.io/component."""
    metadata: dict[str, Any] = {
        "name": name,
        "namespace": rendering.namespace,
        "labels": {**(labels or {}), **common_labels(rendering, component)},
        "ownerReferences": [owner_reference(rendering.names.resource, rendering.uid)],
    }
    if annotations:
        metadata["annotations"] = dict(annotations)
    return {"apiVersion": kind[0], "kind": kind[1], "metadata": metadata, **body}


def common_labels(rendering: Rendering, component: str) -> dict[str, str]:
    """Return the labels of every owned object and pod."""
    return {
        LABEL_NAME: rendering.names.resource,
        "app.kubernetes.io/name": APPLICATION,
        "app.kubernetes.io/instance": rendering.names.resource,
        "app.kubernetes.io/component": component,
        "app.kubernetes.io/managed-by": OPERATOR_APPLICATION,
    }


def rank_selector(rendering: Rendering, pool: str | None = None) -> dict[str, str]:
    """Return labels that select the rank pods of the resource, or of one pool."""
    selector = {LABEL_NAME: rendering.names.resource, LABEL_ROLE: ROLE_RANK}
    return selector if pool is None else {**selector, LABEL_POOL: pool}


def gateway_selector(rendering: Rendering) -> dict[str, str]:
    """Return labels that select the gateway's pod."""
    return {LABEL_NAME: rendering.names.resource, LABEL_ROLE: ROLE_GATEWAY}
