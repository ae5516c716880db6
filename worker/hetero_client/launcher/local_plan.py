"""From a manifest to the processes of one machine: a pure function of the spec and of what the machine has.

What only a cluster has (Secrets, claims, GPU pools in this version) is refused with the field's path, never
left out in silence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from hetero_api.host.cores import CoreDemand, CoreGrant, LogicalCore, plan_cores
from hetero_api.quantity import format_bytes
from hetero_api.spec import HeteroInference, HeteroInferenceSpec, NumaPolicy, PoolSpec, PoolType
from hetero_client.errors import LocalSpecError

DEFAULT_MEMORY_SHARE: Final = 0.8
"""Share of the machine's memory that ranks without memoryPerRank divide among themselves."""


@dataclass(frozen=True, slots=True)
class RankProcess:
    """One rank's process. `name` is unique in the group and names its log file."""

    name: str
    pool: str
    ordinal: int
    local_rank: int
    cores: tuple[int, ...]
    num_threads: int
    numa_policy: NumaPolicy
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class LocalPlan:
    """The ranks in rank order, and what the user should know."""

    ranks: tuple[RankProcess, ...]
    warnings: tuple[str, ...]


def plan_locally(resource: HeteroInference, *, cores: Sequence[LogicalCore], memory_bytes: int) -> LocalPlan:
    """The processes to start. Raises LocalSpecError with every problem."""
    spec = resource.spec
    problems = _cluster_only(spec)
    pools = [(path, pool) for path, pool in _paths_in_rank_order(spec) if pool.type == PoolType.CPU]
    core_plan = plan_cores(cores, [_demand(path, pool) for path, pool in pools])
    problems += [*core_plan.problems, *_memory_problems(pools, memory_bytes)]
    if problems:
        raise LocalSpecError(problems)
    default_bytes = _default_memory(pools, memory_bytes)
    ranks = [
        rank
        for (_, pool), grants in zip(pools, core_plan.grants, strict=True)
        for rank in _rank_processes(pool, grants, default_bytes)
    ]
    return LocalPlan(tuple(ranks), core_plan.warnings)


def _paths_in_rank_order(spec: HeteroInferenceSpec) -> list[tuple[str, PoolSpec]]:
    numbered = [(f"spec.pools[{index}]", pool) for index, pool in enumerate(spec.pools)]
    return sorted(numbered, key=lambda entry: entry[1].type != PoolType.GPU)


def _cluster_only(spec: HeteroInferenceSpec) -> list[str]:
    problems = [
        f"{path}.type: GPU pools are not supported by this version; use type CPU"
        for path, pool in _paths_in_rank_order(spec)
        if pool.type == PoolType.GPU
    ]
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


def _demand(path: str, pool: PoolSpec) -> CoreDemand:
    cpu = pool.cpu_or_default
    return CoreDemand(path=path, ranks=pool.ranks, cores_per_rank=cpu.cores_per_rank, policy=cpu.numa.policy)


def _memory_problems(pools: Sequence[tuple[str, PoolSpec]], memory_bytes: int) -> list[str]:
    asked = sum(pool.ranks * (pool.cpu_or_default.memory_per_rank or 0) for _, pool in pools)
    if asked <= memory_bytes:
        return []
    total = f"all ranks together ask for {asked / 2**30:.1f} GiB, this machine has {memory_bytes / 2**30:.1f} GiB"
    return [
        f"{path}.cpu.memoryPerRank: {pool.ranks} x {format_bytes(pool.cpu_or_default.memory_per_rank)}; {total}"
        for path, pool in pools
        if pool.cpu_or_default.memory_per_rank
    ]


def _default_memory(pools: Sequence[tuple[str, PoolSpec]], memory_bytes: int) -> int:
    """Bytes for each rank whose pool names none: an equal part of what the others leave."""
    given = sum(pool.ranks * (pool.cpu_or_default.memory_per_rank or 0) for _, pool in pools)
    open_ranks = sum(pool.ranks for _, pool in pools if pool.cpu_or_default.memory_per_rank is None)
    return int((memory_bytes - given) * DEFAULT_MEMORY_SHARE / open_ranks) if open_ranks else 0


def _rank_processes(pool: PoolSpec, grants: Sequence[CoreGrant], default_bytes: int) -> list[RankProcess]:
    cpu = pool.cpu_or_default
    return [
        RankProcess(
            name=f"{pool.name}-{index}",
            pool=pool.name,
            ordinal=index // pool.ranks_per_pod,
            local_rank=index % pool.ranks_per_pod,
            cores=grant.cores,
            num_threads=grant.num_threads,
            numa_policy=cpu.numa.policy,
            memory_bytes=cpu.memory_per_rank or default_bytes,
        )
        for index, grant in enumerate(grants)
    ]
