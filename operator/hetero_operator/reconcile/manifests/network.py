"""Services and NetworkPolicies: how pods are found, and who may talk to them.

The client's Service is the front door. Two headless ones are for the inside of a group. They publish addresses that
are not ready: ranks have to find the gateway, and one another, before anything is ready.

Collectives between ranks are not encrypted, those of GPUs and Gloo not authenticated either, and use ports of their own
choosing: ranks are open to one another and closed to everybody else. The gateway's client ports are open to pods of its
namespace, or to all, its admin port to the operator alone, its ranks port to this group's ranks. Metrics are open:
nobody can know where Prometheus runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from hetero_api.contract import ANNOTATION_CLIENTS, POD_HEALTH_PORT, ROLE_GATEWAY, ROLE_RANK
from hetero_operator.reconcile.exposure import Clients
from hetero_operator.reconcile.manifests.model_volumes import HUB, parse_model_uri
from hetero_operator.reconcile.manifests.rendering import (
    OPERATOR_APPLICATION,
    Rendering,
    gateway_selector,
    manifest,
    rank_selector,
)
from hetero_operator.reconcile.names import GATEWAY_PORTS, RANK_PORT
from hetero_operator.reconcile.rank_sets import health_ports

_SERVICE: Final = ("v1", "Service")
_POLICY: Final = ("networking.k8s.io/v1", "NetworkPolicy")
_DNS_PORTS: Final = (53, 5353)
"""5353 is where OpenShift's DNS pods listen: policies see a Service's target, not its port."""
_HTTPS_PORT: Final = 443
_NAMESPACE_NAME: Final = "kubernetes.io/metadata.name"
_NAMESPACE_NAME_SINCE: Final = (1, 21)


def services(rendering: Rendering) -> list[dict[str, Any]]:
    """Return the ranks' headless Service, the gateway's, and the client's."""
    names, service, gateway = rendering.names, rendering.spec.gateway.service, gateway_selector(rendering)
    inside = {name: GATEWAY_PORTS[name] for name in ("ranks", "admin", "metrics")}
    front_door = [
        {"name": "grpc", "port": service.port, "protocol": "TCP", "targetPort": "inference"},
        {"name": "http", "port": service.http_port, "protocol": "TCP", "targetPort": "http"},
    ]
    return [
        manifest(
            rendering, _SERVICE, names.ranks, component=ROLE_RANK,
            spec=_headless(rank_selector(rendering), {RANK_PORT: POD_HEALTH_PORT}),
        ),
        manifest(rendering, _SERVICE, names.gateway, component=ROLE_GATEWAY, spec=_headless(gateway, inside)),
        manifest(
            rendering, _SERVICE, names.resource, component=ROLE_GATEWAY, annotations=service.annotations,
            spec={"type": service.type, "selector": gateway, "ports": front_door},
        ),
    ]  # fmt: skip


def _headless(selector: dict[str, str], ports: dict[str, int]) -> dict[str, Any]:
    return {
        "type": "ClusterIP",
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": selector,
        "ports": [{"name": name, "port": port, "protocol": "TCP", "targetPort": name} for name, port in ports.items()],
    }


def network_policies(rendering: Rendering, *, clients: Clients) -> list[dict[str, Any]]:
    """Return one policy for the ranks and one for the gateway; none when the user wants none."""
    if not rendering.spec.network_policy.enabled:
        return []
    names, ranks, gateway = rendering.names, rank_selector(rendering), gateway_selector(rendering)
    return [
        _policy(
            rendering, names.ranks, component=ROLE_RANK, selector=ranks,
            ingress=[{"from": [_pods(ranks)]}, {"ports": _tcp(health_ports(rendering.spec).values())}],
            egress=[{"to": [_pods(ranks)]}, {"to": [_pods(gateway)], "ports": _gateways("ranks")}],
        ),
        _policy(
            rendering, names.gateway, component=ROLE_GATEWAY, selector=gateway,
            ingress=[
                {"ports": _gateways("metrics")},
                {**_from(clients), "ports": _gateways("inference", "http")},
                {"from": [_pods(ranks)], "ports": _gateways("ranks")},
                {"from": [_operator(rendering)], "ports": _gateways("admin", "inference")},
            ],
            egress=[], annotations={ANNOTATION_CLIENTS: clients.value},
        ),
    ]  # fmt: skip


def _policy(
    rendering: Rendering,
    name: str,
    *,
    component: str,
    selector: Mapping[str, str],
    ingress: list[dict[str, Any]],
    egress: list[dict[str, Any]],
    annotations: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    spec = {
        "podSelector": {"matchLabels": dict(selector)},
        "policyTypes": ["Ingress", "Egress"],
        "ingress": ingress,
        "egress": [*egress, *_outside(rendering)],
    }
    return manifest(rendering, _POLICY, name, component=component, annotations=annotations or {}, spec=spec)


def _from(clients: Clients) -> dict[str, Any]:
    """Return the part of a rule that says where clients may be; nothing where they may be anywhere."""
    return {"from": [{"podSelector": {}}]} if clients is Clients.NAMESPACE else {}


def _outside(rendering: Rendering) -> list[dict[str, Any]]:
    """Return the rules for other hosts. Names are always looked up; the files of a Hub model lie on many hosts."""
    rules = [{"ports": [{"protocol": protocol, "port": port} for port in _DNS_PORTS for protocol in ("UDP", "TCP")]}]
    is_fetched = parse_model_uri(rendering.spec.model.uri).scheme == HUB
    if rendering.spec.network_policy.allow_model_egress and is_fetched:
        rules.append({"ports": [{"protocol": "TCP", "port": _HTTPS_PORT}]})
    return rules


def _operator(rendering: Rendering) -> dict[str, Any]:
    """Return the operator's pods: in its namespace, where namespaces can be selected by name; else in any."""
    options = rendering.options
    named = options.operator_namespace and rendering.capabilities.version >= _NAMESPACE_NAME_SINCE
    namespaces = {"matchLabels": {_NAMESPACE_NAME: options.operator_namespace}} if named else {}
    return {"namespaceSelector": namespaces, **_pods({"app.kubernetes.io/name": OPERATOR_APPLICATION})}


def _pods(labels: Mapping[str, str]) -> dict[str, Any]:
    return {"podSelector": {"matchLabels": dict(labels)}}


def _gateways(*names: str) -> list[dict[str, Any]]:
    """Return ports of the gateway by their names."""
    return _tcp(GATEWAY_PORTS[name] for name in names)


def _tcp(ports: Iterable[int]) -> list[dict[str, Any]]:
    return [{"protocol": "TCP", "port": port} for port in ports]
