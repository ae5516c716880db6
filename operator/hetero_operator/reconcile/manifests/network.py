"""Services and NetworkPolicies: how pods are found, and who may talk to them.

The client's Service is the front door. Two headless ones are for the inside of a group. They publish addresses that
are not ready: ranks have to find the gateway, and one another, before anything is ready.

Collectives between ranks are neither authenticated nor encrypted, and use ports of their own choosing: ranks are open
to one another and closed to everybody else. The gateway's client ports are open to all, its admin port to the operator
alone, its ranks port to this group's ranks. Metrics are open: nobody can know where Prometheus runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from hetero_api.contract import (
    ADMIN_PORT,
    HTTP_PORT,
    INFERENCE_PORT,
    METRICS_PORT,
    POD_HEALTH_PORT,
    RANKS_PORT,
    ROLE_GATEWAY,
    ROLE_RANK,
)
from hetero_operator.reconcile.manifests.model_volumes import HUB, parse_model_uri
from hetero_operator.reconcile.manifests.rendering import (
    OPERATOR_APPLICATION,
    Rendering,
    gateway_selector,
    manifest,
    rank_selector,
)
from hetero_operator.reconcile.names import (
    ADMIN_PORT_NAME,
    HEALTH_PORT_NAME,
    HTTP_PORT_NAME,
    INFERENCE_PORT_NAME,
    METRICS_PORT_NAME,
    RANKS_PORT_NAME,
)

_SERVICE: Final = ("v1", "Service")
_POLICY: Final = ("networking.k8s.io/v1", "NetworkPolicy")
_DNS_PORTS: Final = (53, 5353)
"""5353 is where OpenShift's DNS pods listen: policies see a Service's target, not its port."""
_HTTPS_PORT: Final = 443
_NAMESPACE_NAME: Final = "kubernetes.io/metadata.name"
_NAMESPACE_NAME_SINCE: Final = (1, 21)


def services(rendering: Rendering) -> list[dict[str, Any]]:
    """Return the ranks' headless Service, the gateway's, and the client's."""
    return [_ranks_service(rendering), _gateway_service(rendering), _client_service(rendering)]


def _client_service(rendering: Rendering) -> dict[str, Any]:
    service = rendering.spec.gateway.service
    ports = [
        {"name": "grpc", "port": service.port, "protocol": "TCP", "targetPort": INFERENCE_PORT_NAME},
        {"name": "http", "port": service.http_port, "protocol": "TCP", "targetPort": HTTP_PORT_NAME},
    ]
    return manifest(
        rendering, _SERVICE, rendering.names.client_service, component=ROLE_GATEWAY, annotations=service.annotations,
        spec={"type": service.type, "selector": gateway_selector(rendering), "ports": ports},
    )  # fmt: skip


def _gateway_service(rendering: Rendering) -> dict[str, Any]:
    ports = {RANKS_PORT_NAME: RANKS_PORT, ADMIN_PORT_NAME: ADMIN_PORT, METRICS_PORT_NAME: METRICS_PORT}
    spec = _headless(gateway_selector(rendering), ports)
    return manifest(rendering, _SERVICE, rendering.names.gateway, component=ROLE_GATEWAY, spec=spec)


def _ranks_service(rendering: Rendering) -> dict[str, Any]:
    spec = _headless(rank_selector(rendering), {HEALTH_PORT_NAME: POD_HEALTH_PORT})
    return manifest(rendering, _SERVICE, rendering.names.ranks, component=ROLE_RANK, spec=spec)


def _headless(selector: dict[str, str], ports: dict[str, int]) -> dict[str, Any]:
    return {
        "type": "ClusterIP",
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": selector,
        "ports": [{"name": name, "port": port, "protocol": "TCP", "targetPort": name} for name, port in ports.items()],
    }


def network_policies(rendering: Rendering) -> list[dict[str, Any]]:
    """Return one policy for the ranks and one for the gateway; none when the user wants none."""
    if not rendering.spec.network_policy.enabled:
        return []
    names, ranks, gateway = rendering.names, rank_selector(rendering), gateway_selector(rendering)
    return [
        _policy(
            rendering, names.ranks, component=ROLE_RANK, selector=ranks,
            ingress=[{"from": [_pods(ranks)]}, {"ports": [_tcp(POD_HEALTH_PORT)]}],
            egress=[{"to": [_pods(ranks)]}, {"to": [_pods(gateway)], "ports": [_tcp(RANKS_PORT)]}],
        ),
        _policy(
            rendering, names.gateway, component=ROLE_GATEWAY, selector=gateway,
            ingress=[
                {"ports": [_tcp(INFERENCE_PORT), _tcp(HTTP_PORT), _tcp(METRICS_PORT)]},
                {"from": [_pods(ranks)], "ports": [_tcp(RANKS_PORT)]},
                {"from": [_operator(rendering)], "ports": [_tcp(ADMIN_PORT)]},
            ],
            egress=[],
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
) -> dict[str, Any]:
    spec = {
        "podSelector": {"matchLabels": dict(selector)},
        "policyTypes": ["Ingress", "Egress"],
        "ingress": ingress,
        "egress": [*egress, *_outside(rendering)],
    }
    return manifest(rendering, _POLICY, name, component=component, spec=spec)


def _outside(rendering: Rendering) -> list[dict[str, Any]]:
    """Return the rules for other hosts. Names are always looked up; the files of a Hub model lie on many hosts."""
    rules = [{"ports": [{"protocol": protocol, "port": port} for port in _DNS_PORTS for protocol in ("UDP", "TCP")]}]
    is_fetched = parse_model_uri(rendering.spec.model.uri).scheme == HUB
    if rendering.spec.network_policy.allow_model_egress and is_fetched:
        rules.append({"ports": [_tcp(_HTTPS_PORT)]})
    return rules


def _operator(rendering: Rendering) -> dict[str, Any]:
    """Return the operator's pods: in its namespace, where namespaces can be selected by name; else in any."""
    options = rendering.options
    named = options.operator_namespace and rendering.capabilities.version >= _NAMESPACE_NAME_SINCE
    namespaces = {"matchLabels": {_NAMESPACE_NAME: options.operator_namespace}} if named else {}
    return {"namespaceSelector": namespaces, **_pods({"app.kubernetes.io/name": OPERATOR_APPLICATION})}


def _pods(labels: Mapping[str, str]) -> dict[str, Any]:
    return {"podSelector": {"matchLabels": dict(labels)}}


def _tcp(port: int) -> dict[str, Any]:
    return {"protocol": "TCP", "port": port}
