"""Child processes: started so that none can be left behind, watched through pidfds, stopped in bounded time.

Each child leads a session of its own (a terminal's Ctrl-C reaches the launcher only), writes to its own log,
gets SIGTERM when the launcher dies, and SIGKILL a grace time later (`warden.py`). Children must be started
from the thread that lives as long as the launcher: Linux ties the death signal to the parent *thread*.
A child that ended is reaped only after its process group got SIGKILL, so the group's number cannot have been
given away.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from hetero_api.host.death_signal import dying_with_parent

STOP_GRACE_S: Final = 5.0
"""From the first SIGTERM to SIGKILL."""
GATEWAY_GRACE_S: Final = 2.5
"""How long the process that is stopped first may take before the others get SIGTERM too."""
OWN_END_S: Final = 1.0
"""How long the others may take to end by themselves once the first is gone."""
LOOK_S: Final = 0.1

_HERE: Final = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Command:
    """A process to start."""

    name: str
    argv: tuple[str, ...]
    log_path: Path


class Child:
    """One running, or ended, process."""

    def __init__(self, command: Command, process: subprocess.Popen[bytes]) -> None:
        self.name = command.name
        self.log_path = command.log_path
        self.pid = process.pid
        self._process = process
        self._pidfd = os.pidfd_open(process.pid)

    @property
    def exit_status(self) -> int | None:
        """As Popen.returncode: negative for a signal; None until the end was seen."""
        return self._process.returncode

    def fileno(self) -> int:
        """Readable when the process has ended."""
        return self._pidfd

    def signal(self, number: int) -> None:
        """Signal the process group, unless the end was seen."""
        if self.exit_status is None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    def reap(self) -> None:
        """To be called when `fileno()` is readable: sweep the group, collect the exit status."""
        self.signal(signal.SIGKILL)
        self._process.wait()
        os.close(self._pidfd)


class Supervisor:
    """The children of one launcher."""

    def __init__(self, *, environment: Mapping[str, str], grace_s: float = STOP_GRACE_S) -> None:
        self.children: list[Child] = []
        self._environment = dict(environment)
        self._grace_s = grace_s
        self._warden: subprocess.Popen[bytes] | None = None

    def start(self, command: Command) -> Child:
        """Start one process. Raises OSError when it cannot be."""
        warden_pipe = self._warden_pipe()
        with command.log_path.open("ab") as log:
            process = subprocess.Popen(
                dying_with_parent(list(command.argv), signal_number=signal.SIGTERM),
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._environment, start_new_session=True,
            )  # fmt: skip
        child = Child(command, process)
        self.children.append(child)
        warden_pipe.write(f"{child.pid}\n".encode())
        warden_pipe.flush()
        return child

    @property
    def alive(self) -> list[Child]:
        return [child for child in self.children if child.exit_status is None]

    def wait(self, timeout_s: float, *, wake: int | None = None) -> list[Child]:
        """Children that ended, as soon as one has; empty after the time, or when fd `wake` is readable."""
        with selectors.DefaultSelector() as selector:
            for child in self.alive:
                selector.register(child, selectors.EVENT_READ, child)
            if wake is not None:
                selector.register(wake, selectors.EVENT_READ)
            ended = [key.data for key, _ in selector.select(max(0.0, timeout_s)) if key.data is not None]
        for child in ended:
            child.reap()
        return ended

    def stop(self, *, first: Child | None = None, impatient: Callable[[], bool] = lambda: False) -> None:
        """End all children: `first` alone at first, then the rest; SIGKILL after the grace time."""
        deadline = time.monotonic() + self._grace_s
        self._end_in_order(first, deadline, impatient)
        for child in self.alive:
            child.signal(signal.SIGKILL)
        self._wait_for(self.alive, time.monotonic() + self._grace_s, lambda: False)
        self._end_warden()

    def _end_in_order(self, first: Child | None, deadline: float, impatient: Callable[[], bool]) -> None:
        if first is not None and first.exit_status is None:
            first.signal(signal.SIGTERM)
            self._wait_for([first], min(deadline, time.monotonic() + GATEWAY_GRACE_S), impatient)
            self._wait_for(self.alive, min(deadline, time.monotonic() + OWN_END_S), impatient)
        for child in self.alive:
            child.signal(signal.SIGTERM)
        self._wait_for(self.alive, deadline, impatient)

    def _wait_for(self, children: Iterable[Child], deadline: float, impatient: Callable[[], bool]) -> None:
        waited = list(children)
        while any(child.exit_status is None for child in waited) and not impatient():
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return
            self.wait(min(left_s, LOOK_S))

    def _warden_pipe(self) -> IO[bytes]:
        if self._warden is None:
            self._warden = subprocess.Popen(
                [*_python("warden.py"), str(self._grace_s)],
                stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        if self._warden.stdin is None:
            raise RuntimeError("the warden has no standard input")
        return self._warden.stdin

    def _end_warden(self) -> None:
        if self._warden is not None and self._warden.stdin is not None:
            with suppress(BrokenPipeError):
                self._warden.stdin.close()
            self._warden.wait()
            self._warden = None


def _python(script: str) -> Sequence[str]:
    return (sys.executable, "-I", "-S", str(_HERE / script))
