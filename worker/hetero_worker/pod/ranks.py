"""Each rank of a pod: its cores, its memory, its device and its command line.

A container without exclusive CPUs sees all CPUs of its node, and so does every other pod there. So that pods of one
pool on one node do not all take its first cores, each plans for as many pods as can have what it would have alone.
All pods plan alike, and each takes the part of its ordinal.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from hetero_api.cpu_list import format_cpu_list
from hetero_api.host.cores import CoreDemand, CoreGrant, CorePlan, plan_cores
from hetero_api.host.gpus import visible_gpus
from hetero_api.host.memory import total_memory_bytes
from hetero_api.host.topology import CpuTopology, LogicalCore, NumaNode
from hetero_api.spec import NumaPolicy
from hetero_api.supervision.child import Command
from hetero_worker.pod.config import PodConfig

_DEFAULT_MEMORY_SHARE: Final = 0.8
"""Share of the container's memory that ranks without memoryPerRank divide among themselves."""


def plan_cores_of(config: PodConfig, topology: CpuTopology, environment: Mapping[str, str]) -> CorePlan:
    """Plan the pod's cores on the CPUs that the container sees. `environment` chooses its GPUs."""
    gpu_nodes = {gpu.number: gpu.numa_node for gpu in visible_gpus(environment)}
    return plan_pod_cores(
        topology.cores,
        nodes=topology.numa,
        pool=config.pool,
        ranks=config.ranks_per_pod,
        threads=config.threads_per_rank,
        ordinal=config.ordinal,
        policy=config.numa_policy,
        near=[gpu_nodes.get(number) for number in config.cuda_devices],
        memory_bytes=config.memory_bytes_per_rank,
        field="gpu.coresPerRank" if config.cuda_devices else "cpu.coresPerRank",
    )


def policy_in_force(config: PodConfig, *, num_cpus: int) -> NumaPolicy:
    """Return the pool's policy; BestEffort for GPU ranks that have CPUs to themselves, to be near their device.

    A container that sees more CPUs than it asked for shares them. There the kernel's scheduler does better than ranks
    that choose without knowing their neighbours.
    """
    has_own_cpus = num_cpus <= config.ranks_per_pod * config.threads_per_rank
    return NumaPolicy.BEST_EFFORT if config.cuda_devices and has_own_cpus else config.numa_policy


def plan_pod_cores(
    available: Sequence[LogicalCore],
    *,
    pool: str,
    ranks: int,
    threads: int,
    ordinal: int,
    policy: NumaPolicy,
    nodes: Mapping[int, NumaNode] | None = None,
    near: Sequence[int | None] = (),
    memory_bytes: int = 0,
    field: str = "cpu.coresPerRank",
) -> CorePlan:
    """Grant each rank its cores; warnings and problems are those of `plan_cores`.

    `threads` is CPUs per rank; `near` has a NUMA node for each rank of the pod, or is empty. The other parameters are
    those of `plan_cores` and `CoreDemand`.
    """

    def plan(pods: int) -> CorePlan:
        demand = CoreDemand(
            path=f"spec.pools[{pool}]",
            ranks=pods * ranks,
            cores_per_rank=threads,
            policy=policy,
            near=tuple(near) * pods,
            memory_bytes=memory_bytes,
            field=field,
        )
        return plan_cores(available, [demand], nodes=nodes)

    def has_room(pods: int) -> bool:
        together = plan(pods)
        return together.binds_all and together.grants[0][0].num_threads == alone.grants[0][0].num_threads

    alone = plan(1)
    if not alone.binds_all:
        return alone
    room, too_many = 1, len(available) // ranks + 1
    while too_many - room > 1:
        middle = (room + too_many) // 2
        room, too_many = (middle, too_many) if has_room(middle) else (room, middle)
    place = ordinal % room
    (grants,) = plan(room).grants
    return CorePlan((grants[place * ranks : (place + 1) * ranks],), (), ())


def rank_commands(config: PodConfig, grants: Sequence[CoreGrant], *, folder: Path) -> list[Command]:
    """Return the command of every rank; what a rank measures is kept in `folder` for its successor."""
    memory_bytes = config.memory_bytes_per_rank or int(
        total_memory_bytes() * _DEFAULT_MEMORY_SHARE / config.ranks_per_pod
    )
    return [
        _command(str(local_rank), rank_arguments(config, local_rank, grant, memory_bytes=memory_bytes, folder=folder))
        for local_rank, grant in enumerate(grants)
    ]


def _command(name: str, arguments: tuple[str, ...]) -> Command:
    argv = (sys.executable, "-m", "hetero_worker", *arguments)
    return Command(name, argv, has_heartbeat=True, forked_argv=arguments)


def rank_arguments(
    config: PodConfig, local_rank: int, grant: CoreGrant, *, memory_bytes: int, folder: Path
) -> tuple[str, ...]:
    """Return the arguments of `python -m hetero_worker` for one rank."""
    options = {
        "--gateway": config.gateway,
        "--model": config.model_dir,
        "--pool": config.pool,
        "--ordinal": config.ordinal,
        "--local-rank": local_rank,
        "--pod-name": config.pod_name,
        "--device": f"cuda:{config.cuda_devices[local_rank]}" if config.cuda_devices else "cpu",
        "--cores": format_cpu_list(grant.cores),
        "--communication-cores": format_cpu_list(grant.communication),
        "--num-threads": grant.num_threads,
        "--numa-policy": config.numa_policy,
        "--memory-bytes": memory_bytes,
        "--store-host": config.pod_ip,
        "--connect-timeout-s": config.reconnect_timeout_s,
        "--reconnect-timeout-s": config.reconnect_timeout_s,
        "--measurements-file": folder / f"{local_rank}.measured",
    }
    return tuple(str(part) for option in options.items() for part in option)
