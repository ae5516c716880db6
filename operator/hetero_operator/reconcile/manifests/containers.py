"""Parts that all containers and pods of a group have in common: security, probes, shared volumes.

Security contexts follow the Restricted profile of the Pod Security Standards, for every pod and container. Only volumes
that a user asks for by path on the node (`file://`, `cache.hostPath`, `exchange.hostPath`) are outside of that profile.

Probes decide when a container is restarted, and when it gets traffic. A rank that loads weights must not be killed for
it: its startup probe lasts `recovery.startupTimeoutSeconds`, and only then does liveness count. Liveness is that of the
engine's loop (`/livez` fails when a step hangs), not whether HTTP answers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Final

from hetero_api.contract import POD_GROUP_TOKEN_FILE, SECRET_GROUP_TOKEN_KEY
from hetero_api.spec import SecretKeyRef
from hetero_operator.reconcile.manifests.rendering import Rendering
from hetero_operator.reconcile.model import RenderOptions
from hetero_operator.reconcile.names import HEALTH_PORT_NAME, METRICS_PORT_NAME

_STARTUP_PERIOD_S: Final = 10
_PROBE_TIMEOUT_S: Final = 5
_GATEWAY_STARTUP_S: Final = 300
"""A gateway only reads a tokenizer and opens its ports before /livez answers."""
TMP_DIR: Final = "/tmp"
_TMP: Final = "tmp"
_GROUP_TOKEN: Final = "group-token"
SECRET_FILE_MODE: Final = 0o440
"""Mode of files from Secrets: the owner is root, the pod's group may read."""


def pod_security(options: RenderOptions) -> dict[str, Any]:
    """Return the securityContext of a pod."""
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
    """Return the securityContext of a container."""
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def rank_probes(startup_timeout_s: int) -> dict[str, Any]:
    """Return the probes of a rank pod."""
    return {
        "startupProbe": _startup("/startupz", HEALTH_PORT_NAME, startup_timeout_s),
        "livenessProbe": _probe("/livez", HEALTH_PORT_NAME, period_s=10, failures=6),
        "readinessProbe": _probe("/readyz", HEALTH_PORT_NAME, period_s=5, failures=2),
    }


def gateway_probes() -> dict[str, Any]:
    """Return the probes of the gateway's pod."""
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


@dataclass(frozen=True, slots=True)
class MountedFiles:
    """Volumes of a pod and where a container finds them; empty when there is nothing to mount."""

    volumes: tuple[dict[str, Any], ...] = ()
    mounts: tuple[dict[str, Any], ...] = ()


def container(
    rendering: Rendering,
    name: str,
    image: str,
    *,
    command: Sequence[str],
    resources: Mapping[str, Any],
    mounts: Sequence[Mapping[str, Any]],
    args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    env_from_pod: Sequence[Mapping[str, Any]] = (),
    **more: Any,
) -> dict[str, Any]:
    """Return a container under the Restricted profile; its last log lines become its termination message."""
    variables = [{"name": key, "value": value} for key, value in (env or {}).items()]
    optional = {"args": list(args), "env": [*variables, *env_from_pod]}
    return {
        "name": name,
        "image": image,
        "imagePullPolicy": rendering.spec.images.pull_policy.value,
        "command": list(command),
        **{key: value for key, value in optional.items() if value},
        "resources": resources,
        "securityContext": container_security(),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": list(mounts),
        **more,
    }


def pod_fields(rendering: Rendering, *, account: str, grace_period_s: int) -> dict[str, Any]:
    """Return the fields of every pod's spec."""
    fields: dict[str, Any] = {
        "serviceAccountName": account,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": pod_security(rendering.options),
        "terminationGracePeriodSeconds": grace_period_s,
    }
    if rendering.spec.images.pull_secrets:
        fields["imagePullSecrets"] = [{"name": name} for name in rendering.spec.images.pull_secrets]
    return fields


def pod_field(variable: str, path: str) -> dict[str, Any]:
    """Return an environment variable with a field of the pod, e.g. status.podIP."""
    return {"name": variable, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def tmp_volume() -> dict[str, Any]:
    """Return the volume for temporary files."""
    return {"name": _TMP, "emptyDir": {}}


def tmp_mount() -> dict[str, Any]:
    """Return the mount of the one folder that a program may write to."""
    return {"name": _TMP, "mountPath": TMP_DIR}


def group_token(rendering: Rendering) -> MountedFiles:
    """Return the token by which ranks and gateway recognise one another, as a file."""
    name = rendering.names.group_secret(rendering.revisions.ranks)
    return secret_file(_GROUP_TOKEN, SecretKeyRef(name=name, key=SECRET_GROUP_TOKEN_KEY), POD_GROUP_TOKEN_FILE)


def secret_file(volume: str, secret: SecretKeyRef | None, path: str) -> MountedFiles:
    """Return one key of a Secret as the file `path`, alone in its folder; nothing when there is no Secret."""
    if secret is None:
        return MountedFiles()
    file = PurePosixPath(path)
    items = [{"key": secret.key, "path": file.name}]
    source = {"secretName": secret.name, "defaultMode": SECRET_FILE_MODE, "items": items}
    mount = {"name": volume, "mountPath": str(file.parent), "readOnly": True}
    return MountedFiles(({"name": volume, "secret": source},), (mount,))
