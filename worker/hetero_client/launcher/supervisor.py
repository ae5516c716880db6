"""Child processes: started so that none can be left behind, watched through pidfds, stopped in bounded time.

Each child leads a session of its own (a terminal's Ctrl-C reaches the launcher only), writes to its own log,
gets SIGTERM when the launcher dies, and SIGKILL a grace time later (`warden.py`). Children must be started
from the thread that lives as long as the launcher: Linux ties the death signal to the parent *thread*.
A child that ended is reaped only after its process group got SIGKILL, so the group's number cannot have been
given away.

A child may have a heartbeat, which tells what it is at and that it is frozen. One that another child forked is adopted.
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
from typing import IO, Final, Protocol

from hetero_api.contract import ENV_HEARTBEAT_FILE
from hetero_api.host.death_signal import adopt_orphans, dying_with_parent
from hetero_api.host.heartbeat import Beat, HangWatch, HeartbeatMemory
from hetero_api.host.process_state import is_stopped

STOP_GRACE_S: Final = 5.0
"""From the first SIGTERM to SIGKILL."""
GATEWAY_GRACE_S: Final = 2.5
"""How long the process that is stopped first may take before the others get SIGTERM too."""
LOOK_S: Final = 0.1
_HERE: Final = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Command:
    """A process to start."""

    name: str
    argv: tuple[str, ...]
    log_path: Path
    has_heartbeat: bool = False
    takes_orders: bool = False
    """Standard input and output are pipes to here."""


class Process(Protocol):
    """What a Child needs of Popen."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None: ...

    def wait(self) -> int: ...


class AdoptedProcess:
    """A child of this process that it has not started."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def wait(self) -> int:
        if self.returncode is None:
            _, status = os.waitpid(self.pid, 0)
            self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


class Child:
    """One running, or ended, process."""

    def __init__(self, command: Command, process: Process, heartbeat: HeartbeatMemory | None = None) -> None:
        self.name = command.name
        self.log_path = command.log_path
        self.pid = process.pid
        self._process = process
        self._pidfd = os.pidfd_open(process.pid)
        self._heartbeat = heartbeat
        self._watch = HangWatch()
        self._is_killed = False

    @property
    def exit_status(self) -> int | None:
        """As Popen.returncode: negative for a signal; None until the end was seen."""
        return self._process.returncode

    def fileno(self) -> int:
        """Readable when the process has ended."""
        return self._pidfd

    def beat(self) -> Beat | None:
        """What it is at, or was last; None for one without a heartbeat."""
        return self._heartbeat.read() if self._heartbeat is not None else None

    def hung(self, now_s: float) -> str:
        """Why it is to be killed, "" if it is not. To be asked often, as HangWatch says."""
        beat = self.beat()
        if beat is None or self._is_killed or self.exit_status is not None:
            return ""
        return self._watch.why(beat, now_s, is_stopped=lambda: is_stopped(self.pid))

    def signal(self, number: int) -> None:
        """Signal the process group, unless the end was seen."""
        if self.exit_status is None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    def kill(self) -> None:
        """End it now, with all of its process group."""
        self._is_killed = True
        self.signal(signal.SIGKILL)

    def reap(self) -> None:
        """To be called when `fileno()` is readable: sweep the group, collect the exit status."""
        self.signal(signal.SIGKILL)
        self._process.wait()
        os.close(self._pidfd)
        if self._heartbeat is not None:
            self._heartbeat.release()


class Supervisor:
    """The children of one launcher."""

    def __init__(self, *, environment: Mapping[str, str], grace_s: float = STOP_GRACE_S) -> None:
        self.children: list[Child] = []
        """Those whose end has not been seen."""
        self._environment = dict(environment)
        self._grace_s = grace_s
        adopt_orphans()
        self._warden: subprocess.Popen[bytes] | None = None

    def start(self, command: Command) -> Child:
        """Start one process. Raises OSError when it cannot be."""
        heartbeat = HeartbeatMemory() if command.has_heartbeat else None
        try:
            return self._take(Child(command, self._popen(command, heartbeat), heartbeat))
        finally:
            if heartbeat is not None:
                heartbeat.release()

    def adopt(self, command: Command, pid: int, heartbeat: HeartbeatMemory) -> Child:
        """Take over a process that a child forked for us, and that has become a child of ours."""
        return self._take(Child(command, AdoptedProcess(pid), heartbeat))

    def start_servant(self, command: Command) -> tuple[Child, IO[bytes], IO[bytes]]:
        """Start a process that takes orders: with its standard input and output."""
        process = self._popen(command, None)
        if process.stdin is None or process.stdout is None:
            raise RuntimeError(f"{command.name} has no pipes")
        return self._take(Child(command, process)), process.stdin, process.stdout

    def _popen(self, command: Command, heartbeat: HeartbeatMemory | None) -> subprocess.Popen[bytes]:
        own = {} if heartbeat is None else {ENV_HEARTBEAT_FILE: heartbeat.path}
        with command.log_path.open("ab") as log:
            return subprocess.Popen(
                dying_with_parent(list(command.argv), signal_number=signal.SIGTERM),
                stdin=subprocess.PIPE if command.takes_orders else subprocess.DEVNULL,
                stdout=subprocess.PIPE if command.takes_orders else log, stderr=log, env={**self._environment, **own},
                pass_fds=() if heartbeat is None else (heartbeat.fd,), start_new_session=True,
            )  # fmt: skip

    def _take(self, child: Child) -> Child:
        self.children.append(child)
        warden_pipe = self._warden_pipe()
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
            self.children.remove(child)
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
