"""The PodMonitor, where the Prometheus operator's API exists."""

from __future__ import annotations

from typing import Any, Final

from hetero_api.contract import LABEL_NAME, LABEL_POOL, LABEL_ROLE, ROLE_GATEWAY
from hetero_operator.reconcile.manifests.rendering import Rendering, manifest
from hetero_operator.reconcile.names import HEALTH_PORT_NAME, METRICS_PORT_NAME

POD_MONITOR: Final = ("monitoring.coreos.com/v1", "PodMonitor")


def pod_monitors(rendering: Rendering) -> list[dict[str, Any]]:
    """A PodMonitor of the gateway's and the ranks' metrics; none where it is not wanted or not known."""
    monitoring = rendering.spec.monitoring
    if not monitoring.pod_monitor or not rendering.capabilities.has(*POD_MONITOR):
        return []
    interval = f"{monitoring.interval_seconds}s"
    spec = {
        "selector": {"matchLabels": {LABEL_NAME: rendering.names.resource}},
        "podTargetLabels": [LABEL_NAME, LABEL_ROLE, LABEL_POOL],
        "podMetricsEndpoints": [
            {"port": port, "path": "/metrics", "interval": interval} for port in (METRICS_PORT_NAME, HEALTH_PORT_NAME)
        ],
    }
    return [
        manifest(
            rendering, POD_MONITOR, rendering.names.pod_monitor, component=ROLE_GATEWAY, labels=monitoring.labels,
            spec=spec,
        )
    ]  # fmt: skip
