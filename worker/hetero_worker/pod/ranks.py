"""Each rank of a pod: its cores, its memory, its device and its command line.

A container without exclusive CPUs sees all CPUs of its node, and so does every other pod there. So that pods of one
pool on one node do not all take its first cores, each plans for as many pods as can have what it would have alone.
All pods plan alike, and each takes the part of its ordinal.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from hetero_api.cpu_list import format_cpu_list
from hetero_api.host.cores import CoreDemand, CoreGrant, CorePlan, plan_cores
from hetero_api.host.gpus import visible_gpus
from hetero_api.host.memory import total_memory_bytes
from hetero_api.host.topology import CpuTopology, LogicalCore, NumaNode, NumaPolicy
from hetero_api.supervision.child import Command
from hetero_worker.pod.config import PodConfig

_DEFAULT_MEMORY_SHARE: Final = 0.8
"""Share of the container's memory that ranks without memoryPerRank divide among themselves."""


def plan_cores_of(config: PodConfig, topology: CpuTopology, environment: Mapping[str, str]) -> CorePlan:
    """Plan the pod's cores on the CPUs that the container sees. `environment` chooses its GPUs."""
    gpu_nodes = {gpu.number: gpu.numa_node for gpu in visible_gpus(environment)}
    demand = CoreDemand(
        path=f"spec.pools[{config.pool}]",
        ranks=config.ranks_per_pod,
        cores_per_rank=config.threads_per_rank,
        policy=config.numa_policy,
        near=tuple(gpu_nodes.get(number) for number in config.cuda_devices),
        memory_bytes=config.memory_bytes_per_rank,
        field="gpu.coresPerRank" if config.cuda_devices else "cpu.coresPerRank",
    )
    return plan_pod_cores(topology.cores, demand, ordinal=config.ordinal, nodes=topology.numa)


def policy_in_force(config: PodConfig, *, num_cpus: int) -> NumaPolicy:
    """Return the pool's policy; BestEffort for GPU ranks that have CPUs to themselves, to be near their device.

    A container that sees more CPUs than it asked for shares them. There the kernel's scheduler does better than ranks
    that choose without knowing their neighbours.
    """
    has_own_cpus = num_cpus <= config.ranks_per_pod * config.threads_per_rank
    return NumaPolicy.BEST_EFFORT if config.cuda_devices and has_own_cpus else config.numa_policy


def plan_pod_cores(
    available: Sequence[LogicalCore], demand: CoreDemand, *, ordinal: int, nodes: Mapping[int, NumaNode] | None = None
) -> CorePlan:
    """Grant each rank of a pod its cores; warnings and problems are those of `plan_cores`.

    `demand` is one pod's; its `near` has a NUMA node for each rank of the pod, or is empty. `nodes` is `plan_cores`'.
    """
    ranks = demand.ranks

    def plan(pods: int) -> CorePlan:
        return plan_cores(available, [replace(demand, ranks=pods * ranks, near=demand.near * pods)], nodes=nodes)

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
    commands = []
    for local_rank, grant in enumerate(grants):
        arguments = rank_arguments(config, local_rank, grant, memory_bytes=memory_bytes, folder=folder)
        argv = (sys.executable, "-m", "hetero_worker", *arguments)
        commands.append(Command(str(local_rank), argv, has_heartbeat=True, forked_argv=arguments))
    return commands


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
    if config.inside_tls_dir is not None:
        options["--inside-tls-dir"] = config.inside_tls_dir
    if config.draft_dir is not None:
        options["--draft"] = config.draft_dir
    return tuple(str(part) for option in options.items() for part in option)
