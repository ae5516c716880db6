"""Input of every manifest, and the metadata that all share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from hetero_api.contract import LABEL_NAME, LABEL_POOL, LABEL_REPLICA, LABEL_RESPONDER, LABEL_ROLE, LABEL_ROUTER
from hetero_api.spec import HeteroInferenceSpec
from hetero_operator.reconcile.inventory import owner_reference
from hetero_operator.reconcile.model import Capabilities, Policy, RenderOptions
from hetero_operator.reconcile.names import Names
from hetero_operator.reconcile.revision import Revisions

APPLICATION: Final = "heteroinference"
_INSTANCE: Final = "app.kubernetes.io/instance"
OPERATOR_APPLICATION: Final = "heteroinference-operator"
"""`app.kubernetes.io/name` of the operator's own pods."""


@dataclass(frozen=True, slots=True)
class Rendering:
    """One replica of a resource in one cluster, as one version of the operator renders it."""

    names: Names
    namespace: str
    uid: str
    spec: HeteroInferenceSpec
    revisions: Revisions
    capabilities: Capabilities
    options: RenderOptions
    policy: Policy
    has_gateway: bool
    """Whether its gateway has a pod."""
    has_ranks: bool
    """Whether its ranks have pods: longer than the gateway, which finishes what it has."""


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
        **_replica_label(rendering),
        "app.kubernetes.io/name": APPLICATION,
        _INSTANCE: rendering.names.group,
        "app.kubernetes.io/component": component,
        "app.kubernetes.io/managed-by": OPERATOR_APPLICATION,
    }


def _replica_label(rendering: Rendering) -> dict[str, str]:
    ordinal = rendering.names.ordinal
    return {LABEL_REPLICA: str(ordinal)} if ordinal else {}


def role_selector(rendering: Rendering, role: str) -> dict[str, str]:
    """Return labels that select the pods of a role in all replicas."""
    return {LABEL_NAME: rendering.names.resource, LABEL_ROLE: role}


def responder_selector(rendering: Rendering) -> dict[str, str]:
    """Return the label that selects the responder's pod."""
    return {LABEL_RESPONDER: rendering.names.resource}


def router_selector(rendering: Rendering) -> dict[str, str]:
    """Return the label that selects the router's pod."""
    return {LABEL_ROUTER: rendering.names.resource}


def group_selector(rendering: Rendering, role: str) -> dict[str, str]:
    """Return labels that select the pods of a role in this replica."""
    return {**role_selector(rendering, role), **instance_selector(rendering)}


def instance_selector(rendering: Rendering) -> dict[str, str]:
    """Return the label by which a replica's pods differ from those of the others."""
    return {_INSTANCE: rendering.names.group}


def workload_selector(rendering: Rendering, role: str, pool: str | None = None) -> dict[str, str]:
    """Return the selector of a Deployment, or of the StatefulSet of a pool, which never changes.

    Those of replica 0 are older than replicas and select pods of all: controllers know their own by owner references.
    """
    selector = {**role_selector(rendering, role), **_replica_label(rendering)}
    return selector if pool is None else {**selector, LABEL_POOL: pool}
