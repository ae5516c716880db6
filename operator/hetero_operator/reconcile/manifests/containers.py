"""What all containers of a group have in common, and the volumes that more than one kind of pod has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Final

from hetero_api.contract import POD_GROUP_TOKEN_FILE, SECRET_GROUP_TOKEN_KEY
from hetero_api.spec import SecretKeyRef
from hetero_operator.reconcile.manifests.rendering import Rendering
from hetero_operator.reconcile.manifests.security import container_security, pod_security

TMP_DIR: Final = "/tmp"
_TMP: Final = "tmp"
_GROUP_TOKEN: Final = "group-token"
SECRET_FILE_MODE: Final = 0o440
"""Mode of files from Secrets: the owner is root, the pod's group may read."""


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
    """A container under the Restricted profile; its last log lines become its termination message when it fails."""
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
    """Fields of every pod's spec."""
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
    """An environment variable with a field of the pod, e.g. status.podIP."""
    return {"name": variable, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def tmp_volume() -> dict[str, Any]:
    return {"name": _TMP, "emptyDir": {}}


def tmp_mount() -> dict[str, Any]:
    """The one folder that a program may write to."""
    return {"name": _TMP, "mountPath": TMP_DIR}


def group_token(rendering: Rendering) -> MountedFiles:
    """The token that ranks and gateway know one another by."""
    name = rendering.names.group_secret(rendering.revisions.ranks)
    return secret_file(_GROUP_TOKEN, SecretKeyRef(name=name, key=SECRET_GROUP_TOKEN_KEY), POD_GROUP_TOKEN_FILE)


def secret_file(volume: str, secret: SecretKeyRef | None, path: str) -> MountedFiles:
    """One key of a Secret as the file `path`, alone in its folder; nothing when there is no Secret."""
    if secret is None:
        return MountedFiles()
    file = PurePosixPath(path)
    items = [{"key": secret.key, "path": file.name}]
    source = {"secretName": secret.name, "defaultMode": SECRET_FILE_MODE, "items": items}
    mount = {"name": volume, "mountPath": str(file.parent), "readOnly": True}
    return MountedFiles(({"name": volume, "secret": source},), (mount,))
