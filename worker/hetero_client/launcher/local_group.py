"""One HeteroInference running on this machine, from its first process to its last.

The order is fixed: take the run directory's lock, start the gateway, wait until it listens, start the ranks,
watch the gateway's topology until the group is ready. From the first process on, the end of any of them, or
a failure that the gateway calls permanent, ends all. Single-threaded: everything here runs in the launcher's
main thread (see supervisor.py), and no wait in it is unbounded.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from hetero_api.contract import ENV_ADMIN_TOKEN_FILE, ENV_GROUP_TOKEN_FILE, EXIT_PERMANENT, EXIT_USAGE
from hetero_api.cpu_list import format_cpu_list
from hetero_api.host.stop_signals import StopSignals
from hetero_api.spec import HeteroInference
from hetero_client.admin import AdminClient, GroupState, GroupTopology
from hetero_client.errors import (
    AlreadyRunningError,
    GroupFailedError,
    LaunchError,
    PortTakenError,
    ProcessDiedError,
    RequestError,
    StartInterruptedError,
    StartTimeoutError,
)
from hetero_client.launcher.local_plan import LocalPlan, RankProcess
from hetero_client.launcher.run_directory import GroupRecord, RunDirectory
from hetero_client.launcher.supervisor import Child, Command, Supervisor

HOST: Final = "127.0.0.1"
GATEWAY: Final = "gateway"
GATEWAY_START_S: Final = 60.0
STARTING_LOOK_S: Final = 0.15
RUNNING_LOOK_S: Final = 1.0
TOPOLOGY_TIMEOUT_S: Final = 2.0
REASON_WAIT_S: Final = 1.0
SETTLE_S: Final = 1.0
LOG_TAIL_LINES: Final = 15
LOG_TAIL_BYTES: Final = 16 * 1024

TopologyListener = Callable[[GroupTopology], None]


@dataclass(frozen=True, slots=True)
class Programs:
    """How gateway and rank are started; tests put small stand-ins here."""

    gateway: tuple[str, ...] = (sys.executable, "-m", "hetero_gateway")
    rank: tuple[str, ...] = (sys.executable, "-m", "hetero_worker")


@dataclass(frozen=True, slots=True)
class LocalGroupConfig:
    """All that a local group is made of. `port` 0 lets the system choose."""

    resource: HeteroInference
    manifest: Path
    model_dir: Path
    plan: LocalPlan
    port: int
    programs: Programs = field(default_factory=Programs)
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))


@dataclass(frozen=True, slots=True)
class StartTimes:
    """Monotonic seconds: first process started, weights first seen loading, group ready."""

    started_s: float
    loading_s: float
    ready_s: float


class LocalGroup:
    """Enter it to take the run directory, `start`, `wait_ready`, `watch`; leaving it stops everything."""

    def __init__(self, config: LocalGroupConfig, *, run: RunDirectory, signals: StopSignals) -> None:
        self._config = config
        self._run = run
        self._signals = signals
        # PYTHONSAFEPATH: a json.py where the user stands must not become the gateway's.
        own = {ENV_GROUP_TOKEN_FILE: str(run.token_path), "PYTHONSAFEPATH": "1"}
        # The gateway is on loopback: the launcher, `hetero ps` and `hetero topology` ask it without a token.
        inherited = {key: value for key, value in config.environment.items() if key != ENV_ADMIN_TOKEN_FILE}
        self._supervisor = Supervisor(environment={**inherited, **own})
        self._gateway: Child | None = None
        self._admin: AdminClient | None = None
        self._record: GroupRecord | None = None
        self._started_s = 0.0

    @property
    def record(self) -> GroupRecord:
        """Pids and addresses; there is one once `start` returned."""
        if self._record is None:
            raise LaunchError("the group has not been started")
        return self._record

    def __enter__(self) -> Self:
        if not self._run.lock.try_acquire():
            raise AlreadyRunningError(self._config.resource.metadata.name, pid=self._run.lock.holder_pid())
        self._run.prepare()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._admin is not None:
            self._admin.close()
        self._supervisor.stop(first=self._gateway, impatient=lambda: self._signals.impatient)
        self._run.clear()
        self._run.lock.release()

    def start(self) -> None:
        """Start the gateway, wait until it listens, start the ranks."""
        check_port(self._config.port)
        self._started_s = time.monotonic()
        self._gateway = self._supervisor.start(self._gateway_command())
        addresses = self._wait_for_gateway()
        self._admin = AdminClient(addresses["admin"])
        ranks = [self._supervisor.start(self._rank_command(r, addresses["ranks"])) for r in self._config.plan.ranks]
        self._record = GroupRecord(
            name=self._config.resource.metadata.name,
            pid=os.getpid(),
            manifest=str(self._config.manifest),
            model_dir=str(self._config.model_dir),
            phase="starting",
            inference=addresses["inference"],
            admin=addresses["admin"],
            started_at=time.time(),
            processes={child.name: child.pid for child in [self._gateway, *ranks]},
        )
        self._run.write_record(self._record)

    def wait_ready(self, listener: TopologyListener) -> tuple[GroupTopology, StartTimes]:
        """Tell the listener every topology seen until the group is ready.

        Raises StartInterruptedError, StartTimeoutError, ProcessDiedError or GroupFailedError.
        """
        limit_s = self._config.resource.spec.recovery.rendezvous_timeout_seconds
        deadline = time.monotonic() + limit_s
        loading_s: float | None = None
        seen: GroupTopology | None = None
        while time.monotonic() < deadline:
            self._check(self._supervisor.wait(STARTING_LOOK_S, wake=self._signals.fileno()))
            seen = self._look() or seen
            if seen is None:
                continue
            listener(seen)
            if loading_s is None and seen.state in (GroupState.LOADING, GroupState.READY):
                loading_s = time.monotonic()
            if seen.state == GroupState.READY and loading_s is not None:
                self._record = replace(self.record, phase="ready")
                self._run.write_record(self._record)
                return seen, StartTimes(self._started_s, loading_s, time.monotonic())
        raise StartTimeoutError(_timeout_message(seen, limit_s, self._run.path))

    def watch(self, *, until: Callable[[], bool] = lambda: False) -> None:
        """Return on a stop signal or when `until` says so; raise when a process ends or the group failed."""
        look_at = time.monotonic() + RUNNING_LOOK_S
        while not until():
            ended = self._supervisor.wait(STARTING_LOOK_S, wake=self._signals.fileno())
            if self._signals.first is not None:
                return
            self._raise_if_ended(ended)
            if time.monotonic() >= look_at:
                self._look()
                look_at = time.monotonic() + RUNNING_LOOK_S

    def check_alive(self, *, settle_s: float = SETTLE_S) -> None:
        """Raise when a process ends within `settle_s`: why a request failed, if it failed for that."""
        deadline = time.monotonic() + settle_s
        while (left_s := deadline - time.monotonic()) > 0:
            self._raise_if_ended(self._supervisor.wait(left_s))

    def _check(self, ended: Sequence[Child]) -> None:
        if self._signals.first is not None:
            raise StartInterruptedError(self._signals.first)
        self._raise_if_ended(ended)

    def _raise_if_ended(self, ended: Sequence[Child]) -> None:
        if not ended:
            return
        if self._gateway is not None and self._gateway.exit_status is None:
            self._wait_for_reason(ended)
        # When one rank's failure ends several processes at once, the one that knows best speaks.
        cause = max(ended, key=lambda child: child.exit_status in (EXIT_PERMANENT, EXIT_USAGE))
        raise _died(cause)

    def _wait_for_reason(self, ended: Sequence[Child]) -> None:
        """A rank tells the gateway why before it ends; give the gateway a moment to know it too."""
        permanent = any(child.exit_status == EXIT_PERMANENT for child in ended)
        deadline = time.monotonic() + (REASON_WAIT_S if permanent else 0.0)
        while True:
            self._look()
            if time.monotonic() >= deadline:
                return
            time.sleep(STARTING_LOOK_S)

    def _look(self) -> GroupTopology | None:
        """The topology; None when the gateway does not answer in time. Raises GroupFailedError."""
        if self._admin is None:
            return None
        try:
            topology = self._admin.topology(timeout_s=TOPOLOGY_TIMEOUT_S)
        except RequestError:
            return None
        if topology.failed:
            raise GroupFailedError(topology.reason)
        return topology

    def _wait_for_gateway(self) -> dict[str, str]:
        deadline = time.monotonic() + GATEWAY_START_S
        while time.monotonic() < deadline:
            self._check(self._supervisor.wait(STARTING_LOOK_S / 3, wake=self._signals.fileno()))
            state = self._run.read_gateway_state()
            if state is not None:
                return {key: str(state[key]) for key in ("inference", "admin", "ranks")}
        raise StartTimeoutError(
            f"the gateway did not listen within {GATEWAY_START_S:g} s; see {self._run.log_path(GATEWAY)}"
        )

    def _gateway_command(self) -> Command:
        argv = (
            *self._config.programs.gateway,
            "--manifest", str(self._config.manifest),
            "--model", str(self._config.model_dir),
            "--host", HOST,
            "--inference-port", str(self._config.port),
            "--admin-port", "0",
            "--ranks-port", "0",
            "--state-file", str(self._run.gateway_state_path),
            "--drain-timeout-s", "0",  # Ctrl-C means now
        )  # fmt: skip
        return Command(GATEWAY, argv, self._run.log_path(GATEWAY))

    def _rank_command(self, rank: RankProcess, gateway: str) -> Command:
        argv = (
            *self._config.programs.rank,
            "--gateway", gateway,
            "--model", str(self._config.model_dir),
            "--pool", rank.pool,
            "--ordinal", str(rank.ordinal),
            "--local-rank", str(rank.local_rank),
            "--pod-name", rank.name,
            "--cores", format_cpu_list(rank.cores),
            "--num-threads", str(rank.num_threads),
            "--numa-policy", str(rank.numa_policy),
            "--memory-bytes", str(rank.memory_bytes),
            "--store-host", HOST,
        )  # fmt: skip
        return Command(rank.name, argv, self._run.log_path(rank.name))


def check_port(port: int) -> None:
    """Raise PortTakenError unless the port can be listened on. 0 always can."""
    # gRPC listens with SO_REUSEPORT, so two gateways would share a port without a word; a plain bind tells.
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise PortTakenError(
                f"port {port} on {HOST} cannot be used ({error.strerror}); choose another with --port N "
                "(0 lets the system choose) or spec.gateway.service.port"
            ) from error


def _died(child: Child) -> ProcessDiedError:
    status = child.exit_status or 0
    tail = _log_tail(child.log_path)
    if status in (EXIT_PERMANENT, EXIT_USAGE) and tail:
        return ProcessDiedError(tail[-1], exit_status=status, permanent=True)
    how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with exit code {status}"
    return ProcessDiedError(f"{child.name} {how}; its log is {child.log_path}", exit_status=status, log_tail=tail)


def _log_tail(path: Path) -> list[str]:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - LOG_TAIL_BYTES))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return []
    return [line.rstrip() for line in text.splitlines() if line.strip()][-LOG_TAIL_LINES:]


def _timeout_message(seen: GroupTopology | None, limit_s: float, logs: Path) -> str:
    state = f"it is {seen.state.value}" if seen is not None else "the gateway does not answer"
    missing = [rank.pod_name or f"rank {rank.rank}" for rank in seen.ranks if not rank.joined] if seen else []
    waiting = f", waiting for {', '.join(missing)}" if missing else ""
    return (
        f"the group was not ready within {limit_s:g} s (spec.recovery.rendezvousTimeoutSeconds): "
        f"{state}{waiting}; logs are in {logs}"
    )
