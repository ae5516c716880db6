"""One server process of the control plane, with a log and a pid file.

The pid file is for the keeper, which kills what a crashed test run left.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support.kube.errors import ComponentFailed
from tests.support.kube.spawned import Spawned

STOP_TIMEOUT_S = 10.0
TAIL_BYTES = 4000


class Component:
    """`command` run by this process; it can be stopped and started again."""

    def __init__(
        self, name: str, command: Sequence[str], *, folder: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self.command = tuple(command)
        self.log = folder / f"{name}.log"
        self._record = folder / f"{name}.pid"
        self._environment = {**os.environ, **(environment or {})}
        self._process: Spawned | None = None

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.running

    @property
    def pid(self) -> int:
        """Of the process that runs now."""
        if self._process is None:
            raise ComponentFailed(f"{self.name} is not running")
        return self._process.pid

    def start(self) -> None:
        """Start without waiting for readiness."""
        if self.running:
            raise ComponentFailed(f"{self.name} runs already")
        self._process = Spawned.start(self.command, log=self.log, environment=self._environment)
        self._record.write_text(str(self._process.pid))

    def stop(self, with_signal: signal.Signals = signal.SIGTERM, *, patience_s: float = STOP_TIMEOUT_S) -> None:
        """Signal the process and wait for its end; kill it when that takes longer than `patience_s`."""
        if self._process is None:
            return
        self._process.send(with_signal)
        if not self._process.wait(patience_s):
            self._process.send(signal.SIGKILL)
            self._process.wait(STOP_TIMEOUT_S)
        self._process = None
        self._record.unlink(missing_ok=True)

    def check(self) -> None:
        """Raises ComponentFailed when the process has ended."""
        if not self.running:
            status = None if self._process is None else self._process.status
            raise ComponentFailed(f"{self.name} ended with status {status}\n{self.log_tail()}")

    def log_tail(self) -> str:
        """The end of the log, with its path."""
        if not self.log.exists():
            return f"{self.log}: no log"
        text = self.log.read_bytes()[-TAIL_BYTES:].decode(errors="replace")
        return f"the end of {self.log}:\n{text}"
