"""A rank's progress, in shared memory, for the supervisor beside it.

The rank's main thread writes at every change, in about a microsecond; nobody has to ask it, so an observer can see that
a main thread hangs. A rank that waits (for a gateway, for its peers, for a request) is never late. Work has a limit,
and is late after it; the limit begins anew when long work gets on. Times are of the monotonic clock, which all
processes of a machine share.

A process that is frozen as a whole (stopped, or never given a core) cannot say so; a second thread counts pulses. From
both, `HangWatch` tells a supervisor that a process is to be killed.

A writer counts to an odd number before it writes and to an even one after it; a reader that sees an odd number, or
another one after it read, reads again. The pulse lies outside of that: one number, written by its own thread.
"""

from __future__ import annotations

import enum
import mmap
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_LAYOUT: Final = struct.Struct("=QQdQQ")
"""State, epoch, end of the current work's limit (0: waiting), steps done, loads done."""
_COUNTER: Final = struct.Struct("=Q")
_PULSE_OFFSET: Final = _COUNTER.size + _LAYOUT.size
SIZE_BYTES: Final = _PULSE_OFFSET + _COUNTER.size
PULSE_INTERVAL_S: Final = 0.1
"""Between two pulses of a process that is not frozen."""
STOPPED_S: Final = 1.5
"""A process that is stopped, and gave no pulse for so long, is frozen."""
SILENT_S: Final = 20.0
"""Limit for a process that is not stopped: importing a large library, or reading a slow file, may hold up all threads
of
a Python process, and so does a crowded machine.
"""
_READS: Final = 100
_LONGEST_LOOK_S: Final = 0.5
"""A watch that was away for longer was held up itself, and takes no more than this for silence."""


class RankState(enum.IntEnum):
    """States of a rank's process, as `hetero_worker.process.state_machine` goes through them."""

    STARTING = 0
    JOINING = 1
    """Waiting for a gateway, or for its group to form."""
    FORMED = 2
    LOADED = 3
    SERVING = 4
    BROKEN = 5
    """Its epoch failed; waiting for the gateway's Abort."""


@dataclass(frozen=True, slots=True)
class Beat:
    """One reading."""

    state: RankState
    epoch: int
    """Number of the epoch, 0 before the first."""
    due_s: float
    """Monotonic time by which the current work must have ended; 0 while the rank waits."""
    steps: int
    """Steps done by this process."""
    loads: int
    """Times that weights were loaded, or found to be loaded, by this process."""
    pulse: int = 0
    """Pulses so far."""

    def overdue_s(self, now_s: float) -> float:
        """Seconds that the current work is late; 0 when it is not."""
        return max(0.0, now_s - self.due_s) if self.due_s else 0.0


class Heartbeat:
    """The writing side. `memory` is at least SIZE_BYTES long and begins as zeros.

    For one thread, apart from the pulse's.
    """

    def __init__(self, memory: mmap.mmap | bytearray) -> None:
        self._memory = memory
        self._counter = 0
        self._state = RankState.STARTING
        self._epoch = 0
        self._due_s = 0.0
        self._limit_s = 0.0
        self._steps = 0
        self._loads = 0

    @classmethod
    def open(cls, path: Path | None) -> Heartbeat:
        """On a file of SIZE_BYTES; None for one that nobody reads. Raises OSError."""
        if path is None:
            return cls(bytearray(SIZE_BYTES))
        with path.open("r+b") as file:
            return cls(mmap.mmap(file.fileno(), SIZE_BYTES))

    def enter(self, state: RankState, *, epoch: int) -> None:
        """Record a new state of the rank."""
        self._loads += state is RankState.LOADED
        self._state, self._epoch = state, epoch
        self._write()

    def count_step(self) -> None:
        """Count a step."""
        self._steps += 1
        self._write()

    @contextmanager
    def working(self, limit_s: float) -> Iterator[None]:
        """Limit the work within the block: it hangs if it takes longer than `limit_s` to end or to get on."""
        self._limit_s = limit_s
        self.get_on()
        try:
            yield
        finally:
            self._due_s = 0.0
            self._write()

    def get_on(self) -> None:
        """Begin the limit of the work under way anew."""
        self._due_s = time.monotonic() + self._limit_s
        self._write()

    def keep_pulse(self) -> None:
        """Count pulses from a thread of its own until the process ends."""
        threading.Thread(target=self._pulse, name="pulse", daemon=True).start()

    def _pulse(self) -> None:
        count = 0
        while True:
            count += 1
            _COUNTER.pack_into(self._memory, _PULSE_OFFSET, count)
            time.sleep(PULSE_INTERVAL_S)

    def _write(self) -> None:
        _COUNTER.pack_into(self._memory, 0, self._counter + 1)
        _LAYOUT.pack_into(self._memory, _COUNTER.size, self._state, self._epoch, self._due_s, self._steps, self._loads)
        self._counter += 2
        _COUNTER.pack_into(self._memory, 0, self._counter)


class HeartbeatMemory:
    """The reading side: anonymous memory that a child process opens as a file, and that is gone with its last user."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("hetero-heartbeat")
        os.ftruncate(self.fd, SIZE_BYTES)
        self._memory = mmap.mmap(self.fd, SIZE_BYTES, prot=mmap.PROT_READ)

    @property
    def path(self) -> str:
        """The file's name within a child that has inherited `fd` under its number."""
        return f"/proc/self/fd/{self.fd}"

    @property
    def path_from_outside(self) -> str:
        """The file's name for another process of the same user, until `release`."""
        return f"/proc/{os.getpid()}/fd/{self.fd}"

    def read(self) -> Beat:
        """Return the latest beat; a process that has not begun is in STARTING."""
        for _ in range(_READS):
            before = self._memory[: _COUNTER.size]
            fields = _LAYOUT.unpack_from(self._memory, _COUNTER.size)
            if self._memory[: _COUNTER.size] == before and before[0] % 2 == 0:
                break
        state, epoch, due_s, steps, loads = fields
        (pulse,) = _COUNTER.unpack_from(self._memory, _PULSE_OFFSET)
        return Beat(RankState(state), epoch, due_s, steps, loads, pulse)

    def release(self) -> None:
        """Give up the file, which the child has by now; `read` goes on."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class HangWatch:
    """Watch over one process: whether it hangs, or is frozen. Ask it often: a pulse is missing only while it looks."""

    def __init__(self) -> None:
        self._pulse = -1
        self._silent_s = 0.0
        self._looked_s = 0.0

    def silent_s(self, beat: Beat, now_s: float) -> float:
        """Return the seconds without a pulse, as of this look, of those in which the watch was awake itself."""
        waited_s, self._looked_s = now_s - self._looked_s, now_s
        if beat.pulse != self._pulse:
            self._pulse, self._silent_s = beat.pulse, 0.0
        else:
            self._silent_s += min(waited_s, _LONGEST_LOOK_S)
        return self._silent_s

    def why(self, beat: Beat, now_s: float, *, is_stopped: Callable[[], bool]) -> str:
        """Return why the process must be killed, or "". `is_stopped` asks the kernel, and is called only if need be."""
        silent_s = self.silent_s(beat, now_s)
        if silent_s > STOPPED_S and (silent_s > SILENT_S or is_stopped()):
            return f"has been frozen for {silent_s:.1f} s"
        late_s = beat.overdue_s(now_s)
        return f"is {late_s:.0f} s late with its work" if late_s else ""
