"""The process of a rank pod: starts its ranks, kills what hangs, restarts what died, ends on a signal or when it must.

Exit status 0 after SIGTERM or SIGINT; EXIT_USAGE when the command line is wrong; EXIT_PERMANENT when the policy
Required cannot be fulfilled with the container's cores; EXIT_FAILURE when the probes' port is taken; otherwise that of
the rank that ended the container.

One thread, the main one: children's death signals are tied to the thread that started them. Every wait is bounded, and
`turned_s` shows that the loop turns. It also waits for orphans, as a container's first process must.

A rank that the kernel killed for want of memory ends the container: it would take as much again, and Kubernetes reports
OOMKilled for containers only.
"""

from __future__ import annotations

import logging
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from hetero_api.contract import EXIT_FAILURE, EXIT_OK, EXIT_PERMANENT
from hetero_api.host.gpus import IN_PCI_ORDER
from hetero_api.host.heartbeat import RankState
from hetero_api.host.memory import out_of_memory_kills
from hetero_api.host.restarts import RestartPauses
from hetero_api.host.stop_signals import StopSignals
from hetero_api.host.topology import CpuTopology
from hetero_api.probe_server import ProbeServer
from hetero_api.supervision.child import Child, Command
from hetero_api.supervision.forkserver import Forkserver
from hetero_api.supervision.service import Service, Services
from hetero_api.supervision.supervisor import LOOK_S, Supervisor, write_to_stderr
from hetero_worker.pod.config import PROGRAM, PodConfig
from hetero_worker.pod.health import PodHealth
from hetero_worker.pod.ranks import plan_cores_of, policy_in_force, rank_commands

_log = logging.getLogger(__name__)

FORKSERVER: Final = Command(
    "forkserver", (sys.executable, "-m", "hetero_worker.process.forkserver"), takes_orders=True
)  # fmt: skip
FORKSERVER_START_S: Final = 60.0
"""Longest time until the forkserver is ready; ranks are started directly if it takes longer."""
RAN_WELL_S: Final = 300.0
"""Running time after which a rank did well, however it ended."""
_FIRST_PAUSE_S: Final = 1.0
"""Pause before the second restart of a rank that cannot get up; the first is at once."""
_LONGEST_PAUSE_S: Final = 60.0
_TURN_S: Final = 0.5
_KILLED: Final = 128 + signal.SIGKILL


def main(arguments: Sequence[str], environment: Mapping[str, str], signals: StopSignals) -> int:
    """Run the process, whose signals `__main__` has taken over; return its exit status."""
    config = PodConfig.from_command_line(arguments, environment)
    logging.basicConfig(
        level=config.log_level,
        stream=sys.stderr,
        format=f"%(asctime)s %(levelname)s pod={config.pod_name.replace('%', '%%')} %(name)s: %(message)s",
    )
    topology = CpuTopology.of_this_process()
    config = replace(config, numa_policy=policy_in_force(config, num_cpus=len(topology.cores)))
    plan = plan_cores_of(config, topology, environment)
    for warning in plan.warnings:
        _log.warning("%s", warning)
    if plan.problems:
        sys.stderr.write("".join(f"{PROGRAM}: {problem}\n" for problem in plan.problems))
        return EXIT_PERMANENT
    try:
        with tempfile.TemporaryDirectory(prefix="hetero-pod-") as folder:
            commands = rank_commands(config, plan.grants[0], folder=Path(folder))
            return _supervise(config, commands, environment, signals)
    except OSError as error:
        sys.stderr.write(f"{PROGRAM}: {error}\n")
        return EXIT_FAILURE


def _supervise(
    config: PodConfig, commands: Sequence[Command], environment: Mapping[str, str], signals: StopSignals
) -> int:
    supervisor = PodSupervisor(
        commands,
        environment={**environment, **(IN_PCI_ORDER if config.cuda_devices else {})},
        signals=signals,
        stop_grace_s=config.stop_grace_s,
        forkserver=FORKSERVER,
    )
    health = PodHealth(supervisor.ranks, turned_s=lambda: supervisor.turned_s)
    server = ProbeServer.start(
        host=config.pod_ip, port=config.health_port, probes=health.probes, registry=health.registry
    )
    _log.info("probes and metrics on %s port %d", config.pod_ip, server.port)
    try:
        return supervisor.run()
    finally:
        server.stop()


class PodSupervisor:
    """The loop over a pod's ranks. `forkserver` is None to start every rank directly."""

    def __init__(
        self,
        commands: Sequence[Command],
        *,
        environment: Mapping[str, str],
        signals: StopSignals,
        stop_grace_s: float,
        forkserver: Command | None,
        first_pause_s: float = _FIRST_PAUSE_S,
        longest_pause_s: float = _LONGEST_PAUSE_S,
        count_memory_kills: Callable[[], int] = out_of_memory_kills,
    ) -> None:
        self.turned_s = time.monotonic()
        """Monotonic time of the loop's last turn."""
        self.ranks = tuple(
            Service(command, RestartPauses(first_s=first_pause_s, longest_s=longest_pause_s)) for command in commands
        )
        """The ranks, by local rank."""
        self._supervisor = Supervisor(environment=environment, grace_s=stop_grace_s, death_signal=signal.SIGKILL)
        self._forkserver = None if forkserver is None else Forkserver(self._supervisor, forkserver)
        self._services = Services(self._supervisor, self._forkserver, services=self.ranks)
        self._signals = signals
        self._count_memory_kills = count_memory_kills
        self._memory_kills = count_memory_kills()
        self._forkserver_due_s = self.turned_s + FORKSERVER_START_S

    def run(self) -> int:
        """Supervise until the end; return the exit code."""
        try:
            if self._forkserver is not None:
                self._forkserver.ensure_started()
            while self._signals.first is None:
                if (exit_code := self._turn()) is not None:
                    return exit_code
            _log.info("%s: asking the ranks to leave", signal.Signals(self._signals.first).name)
            self._stop()
            return EXIT_OK
        finally:
            self._supervisor.kill()

    def _turn(self) -> int | None:
        """Start what is due, wait for an event and handle it; return an exit code when the pod must end."""
        pause_s = self._services.seconds_to_next_start(_TURN_S)
        if self._must_wait_for_forkserver():
            pause_s = LOOK_S
        else:
            for rank in self._services.start_due():
                _log.info("local_rank=%s started, pid %s", rank.name, rank.child.pid if rank.child else None)
        ended = self._supervisor.wait(pause_s, wake=self._signals.fileno())
        self.turned_s = time.monotonic()
        for child, why in self._services.kill_hung():
            # The neighbours keep their weights, which they would lose if the kubelet had to restart the container.
            _log.error("local_rank=%s %s; killing it", child.name, why)
        for child in ended:
            service = self._services.find(child)
            if service is None:
                _log.warning("%s ended with exit code %d", child.name, _exit_code(child))
            elif (exit_code := self._handle_end(service, child)) is not None:
                return exit_code
        self._supervisor.reap_orphans()
        if self._forkserver is not None and self._all_serve():
            self._forkserver.ensure_started()
        return None

    def _must_wait_for_forkserver(self) -> bool:
        forkserver = self._forkserver
        return forkserver is not None and forkserver.is_warming_up and time.monotonic() < self._forkserver_due_s

    def _all_serve(self) -> bool:
        beats = [rank.beat() for rank in self.ranks]
        return all(beat is not None and beat.state is RankState.SERVING for beat in beats)

    def _handle_end(self, rank: Service, child: Child) -> int | None:
        """Schedule the rank's restart, or stop the other ranks and return the exit code for all."""
        exit_code = _exit_code(child)
        if exit_code == _KILLED and self._count_memory_kills() > self._memory_kills:
            self._stop()
            _log.error(
                "local_rank=%s was killed by the kernel: the ranks of this pod took more memory than its limit; raise "
                "memoryPerRank, or give them less to hold",
                rank.name,
            )
            return exit_code
        did_well = time.monotonic() - rank.started_s >= RAN_WELL_S
        # A rank that dies once more after the longest pause ends the container, so that Kubernetes counts it.
        if not child.failed_permanently and (did_well or not rank.pauses.is_exhausted):
            pause_s = self._services.schedule_restart(rank, did_well=did_well)
            _log.warning(
                "local_rank=%s ended with exit code %d; restarting it in %g s", rank.name, exit_code, pause_s
            )  # fmt: skip
            return None
        self._stop()
        _log.error("local_rank=%s ended with exit code %d, and this container with it:", rank.name, exit_code)
        tail = child.output.tail() if child.output is not None else []
        write_to_stderr("".join(f"{line}\n" for line in tail).encode())
        return exit_code

    def _stop(self) -> None:
        """Ask the ranks to leave; kill those that do not in time, or when a second signal comes."""
        for child in self._supervisor.stop(impatient=lambda: self._signals.impatient):
            if self._services.find(child) is not None and not child.is_running:
                _log.info("local_rank=%s left with exit code %d", child.name, _exit_code(child))


def _exit_code(child: Child) -> int:
    """Return the exit code as a shell has it: 128 + N for signal N."""
    status = child.exit_status or 0
    return status if status >= 0 else 128 - status
