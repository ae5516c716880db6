"""Services and NetworkPolicies: how pods are found, and who may talk to them.

The client's Service is the front door of all replicas. Two headless ones are for the inside of each group. They publish
addresses that are not ready: ranks have to find the gateway, and one another, before anything is ready. A router has
two: its own for clients, and a headless one of the gateways' ports for it, by which it asks a gateway that is ready.

Collectives between ranks are not encrypted, those of GPUs and Gloo not authenticated either, and use ports of their own
choosing: ranks are open to one another and closed to everybody else. The gateway's client ports are open to pods of its
namespace, or to all, its admin port to the operator alone, its ranks port to this group's ranks. Metrics are open
unless the spec says where Prometheus runs. Pods ask the cluster's name servers and no others, since a name that is
looked up elsewhere can carry data out. The gateways' port for a router has neither TLS nor keys, so only the router
reaches it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from hetero_api.contract import (
    ANNOTATION_CLIENTS,
    COMPONENT_RESPONDER,
    COMPONENT_ROUTER,
    HTTP_PORT,
    METRICS_PORT,
    POD_HEALTH_PORT,
    ROLE_GATEWAY,
    ROLE_RANK,
    ROUTER_PORT,
)
from hetero_operator.reconcile.exposure import Clients
from hetero_operator.reconcile.manifests.model_volumes import HUB, model_uris
from hetero_operator.reconcile.manifests.rendering import (
    OPERATOR_APPLICATION,
    Rendering,
    group_selector,
    manifest,
    responder_selector,
    role_selector,
    router_selector,
)
from hetero_operator.reconcile.model import ANY_NAME
from hetero_operator.reconcile.names import GATEWAY_PORTS, RANK_PORT
from hetero_operator.reconcile.rank_sets import health_ports

_SERVICE: Final = ("v1", "Service")
_POLICY: Final = ("networking.k8s.io/v1", "NetworkPolicy")
_DNS_PORTS: Final = (53, 5353)
"""5353 is where OpenShift's DNS pods listen: policies see a Service's target, not its port."""
_HTTPS_PORT: Final = 443
_NAMESPACE_NAME: Final = "kubernetes.io/metadata.name"
_NAMESPACE_NAME_SINCE: Final = (1, 21)


def group_services(rendering: Rendering) -> list[dict[str, Any]]:
    """Return the headless Services of a replica's ranks and of its gateway."""
    names = rendering.names
    ranks, gateway = (group_selector(rendering, role) for role in (ROLE_RANK, ROLE_GATEWAY))
    inside = {name: GATEWAY_PORTS[name] for name in ("ranks", "admin", "metrics")}
    return [
        manifest(
            rendering, _SERVICE, names.ranks, component=ROLE_RANK, spec=_headless(ranks, {RANK_PORT: POD_HEALTH_PORT})
        ),
        manifest(rendering, _SERVICE, names.gateway, component=ROLE_GATEWAY, spec=_headless(gateway, inside)),
    ]


def client_service(rendering: Rendering, *, responds: bool) -> dict[str, Any]:
    """Return the Service that clients dial: the ready gateways of all replicas, or the responder in their place."""
    service = rendering.spec.gateway.service
    front_door = [
        {"name": "grpc", "port": service.port, "protocol": "TCP", "targetPort": "inference"},
        {"name": "http", "port": service.http_port, "protocol": "TCP", "targetPort": "http"},
    ]
    selector = responder_selector(rendering) if responds else role_selector(rendering, ROLE_GATEWAY)
    spec = {"type": service.type, "selector": selector, "ports": front_door}
    return manifest(
        rendering, _SERVICE, rendering.names.resource, component=ROLE_GATEWAY, annotations=service.annotations,
        spec=spec,
    )  # fmt: skip


def router_services(rendering: Rendering, *, responds: bool) -> list[dict[str, Any]]:
    """Return the Service that clients dial, and that of the gateways' ports for the router."""
    selector = responder_selector(rendering) if responds else router_selector(rendering)
    port = {"name": "http", "port": rendering.spec.router.port, "protocol": "TCP", "targetPort": "http"}
    # A Response is remembered by the pod that gave it, so a caller's address stays with one.
    door = {"type": "ClusterIP", "selector": selector, "ports": [port], "sessionAffinity": "ClientIP"}
    gateways = role_selector(rendering, ROLE_GATEWAY)
    engines = _headless(gateways, {"router": ROUTER_PORT}, is_early=False)
    names = rendering.names
    return [
        manifest(rendering, _SERVICE, names.router, component=COMPONENT_ROUTER, spec=door),
        manifest(rendering, _SERVICE, names.engines, component=ROLE_GATEWAY, spec=engines),
    ]


def _headless(selector: dict[str, str], ports: dict[str, int], *, is_early: bool = True) -> dict[str, Any]:
    return {
        "type": "ClusterIP",
        "clusterIP": "None",
        # API servers leave a false one out, so it would always differ.
        **({"publishNotReadyAddresses": True} if is_early else {}),
        "selector": selector,
        "ports": [{"name": name, "port": port, "protocol": "TCP", "targetPort": name} for name, port in ports.items()],
    }


def network_policies(rendering: Rendering, *, clients: Clients) -> list[dict[str, Any]]:
    """Return one policy for the ranks and one for the gateways of all replicas; none when the user wants none."""
    if not rendering.spec.network_policy.enabled:
        return []
    names, has_router = rendering.names, rendering.spec.has_router
    ranks, gateway = (role_selector(rendering, role) for role in (ROLE_RANK, ROLE_GATEWAY))
    return [
        _policy(
            rendering, names.rank_policy, component=ROLE_RANK, selector=ranks,
            ingress=[
                {"from": [_pods(ranks)]},
                {**_metrics_from(rendering), "ports": _tcp(health_ports(rendering.spec).values())},
            ],
            egress=[{"to": [_pods(ranks)]}, {"to": [_pods(gateway)], "ports": _gateways("ranks")}],
        ),
        _policy(
            rendering, names.gateway_account, component=ROLE_GATEWAY, selector=gateway,
            ingress=[
                {**_metrics_from(rendering), "ports": _gateways("metrics")},
                {**_from(clients), "ports": _gateways("inference", "http")},
                {"from": [_pods(ranks)], "ports": _gateways("ranks")},
                {"from": [_operator(rendering)], "ports": _gateways("admin", "inference")},
                *([{"from": [_pods(router_selector(rendering))], "ports": _tcp([ROUTER_PORT])}] if has_router else ()),
            ],
            egress=[], annotations={ANNOTATION_CLIENTS: clients.value},
        ),
    ]  # fmt: skip


def responder_policy(rendering: Rendering, *, clients: Clients) -> list[dict[str, Any]]:
    """Return the policy of the responder, which calls nobody; none when the user wants none."""
    if not rendering.spec.network_policy.enabled:
        return []
    spec = {
        "podSelector": {"matchLabels": responder_selector(rendering)},
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [{**_from(clients), "ports": _gateways("inference", "http")}],
        "egress": [],
    }
    return [manifest(rendering, _POLICY, rendering.names.responder, component=COMPONENT_RESPONDER, spec=spec)]


def router_policy(rendering: Rendering, *, clients: Clients) -> dict[str, Any]:
    """Return the policy of the router: clients and scrapes in; gateways, the API server and name servers out."""
    # What an earlier version opened to all was a gateway; a router is new.
    where = Clients.NAMESPACE if clients is Clients.AS_BEFORE else clients
    gateways = _pods(role_selector(rendering, ROLE_GATEWAY))
    spec = {
        "podSelector": {"matchLabels": router_selector(rendering)},
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [
            {**_metrics_from(rendering), "ports": _tcp([METRICS_PORT])},
            {**_from(where), "ports": _tcp([HTTP_PORT])},
        ],
        "egress": [
            {"to": [gateways], "ports": _tcp([ROUTER_PORT])},
            {"ports": _tcp(rendering.policy.api_server_ports)},
            *_name_servers(rendering),
        ],
    }
    return manifest(rendering, _POLICY, rendering.names.router, component=COMPONENT_ROUTER, spec=spec)


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


def _metrics_from(rendering: Rendering) -> dict[str, Any]:
    """Return the part of a rule that says whose pods may scrape; nothing where anyone may. The kubelet always may."""
    namespaces = rendering.spec.network_policy.metrics_from
    return {"from": [_namespace(name) for name in namespaces]} if namespaces else {}


def _outside(rendering: Rendering) -> list[dict[str, Any]]:
    """Return the rules for other hosts: name servers, and the many hosts that the files of a Hub model lie on."""
    rules = _name_servers(rendering)
    is_fetched = any(uri.scheme == HUB for uri in model_uris(rendering.spec).values())
    if rendering.spec.network_policy.allow_model_egress and is_fetched:
        rules.append({"ports": [{"protocol": "TCP", "port": _HTTPS_PORT}]})
    return rules


def _name_servers(rendering: Rendering) -> list[dict[str, Any]]:
    """Return the rule for name servers; none where pods may ask none."""
    ports = [{"protocol": protocol, "port": port} for port in _DNS_PORTS for protocol in ("UDP", "TCP")]
    servers = rendering.policy.cluster_dns
    asked = {} if ANY_NAME in servers else {"to": [_name_server(rendering, entry) for entry in servers]}
    return [{**asked, "ports": ports}] if servers else []


def _name_server(rendering: Rendering, entry: str) -> dict[str, Any]:
    """Return the peer that an entry of Policy.cluster_dns means."""
    if "=" not in entry:
        return {"ipBlock": {"cidr": entry}}
    namespace, _, label = entry.partition("/")
    key, _, value = label.partition("=")
    named = rendering.capabilities.version >= _NAMESPACE_NAME_SINCE
    return {**(_namespace(namespace) if named else {"namespaceSelector": {}}), **_pods({key: value})}


def _namespace(name: str) -> dict[str, Any]:
    """Return the namespace of a name as a peer."""
    return {"namespaceSelector": {"matchLabels": {_NAMESPACE_NAME: name}}}


def _operator(rendering: Rendering) -> dict[str, Any]:
    """Return the operator's pods: in its namespace, where namespaces can be selected by name; else in any."""
    options = rendering.options
    named = options.operator_namespace and rendering.capabilities.version >= _NAMESPACE_NAME_SINCE
    namespaces = _namespace(options.operator_namespace) if named else {"namespaceSelector": {}}
    return {**namespaces, **_pods({"app.kubernetes.io/name": OPERATOR_APPLICATION})}


def _pods(labels: Mapping[str, str]) -> dict[str, Any]:
    return {"podSelector": {"matchLabels": dict(labels)}}


def _gateways(*names: str) -> list[dict[str, Any]]:
    """Return ports of the gateway by their names."""
    return _tcp(GATEWAY_PORTS[name] for name in names)


def _tcp(ports: Iterable[int]) -> list[dict[str, Any]]:
    return [{"protocol": "TCP", "port": port} for port in ports]
