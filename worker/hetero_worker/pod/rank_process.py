"""One rank of the pod: its process, what it last said, and the pause until the next process.

Output and error output come through a pipe and are passed on in whole lines, so that lines of two ranks never mix.
Their end is kept: a container's last lines are what Kubernetes shows, and a rank that ends it has the last word.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Final

from hetero_api.contract import ENV_HEARTBEAT_FILE, EXIT_PERMANENT, EXIT_USAGE
from hetero_api.host.death_signal import dying_with_parent
from hetero_api.host.heartbeat import Beat, HangWatch, HeartbeatMemory
from hetero_api.host.process_state import is_stopped
from hetero_api.host.restarts import RestartPauses

_CHUNK_BYTES: Final = 64 * 1024
_TAIL_BYTES: Final = 1500
"""Kubernetes keeps 2048 bytes of a container's last output."""
_TAIL_LINES: Final = 12
RAN_WELL_S: Final = 300.0
"""A rank that ran for so long did well, whatever ended it."""
_LONGEST_LINE_BYTES: Final = 64 * 1024
"""A line that is longer is passed on in pieces."""


class RankProcess:
    """Belongs to the supervisor's thread; `beat`, `is_running` and `restarts` may be read from any."""

    def __init__(
        self,
        local_rank: int,
        *,
        argv: Sequence[str],
        environment: Mapping[str, str],
        pauses: RestartPauses,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.local_rank = local_rank
        self.restarts = 0
        self.due_s = clock()
        """When it is to be started; of a running one, when it was."""
        self._argv = tuple(argv)
        self._environment = dict(environment)
        self._pauses = pauses
        self._clock = clock
        self._process: subprocess.Popen[bytes] | None = None
        self._pidfd = -1
        self._output_fd = -1
        self._heartbeat: HeartbeatMemory | None = None
        self._watch = HangWatch()
        self._is_killed = False
        self._tail = b""
        self._unfinished = b""

    # --- what it is like ----------------------------------------------------------------------------------

    @property
    def is_running(self) -> bool:
        return self._process is not None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def beat(self) -> Beat | None:
        """What it is at; None while it does not run."""
        heartbeat = self._heartbeat
        return heartbeat.read() if heartbeat is not None and self.is_running else None

    def hung(self) -> str:
        """Why it is to be killed, "" if it is not or was. To be asked often, as HangWatch says."""
        beat, pid = self.beat(), self.pid
        if beat is None or pid is None or self._is_killed:
            return ""
        return self._watch.why(beat, self._clock(), is_stopped=lambda: is_stopped(pid))

    def descriptors(self) -> list[int]:
        """What to wait for: its end, and its output."""
        return [fd for fd in (self._pidfd, self._output_fd) if fd >= 0]

    def tail(self) -> list[str]:
        """The last lines that it wrote."""
        return self._tail.decode(errors="replace").splitlines()[-_TAIL_LINES:]

    # --- from start to end --------------------------------------------------------------------------------

    def start(self) -> None:
        """Start it. Raises OSError."""
        heartbeat = HeartbeatMemory()
        try:
            self._process = subprocess.Popen(
                dying_with_parent(list(self._argv), signal_number=signal.SIGKILL),
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, pass_fds=(heartbeat.fd,),
                env={**self._environment, ENV_HEARTBEAT_FILE: heartbeat.path}, start_new_session=True,
            )  # fmt: skip
        finally:
            heartbeat.release()
        self._heartbeat, self._tail = heartbeat, b""
        self._watch, self._is_killed = HangWatch(), False
        self._pidfd = os.pidfd_open(self._process.pid)
        self._output_fd = self._process.stdout.fileno() if self._process.stdout is not None else -1
        os.set_blocking(self._output_fd, False)
        self.due_s = self._clock()

    def forward_output(self, write: Callable[[bytes], object]) -> None:
        """Pass on the lines that it has written."""
        while self._output_fd >= 0:
            try:
                chunk = os.read(self._output_fd, _CHUNK_BYTES)
            except BlockingIOError:
                return
            if not chunk:
                self._output_fd = -1
                return
            self._tail = (self._tail + chunk)[-_TAIL_BYTES:]
            lines, newline, rest = (self._unfinished + chunk).rpartition(b"\n")
            if len(rest) > _LONGEST_LINE_BYTES:
                lines, newline, rest = lines + newline + rest, b"", b""
            self._unfinished = rest
            if whole := lines + newline:
                write(whole)

    def has_ended(self) -> bool:
        return self._process is not None and self._process.poll() is not None

    def reap(self, write: Callable[[bytes], object]) -> int:
        """Of one that has ended: pass on its last output; the exit code, 128 + N for signal N."""
        process = self._process
        if process is None:
            raise ValueError(f"rank {self.local_rank} does not run")
        status = process.wait()
        self.forward_output(write)
        if self._unfinished:
            write(self._unfinished)
            self._unfinished = b""
        os.close(self._pidfd)
        if process.stdout is not None:
            process.stdout.close()
        self._process, self._pidfd, self._output_fd = None, -1, -1
        return status if status >= 0 else 128 - status

    def plan_restart(self, exit_code: int) -> float | None:
        """It ended: the pause until its next start, None if there is to be none.

        One that dies once more after the longest pause is given up: the container ends, so that Kubernetes counts it.
        """
        if exit_code in (EXIT_PERMANENT, EXIT_USAGE):
            return None
        now_s = self._clock()
        did_well = now_s - self.due_s >= RAN_WELL_S
        if self._pauses.is_exhausted and not did_well:
            return None
        pause_s = self._pauses.next_pause_s(did_well=did_well)
        self.restarts += 1
        self.due_s = now_s + pause_s
        return pause_s

    def signal(self, number: int) -> None:
        """Signal it, if it runs."""
        self._is_killed = self._is_killed or number == signal.SIGKILL
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)
