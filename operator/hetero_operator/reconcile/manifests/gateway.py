"""The gateway's Deployment and pod template.

One pod, and Recreate: two gateways would be two groups. Rank pods find whichever one is there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any, Final

from hetero_api.contract import (
    CONFIG_MANIFEST_KEY,
    ENV_ADMIN_TOKEN_FILE,
    ENV_GROUP_TOKEN_FILE,
    LABEL_GATEWAY_REVISION,
    LABEL_REVISION,
    POD_ADMIN_TOKEN_FILE,
    POD_CLIENT_CA_DIR,
    POD_GROUP_TOKEN_FILE,
    POD_KEYS_FILE,
    POD_MANIFEST,
    POD_TLS_DIR,
    ROLE_GATEWAY,
    SECRET_ADMIN_TOKEN_KEY,
    SECRET_GATEWAY_CERTIFICATE,
    SECRET_GATEWAY_KEY,
    TLS_AUTHORITY,
    TLS_CERTIFICATE,
    TLS_KEY,
)
from hetero_api.spec import GatewaySpec, HeteroInferenceSpec
from hetero_api.spec_model import SecretKeyRef
from hetero_operator.reconcile.manifests.adaptation import Adaptation, adapted
from hetero_operator.reconcile.manifests.containers import (
    TMP_DIR,
    MountedFiles,
    container,
    container_ports,
    gateway_probes,
    gateway_resources,
    gateway_scheduling,
    group_token,
    inside_arguments,
    inside_certificate,
    pod_template,
    secret_file,
    secret_folder,
    tmp_files,
)
from hetero_operator.reconcile.manifests.model_volumes import adapter_directories, deliver_models, model_options
from hetero_operator.reconcile.manifests.optional_kinds import pool_labels
from hetero_operator.reconcile.manifests.rendering import Rendering, common_labels, manifest, workload_selector
from hetero_operator.reconcile.names import GATEWAY_CONTAINER, gateway_ports

_KIND: Final = ("apps/v1", "Deployment")
_HISTORY: Final = 2
_GRACE_AFTER_DRAIN_S: Final = 30
_CONFIG: Final = "config"
_CONFIG_DIR: Final = POD_MANIFEST.rpartition("/")[0]


def deployment(rendering: Rendering, template: Mapping[str, Any]) -> dict[str, Any]:
    """Return the gateway's Deployment with a pod template."""
    spec = {
        "replicas": 1 if rendering.has_gateway else 0,
        "strategy": {"type": "Recreate"},
        "revisionHistoryLimit": _HISTORY,
        "selector": {"matchLabels": workload_selector(rendering, ROLE_GATEWAY)},
        "template": dict(template),
    }
    return manifest(
        rendering, _KIND, rendering.names.gateway, component=ROLE_GATEWAY, labels=_revision_labels(rendering), spec=spec
    )


def gateway_additions(spec: HeteroInferenceSpec) -> list[Adaptation]:
    """Return what the user adds to the gateway's pod."""
    return [Adaptation.of("spec.gateway", spec.gateway)]


def gateway_template(rendering: Rendering) -> dict[str, Any]:
    """Return metadata and spec of the gateway's pod."""
    return adapted(plain_gateway_template(rendering), gateway_additions(rendering.spec))


def plain_gateway_template(rendering: Rendering) -> dict[str, Any]:
    """Return metadata and spec of the gateway's pod before what users add."""
    spec, names = rendering.spec, rendering.names
    image = spec.images.gateway or rendering.options.gateway_image
    resources = gateway_resources(spec.gateway.resources)
    admin = SecretKeyRef(name=names.group_secret(rendering.revisions.ranks), key=SECRET_ADMIN_TOKEN_KEY)
    files = [
        deliver_models(rendering, image=image, resources=resources, tokenizer_only=True),
        _config(rendering),
        group_token(rendering),
        inside_certificate(rendering, SECRET_GATEWAY_CERTIFICATE, SECRET_GATEWAY_KEY),
        secret_file("admin-token", admin, POD_ADMIN_TOKEN_FILE),
        secret_file("keys", spec.gateway.keys_secret, POD_KEYS_FILE),
        *door_certificates(spec.gateway),
        tmp_files(),
    ]
    return pod_template(
        rendering,
        files,
        labels={
            **common_labels(rendering, ROLE_GATEWAY),
            **workload_selector(rendering, ROLE_GATEWAY),
            **_revision_labels(rendering),
            **pool_labels(spec),
        },
        annotations={},
        account=names.gateway_account,
        grace_period_s=spec.gateway.drain_timeout_seconds + _GRACE_AFTER_DRAIN_S,
        scheduling=gateway_scheduling(rendering),
        containers=[_container(rendering, image, resources, files)],
    )


def _revision_labels(rendering: Rendering) -> dict[str, str]:
    return {LABEL_REVISION: rendering.revisions.ranks, LABEL_GATEWAY_REVISION: rendering.revisions.gateway}


def _container(
    rendering: Rendering, image: str, resources: dict[str, Any], files: list[MountedFiles]
) -> dict[str, Any]:
    open_ports = gateway_ports(rendering.spec)
    listen = [text for name, port in open_ports.items() for text in (f"--{name}-port", str(port))]
    return container(
        rendering, GATEWAY_CONTAINER, image, resources=resources,
        command=["python", "-m", "hetero_gateway"],
        args=[
            "--manifest", POD_MANIFEST, *chain.from_iterable(model_options(rendering.spec).items()),
            *(text for folder in adapter_directories(rendering.spec) for text in ("--adapter", folder)),
            "--host", rendering.options.any_address, *listen,
            *_access_arguments(rendering.spec.gateway),
            *(text for option in inside_arguments(rendering).items() for text in option),
        ],
        env={
            ENV_GROUP_TOKEN_FILE: POD_GROUP_TOKEN_FILE, ENV_ADMIN_TOKEN_FILE: POD_ADMIN_TOKEN_FILE, "HOME": TMP_DIR,
        },
        mounts=[mount for item in files for mount in item.mounts],
        ports=container_ports(open_ports),
        **gateway_probes(),
    )  # fmt: skip


def _access_arguments(gateway: GatewaySpec) -> Iterator[str]:
    """Yield the arguments that name the files of the front door's Secrets."""
    if gateway.keys_secret is not None:
        yield from ("--keys", POD_KEYS_FILE)
    yield from door_arguments(gateway)


def door_certificates(gateway: GatewaySpec) -> list[MountedFiles]:
    """Return the files of the front door's TLS."""
    tls = gateway.tls
    return [
        secret_folder("tls", tls.secret_name if tls else None, (TLS_CERTIFICATE, TLS_KEY), POD_TLS_DIR),
        secret_folder("client-ca", tls.client_ca_secret_name if tls else None, (TLS_AUTHORITY,), POD_CLIENT_CA_DIR),
    ]


def door_arguments(gateway: GatewaySpec) -> Iterator[str]:
    """Yield the arguments that name these files."""
    if gateway.tls is not None:
        yield from ("--tls-dir", POD_TLS_DIR)
        if gateway.tls.client_ca_secret_name is not None:
            yield from ("--client-ca-dir", POD_CLIENT_CA_DIR)


def _config(rendering: Rendering) -> MountedFiles:
    source = {
        "name": rendering.names.config(rendering.revisions.gateway),
        "items": [{"key": CONFIG_MANIFEST_KEY, "path": POD_MANIFEST.rpartition("/")[2]}],
    }
    mount = {"name": _CONFIG, "mountPath": _CONFIG_DIR, "readOnly": True}
    return MountedFiles(({"name": _CONFIG, "configMap": source},), (mount,))
