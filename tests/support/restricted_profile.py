"""The Restricted profile of the Pod Security Standards, for clusters too old to enforce it themselves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

RESTRICTED_VOLUMES: Final = {
    "configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "image", "persistentVolumeClaim", "projected", "secret",
}  # fmt: skip
BASELINE_SYSCTLS: Final = ("hostNetwork", "hostPID", "hostIPC")


def restricted_violations(spec: dict[str, Any]) -> Iterator[str]:
    """What breaks the Restricted profile of the Pod Security Standards (which includes Baseline)."""
    yield from (field for field in BASELINE_SYSCTLS if spec.get(field))
    security = spec.get("securityContext", {})
    yield from ("sysctls" for _ in security.get("sysctls", ()))
    for volume in spec.get("volumes", ()):
        kinds = set(volume) - {"name"}
        if not kinds <= RESTRICTED_VOLUMES:
            yield f"volume {volume['name']}: {kinds}"
    for container in (*spec["containers"], *spec.get("initContainers", ())):
        own = {**security, **container.get("securityContext", {})}
        name = container["name"]
        if own.get("privileged") or own.get("allowPrivilegeEscalation") is not False:
            yield f"{name}: privileges"
        if own.get("runAsNonRoot") is not True or own.get("runAsUser", 1) == 0:
            yield f"{name}: root"
        if own.get("seccompProfile", {}).get("type") not in ("RuntimeDefault", "Localhost"):
            yield f"{name}: seccomp"
        capabilities = own.get("capabilities", {})
        if capabilities.get("drop") != ["ALL"] or set(capabilities.get("add", ())) - {"NET_BIND_SERVICE"}:
            yield f"{name}: capabilities"
        if own.get("procMount", "Default") != "Default" or "appArmorProfile" in own or "seLinuxOptions" in own:
            yield f"{name}: confinement"
        if any("hostPort" in port for port in container.get("ports", ())):
            yield f"{name}: host port"
        if any(
            "host" in container.get(probe, {}).get("httpGet", {})
            for probe in ("startupProbe", "livenessProbe", "readinessProbe")
        ):
            yield f"{name}: probe of another host"
