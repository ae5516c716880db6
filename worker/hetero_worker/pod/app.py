"""The process of a rank pod.

Exit status 0 after SIGTERM or SIGINT; EXIT_USAGE when the command line is wrong; EXIT_PERMANENT when the policy
Required cannot be fulfilled with the container's cores; EXIT_FAILURE when the probes' port cannot be had; otherwise
that of the rank that ended the container.
"""

from __future__ import annotations

import logging
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from hetero_api.contract import EXIT_FAILURE, EXIT_PERMANENT
from hetero_api.cpu_list import format_cpu_list
from hetero_api.host.cores import CoreGrant
from hetero_api.host.gpus import IN_PCI_ORDER, visible_gpus
from hetero_api.host.memory import total_memory_bytes
from hetero_api.host.restarts import RestartPauses
from hetero_api.host.stop_signals import StopSignals
from hetero_api.host.topology import CpuTopology
from hetero_api.probe_server import ProbeServer
from hetero_api.spec import NumaPolicy
from hetero_worker.pod.config import PROGRAM, PodConfig
from hetero_worker.pod.cores import plan_pod_cores
from hetero_worker.pod.health import PodHealth
from hetero_worker.pod.rank_process import RankProcess
from hetero_worker.pod.supervisor import PodSupervisor

_log = logging.getLogger(__name__)

_FIRST_PAUSE_S: Final = 1.0
"""Before the second new start of a rank that cannot get up; the first is at once."""
_LONGEST_PAUSE_S: Final = 60.0
_DEFAULT_MEMORY_SHARE: Final = 0.8
"""Share of the container's memory that ranks without memoryPerRank divide among themselves."""


def main(arguments: Sequence[str], environment: Mapping[str, str], signals: StopSignals) -> int:
    """The whole process but for its signals, which `__main__` has taken over; its exit status."""
    config = PodConfig.from_command_line(arguments, environment)
    logging.basicConfig(
        level=config.log_level,
        stream=sys.stderr,
        format=f"%(asctime)s %(levelname)s pod={config.pod_name.replace('%', '%%')} %(name)s: %(message)s",
    )
    topology = CpuTopology.of_this_process()
    config = replace(config, numa_policy=policy_in_force(config, num_cpus=len(topology.cores)))
    plan = plan_pod_cores(
        topology.cores,
        nodes=topology.numa,
        pool=config.pool,
        ranks=config.ranks_per_pod,
        threads=config.threads_per_rank,
        ordinal=config.ordinal,
        policy=config.numa_policy,
        near=_near(config, environment),
        memory_bytes=config.memory_bytes_per_rank,
        field="gpu.coresPerRank" if config.cuda_devices else "cpu.coresPerRank",
    )
    for warning in plan.warnings:
        _log.warning("%s", warning)
    if plan.problems:
        sys.stderr.write("".join(f"{PROGRAM}: {problem}\n" for problem in plan.problems))
        return EXIT_PERMANENT
    try:
        with tempfile.TemporaryDirectory(prefix="hetero-pod-") as folder:
            ranks = _ranks(config, plan.grants[0], environment, Path(folder))
            return _supervise(config, ranks, signals)
    except OSError as error:
        sys.stderr.write(f"{PROGRAM}: {error}\n")
        return EXIT_FAILURE


def policy_in_force(config: PodConfig, *, num_cpus: int) -> NumaPolicy:
    """The pool's; but GPU ranks that have CPUs to themselves are bound to those near their device.

    A container that sees more CPUs than it asked for shares them: there the kernel's scheduler does better than ranks
    that choose without knowing of their neighbours'.
    """
    has_own_cpus = num_cpus <= config.ranks_per_pod * config.threads_per_rank
    return NumaPolicy.BEST_EFFORT if config.cuda_devices and has_own_cpus else config.numa_policy


def _near(config: PodConfig, environment: Mapping[str, str]) -> list[int | None]:
    """NUMA node of each rank's device, as far as it is told; [] for ranks on host cores."""
    nodes = {gpu.number: gpu.numa_node for gpu in visible_gpus(environment)}
    return [nodes.get(number) for number in config.cuda_devices]


def _ranks(
    config: PodConfig, grants: Sequence[CoreGrant], environment: Mapping[str, str], folder: Path
) -> list[RankProcess]:
    memory_bytes = config.memory_bytes_per_rank or int(
        total_memory_bytes() * _DEFAULT_MEMORY_SHARE / config.ranks_per_pod
    )
    return [
        RankProcess(
            local_rank,
            argv=rank_command(config, local_rank, grant, memory_bytes=memory_bytes, folder=folder),
            environment={**environment, **(IN_PCI_ORDER if config.cuda_devices else {})},
            pauses=RestartPauses(first_s=_FIRST_PAUSE_S, longest_s=_LONGEST_PAUSE_S),
        )
        for local_rank, grant in enumerate(grants)
    ]


def _supervise(config: PodConfig, ranks: Sequence[RankProcess], signals: StopSignals) -> int:
    supervisor = PodSupervisor(ranks, signals=signals, stop_grace_s=config.stop_grace_s)
    health = PodHealth(ranks, turned_s=lambda: supervisor.turned_s)
    server = ProbeServer.start(
        host=config.pod_ip, port=config.health_port, probes=health.probes, registry=health.registry
    )
    _log.info("probes and metrics on %s port %d", config.pod_ip, server.port)
    try:
        return supervisor.run()
    finally:
        server.stop()


def rank_command(
    config: PodConfig, local_rank: int, grant: CoreGrant, *, memory_bytes: int, folder: Path
) -> tuple[str, ...]:
    """The command line of one rank; what its process measures is kept in `folder` for the next."""
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
    return (sys.executable, "-m", "hetero_worker", *(str(part) for option in options.items() for part in option))
