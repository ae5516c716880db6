"""Security contexts: the Restricted profile of the Pod Security Standards, for every pod and container.

Volumes that a user asks for by path on the node (`file://`, `cache.hostPath`, `exchange.hostPath`) are outside of that
profile; nothing else is.
"""

from __future__ import annotations

from typing import Any

from hetero_operator.reconcile.model import RenderOptions


def pod_security(options: RenderOptions) -> dict[str, Any]:
    """securityContext of a pod."""
    user = options.run_as_user
    return {
        "runAsNonRoot": True,
        "runAsUser": user,
        "runAsGroup": user,
        "fsGroup": user,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def container_security() -> dict[str, Any]:
    """securityContext of a container."""
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
