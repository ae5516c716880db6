"""Several groups of one manifest on this machine, and the router before them: `hetero up --replicas N --router`.

Each group is a `hetero up` of its own, which heals its ranks and its gateway. This process starts the groups and the
router (`python -m hetero_gateway route`), starts the router again when it ends, and ends with any group.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from hetero_api.host.stop_signals import StopSignals
from hetero_api.supervision.child import Child, Command
from hetero_api.supervision.supervisor import Supervisor
from hetero_client.errors import LocalSpecError, MissingExtraError, ProcessDiedError, StartInterruptedError
from hetero_client.launcher.commands import HOST, Programs

ROUTER: Final = "router"
ROUTER_PACKAGES: Final = ("smg", "smg_grpc_proto")
GRACE_S: Final = 12.0
"""Longest time that groups have to stop their own processes, which takes them two grace times at most."""
LOOK_S: Final = 0.2
MIN_LIFE_S: Final = 5.0
"""A router that ends sooner would end again: that is an error."""


@dataclass(frozen=True, slots=True)
class ReplicasConfig:
    """Settings that are decided before the first process."""

    manifest: Path
    num_replicas: int
    http_port: int
    """Port of the router; 0 lets the system choose."""
    router_log: Path
    keys: Path | None = None
    """File with lines TENANT:KEY; None: callers need no key."""
    tls_dir: Path | None = None
    """Folder with tls.crt and tls.key; None: no TLS."""
    group_options: Sequence[str] = ()
    """Further options of each group's `hetero up`."""
    programs: Programs = field(default_factory=Programs)
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

    def check(self) -> None:
        """Raise MissingExtraError without the router's package, LocalSpecError for files that are not there."""
        if any(find_spec(package) is None for package in ROUTER_PACKAGES):
            raise MissingExtraError("--router needs Shepherd Model Gateway: pip install 'heteroinference[router]'")
        if self.keys is not None and not self.keys.is_file():
            raise LocalSpecError([f"--router-keys: {self.keys} is no file"])


class LocalReplicas:
    """The groups and their router."""

    def __init__(self, config: ReplicasConfig, *, signals: StopSignals, report: Callable[[str], None]) -> None:
        self._config = config
        self._signals = signals
        self._report = report
        self._supervisor = Supervisor(environment=config.environment, grace_s=GRACE_S)
        self._router: Child | None = None
        self._router_started_s = 0.0
        port, metrics_port, *self._doors = _free_ports(config.num_replicas + 2)
        self._metrics_port = metrics_port
        self.http = f"{HOST}:{config.http_port or port}"
        """Address of the router."""

    def run(self) -> None:
        """Run until a stop signal. Raises ProcessDiedError, and StartInterruptedError if none was ready by then."""
        try:
            for ordinal in range(self._config.num_replicas):
                self._supervisor.start(Command(f"replica {ordinal}", self._group(ordinal)))
            self._start_router()
            is_ready = False
            while self._signals.first is None:
                ended = self._supervisor.wait(LOOK_S, wake=self._signals.fileno())
                if self._signals.first is None:
                    self._look_after(ended)
                if not is_ready and _listens(self.http):
                    is_ready = True
                    scheme = "http" if self._config.tls_dir is None else "https"
                    self._report(f"router: {scheme}://{self.http}/v1\n  log in {self._config.router_log}")
            if not is_ready:
                raise StartInterruptedError(self._signals.first)
        finally:
            self._supervisor.stop(first=self._router, impatient=lambda: self._signals.impatient)

    def _group(self, ordinal: int) -> tuple[str, ...]:
        return (
            sys.executable, "-m", "hetero_client", "up", str(self._config.manifest),
            "--port", "0", "--http-port", "0", "--router-port", str(self._doors[ordinal]),
            "--dp-local-rank", str(ordinal), "--replicas", str(self._config.num_replicas), *self._config.group_options,
        )  # fmt: skip

    def _start_router(self) -> None:
        config = self._config
        files = {"--keys": config.keys, "--tls-dir": config.tls_dir}
        argv = (
            *config.programs.gateway, "route", "--host", HOST, "--port", self.http.rpartition(":")[2],
            "--metrics-port", str(self._metrics_port),
            *(text for door in self._doors for text in ("--gateway", f"{HOST}:{door}")),
            *(text for option, path in files.items() if path for text in (option, str(path.absolute()))),
        )  # fmt: skip
        self._router = self._supervisor.start(Command(ROUTER, argv, config.router_log))
        self._router_started_s = time.monotonic()

    def _look_after(self, ended: Sequence[Child]) -> None:
        for child in ended:
            status = child.exit_status or 0
            lived_s = time.monotonic() - self._router_started_s
            if child is self._router and lived_s >= MIN_LIFE_S and not child.failed_permanently:
                self._report("the router ended; another one starts")
                self._start_router()
                continue
            how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
            log = f"; its log is {self._config.router_log}" if child is self._router else ""
            raise ProcessDiedError(f"{child.name} {how}{log}", exit_status=status, permanent=status > 0)


def _free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on now."""
    with ExitStack() as stack:
        held = [stack.enter_context(socket.create_server((HOST, 0))) for _ in range(count)]
        return [server.getsockname()[1] for server in held]


def _listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=LOOK_S).close()
    except OSError:
        return False
    return True
