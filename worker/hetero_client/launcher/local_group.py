"""One HeteroInference running on this machine, from its first process to its last.

The order is fixed: take the run directory's lock, start forkserver and gateway, wait until both answer, start the
ranks, watch the gateway's topology until the group is ready. The forkserver goes first: its imports take longest and
need no other process, and what only the rest needs is imported meanwhile. Until the group is ready the end of any
process but the forkserver ends all: nothing is served yet, and the user wants to know. From then on processes are
restarted (`healing`), until the restart budget is used up or the gateway reports that the group has failed.
Single-threaded: everything here runs in the launcher's main thread (see hetero_api/supervision), and every wait is
bounded.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from hetero_api.contract import ENV_ADMIN_TOKEN_FILE, ENV_GROUP_TOKEN_FILE, EXIT_PERMANENT
from hetero_api.cpu_list import format_cpu_list
from hetero_api.group_state import GroupState
from hetero_api.host.gpus import IN_PCI_ORDER
from hetero_api.host.stop_signals import StopSignals
from hetero_api.spec import HeteroInference
from hetero_api.supervision.child import Child
from hetero_api.supervision.forkserver import Forkserver
from hetero_api.supervision.service import Services
from hetero_api.supervision.supervisor import Supervisor
from hetero_client.errors import (
    AlreadyRunningError,
    GroupFailedError,
    LaunchError,
    PortTakenError,
    RequestError,
    StartInterruptedError,
    StartTimeoutError,
)
from hetero_client.launcher.commands import GATEWAY, HOST, DoorFiles, GatewayPorts, GroupCommands, Programs
from hetero_client.launcher.healing import Healing, Report, died, new_service
from hetero_client.launcher.local_plan import LocalPlan
from hetero_client.launcher.run_directory import GroupRecord, MeasurementStore, RunDirectory

if TYPE_CHECKING:
    from hetero_client.admin import AdminClient, GroupTopology

GATEWAY_START_S: Final = 60.0
FORKSERVER_START_S: Final = 60.0
"""Longest time until the forkserver is ready; ranks are started directly if it takes longer."""
STARTING_LOOK_S: Final = 0.05
RUNNING_LOOK_S: Final = 1.0
HEALING_LOOK_S: Final = 0.2
TOPOLOGY_TIMEOUT_S: Final = 2.0
RUNNING_TOPOLOGY_TIMEOUT_S: Final = 0.5
"""Shorter, because nobody watches the processes meanwhile."""
GATEWAY_SILENCE_S: Final = 15.0
"""A running gateway that has not answered for this long is killed."""
REASON_WAIT_S: Final = 1.0
SETTLE_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class LocalGroupConfig:
    """Configuration of a local group. Ports of 0 let the system choose."""

    resource: HeteroInference
    manifest: Path
    model_dir: Path
    plan: LocalPlan
    port: int
    http_port: int
    programs: Programs = field(default_factory=Programs)
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    with_forkserver: bool = True
    """Whether ranks and successors of lost ones are forked from a process that has torch loaded."""
    measurements: MeasurementStore | None = None
    """Measurements of earlier starts; None: ranks measure at every start."""
    packed_weights: Path | None = None
    """Folder in which ranks keep packed weights from start to start; None: nowhere."""
    door: DoorFiles = field(default_factory=DoorFiles)
    """Files in place of the Secrets that spec.gateway names."""
    dp_local_rank: int = 0
    """Number of this group among those of the same resource that share this machine's devices and cores."""

    draft_dir: Path | None = None
    """Draft model; None: there is none."""
    adapter_dirs: tuple[Path, ...] = ()
    """Adapters that the resource names by URI, in order."""
    router_port: int | None = None
    """Port of the engine protocol that a router speaks; None: none."""

    @property
    def ports(self) -> GatewayPorts:
        """Ports of the gateway."""
        return GatewayPorts(self.port, self.http_port, router=self.router_port)

    @property
    def name(self) -> str:
        """Name of the group, unique on this machine."""
        name = self.resource.metadata.name
        return f"{name}.{self.dp_local_rank}" if self.dp_local_rank else name


@dataclass(frozen=True, slots=True)
class StartTimes:
    """Monotonic seconds: first process started, weights first seen loading, group ready."""

    started_s: float
    loading_s: float
    ready_s: float


class LocalGroup:
    """One local group: enter it to take the run directory, `start`, `wait_ready`, `watch`; leaving stops everything.

    `report` takes a line for the user on every event of a running group's processes.
    """

    def __init__(
        self, config: LocalGroupConfig, *, run: RunDirectory, signals: StopSignals, report: Report = lambda _: None
    ) -> None:
        self._config = config
        self._run = run
        self._signals = signals
        self._report = report
        self._commands = GroupCommands(
            config.programs,
            config.model_dir,
            run,
            packed_weights=config.packed_weights,
            door=config.door,
            draft_dir=config.draft_dir,
            adapter_dirs=config.adapter_dirs,
        )
        # PYTHONSAFEPATH: a json.py in the user's folder must not shadow the gateway's.
        own = {ENV_GROUP_TOKEN_FILE: str(run.token_path), "PYTHONSAFEPATH": "1"}
        if config.plan.uses_gpus:
            own |= IN_PCI_ORDER  # as the plan numbers devices
        # On loopback, the launcher, `hetero ps` and `hetero topology` need no token, unless others need keys.
        if config.door.keys is not None:
            own[ENV_ADMIN_TOKEN_FILE] = str(run.admin_token_path)
        inherited = {key: value for key, value in config.environment.items() if key != ENV_ADMIN_TOKEN_FILE}
        self._supervisor = Supervisor(environment={**inherited, **own})
        self._forkserver = Forkserver(self._supervisor, self._commands.forkserver()) if config.with_forkserver else None
        self._services = Services(self._supervisor, self._forkserver)
        self._healing: Healing | None = None
        self._admin: AdminClient | None = None
        self._record: GroupRecord | None = None
        self._is_recorded = True
        self._begun_at = time.time()
        self._started_s = 0.0
        self._answered_s = 0.0
        """Monotonic time of the gateway's last answer."""

    @property
    def record(self) -> GroupRecord:
        """Pids and addresses. Raises LaunchError before `start` has returned."""
        if self._record is None:
            raise LaunchError("the group has not been started")
        return self._record

    def __enter__(self) -> Self:
        if not self._run.lock.try_acquire():
            raise AlreadyRunningError(self._config.name, pid=self._run.lock.holder_pid())
        self._run.prepare(self._config.resource, with_admin_token=self._config.door.keys is not None)
        if self._config.measurements is not None:
            self._config.measurements.copy_to(self._run)
        self._started_s = time.monotonic()
        if self._forkserver is not None:
            self._forkserver.ensure_started()
        return self

    def __exit__(self, *_: object) -> None:
        if self._admin is not None:
            self._admin.close()
        self._supervisor.stop(first=self._gateway, impatient=lambda: self._signals.impatient)
        self._run.clear()
        self._run.lock.release()

    # --- until ready --------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the gateway, wait until it listens and the forkserver is ready, start the ranks. Raises LaunchError."""
        check_port(self._config.port, option="--port", field_path="spec.gateway.service.port")
        check_port(self._config.http_port, option="--http-port", field_path="spec.gateway.service.httpPort")
        if self._config.router_port is not None:
            check_port(self._config.router_port, option="--router-port", field_path="leave it out")
        gateway = new_service(self._commands.gateway(self._config.ports))
        self._services.add(gateway)
        from hetero_client.admin import AdminClient

        addresses = self._wait_for_gateway()
        gateway.command = self._commands.gateway(GatewayPorts.from_addresses(addresses), is_first=False)
        self._admin = AdminClient(addresses["admin"], token=self._run.read_admin_token())
        self._wait_for_forkserver()
        for rank in self._config.plan.ranks:
            self._services.add(new_service(self._commands.rank(rank, addresses["ranks"])))
        share = self._config.plan.share(self._config.name)
        self._record = GroupRecord(
            name=self._config.name,
            pid=os.getpid(),
            manifest=str(self._config.manifest),
            model_dir=str(self._config.model_dir),
            phase="starting",
            **{service: addresses[service] for service in ("inference", "admin", "http", "router")},
            started_at=time.time(),
            processes=self._pids(),
            cores=format_cpu_list(share.cores),
            memory_bytes=share.memory_bytes,
        )
        self._run.write_record(self._record)

    def keep_measurements(self) -> float | None:
        """Keep the ranks' measurements for the next start.

        Returns when they were taken, in seconds since 1970, if that was before this start, and None otherwise.
        """
        if self._config.measurements is None:
            return None
        try:
            measured_at = self._config.measurements.save_from(self._run)
        except OSError as error:
            self._report(f"measurements cannot be kept, so the next start takes them again: {error}")
            return None
        return measured_at if measured_at is not None and measured_at < self._begun_at else None

    def wait_ready(self, listener: Callable[[GroupTopology], None]) -> tuple[GroupTopology, StartTimes]:
        """Call the listener with every topology until the group is ready; return the last one and the start's times.

        Raises StartInterruptedError, StartTimeoutError, ProcessDiedError or GroupFailedError.
        """
        limit_s = self._config.resource.spec.recovery.rendezvous_timeout_seconds
        deadline = time.monotonic() + limit_s
        loading_s: float | None = None
        seen: GroupTopology | None = None
        while time.monotonic() < deadline:
            self._check(self._supervisor.wait(STARTING_LOOK_S, wake=self._signals.fileno()))
            before, seen = seen, self._look() or seen
            if seen is None:
                continue
            if _got_on(before, seen):
                deadline = time.monotonic() + limit_s
            listener(seen)
            if loading_s is None and seen.state in (GroupState.LOADING, GroupState.READY):
                loading_s = time.monotonic()
            if seen.state == GroupState.READY and loading_s is not None:
                self._update_record(phase="ready")
                return seen, StartTimes(self._started_s, loading_s, time.monotonic())
        raise StartTimeoutError(_timeout_message(seen, limit_s, self._run.path))

    # --- once ready ---------------------------------------------------------------------------------------

    def watch(self, *, until: Callable[[], bool] = lambda: False) -> None:
        """Keep the group running; return on a stop signal or when `until` returns True.

        Raises ProcessDiedError, RestartsExhaustedError or GroupFailedError when it cannot be kept running.
        """
        recovery = self._config.resource.spec.recovery
        healing = self._healing = self._healing or Healing(self._services, limits=recovery, report=self._report)
        self._answered_s = time.monotonic()
        look_at_s = 0.0
        while not until():
            pause_s = self._services.seconds_to_next_start(STARTING_LOOK_S)
            ended = self._supervisor.wait(pause_s, wake=self._signals.fileno())
            if self._signals.first is not None:
                return
            self._heal(healing, ended)
            if time.monotonic() >= look_at_s:
                look_at_s = time.monotonic() + self._look_after()
                self._write_record()

    def check_alive(self, *, settle_s: float = SETTLE_S) -> None:
        """Raise the reason of a failed request if a process that ends the group ends within `settle_s`."""
        deadline = time.monotonic() + settle_s
        while (left_s := deadline - time.monotonic()) > 0:
            ended = self._supervisor.wait(min(left_s, STARTING_LOOK_S))
            if self._healing is not None:
                self._heal(self._healing, ended)
            else:
                self._raise_if_ended(ended)

    def _heal(self, healing: Healing, ended: Sequence[Child]) -> None:
        if any(child.failed_permanently for child in ended):
            self._wait_for_reason(ended)
        if healing.handle(ended):
            self._update_record(phase="recovering", processes=self._pids())
            self._answered_s = time.monotonic() + GATEWAY_START_S

    def _look_after(self) -> float:
        """Read the group's state and act on it; return the seconds until the next look."""
        try:
            topology = self._look(timeout_s=RUNNING_TOPOLOGY_TIMEOUT_S)
        except GroupFailedError:
            # The end of a process that used up the budget comes first, and the gateway may know of it sooner.
            self.check_alive()
            raise
        if topology is None:
            self._kill_silent_gateway()
            return HEALING_LOOK_S
        self._answered_s = time.monotonic()
        if not topology.state.is_serving or not all(service.is_running for service in self._services.all):
            return HEALING_LOOK_S
        if self.record.phase != "ready":
            self._report(f"ready again, epoch {topology.epoch}")
            self._update_record(phase="ready")
        if self._forkserver is not None:
            with suppress(OSError):  # ranks are started without it
                self._forkserver.ensure_started()
        return RUNNING_LOOK_S

    def _kill_silent_gateway(self) -> None:
        gateway = self._gateway
        if gateway is None or not gateway.is_running:
            return
        if (silent_s := time.monotonic() - self._answered_s) > GATEWAY_SILENCE_S:
            self._report(f"{GATEWAY} (pid {gateway.pid}) has not answered for {silent_s:.0f} s; it is killed")
            gateway.kill()

    # --- shared -------------------------------------------------------------------------------------------

    @property
    def _gateway(self) -> Child | None:
        return next((service.child for service in self._services.all if service.name == GATEWAY), None)

    def _pids(self) -> dict[str, int]:
        """Return pids by name; the last one's of a service that waits for its next start."""
        return {service.name: service.child.pid for service in self._services.all if service.child is not None}

    def _update_record(self, *, phase: str, processes: dict[str, int] | None = None) -> None:
        self._record = replace(self.record, phase=phase, processes=processes or self.record.processes)
        self._is_recorded = False
        self._write_record()

    def _write_record(self) -> None:
        """Write the record, unless it is written. A full disk ends no group: it is removed, and tried again later.

        An old record would claim what is true no more.
        """
        if self._is_recorded:
            return
        try:
            self._run.write_record(self.record)
            self._is_recorded = True
        except OSError as error:
            if self._run.record_path.exists():
                self._report(f"{self._run.record_path} cannot be written, so the group is not listed: {error.strerror}")
                self._run.record_path.unlink()

    def _check(self, ended: Sequence[Child]) -> None:
        if self._signals.first is not None:
            raise StartInterruptedError(self._signals.first)
        self._raise_if_ended(ended)

    def _raise_if_ended(self, ended: Sequence[Child]) -> None:
        ended = [child for child in ended if self._services.find(child) is not None]  # the forkserver may end
        if not ended:
            return
        self._wait_for_reason(ended)
        # When one rank's failure ends several processes at once, report the one with a permanent reason.
        raise died(max(ended, key=lambda child: child.failed_permanently))

    def _wait_for_reason(self, ended: Sequence[Child]) -> None:
        """Give the gateway a moment to learn the reason, which a rank reports to it before it ends."""
        if self._gateway is None or not self._gateway.is_running:
            return
        permanent = any(child.exit_status == EXIT_PERMANENT for child in ended)
        deadline = time.monotonic() + (REASON_WAIT_S if permanent else 0.0)
        while True:
            self._look()
            if time.monotonic() >= deadline:
                return
            time.sleep(STARTING_LOOK_S)

    def _look(self, *, timeout_s: float = TOPOLOGY_TIMEOUT_S) -> GroupTopology | None:
        """Return the topology; None when the gateway does not answer in time. Raises GroupFailedError."""
        if self._admin is None:
            return None
        try:
            topology = self._admin.topology(timeout_s=timeout_s, wait_for_ready=True)
        except RequestError:
            return None
        if topology.failed:
            raise GroupFailedError(topology.reason)
        return topology

    def _wait_for_forkserver(self) -> None:
        deadline = self._started_s + FORKSERVER_START_S
        while self._forkserver is not None and self._forkserver.is_warming_up and time.monotonic() < deadline:
            self._check(self._supervisor.wait(STARTING_LOOK_S / 2, wake=self._signals.fileno()))

    def _wait_for_gateway(self) -> dict[str, str]:
        deadline = time.monotonic() + GATEWAY_START_S
        while time.monotonic() < deadline:
            self._check(self._supervisor.wait(STARTING_LOOK_S / 2, wake=self._signals.fileno()))
            state = self._run.read_gateway_state()
            if state is not None:
                return {key: str(state.get(key, "")) for key in ("inference", "http", "admin", "ranks", "router")}
        raise StartTimeoutError(
            f"the gateway did not listen within {GATEWAY_START_S:g} s; see {self._run.log_path(GATEWAY)}"
        )


def check_port(port: int, *, option: str, field_path: str) -> None:
    """Raise PortTakenError unless the port is free. 0 always is."""
    # gRPC listens with SO_REUSEPORT, so two gateways would share a port silently; a plain bind fails.
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise PortTakenError(
                f"port {port} on {HOST} cannot be used ({error.strerror}); choose another with {option} N "
                f"(0 lets the system choose) or {field_path}"
            ) from error


def _got_on(before: GroupTopology | None, seen: GroupTopology) -> bool:
    """Return whether a rank reports another progress of its long work than before."""
    known = {rank.rank: rank.progress for rank in before.ranks} if before is not None else {}
    return any(rank.progress is not None and rank.progress != known.get(rank.rank) for rank in seen.ranks)


def _timeout_message(seen: GroupTopology | None, limit_s: float, logs: Path) -> str:
    state = f"it is {seen.state.value}" if seen is not None else "the gateway does not answer"
    missing = [rank.pod_name or f"rank {rank.rank}" for rank in seen.ranks if not rank.joined] if seen else []
    waiting = f", waiting for {', '.join(missing)}" if missing else ""
    return (
        f"the group was not ready within {limit_s:g} s of its start or last progress "
        f"(spec.recovery.rendezvousTimeoutSeconds): "
        f"{state}{waiting}; logs are in {logs}"
    )
