"""The StatefulSet of a set of rank pods and its pod template: containers that supervise the pod's ranks.

Parallel: ranks wait for one another, so one at a time would never end. OnDelete: a new revision is rolled out by the
operator, which deletes all old rank pods together; the StatefulSet controller would do it one by one, and mix
revisions in one group.

Containers of one pod start again one by one, by the kubelet: the ranks of the others keep their weights and wait for
the next epoch. They share the model's files, /tmp and /dev/shm; no rank knows another by its process id, which each
container counts for itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from hetero_api.contract import (
    ENV_GROUP_TOKEN_FILE,
    ENV_POD_IP,
    ENV_POD_NAME,
    LABEL_POOL,
    LABEL_REVISION,
    POD_GROUP_TOKEN_FILE,
    RANKS_PORT,
    ROLE_RANK,
    SECRET_RANK_CERTIFICATE,
    SECRET_RANK_KEY,
)
from hetero_api.host.topology import NumaPolicy
from hetero_api.spec import HeteroInferenceSpec
from hetero_api.spec_pools import PoolSpec, PoolType
from hetero_operator.reconcile.manifests.adaptation import Adaptation, adapted
from hetero_operator.reconcile.manifests.containers import (
    TMP_DIR,
    MountedFiles,
    container,
    container_ports,
    device_numbers,
    group_token,
    inside_arguments,
    inside_certificate,
    memory,
    pod_field,
    pod_template,
    rank_init_resources,
    rank_probes,
    rank_resources,
    rank_scheduling,
    tmp_files,
)
from hetero_operator.reconcile.manifests.model_volumes import deliver_models, model_containers, model_options
from hetero_operator.reconcile.manifests.optional_kinds import CLAIM_NAME, device_class, gang_annotations, gang_labels
from hetero_operator.reconcile.manifests.rendering import Rendering, common_labels, manifest, workload_selector
from hetero_operator.reconcile.rank_sets import RankContainer, RankSet

_KIND: Final = ("apps/v1", "StatefulSet")
_HISTORY: Final = 2
_STOP_GRACE_S: Final = 30
"""Longest that ranks take to leave their group, once a gateway that stops with them has drained."""
_GRACE_AFTER_STOP_S: Final = 30
"""Longest that a pod takes to end ranks that did not leave, and itself."""
_SHARED_MEMORY: Final = "shared-memory"
_NODE_SHARED_MEMORY: Final = "node-shared-memory"
"""Another name, so that a merge never makes one volume with two sources (see model_volumes)."""
_HUGEPAGES: Final = "hugepages"


def statefulset(rendering: Rendering, ranks: RankSet, template: Mapping[str, Any], *, held: bool) -> dict[str, Any]:
    """Return the StatefulSet of a set with a pod template; `held` keeps it without pods."""
    spec = {
        "serviceName": rendering.names.ranks,
        "replicas": ranks.pods if rendering.has_ranks and not held else 0,
        "podManagementPolicy": "Parallel",
        "updateStrategy": {"type": "OnDelete"},
        "revisionHistoryLimit": _HISTORY,
        "selector": {"matchLabels": workload_selector(rendering, ROLE_RANK, ranks.name)},
        "template": dict(template),
    }
    return manifest(
        rendering, _KIND, rendering.names.rank_set(ranks.name), component=ROLE_RANK,
        labels={LABEL_POOL: ranks.name, LABEL_REVISION: rendering.revisions.ranks}, spec=spec,
    )  # fmt: skip


def rank_additions(spec: HeteroInferenceSpec, ranks: RankSet) -> list[Adaptation]:
    """Return what the user adds to the pods of a set, pool by pool."""
    by_pool: dict[str, set[str]] = {}
    for item in ranks.containers:
        by_pool.setdefault(item.pool.name, model_containers(spec)).add(item.name)
    return [
        Adaptation.of(f"spec.pools[{index}]", pool, frozenset(by_pool[pool.name]))
        for index, pool in enumerate(spec.pools)
        if pool.name in by_pool
    ]


def rank_template(rendering: Rendering, ranks: RankSet) -> dict[str, Any]:
    """Return metadata and spec of the pods of a set."""
    return adapted(plain_rank_template(rendering, ranks), rank_additions(rendering.spec, ranks))


def plain_rank_template(rendering: Rendering, ranks: RankSet) -> dict[str, Any]:
    """Return metadata and spec of the pods of a set before what users add."""
    selector = workload_selector(rendering, ROLE_RANK, ranks.name)
    revision = {LABEL_REVISION: rendering.revisions.ranks}
    first = ranks.containers[0].pool  # scheduling is the same for all pools of a pod
    files = [
        deliver_models(
            rendering, image=_image(rendering, first), resources=rank_init_resources(first), tokenizer_only=False
        ),
        group_token(rendering),
        inside_certificate(rendering, SECRET_RANK_CERTIFICATE, SECRET_RANK_KEY),
        _shared_memory(rendering, ranks),
        tmp_files(),
    ]
    pages = next((found for item in ranks.containers if (found := _hugepages(item.pool)).volumes), MountedFiles())
    return pod_template(
        rendering,
        [*files, pages],
        labels={**gang_labels(rendering), **common_labels(rendering, ROLE_RANK), **selector, **revision},
        annotations=gang_annotations(rendering),
        account=rendering.names.rank_account,
        grace_period_s=_stop_grace_s(rendering) + _GRACE_AFTER_STOP_S,
        scheduling=rank_scheduling(rendering, first),
        containers=[_container(rendering, item, [*files, _hugepages(item.pool)]) for item in ranks.containers],
        runtimeClassName=_runtime_class(ranks),
        resourceClaims=_resource_claims(rendering, ranks),
    )


def _stop_grace_s(rendering: Rendering) -> int:
    """Return the longest time that ranks have to leave: a gateway that drains keeps them for its streams."""
    return rendering.spec.gateway.drain_timeout_seconds + _STOP_GRACE_S


def _runtime_class(ranks: RankSet) -> str | None:
    """Return the RuntimeClass of the pods: that of their GPU ranks."""
    classes = (item.pool.gpu_or_default.runtime_class_name for item in ranks.containers)
    return next((name for name in classes if name), None)


def _shared_memory(rendering: Rendering, ranks: RankSet) -> MountedFiles:
    """Return /dev/shm: the pod's own memory, or an existing folder in the node's.

    The kubelet would create one that only root can write. Ranks leave nothing behind in it: they unlink a segment as
    soon as all have it mapped, and its memory counts as the container's that touched it first. Each rank touches first
    what it writes, so each container's limit has its part of the volume's size.
    """
    folder = rendering.spec.exchange.host_path
    if folder is not None:
        volume = {"name": _NODE_SHARED_MEMORY, "hostPath": {"path": folder, "type": "Directory"}}
    else:
        limit = memory(sum(item.pool.shared_memory for item in ranks.containers))
        volume = {"name": _SHARED_MEMORY, "emptyDir": {"medium": "Memory", "sizeLimit": limit}}
    return MountedFiles((volume,), ({"name": volume["name"], "mountPath": "/dev/shm"},))


def _hugepages(pool: PoolSpec) -> MountedFiles:
    if pool.cpu is None or pool.cpu.hugepages is None:
        return MountedFiles()
    volume = {"name": _HUGEPAGES, "emptyDir": {"medium": "HugePages"}}
    return MountedFiles((volume,), ({"name": _HUGEPAGES, "mountPath": "/dev/hugepages"},))


def _container(rendering: Rendering, item: RankContainer, files: Sequence[MountedFiles]) -> dict[str, Any]:
    startup_timeout_s = rendering.spec.recovery.startup_timeout_seconds
    return container(
        rendering, item.name, _image(rendering, item.pool),
        resources=rank_resources(item.pool, claim=item.numbered(CLAIM_NAME)),
        command=["python", "-m", "hetero_worker.pod"],
        args=_arguments(rendering, item),
        env={ENV_GROUP_TOKEN_FILE: POD_GROUP_TOKEN_FILE, "HOME": TMP_DIR},
        env_from_pod=[pod_field(ENV_POD_NAME, "metadata.name"), pod_field(ENV_POD_IP, "status.podIP")],
        mounts=[mount for part in files for mount in part.mounts],
        ports=container_ports({item.port_name: item.port}),
        **rank_probes(startup_timeout_s, port=item.port_name),
    )  # fmt: skip


def _arguments(rendering: Rendering, item: RankContainer) -> list[str]:
    """Return the command line of `hetero_worker.pod`; it takes an ordinal that it is not given from the pod's name."""
    pool = item.pool
    host = rendering.names.gateway_host(rendering.namespace, rendering.options.cluster_domain)
    is_cpu = pool.type == PoolType.CPU
    options = {
        "--gateway": f"{host}:{RANKS_PORT}",
        **model_options(rendering.spec),
        "--pool": pool.name,
        "--ranks-per-pod": pool.ranks_per_pod,
        "--threads-per-rank": pool.cores_per_rank,
        "--numa-policy": (pool.cpu_or_default.numa.policy if is_cpu else NumaPolicy.NONE).value,
        "--memory-bytes-per-rank": pool.memory_per_rank or 0,
        "--health-port": item.port,
        "--stop-grace-s": _stop_grace_s(rendering),
        **inside_arguments(rendering),
    }
    if item.ordinal is not None:
        options["--ordinal"] = item.ordinal
    if not is_cpu:
        options["--cuda-devices"] = ",".join(map(str, device_numbers(pool)))
    return [text for option, value in options.items() for text in (option, str(value))]


def _image(rendering: Rendering, pool: PoolSpec) -> str:
    images, options = rendering.spec.images, rendering.options
    if pool.type == PoolType.GPU:
        return images.gpu_worker or options.gpu_worker_image
    return images.cpu_worker or options.cpu_worker_image


def _resource_claims(rendering: Rendering, ranks: RankSet) -> list[dict[str, Any]]:
    """Return a claim for each container whose pool claims its cores."""
    names, revision = rendering.names, rendering.revisions.ranks
    return [
        {"name": item.numbered(CLAIM_NAME), "resourceClaimTemplateName": names.claim_template(item.pool.name, revision)}
        for item in ranks.containers
        if device_class(item.pool)
    ]
