"""Services: the client's front door, and two headless ones for the inside of a group.

The headless ones publish addresses that are not ready: ranks have to find the gateway, and one another, before
anything is ready. Clients only ever see a gateway that is.
"""

from __future__ import annotations

from typing import Any, Final

from hetero_api.contract import ADMIN_PORT, METRICS_PORT, POD_HEALTH_PORT, RANKS_PORT, ROLE_GATEWAY, ROLE_RANK
from hetero_operator.reconcile.manifests.rendering import Rendering, gateway_selector, manifest, rank_selector
from hetero_operator.reconcile.names import (
    ADMIN_PORT_NAME,
    HEALTH_PORT_NAME,
    HTTP_PORT_NAME,
    INFERENCE_PORT_NAME,
    METRICS_PORT_NAME,
    RANKS_PORT_NAME,
)

_KIND: Final = ("v1", "Service")


def services(rendering: Rendering) -> list[dict[str, Any]]:
    """The ranks' headless Service, the gateway's, and the client's."""
    return [_ranks(rendering), _gateway(rendering), _client(rendering)]


def _client(rendering: Rendering) -> dict[str, Any]:
    service = rendering.spec.gateway.service
    ports = [
        {"name": "grpc", "port": service.port, "protocol": "TCP", "targetPort": INFERENCE_PORT_NAME},
        {"name": "http", "port": service.http_port, "protocol": "TCP", "targetPort": HTTP_PORT_NAME},
    ]
    return manifest(
        rendering, _KIND, rendering.names.client_service, component=ROLE_GATEWAY, annotations=service.annotations,
        spec={"type": service.type, "selector": gateway_selector(rendering), "ports": ports},
    )  # fmt: skip


def _gateway(rendering: Rendering) -> dict[str, Any]:
    ports = {RANKS_PORT_NAME: RANKS_PORT, ADMIN_PORT_NAME: ADMIN_PORT, METRICS_PORT_NAME: METRICS_PORT}
    spec = _headless(gateway_selector(rendering), ports)
    return manifest(rendering, _KIND, rendering.names.gateway, component=ROLE_GATEWAY, spec=spec)


def _ranks(rendering: Rendering) -> dict[str, Any]:
    spec = _headless(rank_selector(rendering), {HEALTH_PORT_NAME: POD_HEALTH_PORT})
    return manifest(rendering, _KIND, rendering.names.ranks, component=ROLE_RANK, spec=spec)


def _headless(selector: dict[str, str], ports: dict[str, int]) -> dict[str, Any]:
    return {
        "type": "ClusterIP",
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": selector,
        "ports": [{"name": name, "port": port, "protocol": "TCP", "targetPort": name} for name, port in ports.items()],
    }
