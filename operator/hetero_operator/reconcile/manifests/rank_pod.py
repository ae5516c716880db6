"""The StatefulSet of a pool and its pod template: one container that supervises the pod's ranks.

Parallel: ranks wait for one another, so one at a time would never end. OnDelete: a new revision is rolled out by the
operator, which deletes all old rank pods together; the StatefulSet controller would do it one by one, and mix
revisions in one group.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from hetero_api.contract import (
    ENV_GROUP_TOKEN_FILE,
    ENV_POD_IP,
    ENV_POD_NAME,
    LABEL_POOL,
    LABEL_REVISION,
    POD_GROUP_TOKEN_FILE,
    POD_HEALTH_PORT,
    POD_MODEL_DIR,
    RANKS_PORT,
    ROLE_RANK,
)
from hetero_api.host.topology import NumaPolicy
from hetero_api.spec_pools import PoolSpec, PoolType
from hetero_operator.reconcile.manifests.containers import (
    TMP_DIR,
    MountedFiles,
    container,
    container_ports,
    device_numbers,
    group_token,
    memory,
    pod_field,
    pod_template,
    rank_init_resources,
    rank_probes,
    rank_resources,
    rank_scheduling,
    tmp_files,
)
from hetero_operator.reconcile.manifests.model_volumes import deliver_model
from hetero_operator.reconcile.manifests.optional_kinds import CLAIM_NAME, device_class, gang_annotations, gang_labels
from hetero_operator.reconcile.manifests.rendering import Rendering, common_labels, manifest, rank_selector
from hetero_operator.reconcile.names import RANK_CONTAINER, RANK_PORTS

_KIND: Final = ("apps/v1", "StatefulSet")
_HISTORY: Final = 2
GRACE_PERIOD_S: Final = 60
"""Longest time that ranks take to leave their group."""
_SHARED_MEMORY: Final = "shared-memory"
_NODE_SHARED_MEMORY: Final = "node-shared-memory"
"""Another name, so that a merge never makes one volume with two sources (see model_volumes)."""
_HUGEPAGES: Final = "hugepages"


def statefulset(rendering: Rendering, pool: PoolSpec, template: Mapping[str, Any], *, held: bool) -> dict[str, Any]:
    """Return the pool's StatefulSet with a pod template; `held` keeps it without pods."""
    spec = {
        "serviceName": rendering.names.ranks,
        "replicas": pool.pods if rendering.runs and not held else 0,
        "podManagementPolicy": "Parallel",
        "updateStrategy": {"type": "OnDelete"},
        "revisionHistoryLimit": _HISTORY,
        "selector": {"matchLabels": rank_selector(rendering, pool.name)},
        "template": dict(template),
    }
    return manifest(
        rendering, _KIND, rendering.names.pool(pool.name), component=ROLE_RANK,
        labels={LABEL_POOL: pool.name, LABEL_REVISION: rendering.revisions.ranks}, spec=spec,
    )  # fmt: skip


def rank_template(rendering: Rendering, pool: PoolSpec) -> dict[str, Any]:
    """Return metadata and spec of the pods of a pool."""
    selector, revision = rank_selector(rendering, pool.name), {LABEL_REVISION: rendering.revisions.ranks}
    files = [
        deliver_model(
            rendering, image=_image(rendering, pool), resources=rank_init_resources(pool), tokenizer_only=False
        ),
        group_token(rendering),
        _shared_memory(rendering, pool),
        tmp_files(),
        _hugepages(pool),
    ]
    return pod_template(
        rendering,
        files,
        labels={**gang_labels(rendering), **common_labels(rendering, ROLE_RANK), **selector, **revision},
        annotations=gang_annotations(rendering),
        account=rendering.names.rank_account,
        grace_period_s=GRACE_PERIOD_S,
        scheduling=rank_scheduling(rendering, pool),
        container=_container(rendering, pool, files),
        runtimeClassName=pool.gpu_or_default.runtime_class_name,
        resourceClaims=_resource_claims(rendering, pool),
    )


def _shared_memory(rendering: Rendering, pool: PoolSpec) -> MountedFiles:
    """Return /dev/shm: the pod's own memory, or an existing folder in the node's.

    The kubelet would create one that only root can write. Ranks leave nothing behind in it: they unlink a segment as
    soon as all have it mapped, and its memory counts as the pod's that touched it first.
    """
    folder = rendering.spec.exchange.host_path
    if folder is not None:
        volume = {"name": _NODE_SHARED_MEMORY, "hostPath": {"path": folder, "type": "Directory"}}
    else:
        limit = memory(pool.shared_memory)
        volume = {"name": _SHARED_MEMORY, "emptyDir": {"medium": "Memory", "sizeLimit": limit}}
    return MountedFiles((volume,), ({"name": volume["name"], "mountPath": "/dev/shm"},))


def _hugepages(pool: PoolSpec) -> MountedFiles:
    if pool.cpu is None or pool.cpu.hugepages is None:
        return MountedFiles()
    volume = {"name": _HUGEPAGES, "emptyDir": {"medium": "HugePages"}}
    return MountedFiles((volume,), ({"name": _HUGEPAGES, "mountPath": "/dev/hugepages"},))


def _container(rendering: Rendering, pool: PoolSpec, files: list[MountedFiles]) -> dict[str, Any]:
    return container(
        rendering, RANK_CONTAINER, _image(rendering, pool), resources=rank_resources(pool),
        command=["python", "-m", "hetero_worker.pod"],
        args=_arguments(rendering, pool),
        env={ENV_GROUP_TOKEN_FILE: POD_GROUP_TOKEN_FILE, "HOME": TMP_DIR},
        env_from_pod=[pod_field(ENV_POD_NAME, "metadata.name"), pod_field(ENV_POD_IP, "status.podIP")],
        mounts=[mount for item in files for mount in item.mounts],
        ports=container_ports(RANK_PORTS),
        **rank_probes(rendering.spec.recovery.startup_timeout_seconds),
    )  # fmt: skip


def _arguments(rendering: Rendering, pool: PoolSpec) -> list[str]:
    """Return the command line of `hetero_worker.pod`; it takes its ordinal from the pod's name."""
    host = rendering.names.gateway_host(rendering.namespace, rendering.options.cluster_domain)
    is_cpu = pool.type == PoolType.CPU
    options = {
        "--gateway": f"{host}:{RANKS_PORT}",
        "--model": POD_MODEL_DIR,
        "--pool": pool.name,
        "--ranks-per-pod": pool.ranks_per_pod,
        "--threads-per-rank": pool.cores_per_rank,
        "--numa-policy": (pool.cpu_or_default.numa.policy if is_cpu else NumaPolicy.NONE).value,
        "--memory-bytes-per-rank": pool.memory_per_rank or 0,
        "--health-port": POD_HEALTH_PORT,
    }
    if not is_cpu:
        options["--cuda-devices"] = ",".join(map(str, device_numbers(pool)))
    return [text for option, value in options.items() for text in (option, str(value))]


def _image(rendering: Rendering, pool: PoolSpec) -> str:
    images, options = rendering.spec.images, rendering.options
    if pool.type == PoolType.GPU:
        return images.gpu_worker or options.gpu_worker_image
    return images.cpu_worker or options.cpu_worker_image


def _resource_claims(rendering: Rendering, pool: PoolSpec) -> list[dict[str, Any]]:
    template = rendering.names.claim_template(pool.name, rendering.revisions.ranks)
    return [{"name": CLAIM_NAME, "resourceClaimTemplateName": template}] if device_class(pool) else []
