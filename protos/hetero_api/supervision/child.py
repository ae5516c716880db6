"""One child process: how it ended, what it is at, what it wrote.

A child leads a session of its own, so a terminal's Ctrl-C reaches its supervisor only. It is held by a pidfd. A child
that ended is reaped only after its process group got SIGKILL, so the group's number cannot have been reused.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hetero_api.contract import EXIT_PERMANENT, EXIT_USAGE
from hetero_api.host.heartbeat import Beat, HangWatch, HeartbeatMemory

_CHUNK_BYTES: Final = 64 * 1024
_TAIL_BYTES: Final = 1500
"""Kubernetes keeps 2048 bytes of a container's last output."""
_TAIL_LINES: Final = 12
_LONGEST_LINE_BYTES: Final = 64 * 1024
"""A longer line is passed on in pieces."""

Write = Callable[[bytes], object]


@dataclass(frozen=True, slots=True)
class Command:
    """A process to start."""

    name: str
    argv: tuple[str, ...]
    log_path: Path | None = None
    """File that output is appended to; None: the supervisor passes it on."""
    has_heartbeat: bool = False
    takes_orders: bool = False
    """Standard input and output are pipes to the supervisor."""
    forked_argv: tuple[str, ...] | None = None
    """Arguments for the forkserver, which can start it sooner; None: it cannot be forked."""


class Output:
    """Output of one child: passed on in whole lines, so that lines of two children never mix, and its end kept."""

    def __init__(self) -> None:
        self._read_fd, self.write_fd = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._read_fd, False)
        self._tail = b""
        self._unfinished = b""

    @property
    def path(self) -> str:
        """The writing end's name for another process of the same user, until `close`."""
        return f"/proc/{os.getpid()}/fd/{self.write_fd}"

    def fileno(self) -> int:
        """Return the descriptor that is readable when there is output."""
        return self._read_fd

    def forward(self, write: Write) -> None:
        """Pass on the lines that have been written."""
        while chunk := self._read():
            self._tail = (self._tail + chunk)[-_TAIL_BYTES:]
            lines, newline, rest = (self._unfinished + chunk).rpartition(b"\n")
            if len(rest) > _LONGEST_LINE_BYTES:
                lines, newline, rest = lines + newline + rest, b"", b""
            self._unfinished = rest
            if whole := lines + newline:
                write(whole)

    def close(self, write: Write) -> None:
        """Pass on the rest of a child that ended."""
        self.forward(write)
        if self._unfinished:
            write(self._unfinished)
        self._unfinished = b""
        os.close(self._read_fd)
        os.close(self.write_fd)

    def tail(self) -> list[str]:
        """Return the last lines; `close` keeps them."""
        return self._tail.decode(errors="replace").splitlines()[-_TAIL_LINES:]

    def _read(self) -> bytes:
        try:
            return os.read(self._read_fd, _CHUNK_BYTES)
        except BlockingIOError:
            return b""


class ForkedProcess:
    """A child of this process that another process forked for it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def wait(self) -> int:
        """Wait for its end and return its exit status, negative for a signal."""
        if self.returncode is None:
            _, status = os.waitpid(self.pid, 0)
            self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


class Child:
    """One process, running or ended. `beat` and `exit_status` may be read from any thread."""

    def __init__(
        self,
        command: Command,
        process: subprocess.Popen[bytes] | ForkedProcess,
        *,
        heartbeat: HeartbeatMemory | None = None,
        output: Output | None = None,
    ) -> None:
        self.name = command.name
        self.log_path = command.log_path
        self.pid = process.pid
        self.output = output
        """None for a child that writes to its log."""
        self._process = process
        self._pidfd = os.pidfd_open(process.pid)
        self._heartbeat = heartbeat
        self._watch = HangWatch()
        self._is_killed = False

    @property
    def exit_status(self) -> int | None:
        """Exit status as Popen has it, negative for a signal; None until the child is reaped."""
        return self._process.returncode

    @property
    def is_running(self) -> bool:
        """Whether the end has not been seen."""
        return self._process.returncode is None

    @property
    def failed_permanently(self) -> bool:
        """Return whether it ended for a reason that a restart cannot cure."""
        return self.exit_status in (EXIT_PERMANENT, EXIT_USAGE)

    def fileno(self) -> int:
        """Return the descriptor that is readable when the process has ended."""
        return self._pidfd

    def beat(self) -> Beat | None:
        """Return the last heartbeat; None for a child without one."""
        return self._heartbeat.read() if self._heartbeat is not None else None

    def why_hung(self, now_s: float) -> str:
        """Return why the child must be killed, or "". Call it often: see `HangWatch`."""
        beat = self.beat()
        if beat is None or self._is_killed or not self.is_running:
            return ""
        return self._watch.why(beat, now_s, is_stopped=lambda: is_stopped(self.pid))

    def signal(self, number: int) -> None:
        """Signal the process group, unless the child was reaped."""
        if self.is_running:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    def kill(self) -> None:
        """Kill the whole process group."""
        self._is_killed = True
        self.signal(signal.SIGKILL)

    def reap(self, write: Write) -> None:
        """Kill the rest of the group, collect the exit status and pass on the last output. Blocks until it ended."""
        self.signal(signal.SIGKILL)
        self._process.wait()
        os.close(self._pidfd)
        if self.output is not None:
            self.output.close(write)
        if self._heartbeat is not None:
            self._heartbeat.release()


_PROC: Final = Path("/proc")
_STOPPED: Final = frozenset("Tt")


def is_stopped(pid: int, *, proc: Path = _PROC) -> bool:
    """Whether the process is stopped, by a signal or a debugger. False for one that is gone."""
    try:
        stat = (proc / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    # The program's name, in parentheses before the state, may hold anything.
    return stat.rpartition(")")[2].strip()[:1] in _STOPPED
