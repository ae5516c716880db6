"""From a manifest to the processes of one machine: a pure function of the spec and of what the machine has.

What only a cluster has (Secrets, claims) is refused with the field's path, never left out in silence.

GPU ranks get cores too: they launch work on their device and exchange in host memory. Cores near the device are taken
where they are free, and no rank is refused for want of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from hetero_api.host.cores import CoreDemand, CoreGrant, CorePlan, plan_cores
from hetero_api.host.gpus import Gpu
from hetero_api.host.topology import LogicalCore, NumaNode
from hetero_api.quantity import format_bytes
from hetero_api.spec import HeteroInference, HeteroInferenceSpec, NumaPolicy, PoolSpec, PoolType
from hetero_client.errors import LocalSpecError
from hetero_client.launcher.local_devices import DevicePlan, PoolAt, plan_devices

DEFAULT_MEMORY_SHARE: Final = 0.8
"""Share of the machine's memory that CPU ranks without memoryPerRank divide among themselves."""
HOST_CORES: Final = "cpu"
"""Device of a rank that computes on host cores."""


@dataclass(frozen=True, slots=True)
class RankProcess:
    """One rank's process. `name` is unique in the group and names its log file."""

    name: str
    pool: str
    ordinal: int
    local_rank: int
    device: str
    """HOST_CORES or "cuda:N"."""
    cores: tuple[int, ...]
    num_threads: int
    numa_policy: NumaPolicy
    memory_bytes: int
    """Host memory; 0: not limited, for GPU ranks only."""
    communication_cores: tuple[int, ...] = ()
    """For its threads that do not compute; empty: where the machine lets them."""


@dataclass(frozen=True, slots=True)
class LocalPlan:
    """The ranks in rank order, and what the user should know."""

    ranks: tuple[RankProcess, ...]
    warnings: tuple[str, ...]

    @property
    def uses_gpus(self) -> bool:
        return any(rank.device != HOST_CORES for rank in self.ranks)


def plan_locally(
    resource: HeteroInference,
    *,
    cores: Sequence[LogicalCore],
    memory_bytes: int,
    gpus: Sequence[Gpu] = (),
    nodes: Mapping[int, NumaNode] | None = None,
    dp_local_rank: int = 0,
) -> LocalPlan:
    """The processes to start. Raises LocalSpecError with every problem.

    `gpus` are the machine's, as CUDA numbers them; `nodes` its NUMA nodes, if they are told. `dp_local_rank` numbers
    the groups that share all that from 0, each of this resource's size: one takes the devices and cores after those of
    the groups before it.
    """
    spec = resource.spec
    pools = [
        PoolAt(f"spec.pools[{index}]", pool)
        for index, pool in sorted(enumerate(spec.pools), key=lambda entry: entry[1].type != PoolType.GPU)
    ]
    devices = plan_devices(pools, gpus, dp_local_rank=dp_local_rank)
    core_plan = _plan_cores(cores, [_demand(at, devices) for at in pools], nodes, dp_local_rank)
    problems = [*_cluster_only(spec), *devices.problems, *core_plan.problems, *_memory_problems(pools, memory_bytes)]
    if problems:
        raise LocalSpecError(problems)
    default_bytes = _default_memory(pools, memory_bytes)
    ranks = [
        rank
        for at, grants in zip(pools, core_plan.grants, strict=True)
        for rank in _rank_processes(at, grants, devices, default_bytes)
    ]
    return LocalPlan(tuple(ranks), core_plan.warnings)


def _plan_cores(
    cores: Sequence[LogicalCore],
    demands: Sequence[CoreDemand],
    nodes: Mapping[int, NumaNode] | None,
    dp_local_rank: int,
) -> CorePlan:
    """Of this group: the groups before it chose as it does, each from what was left."""
    plan = plan_cores(cores, demands, nodes=nodes)
    for _ in range(dp_local_rank):
        taken = {number for grants in plan.grants for grant in grants for number in grant.cores}
        busy = {core.physical for core in cores if core.number in taken}
        cores = [core for core in cores if core.physical not in busy]
        plan = plan_cores(cores, demands, nodes=nodes)
    return plan


def _cluster_only(spec: HeteroInferenceSpec) -> list[str]:
    problems = []
    if spec.suspend or not spec.replicas:
        field = "suspend is true" if spec.suspend else "replicas is 0"
        problems.append(f"spec.{field}: there is nothing to start")
    secrets = {
        "spec.gateway.tlsSecretName": spec.gateway.tls_secret_name,
        "spec.gateway.authTokenSecretRef": spec.gateway.auth_token_secret_ref,
        "spec.model.tokenSecretRef": spec.model.token_secret_ref,
    }
    problems += [
        f"{path}: Secrets exist only in a cluster; leave it out to run on one machine"
        for path, value in secrets.items()
        if value is not None
    ]
    return problems


def _numa_policy(pool: PoolSpec) -> NumaPolicy:
    """Of a GPU rank: bound to what it gets, for launches that wait for a core make a device wait."""
    return NumaPolicy.BEST_EFFORT if pool.type == PoolType.GPU else pool.cpu_or_default.numa.policy


def _demand(at: PoolAt, devices: DevicePlan) -> CoreDemand:
    return CoreDemand(
        path=at.path,
        ranks=at.pool.ranks,
        cores_per_rank=at.pool.cores_per_rank,
        policy=_numa_policy(at.pool),
        near=tuple(gpu.numa_node for gpu in devices.of_pool(at.pool.name)),
        memory_bytes=at.pool.memory_per_rank or 0,
        field=f"{at.section}.coresPerRank",
    )


def _memory_problems(pools: Sequence[PoolAt], memory_bytes: int) -> list[str]:
    asked = sum(_given_memory(at.pool) for at in pools)
    if asked <= memory_bytes:
        return []
    total = f"all ranks together ask for {asked / 2**30:.1f} GiB, this machine has {memory_bytes / 2**30:.1f} GiB"
    return [
        f"{at.path}.{at.section}.memoryPerRank: {at.pool.ranks} x {format_bytes(at.pool.memory_per_rank)}; {total}"
        for at in pools
        if at.pool.memory_per_rank
    ]


def _given_memory(pool: PoolSpec) -> int:
    return pool.ranks * (pool.memory_per_rank or 0)


def _default_memory(pools: Sequence[PoolAt], memory_bytes: int) -> int:
    """Bytes for each CPU rank whose pool names none: an equal part of what the others leave."""
    given = sum(_given_memory(at.pool) for at in pools)
    open_ranks = sum(
        at.pool.ranks for at in pools if at.pool.type == PoolType.CPU and at.pool.memory_per_rank is None
    )  # fmt: skip
    return int((memory_bytes - given) * DEFAULT_MEMORY_SHARE / open_ranks) if open_ranks else 0


def _rank_processes(
    at: PoolAt, grants: Sequence[CoreGrant], devices: DevicePlan, default_bytes: int
) -> list[RankProcess]:
    pool = at.pool
    gpus = devices.of_pool(pool.name)
    return [
        RankProcess(
            name=f"{pool.name}-{index}",
            pool=pool.name,
            ordinal=index // pool.ranks_per_pod,
            local_rank=index % pool.ranks_per_pod,
            device=f"cuda:{gpus[index].number}" if gpus else HOST_CORES,
            cores=grant.cores,
            num_threads=grant.num_threads,
            numa_policy=_numa_policy(pool),
            memory_bytes=pool.memory_per_rank or (0 if gpus else default_bytes),
            communication_cores=grant.communication,
        )
        for index, grant in enumerate(grants)
    ]
