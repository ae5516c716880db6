"""The gateway's Deployment and pod template.

One pod, and Recreate: two gateways would be two groups. Rank pods find whichever one is there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from hetero_api.contract import (
    ADMIN_PORT,
    ANNOTATION_RENDER,
    CONFIG_MANIFEST_KEY,
    ENV_ADMIN_TOKEN_FILE,
    ENV_GROUP_TOKEN_FILE,
    HTTP_PORT,
    INFERENCE_PORT,
    LABEL_GATEWAY_REVISION,
    LABEL_REVISION,
    METRICS_PORT,
    POD_ADMIN_TOKEN_FILE,
    POD_GROUP_TOKEN_FILE,
    POD_MANIFEST,
    POD_MODEL_DIR,
    RANKS_PORT,
    ROLE_GATEWAY,
    SECRET_ADMIN_TOKEN_KEY,
)
from hetero_api.spec import SecretKeyRef
from hetero_operator.reconcile.manifests.containers import (
    TMP_DIR,
    MountedFiles,
    container,
    gateway_probes,
    gateway_resources,
    gateway_scheduling,
    group_token,
    pod_fields,
    secret_file,
    tmp_mount,
    tmp_volume,
)
from hetero_operator.reconcile.manifests.model_volumes import ModelDelivery, deliver_model
from hetero_operator.reconcile.manifests.rendering import Rendering, common_labels, gateway_selector, manifest
from hetero_operator.reconcile.names import (
    ADMIN_PORT_NAME,
    GATEWAY_CONTAINER,
    HTTP_PORT_NAME,
    INFERENCE_PORT_NAME,
    METRICS_PORT_NAME,
    RANKS_PORT_NAME,
)

_KIND: Final = ("apps/v1", "Deployment")
_HISTORY: Final = 2
_GRACE_AFTER_DRAIN_S: Final = 30
_CONFIG: Final = "config"
_CONFIG_DIR: Final = POD_MANIFEST.rpartition("/")[0]


def deployment(rendering: Rendering, template: Mapping[str, Any]) -> dict[str, Any]:
    """Return the gateway's Deployment with a pod template."""
    spec = {
        "replicas": 1 if rendering.runs else 0,
        "strategy": {"type": "Recreate"},
        "revisionHistoryLimit": _HISTORY,
        "selector": {"matchLabels": gateway_selector(rendering)},
        "template": dict(template),
    }
    return manifest(
        rendering, _KIND, rendering.names.gateway, component=ROLE_GATEWAY, labels=_revision_labels(rendering), spec=spec
    )


def gateway_template(rendering: Rendering) -> dict[str, Any]:
    """Return metadata and spec of the gateway's pod."""
    user = rendering.spec.pod_metadata
    labels = {**common_labels(rendering, ROLE_GATEWAY), **gateway_selector(rendering), **_revision_labels(rendering)}
    return {
        "metadata": {
            "labels": {**user.labels, **labels},
            "annotations": {**user.annotations, ANNOTATION_RENDER: rendering.options.operator_version},
        },
        "spec": _pod(rendering),
    }


def _revision_labels(rendering: Rendering) -> dict[str, str]:
    return {LABEL_REVISION: rendering.revisions.ranks, LABEL_GATEWAY_REVISION: rendering.revisions.gateway}


def _pod(rendering: Rendering) -> dict[str, Any]:
    spec = rendering.spec
    image = spec.images.gateway or rendering.options.gateway_image
    resources = gateway_resources(spec.gateway.resources)
    model = deliver_model(rendering, image=image, resources=resources, tokenizer_only=True)
    files = _files(rendering)
    grace_period_s = spec.gateway.drain_timeout_seconds + _GRACE_AFTER_DRAIN_S
    pod = {
        **pod_fields(rendering, account=rendering.names.gateway, grace_period_s=grace_period_s),
        **gateway_scheduling(spec),
        "containers": [_container(rendering, image, resources, model, files)],
        "volumes": [*model.volumes, *(volume for item in files for volume in item.volumes), tmp_volume()],
    }
    return {**pod, "initContainers": model.init_containers} if model.init_containers else pod


def _container(
    rendering: Rendering, image: str, resources: dict[str, Any], model: ModelDelivery, files: list[MountedFiles]
) -> dict[str, Any]:
    ports = {
        INFERENCE_PORT_NAME: INFERENCE_PORT,
        HTTP_PORT_NAME: HTTP_PORT,
        ADMIN_PORT_NAME: ADMIN_PORT,
        RANKS_PORT_NAME: RANKS_PORT,
        METRICS_PORT_NAME: METRICS_PORT,
    }
    listen = [text for name, port in ports.items() for text in (f"--{name}-port", str(port))]
    return container(
        rendering, GATEWAY_CONTAINER, image, resources=resources,
        command=["python", "-m", "hetero_gateway"],
        args=["--manifest", POD_MANIFEST, "--model", POD_MODEL_DIR, "--host", "0.0.0.0", *listen],
        env={
            ENV_GROUP_TOKEN_FILE: POD_GROUP_TOKEN_FILE, ENV_ADMIN_TOKEN_FILE: POD_ADMIN_TOKEN_FILE, "HOME": TMP_DIR,
        },
        mounts=[*model.mounts, *(mount for item in files for mount in item.mounts), tmp_mount()],
        ports=[{"name": name, "containerPort": port, "protocol": "TCP"} for name, port in ports.items()],
        **gateway_probes(),
    )  # fmt: skip


def _files(rendering: Rendering) -> list[MountedFiles]:
    """Return the resolved resource, and every secret that the gateway needs, as files."""
    admin = SecretKeyRef(name=rendering.names.group_secret(rendering.revisions.ranks), key=SECRET_ADMIN_TOKEN_KEY)
    return [
        _config(rendering),
        group_token(rendering),
        secret_file("admin-token", admin, POD_ADMIN_TOKEN_FILE),
    ]


def _config(rendering: Rendering) -> MountedFiles:
    source = {
        "name": rendering.names.config(rendering.revisions.gateway),
        "items": [{"key": CONFIG_MANIFEST_KEY, "path": POD_MANIFEST.rpartition("/")[2]}],
    }
    mount = {"name": _CONFIG, "mountPath": _CONFIG_DIR, "readOnly": True}
    return MountedFiles(({"name": _CONFIG, "configMap": source},), (mount,))
