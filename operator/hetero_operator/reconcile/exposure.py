"""Who reaches a gateway, and whether it asks them for anything.

A gateway is exposed when clients beyond its namespace reach it and it asks them neither for a key nor for a
certificate. A spec that would expose it is refused, unless `spec.gateway.auth.mode: None` says so in as many words.
What an earlier version exposed serves on, since its clients depend on it; the condition Exposed tells of it.

A spec that opens doors and asks for proof at once opens them last: when no gateway is left that asks for nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import Any, Final

from hetero_api.contract import ANNOTATION_CLIENTS, COMPONENT_RESPONDER
from hetero_api.spec import HeteroInferenceSpec
from hetero_api.spec_access import AuthMode
from hetero_api.spec_cluster import ClientSource
from hetero_operator.reconcile.inventory import Inventory, label_of
from hetero_operator.reconcile.model import Object
from hetero_operator.reconcile.names import Names

_INSIDE: Final = "ClusterIP"
_REMEDY: Final = (
    "set spec.gateway.auth.keysSecretRef or spec.gateway.tls.clientCASecretName, or say spec.gateway.auth.mode: None"
)


class Clients(StrEnum):
    """Where a NetworkPolicy lets clients be, as its annotation says."""

    NAMESPACE = "Namespace"
    ALL = "All"
    AS_BEFORE = "AsBefore"
    """Anywhere, because an earlier version let them, and the spec does not say."""


def clients_of(spec: HeteroInferenceSpec, names: Names, inventory: Inventory) -> Clients:
    """Return where the gateway's clients may be."""
    asked = spec.network_policy.clients_from
    if asked is not None:
        return Clients(asked.value)
    if spec.gateway.service.type != _INSIDE:
        return Clients.ALL
    policy = inventory.named("NetworkPolicy", names.gateway_account, group="networking.k8s.io")
    if policy is None:
        return Clients.NAMESPACE
    annotations = policy["metadata"].get("annotations") or {}
    was = annotations.get(ANNOTATION_CLIENTS, Clients.AS_BEFORE)
    return Clients.AS_BEFORE if was == Clients.AS_BEFORE else Clients.NAMESPACE


def held_doors(
    spec: HeteroInferenceSpec, names: Names, inventory: Inventory, deployments: Iterable[Object]
) -> dict[str, Any]:
    """Return the fields that stay as they are while one of all `deployments` does not ask for the proof of the spec."""
    doors = [item for item in deployments if label_of(item, "app.kubernetes.io/component") != COMPONENT_RESPONDER]
    if not spec.gateway.asks_for_proof or is_asked_for(spec) or all(map(_asks_for_proof, doors)):
        return {}
    held: dict[str, Any] = {}
    service = inventory.named("Service", names.resource)
    if service is None or service["spec"].get("type", _INSIDE) == _INSIDE:
        held["gateway"] = {"service": {"type": _INSIDE}}
    policy = inventory.named("NetworkPolicy", names.gateway_account, group="networking.k8s.io")
    annotations = {} if policy is None else policy["metadata"].get("annotations") or {}
    if annotations.get(ANNOTATION_CLIENTS) == Clients.NAMESPACE:
        held["networkPolicy"] = {"clientsFrom": Clients.NAMESPACE.value}
    return held


def _asks_for_proof(deployment: Object) -> bool:
    """Return whether all pods of a gateway's or router's Deployment ask callers for a key or a certificate."""
    arguments = deployment["spec"]["template"]["spec"]["containers"][0].get("args") or ()
    status, generation = deployment.get("status") or {}, deployment["metadata"].get("generation")
    is_old = status.get("observedGeneration", generation) != generation
    others = status.get("replicas", 0) - status.get("updatedReplicas", 0)
    return not (is_old or others) and any(option in arguments for option in ("--keys", "--client-ca-dir"))


def exposure(spec: HeteroInferenceSpec, names: Names, inventory: Inventory) -> str:
    """Return the reason why strangers reach a gateway that asks them for nothing; "" if they do not."""
    if spec.gateway.asks_for_proof:
        return ""
    if spec.gateway.service.type != _INSIDE:
        return f"spec.gateway.service.type is {spec.gateway.service.type}"
    if not spec.network_policy.enabled:
        return "spec.networkPolicy.enabled is false"
    match clients_of(spec, names, inventory):
        case Clients.ALL:
            return "spec.networkPolicy.clientsFrom is All"
        case Clients.AS_BEFORE:
            return "an earlier version let clients be anywhere, and spec.networkPolicy.clientsFrom does not say where"
    return ""


def is_asked_for(spec: HeteroInferenceSpec) -> bool:
    """Return whether the spec says that the gateway asks for nothing."""
    return spec.gateway.auth is not None and spec.gateway.auth.mode == AuthMode.NONE


def unguarded_router(spec: HeteroInferenceSpec) -> Iterator[str]:
    """Yield why the router would let in callers that the gateway asks for proof."""
    if spec.has_router and spec.gateway.asks_for_proof and spec.router.keys_secret_ref is None:
        yield (
            "spec.router.keysSecretRef: is required where spec.gateway.auth or spec.gateway.tls asks callers for a key "
            "or a certificate, because the router is another door to the same model"
        )


def exposing_fields(spec: HeteroInferenceSpec, *, service_type: str | None) -> Iterator[str]:
    """Yield `path: message` of each field for which the spec is refused.

    `service_type` is that of a Service that strangers reach already without being asked: it may stay.
    """
    if spec.gateway.asks_for_proof or is_asked_for(spec):
        return
    kind = spec.gateway.service.type
    if kind not in (_INSIDE, service_type):
        yield f"spec.gateway.service.type: {kind} lets in clients that the gateway asks for nothing; {_REMEDY}"
    if spec.network_policy.clients_from is ClientSource.ALL:
        yield f"spec.networkPolicy.clientsFrom: All lets in clients that the gateway asks for nothing; {_REMEDY}"
