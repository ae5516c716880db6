"""NetworkPolicies: who may talk to a group's pods, and whom they may talk to.

Collectives between ranks are neither authenticated nor encrypted, and use ports of their own choosing: ranks are
open to one another and closed to everybody else. The gateway's client ports are open to all, its admin port to the
operator alone, its ranks port to this group's ranks. Metrics are open: nobody can know where Prometheus runs.
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
from hetero_operator.reconcile.manifests.model_uri import HUB, parse_model_uri
from hetero_operator.reconcile.manifests.rendering import (
    OPERATOR_APPLICATION,
    Rendering,
    gateway_selector,
    manifest,
    rank_selector,
)

_KIND: Final = ("networking.k8s.io/v1", "NetworkPolicy")
_DNS_PORTS: Final = (53, 5353)
"""5353 is where OpenShift's DNS pods listen: policies see a Service's target, not its port."""
_HTTPS_PORT: Final = 443
_NAMESPACE_NAME: Final = "kubernetes.io/metadata.name"
_NAMESPACE_NAME_SINCE: Final = (1, 21)


def network_policies(rendering: Rendering) -> list[dict[str, Any]]:
    """One for the ranks and one for the gateway; none when the user wants none."""
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
    return manifest(rendering, _KIND, name, component=component, spec=spec)


def _outside(rendering: Rendering) -> list[dict[str, Any]]:
    """Names are always looked up; a Hub model is fetched from anywhere, for a hub's files lie on many hosts."""
    rules = [{"ports": [{"protocol": protocol, "port": port} for port in _DNS_PORTS for protocol in ("UDP", "TCP")]}]
    is_fetched = parse_model_uri(rendering.spec.model.uri).scheme == HUB
    if rendering.spec.network_policy.allow_model_egress and is_fetched:
        rules.append({"ports": [_tcp(_HTTPS_PORT)]})
    return rules


def _operator(rendering: Rendering) -> dict[str, Any]:
    """The operator's pods: in its namespace, where namespaces can be told by name; else in any."""
    options = rendering.options
    named = options.operator_namespace and rendering.capabilities.version >= _NAMESPACE_NAME_SINCE
    namespaces = {"matchLabels": {_NAMESPACE_NAME: options.operator_namespace}} if named else {}
    return {"namespaceSelector": namespaces, **_pods({"app.kubernetes.io/name": OPERATOR_APPLICATION})}


def _pods(labels: Mapping[str, str]) -> dict[str, Any]:
    return {"podSelector": {"matchLabels": dict(labels)}}


def _tcp(port: int) -> dict[str, Any]:
    return {"protocol": "TCP", "port": port}
