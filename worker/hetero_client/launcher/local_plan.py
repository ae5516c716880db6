"""From a manifest to the processes of one machine: a pure function of the spec and of the machine's hardware.

Features that need a cluster (Secrets, claims) are refused with the field's path, never left out silently.

GPU ranks get cores too: they launch work on their device and exchange in host memory. Cores near the device are taken
where they are free, and no rank is refused for want of them. In a cluster a pod sees the devices that it was given. On
one machine all pods of a resource see the same devices, so no two ranks may name the same one.

Groups of other manifests that run here keep their cores and memory. Where too few cores are left they are shared, with
a warning.

`plan_here` is the one place where the launcher reads the machine.
"""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import islice
from typing import Final

from hetero_api.cpu_list import format_cpu_list
from hetero_api.host.cgroup import cgroup_limits
from hetero_api.host.cores import CoreDemand, CoreGrant, CorePlan, plan_cores
from hetero_api.host.gpus import Gpu, visible_gpus
from hetero_api.host.memory import total_memory_bytes
from hetero_api.host.topology import CpuTopology, LogicalCore, NumaNode, NumaPolicy
from hetero_api.manifest import find_unserved
from hetero_api.quantity import format_bytes
from hetero_api.spec import HeteroInference, HeteroInferenceSpec
from hetero_api.spec_pools import PoolSpec, PoolType
from hetero_client.errors import LocalSpecError

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
    """CPUs for threads that do not compute; empty: any."""


@dataclass(frozen=True, slots=True)
class LocalPlan:
    """The ranks in rank order, and warnings for the user."""

    ranks: tuple[RankProcess, ...]
    warnings: tuple[str, ...]

    @property
    def uses_gpus(self) -> bool:
        """Whether any rank computes on a GPU."""
        return any(rank.device != HOST_CORES for rank in self.ranks)

    def share(self, group: str) -> GroupShare:
        """Return the part of the machine that the plan takes for a group of this name."""
        cores = tuple(sorted(number for rank in self.ranks for number in rank.cores))
        return GroupShare(group, cores, sum(rank.memory_bytes for rank in self.ranks))


@dataclass(frozen=True, slots=True)
class GroupShare:
    """The cores and the host memory that a running group has."""

    name: str
    cores: tuple[int, ...]
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class PoolAt:
    """A pool and its path in the manifest, e.g. "spec.pools[0]"."""

    path: str
    pool: PoolSpec

    @property
    def section(self) -> str:
        """Section of its ranks' settings below `path`: "gpu" or "cpu"."""
        return self.pool.type.lower()


Devices = Mapping[str, tuple[Gpu, ...]]
"""Devices by pool, one for each rank; pools of CPU ranks have none."""


def plan_here(
    resource: HeteroInference, *, dp_local_rank: int = 0, num_groups: int = 1, running: Sequence[GroupShare] = ()
) -> LocalPlan:
    """Plan a manifest's processes on this machine. Raises LocalSpecError with every problem."""
    if platform.system() != "Linux":
        raise LocalSpecError([f"groups run on Linux only, this is {platform.system()}"])
    topology = CpuTopology.of_this_process()
    plan = plan_locally(
        resource,
        cores=topology.cores,
        nodes=topology.numa,
        memory_bytes=total_memory_bytes(),
        gpus=visible_gpus(os.environ),
        dp_local_rank=dp_local_rank,
        num_groups=num_groups,
        running=running,
    )
    threads, quota = sum(rank.num_threads for rank in plan.ranks), cgroup_limits().cpus
    if quota is None or threads <= math.ceil(quota):
        return plan
    warning = (
        f"ranks compute with {threads} threads and have {quota:g} CPUs of time, by the quota of a cgroup: the kernel "
        "stops them within a step; give whole CPUs by a cpuset (--cpuset-cpus), or lower coresPerRank or ranks"
    )
    return replace(plan, warnings=(*plan.warnings, warning))


def plan_locally(
    resource: HeteroInference,
    *,
    cores: Sequence[LogicalCore],
    memory_bytes: int,
    gpus: Sequence[Gpu] = (),
    nodes: Mapping[int, NumaNode] | None = None,
    dp_local_rank: int = 0,
    num_groups: int = 1,
    running: Sequence[GroupShare] = (),
) -> LocalPlan:
    """Plan the processes to start. Raises LocalSpecError with every problem.

    `gpus` are the machine's, as CUDA numbers them; `nodes` its NUMA nodes, if they are known. `dp_local_rank` numbers
    the groups of this resource that share the machine, from 0. A group takes the devices and cores after those of the
    groups before it, and an equal part of the memory that `num_groups` of them share. `running` are the groups that
    run now.
    """
    name = resource.metadata.name
    siblings = [group for group in running if group.name.partition(".")[0] == name]
    others = [group for group in running if group not in siblings]
    # Groups that start together know of each other by their number, not by what runs already.
    counted = others if num_groups > 1 else running
    left_bytes = max(0, memory_bytes - sum(group.memory_bytes for group in counted)) // num_groups
    spec = resource.spec
    pools = [
        PoolAt(f"spec.pools[{index}]", pool)
        for index, pool in sorted(enumerate(spec.pools), key=lambda entry: entry[1].type != PoolType.GPU)
    ]
    devices, device_problems = plan_devices(pools, gpus, dp_local_rank=dp_local_rank)
    core_plan = _plan_cores_beside(others, cores, [_demand(at, devices) for at in pools], nodes, dp_local_rank)
    problems = [
        *_unserved(spec),
        *device_problems,
        *core_plan.problems,
        *_memory_problems(pools, memory_bytes, num_groups),
    ]
    if problems:
        raise LocalSpecError(problems)
    default_bytes = _default_memory(pools, left_bytes)
    ranks = [
        rank
        for at, grants in zip(pools, core_plan.grants, strict=True)
        for rank in _rank_processes(at, grants, devices, default_bytes)
    ]
    plan = LocalPlan(tuple(ranks), core_plan.warnings)
    warnings = [*_shared_cores(plan, others, cores), *_scarce_memory(plan, counted, memory_bytes, left_bytes)]
    return replace(plan, warnings=(*plan.warnings, *warnings))


def _plan_cores_beside(
    others: Sequence[GroupShare],
    cores: Sequence[LogicalCore],
    demands: Sequence[CoreDemand],
    nodes: Mapping[int, NumaNode] | None,
    dp_local_rank: int,
) -> CorePlan:
    """Plan on the cores that no other group has, unless ranks would get fewer of them than where all are shared."""
    shared = _plan_cores(cores, demands, nodes, dp_local_rank)
    if not others:
        return shared
    free = _plan_cores(_without(cores, {n for group in others for n in group.cores}), demands, nodes, dp_local_rank)
    return min(free, shared, key=_shortfall)


def _shortfall(plan: CorePlan) -> tuple[int, int, int]:
    bound = sum(len(grant.cores) for grants in plan.grants for grant in grants)
    return len(plan.problems), len(plan.warnings), -bound


def _without(cores: Sequence[LogicalCore], numbers: Set[int]) -> list[LogicalCore]:
    """Return the CPUs of physical cores that have none of these numbers."""
    busy = {core.physical for core in cores if core.number in numbers}
    return [core for core in cores if core.physical not in busy]


def _shared_cores(plan: LocalPlan, others: Sequence[GroupShare], cores: Sequence[LogicalCore]) -> Iterator[str]:
    physical = {core.number: core.physical for core in cores}
    own = {number: physical[number] for number in plan.share("").cores}
    for group in others:
        busy = {physical.get(number) for number in group.cores}
        if shared := [number for number, core in own.items() if core in busy]:
            yield (
                f"group {group.name!r} computes on cores {format_cpu_list(shared)} too, because too few are free: both "
                "will be slow; lower coresPerRank or ranks of one, or stop the other"
            )


def _scarce_memory(plan: LocalPlan, counted: Sequence[GroupShare], memory_bytes: int, left_bytes: int) -> Iterator[str]:
    own = plan.share("").memory_bytes
    taken = {group.name: group.memory_bytes for group in counted if group.memory_bytes}
    if taken and own > DEFAULT_MEMORY_SHARE * left_bytes - len(plan.ranks):
        yield (
            f"groups that run ({', '.join(taken)}) have {sum(taken.values()) / 2**30:.1f} of this machine's "
            f"{memory_bytes / 2**30:.1f} GiB; all ranks of this one together get {own / 2**30:.1f} GiB"
        )


def _plan_cores(
    cores: Sequence[LogicalCore],
    demands: Sequence[CoreDemand],
    nodes: Mapping[int, NumaNode] | None,
    dp_local_rank: int,
) -> CorePlan:
    """Plan this group's cores: the groups before it chose in the same way, each from what was left."""
    plan = plan_cores(cores, demands, nodes=nodes)
    for _ in range(dp_local_rank):
        cores = _without(cores, {number for grants in plan.grants for grant in grants for number in grant.cores})
        plan = plan_cores(cores, demands, nodes=nodes)
    return plan


def _unserved(spec: HeteroInferenceSpec) -> list[str]:
    """Return what keeps one machine from serving the spec, whatever the machine is."""
    problems = find_unserved(spec)
    if spec.suspend or not spec.replicas:
        field = "suspend is true" if spec.suspend else "replicas is 0"
        problems.append(f"spec.{field}: there is nothing to start")
    if spec.model.token_secret_ref is not None:
        problems.append(
            "spec.model.tokenSecretRef: Secrets exist only in a cluster; leave it out to run on one machine"
        )
    return problems


def _numa_policy(pool: PoolSpec) -> NumaPolicy:
    """Return the pool's policy. GPU ranks are bound: a launch that waits for a core makes the device wait."""
    return NumaPolicy.BEST_EFFORT if pool.type == PoolType.GPU else pool.cpu_or_default.numa.policy


def _demand(at: PoolAt, devices: Devices) -> CoreDemand:
    return CoreDemand(
        path=at.path,
        ranks=at.pool.ranks,
        cores_per_rank=at.pool.cores_per_rank,
        policy=_numa_policy(at.pool),
        near=tuple(gpu.numa_node for gpu in devices.get(at.pool.name, ())),
        memory_bytes=at.pool.memory_per_rank or 0,
        field=f"{at.section}.coresPerRank",
    )


def _memory_problems(pools: Sequence[PoolAt], memory_bytes: int, num_groups: int) -> list[str]:
    asked = num_groups * sum(_given_memory(at.pool) for at in pools)
    if asked <= memory_bytes:
        return []
    who = f"all ranks of {num_groups} groups" if num_groups > 1 else "all ranks"
    total = f"{who} together ask for {asked / 2**30:.1f} GiB, this machine has {memory_bytes / 2**30:.1f} GiB"
    return [
        f"{at.path}.{at.section}.memoryPerRank: {at.pool.ranks} x {format_bytes(at.pool.memory_per_rank)}; {total}"
        for at in pools
        if at.pool.memory_per_rank
    ]


def _given_memory(pool: PoolSpec) -> int:
    return pool.ranks * (pool.memory_per_rank or 0)


def _default_memory(pools: Sequence[PoolAt], memory_bytes: int) -> int:
    """Return the bytes of each CPU rank whose pool names none: an equal part of what the others leave."""
    given = sum(_given_memory(at.pool) for at in pools)
    open_ranks = sum(
        at.pool.ranks for at in pools if at.pool.type == PoolType.CPU and at.pool.memory_per_rank is None
    )  # fmt: skip
    # Of 0 bytes a rank would have the machine's.
    return max(1, int((memory_bytes - given) * DEFAULT_MEMORY_SHARE / open_ranks)) if open_ranks else 0


def _rank_processes(at: PoolAt, grants: Sequence[CoreGrant], devices: Devices, default_bytes: int) -> list[RankProcess]:
    pool = at.pool
    gpus = devices.get(pool.name, ())
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


def plan_devices(
    pools: Sequence[PoolAt], gpus: Sequence[Gpu], *, dp_local_rank: int = 0
) -> tuple[Devices, Sequence[str]]:
    """Give each GPU rank a device; return the devices, or problems, as `path: what`.

    `pools` are in rank order, `gpus` in the order of their numbers.

    `dp_local_rank` numbers the groups of this resource on this machine from 0. The first group gets the devices that
    its pools name, and the first free ones for its other pools. The groups after it share out what is left, one after
    another: group n has the devices from (n - 1) * ranks on.
    """
    of_gpus = [at for at in pools if at.pool.type == PoolType.GPU]
    if of_gpus and not gpus:
        missing = "GPU: this machine has no NVIDIA GPU that may be used; use type CPU"
        return {}, [f"{at.path}.type: {missing}" for at in of_gpus]
    if problems := list(_problems_of_named(of_gpus, gpus)):
        return {}, problems
    named = {number for at in of_gpus for number in _named(at.pool)}
    free = [gpu for gpu in gpus if gpu.number not in named]
    unnamed = sum(at.pool.ranks for at in of_gpus if not _named(at.pool))
    if len(free) < unnamed + dp_local_rank * sum(at.pool.ranks for at in of_gpus):
        return {}, _shortage(of_gpus, free, dp_local_rank)
    if dp_local_rank:
        skipped = unnamed + (dp_local_rank - 1) * sum(at.pool.ranks for at in of_gpus)
        order = iter(free[skipped:])
        return {at.pool.name: tuple(islice(order, at.pool.ranks)) for at in of_gpus}, ()
    by_number, order = {gpu.number: gpu for gpu in gpus}, iter(free)
    devices = {
        at.pool.name: tuple(by_number[number] for number in _named(at.pool)) or tuple(islice(order, at.pool.ranks))
        for at in of_gpus
    }
    return devices, ()


def _named(pool: PoolSpec) -> list[int]:
    """Return the device that the pool names for each of its ranks; [] if it names none."""
    return (pool.gpu_or_default.devices or []) * pool.pods


def _problems_of_named(pools: Sequence[PoolAt], gpus: Sequence[Gpu]) -> Iterator[str]:
    there = [gpu.number for gpu in gpus]
    seen: set[int] = set()
    for at in pools:
        numbers = _named(at.pool)
        path = f"{at.path}.gpu.devices"
        if missing := sorted(set(numbers) - set(there)):
            yield f"{path}: there is no device {format_cpu_list(missing)}; this machine has {format_cpu_list(there)}"
        if twice := sorted(number for number in set(numbers) if number in seen or numbers.count(number) > 1):
            yield (
                f"{path}: device {format_cpu_list(twice)} would be two ranks'; on one machine all pods share the "
                "devices: put the pool's ranks into one pod (ranksPerPod), and name each device once"
            )
        seen.update(numbers)


def _shortage(pools: Sequence[PoolAt], free: Sequence[Gpu], dp_local_rank: int) -> tuple[str, ...]:
    """Return one problem for each pool that needs free devices."""
    asking = [at for at in pools if dp_local_rank or not _named(at.pool)]
    needed = sum(at.pool.ranks for at in asking)
    before = f" after those of the groups before this one (--dp-local-rank {dp_local_rank})" if dp_local_rank else ""
    there = format_cpu_list([gpu.number for gpu in free]) or "none"
    return tuple(
        f"{at.path}.ranks: {needed} GPU ranks need a device each{before}; free on this machine: {there}"
        for at in asking
    )  # fmt: skip
