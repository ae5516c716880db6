"""Probes: when a container is started anew, and when it is given traffic.

A rank that loads weights must not be killed for it: its startup probe lasts `recovery.startupTimeoutSeconds`, and
only then does liveness count. Liveness is that of the engine's loop (`/livez` fails when a step hangs), not whether
HTTP answers.
"""

from __future__ import annotations

import math
from typing import Any, Final

from hetero_operator.reconcile.names import HEALTH_PORT_NAME, METRICS_PORT_NAME

_STARTUP_PERIOD_S: Final = 10
_PROBE_TIMEOUT_S: Final = 5
_GATEWAY_STARTUP_S: Final = 300
"""A gateway only reads a tokenizer and opens its ports before /livez answers."""


def rank_probes(startup_timeout_s: int) -> dict[str, Any]:
    """Probes of a rank pod."""
    return {
        "startupProbe": _startup("/startupz", HEALTH_PORT_NAME, startup_timeout_s),
        "livenessProbe": _probe("/livez", HEALTH_PORT_NAME, period_s=10, failures=6),
        "readinessProbe": _probe("/readyz", HEALTH_PORT_NAME, period_s=5, failures=2),
    }


def gateway_probes() -> dict[str, Any]:
    """Probes of the gateway's pod."""
    return {
        "startupProbe": _startup("/livez", METRICS_PORT_NAME, _GATEWAY_STARTUP_S),
        "livenessProbe": _probe("/livez", METRICS_PORT_NAME, period_s=10, failures=3),
        "readinessProbe": _probe("/readyz", METRICS_PORT_NAME, period_s=2, failures=2),
    }


def _startup(path: str, port: str, timeout_s: int) -> dict[str, Any]:
    return _probe(path, port, period_s=_STARTUP_PERIOD_S, failures=math.ceil(timeout_s / _STARTUP_PERIOD_S))


def _probe(path: str, port: str, *, period_s: int, failures: int) -> dict[str, Any]:
    return {
        "httpGet": {"path": path, "port": port},
        "periodSeconds": period_s,
        "timeoutSeconds": _PROBE_TIMEOUT_S,
        "failureThreshold": failures,
    }
