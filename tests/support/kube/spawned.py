"""A child process that may outlive us.

subprocess.Popen warns, rightly, when it is forgotten while its process runs. Servers of a shared control plane run
until its last user is gone, which is often not the process that started them, and the keeper ends them.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

WAIT_INTERVAL_S = 0.01


class Spawned:
    """Started in a session of its own, both output streams appended to `log`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.status: int | None = None
        """Exit status, negative for a signal, once the process has ended."""

    @classmethod
    def start(cls, command: Sequence[str], *, log: Path, environment: Mapping[str, str]) -> Spawned:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        actions = [
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(log), flags, 0o600),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ]
        return cls(os.posix_spawn(command[0], tuple(command), environment, file_actions=actions, setsid=True))

    @property
    def running(self) -> bool:
        if self.status is None:
            pid, code = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = os.waitstatus_to_exitcode(code)
        return self.status is None

    def send(self, with_signal: signal.Signals) -> None:
        """Signal it, unless it has ended."""
        if self.running:
            os.kill(self.pid, with_signal)

    def wait(self, timeout_s: float) -> bool:
        """Whether it ended in time."""
        deadline = time.monotonic() + timeout_s
        while self.running:
            if time.monotonic() > deadline:
                return False
            time.sleep(WAIT_INTERVAL_S)
        return True


def alive(pid: int) -> bool:
    """Whether any process with this number runs (one that ended but was not reaped does not)."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
