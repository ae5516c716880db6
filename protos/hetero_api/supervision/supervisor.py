"""All children of one supervising process: started so that none can be left behind, and stopped in bounded time.

A child gets a death signal when its supervisor dies. That is SIGKILL in a pod. The launcher's children get SIGTERM, and
SIGKILL a grace time later from the warden. Start children from the thread that lives as long as the supervisor: Linux
ties the death signal to the parent *thread*. A child may also be forked by the forkserver and then adopted.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Final

from hetero_api.contract import ENV_HEARTBEAT_FILE
from hetero_api.host.death_signal import adopt_orphans, dying_with_parent
from hetero_api.host.heartbeat import HeartbeatMemory
from hetero_api.supervision.child import Child, Command, ForkedProcess, Output, Write

STOP_GRACE_S: Final = 5.0
"""From the first SIGTERM to SIGKILL."""
FIRST_GRACE_S: Final = 2.5
"""Longest time that the child that is stopped first has before the others get SIGTERM too."""
LOOK_S: Final = 0.05
_WARDEN: Final = Path(__file__).with_name("warden.py")


def write_to_stderr(chunk: bytes) -> None:
    """Write all of `chunk` to this process's standard error."""
    sys.stderr.flush()
    left = memoryview(chunk)
    while left:
        left = left[os.write(sys.stderr.fileno(), left) :]


class Supervisor:
    """The children of one process, which adopts orphans of its descendants.

    `death_signal` is what children get when this process dies. `write` takes the output of children without a log.
    """

    def __init__(
        self,
        *,
        environment: Mapping[str, str],
        grace_s: float = STOP_GRACE_S,
        death_signal: signal.Signals = signal.SIGTERM,
        write: Write = write_to_stderr,
    ) -> None:
        self.children: list[Child] = []
        """Children whose end has not been seen."""
        self.death_signal = death_signal
        self._environment = dict(environment)
        self._grace_s = grace_s
        self._write = write
        self._warden: subprocess.Popen[bytes] | None = None
        adopt_orphans()

    def start(self, command: Command) -> Child:
        """Start a process. Raises OSError."""
        child, _ = self._spawn(command)
        return child

    def start_with_pipes(self, command: Command) -> tuple[Child, IO[bytes], IO[bytes]]:
        """Start a process that takes orders; return it with its standard input and output. Raises OSError."""
        child, process = self._spawn(command)
        if process.stdin is None or process.stdout is None:
            raise ValueError(f"{command.name} takes no orders")
        return child, process.stdin, process.stdout

    def adopt(self, command: Command, pid: int, heartbeat: HeartbeatMemory, output: Output | None) -> Child:
        """Take over a process that the forkserver forked, and that has become a child of this process."""
        return self._add(Child(command, ForkedProcess(pid), heartbeat=heartbeat, output=output))

    def wait(self, timeout_s: float, *, wake: int | None = None) -> list[Child]:
        """Wait until a child ends or writes, or descriptor `wake` is readable, at most `timeout_s`.

        Passes output on, and replaces a warden that was killed. Returns the children that ended, reaped.
        """
        if self._warden is not None:
            self._ensure_warden()
        with selectors.DefaultSelector() as selector:
            for child in self.children:
                selector.register(child, selectors.EVENT_READ, child)
                if child.output is not None:
                    selector.register(child.output, selectors.EVENT_READ)
            if wake is not None:
                selector.register(wake, selectors.EVENT_READ)
            ended = [key.data for key, _ in selector.select(max(0.0, timeout_s)) if key.data is not None]
        for child in self.children:
            if child.output is not None:
                child.output.forward(self._write)
        for child in ended:
            child.reap(self._write)
            self.children.remove(child)
        return ended

    def reap_orphans(self) -> list[int]:
        """Wait for ended descendants that lost their parent, as a container's first process must; return their pids.

        Otherwise each stays in the process table and counts against the pod's limit. A child of this supervisor that
        has ended hides orphans that ended after it, until it was reaped.
        """
        own = {child.pid for child in self.children}
        own |= {self._warden.pid} if self._warden is not None else set()
        reaped: list[int] = []
        while (pid := _ended_child()) is not None and pid not in own:
            os.waitpid(pid, 0)
            reaped.append(pid)
        return reaped

    def stop(self, *, first: Child | None = None, impatient: Callable[[], bool] = lambda: False) -> list[Child]:
        """End all children, `first` before the others; SIGKILL after the grace time. Returns those that ended."""
        stopped = list(self.children)
        deadline_s = time.monotonic() + self._grace_s
        if first is not None and first.is_running:
            first.signal(signal.SIGTERM)
            self._wait_for([first], min(deadline_s, time.monotonic() + FIRST_GRACE_S), impatient)
        for child in self.children:
            child.signal(signal.SIGTERM)
        self._wait_for(self.children, deadline_s, impatient)
        self.kill()
        self._end_warden()
        return stopped

    def kill(self) -> None:
        """Kill all children and wait for their end, at most a grace time."""
        for child in self.children:
            child.kill()
        self._wait_for(self.children, time.monotonic() + STOP_GRACE_S, lambda: False)

    def _spawn(self, command: Command) -> tuple[Child, subprocess.Popen[bytes]]:
        heartbeat = HeartbeatMemory() if command.has_heartbeat else None
        output = Output() if command.log_path is None else None
        try:
            process = self._popen(command, heartbeat, output)
        except OSError:
            if output is not None:
                output.close(self._write)
            raise
        finally:
            if heartbeat is not None:
                heartbeat.release()
        return self._add(Child(command, process, heartbeat=heartbeat, output=output)), process

    def _popen(
        self, command: Command, heartbeat: HeartbeatMemory | None, output: Output | None
    ) -> subprocess.Popen[bytes]:
        own = {} if heartbeat is None else {ENV_HEARTBEAT_FILE: heartbeat.path}
        log = os.dup(output.write_fd) if output is not None else _open_log(command.log_path)
        try:
            return subprocess.Popen(
                dying_with_parent(list(command.argv), signal_number=self.death_signal),
                stdin=subprocess.PIPE if command.takes_orders else subprocess.DEVNULL,
                stdout=subprocess.PIPE if command.takes_orders else log, stderr=log, env={**self._environment, **own},
                pass_fds=() if heartbeat is None else (heartbeat.fd,), start_new_session=True,
            )  # fmt: skip
        finally:
            os.close(log)

    def _add(self, child: Child) -> Child:
        self.children.append(child)
        if self.death_signal != signal.SIGKILL and not self._ensure_warden():
            self._tell_warden(child)
        return child

    def _wait_for(self, children: Iterable[Child], deadline_s: float, impatient: Callable[[], bool]) -> None:
        waited = list(children)
        while any(child.is_running for child in waited) and not impatient():
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return
            self.wait(min(left_s, LOOK_S))

    def _ensure_warden(self) -> bool:
        """Start a warden that knows all children, unless one runs; return whether it was started."""
        if self._warden is not None and self._warden.poll() is None:
            return False
        self._end_warden()
        self._warden = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_WARDEN), str(self._grace_s)],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        for child in self.children:
            self._tell_warden(child)
        return True

    def _tell_warden(self, child: Child) -> None:
        if self._warden is None or self._warden.stdin is None:
            raise RuntimeError("there is no warden with a standard input")
        with suppress(BrokenPipeError):  # killed just now: the next one is told
            self._warden.stdin.write(f"{child.pid}\n".encode())
            self._warden.stdin.flush()

    def _end_warden(self) -> None:
        if self._warden is not None and self._warden.stdin is not None:
            with suppress(BrokenPipeError):
                self._warden.stdin.close()
            self._warden.wait()
            self._warden = None


def _open_log(path: Path | None) -> int:
    return os.open(path or os.devnull, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)


def _ended_child() -> int | None:
    """Return the pid of a child that has ended, without reaping it."""
    try:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return ended.si_pid if ended is not None else None
