"""Parts that pods of a group and their containers share: security, probes, volumes, resources, scheduling.

Security contexts follow the Restricted profile of the Pod Security Standards, for every pod and container. Only volumes
that a user asks for by path on the node (`file://`, `cache.hostPath`, `exchange.hostPath`) are outside of that profile.

Probes decide when a container is restarted, and when it gets traffic. A rank that waits for its
group or loads weights must not be killed for it: its startup probe lasts until its ranks have met, at most
`recovery.startupTimeoutSeconds`, and then liveness counts. That is of the engine's loop (`/livez` fails when a step
hangs, or a load no longer gets on), not whether HTTP answers.

Requests and limits decide whether the kubelet gives a rank cores, memory and devices of its own. CPU pods are
Guaranteed: requests equal limits, in whole cores, on every container of the pod, init containers included; otherwise a
static CPU manager leaves them in the shared pool. Memory covers the ranks and /dev/shm, which the kernel counts to the
pod. Without `memoryPerRank` there is nothing to ask for, and the pod is Burstable.

The device plugin chooses a container's devices, which sees them numbered from 0. So it asks for one for each of its
ranks, and the numbers that a pool names give the order of its ranks on them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Final

from hetero_api.contract import (
    ANNOTATION_RENDER,
    POD_GROUP_TOKEN_FILE,
    POD_INSIDE_TLS_DIR,
    ROLE_GATEWAY,
    ROLE_RANK,
    SECRET_GROUP_TOKEN_KEY,
    SECRET_INSIDE_AUTHORITY,
    TLS_AUTHORITY,
    TLS_CERTIFICATE,
    TLS_KEY,
)
from hetero_api.quantity import format_bytes
from hetero_api.spec import HeteroInferenceSpec
from hetero_api.spec_cluster import ReplicaSpreadSpec, ResourcesSpec, SpreadPolicy, Toleration
from hetero_api.spec_model import SecretKeyRef
from hetero_api.spec_pools import PoolSpec, PoolType
from hetero_operator.reconcile.manifests.optional_kinds import device_class, rank_scheduler
from hetero_operator.reconcile.manifests.rendering import (
    Rendering,
    group_selector,
    instance_selector,
    role_selector,
    router_selector,
)
from hetero_operator.reconcile.model import RenderOptions

_STARTUP_PERIOD_S: Final = 2
"""A replica that rolls out waits for it, and the next replica for that one."""
_PROBE_TIMEOUT_S: Final = 5
_GATEWAY_STARTUP_S: Final = 300
"""A gateway only reads a tokenizer and opens its ports before /livez answers."""
TMP_DIR: Final = "/tmp"
_TMP: Final = "tmp"
_GROUP_TOKEN: Final = "group-token"
INSIDE_VOLUME: Final = "inside-tls"
SECRET_FILE_MODE: Final = 0o440
"""Mode of files from Secrets: the owner is root, the pod's group may read."""
_DECIMAL_SUFFIXES: Final = (("P", 10**15), ("T", 10**12), ("G", 10**9), ("M", 10**6), ("k", 10**3))
_NODE_TAINTS: Final = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
_NODE_TAINT_SECONDS: Final = 60
"""Kubernetes' own default is 300: too long for a group that stands still without the lost pod."""
_FULL_WEIGHT: Final = 100
_NODE: Final = "kubernetes.io/hostname"


def pod_security(options: RenderOptions) -> dict[str, Any]:
    """Return the securityContext of a pod."""
    user = options.run_as_user
    return {
        "runAsNonRoot": True,
        **(dict.fromkeys(("runAsUser", "runAsGroup", "fsGroup"), user) if user else {}),
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def container_security() -> dict[str, Any]:
    """Return the securityContext of a container."""
    return {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}


def rank_probes(startup_timeout_s: int, *, port: str) -> dict[str, Any]:
    """Return the probes of a rank container, at its port of that name."""
    return {
        "startupProbe": _startup("/startupz", port, startup_timeout_s),
        "livenessProbe": _probe("/livez", port, period_s=10, failures=6),
        "readinessProbe": _probe("/readyz", port, period_s=5, failures=2),
    }


def gateway_probes() -> dict[str, Any]:
    """Return the probes of the gateway's pod."""
    return {
        "startupProbe": _startup("/livez", "metrics", _GATEWAY_STARTUP_S),
        "livenessProbe": _probe("/livez", "metrics", period_s=10, failures=3),
        "readinessProbe": _probe("/readyz", "metrics", period_s=2, failures=2),
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
    """Volumes of a pod, and where its main container finds them; empty when there is nothing to mount."""

    volumes: tuple[dict[str, Any], ...] = ()
    mounts: tuple[dict[str, Any], ...] = ()
    init_containers: tuple[dict[str, Any], ...] = ()
    """Containers that fill the volumes before the main container starts."""


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


def container_ports(ports: Mapping[str, int]) -> list[dict[str, Any]]:
    """Return the ports of a container, given their numbers by name."""
    return [{"name": name, "containerPort": port, "protocol": "TCP"} for name, port in ports.items()]


def pod_template(
    rendering: Rendering,
    files: Sequence[MountedFiles],
    *,
    labels: Mapping[str, str],
    annotations: Mapping[str, str],
    account: str,
    grace_period_s: int,
    scheduling: Mapping[str, Any],
    containers: Sequence[Mapping[str, Any]],
    **optional: Any,
) -> dict[str, Any]:
    """Return metadata and spec of a pod with its main containers. Fields in `optional` that are empty are left out."""
    user, pull_secrets = rendering.spec.pod_metadata, rendering.spec.images.pull_secrets
    init_containers = [item for part in files for item in part.init_containers]
    optional = {"initContainers": init_containers, **optional}
    spec = {
        "serviceAccountName": account,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": pod_security(rendering.options),
        "terminationGracePeriodSeconds": grace_period_s,
        **({"imagePullSecrets": [{"name": name} for name in pull_secrets]} if pull_secrets else {}),
        **scheduling,
        "containers": list(containers),
        "volumes": [volume for part in files for volume in part.volumes],
        **{key: value for key, value in optional.items() if value},
    }
    rendered_by = {ANNOTATION_RENDER: rendering.options.operator_version}
    metadata = {"labels": {**user.labels, **labels}, "annotations": {**user.annotations, **annotations, **rendered_by}}
    return {"metadata": metadata, "spec": spec}


def pod_field(variable: str, path: str) -> dict[str, Any]:
    """Return an environment variable with a field of the pod, e.g. status.podIP."""
    return {"name": variable, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def tmp_mount() -> dict[str, Any]:
    """Return the mount of the one folder that a program may write to."""
    return {"name": _TMP, "mountPath": TMP_DIR}


def tmp_files() -> MountedFiles:
    """Return the folder for temporary files."""
    return MountedFiles(({"name": _TMP, "emptyDir": {}},), (tmp_mount(),))


def group_token(rendering: Rendering) -> MountedFiles:
    """Return the token by which ranks and gateway recognise one another, as a file."""
    name = rendering.names.group_secret(rendering.revisions.ranks)
    return secret_file(_GROUP_TOKEN, SecretKeyRef(name=name, key=SECRET_GROUP_TOKEN_KEY), POD_GROUP_TOKEN_FILE)


def inside_certificate(rendering: Rendering, certificate: str, key: str) -> MountedFiles:
    """Return a certificate of the group's inside as files, given its keys in the Secret; nothing without inside TLS."""
    if not rendering.options.inside_tls:
        return MountedFiles()
    name = rendering.names.inside_secret(rendering.revisions.ranks)
    files = {SECRET_INSIDE_AUTHORITY: TLS_AUTHORITY, certificate: TLS_CERTIFICATE, key: TLS_KEY}
    return _secret_folder(INSIDE_VOLUME, name, files, POD_INSIDE_TLS_DIR)


def inside_arguments(rendering: Rendering) -> dict[str, str]:
    """Return the option that names these files; nothing where there are none."""
    return {"--inside-tls-dir": POD_INSIDE_TLS_DIR} if rendering.options.inside_tls else {}


def secret_file(volume: str, secret: SecretKeyRef | None, path: str) -> MountedFiles:
    """Return one key of a Secret as the file `path`, alone in its folder; nothing when there is no Secret."""
    if secret is None:
        return MountedFiles()
    file = PurePosixPath(path)
    return _secret_folder(volume, secret.name, {secret.key: file.name}, str(file.parent))


def secret_folder(volume: str, secret: str | None, keys: Sequence[str], folder: str) -> MountedFiles:
    """Return keys of a Secret as files of `folder`, under their own names; nothing when there is no Secret."""
    return MountedFiles() if secret is None else _secret_folder(volume, secret, {key: key for key in keys}, folder)


def _secret_folder(volume: str, secret: str, files: Mapping[str, str], folder: str) -> MountedFiles:
    """Return keys of a Secret as files, by name. The kubelet replaces them when the Secret changes."""
    items = [{"key": key, "path": file} for key, file in files.items()]
    source = {"secretName": secret, "defaultMode": SECRET_FILE_MODE, "items": items}
    mount = {"name": volume, "mountPath": folder, "readOnly": True}
    return MountedFiles(({"name": volume, "secret": source},), (mount,))


def rank_resources(pool: PoolSpec, *, claim: str) -> dict[str, Any]:
    """Return the resources of a container for ranks; `claim` names its cores in the pod, where the pool claims them."""
    limits = {**_shared_limits(pool), **_devices(pool)}
    claims = {"claims": [{"name": claim}]} if device_class(pool) else {}
    return {"requests": limits, "limits": limits, **claims}


def rank_init_resources(pool: PoolSpec) -> dict[str, Any]:
    """Return the resources of a rank pod's init container: cores and memory of its first container, no devices.

    A static CPU manager gives the cores of init containers to the first container that follows. More of them would be
    left for the next one, and bind it to the same NUMA node.
    """
    limits = _shared_limits(pool)
    return {"requests": limits, "limits": limits}


def gateway_resources(resources: ResourcesSpec) -> dict[str, Any]:
    """Return the resources of each of the gateway pod's containers."""
    limits = {"cpu": millis(resources.cpu_millis), "memory": memory(resources.memory)}
    return {"requests": limits, "limits": limits}


def memory(count: int) -> str:
    """Format bytes as the API server writes them, so that its answer reads the same: 1536Mi, 64M, 17."""
    if count % 1024 == 0:
        return format_bytes(count)
    for suffix, unit in _DECIMAL_SUFFIXES:
        if count % unit == 0:
            return f"{count // unit}{suffix}"
    return str(count)


def millis(count: int) -> str:
    """Format thousandths of a core as the API server writes them: 1500m, 2, 3k."""
    if count % 1_000_000 == 0:
        return f"{count // 1_000_000}k"
    return f"{count}m" if count % 1000 else str(count // 1000)


def device_numbers(pool: PoolSpec) -> list[int]:
    """Return the CUDA device of each rank of a pod."""
    named = pool.gpu_or_default.devices or list(range(pool.ranks_per_pod))
    return [sorted(named).index(number) for number in named]


def _shared_limits(pool: PoolSpec) -> dict[str, str]:
    """Return the cores and memory of all ranks of a container."""
    limits = {"cpu": str(pool.cores_per_rank * pool.ranks_per_pod)}
    if pool.memory_per_rank is not None:
        limits["memory"] = memory(pool.memory_per_rank * pool.ranks_per_pod + pool.shared_memory)
    return limits


def _devices(pool: PoolSpec) -> dict[str, str]:
    """Return GPUs and huge pages."""
    if pool.type == PoolType.GPU:
        return {pool.gpu_or_default.resource_name: str(pool.ranks_per_pod)}
    pages = pool.cpu_or_default.hugepages
    if pages is None:
        return {}
    return {f"hugepages-{pages.size}": memory(pages.per_rank * pool.ranks_per_pod)}


def rank_scheduling(rendering: Rendering, pool: PoolSpec) -> dict[str, Any]:
    """Return the scheduling fields of a rank pod's spec."""
    spec = rendering.spec
    fields = _fields(
        spec,
        scheduler=rank_scheduler(spec),
        node_selector={**spec.scheduling.node_selector, **pool.scheduling.node_selector},
        tolerations=[*spec.scheduling.tolerations, *pool.scheduling.tolerations],
    )
    affinity = {**_shared_domain(rendering), **_apart(rendering, ROLE_RANK, rendering.spec.scheduling.replica_spread)}
    return {**fields, "affinity": affinity} if affinity else fields


def gateway_scheduling(rendering: Rendering) -> dict[str, Any]:
    """Return the scheduling fields of the gateway pod's spec: replicas spread as their ranks do, else over nodes."""
    spread = rendering.spec.scheduling.replica_spread or ReplicaSpreadSpec(key=_NODE, policy=SpreadPolicy.PREFERRED)
    return {**door_scheduling(rendering.spec), "affinity": _apart(rendering, ROLE_GATEWAY, spread)}


def door_scheduling(spec: HeteroInferenceSpec) -> dict[str, Any]:
    """Return the scheduling fields of pods without ranks; none of those for ranks together."""
    scheduling = spec.scheduling
    return _fields(
        spec,
        scheduler=scheduling.scheduler_name,
        node_selector=scheduling.node_selector,
        tolerations=scheduling.tolerations,
    )


def router_scheduling(rendering: Rendering) -> dict[str, Any]:
    """Return the scheduling fields of the router's pods, with an aversion to one another's nodes."""
    apart = _affinity(_NODE, {"matchLabels": router_selector(rendering)}, SpreadPolicy.PREFERRED)
    return {**door_scheduling(rendering.spec), "affinity": {"podAntiAffinity": apart}}


def _fields(
    spec: HeteroInferenceSpec,
    *,
    scheduler: str | None,
    node_selector: dict[str, str],
    tolerations: Sequence[Toleration],
) -> dict[str, Any]:
    optional = {
        "schedulerName": scheduler,
        "priorityClassName": spec.scheduling.priority_class_name,
        "nodeSelector": dict(node_selector),
    }
    present = {key: value for key, value in optional.items() if value}
    return {**present, "tolerations": _with_node_taints(tolerations)}


def _with_node_taints(tolerations: Sequence[Toleration]) -> list[dict[str, Any]]:
    """Return the user's tolerations, and short ones for lost nodes where the user has none for these."""
    own = [item.model_dump(mode="json", by_alias=True, exclude_none=True) for item in tolerations]
    added = [
        {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": _NODE_TAINT_SECONDS}
        for key in _NODE_TAINTS
        if not any(_covers(item, key) for item in tolerations)
    ]
    return [*own, *added]


def _covers(toleration: Toleration, taint: str) -> bool:
    return toleration.key in (None, taint) and toleration.effect in (None, "NoExecute")


def _shared_domain(rendering: Rendering) -> dict[str, Any]:
    """Return the affinity of every rank to all ranks of its replica."""
    topology = rendering.spec.scheduling.topology
    if topology is None:
        return {}
    selector = {"matchLabels": group_selector(rendering, ROLE_RANK)}
    return {"podAffinity": _affinity(topology.key, selector, topology.policy)}


def _apart(rendering: Rendering, role: str, spread: ReplicaSpreadSpec | None) -> dict[str, Any]:
    """Return the aversion of every pod of a role to those of other replicas."""
    if spread is None:
        return {}
    [(label, group)] = instance_selector(rendering).items()
    others = {"key": label, "operator": "NotIn", "values": [group]}
    selector = {"matchLabels": role_selector(rendering, role), "matchExpressions": [others]}
    return {"podAntiAffinity": _affinity(spread.key, selector, spread.policy)}


def _affinity(key: str, selector: Mapping[str, Any], policy: SpreadPolicy) -> dict[str, Any]:
    term = {"topologyKey": key, "labelSelector": selector}
    if policy == SpreadPolicy.REQUIRED:
        return {"requiredDuringSchedulingIgnoredDuringExecution": [term]}
    preferred = {"weight": _FULL_WEIGHT, "podAffinityTerm": term}
    return {"preferredDuringSchedulingIgnoredDuringExecution": [preferred]}
