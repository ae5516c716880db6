"""Times of a rank's steps: work within a step, and the gap before the next one.

The gap is the time between the end of a step's last work (the draw, with its collectives) and the beginning of the
next one's first, which overlapped scheduling is to make small. It includes waiting for the plan and applying it. A rank
whose group has nothing to do waits as well: gaps of over a quarter of a second mean that, and are left out.

Where a step begins while the one before is running, the device goes from one to the other by itself, and there is no
gap; the step's work is then the time from the other one's end to its own. If the device has run out of work meanwhile,
nobody saw when. The gap is then counted from when it was last seen at work, and is too long rather than too short. Time
that a device waits within a step, for kernels that the host is slow to launch, counts as work.
"""

from __future__ import annotations

import gzip
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from torch.profiler import ProfilerActivity, profile

IDLE_S: Final = 0.25
_KEPT: Final = 4096
"""Number of latest steps that are remembered."""


@dataclass(frozen=True, slots=True)
class GapSummary:
    """Summary of the steps that followed another at once; times in seconds."""

    num_steps: int
    median_gap_s: float
    p90_gap_s: float
    median_work_s: float
    gap_share: float
    """Share of gaps in the time of these steps, gap and work together."""
    overlapped_share: float
    """Share of these steps that began before the one before had been finished."""

    def __str__(self) -> str:
        text = (
            f"{self.num_steps} steps: gap before a step median {self.median_gap_s * 1e3:.2f} ms, "
            f"p90 {self.p90_gap_s * 1e3:.2f} ms; work median {self.median_work_s * 1e3:.2f} ms; "
            f"gaps are {self.gap_share:.1%} of the time"
        )
        return (
            f"{text}; {self.overlapped_share:.1%} began before the last was finished" if self.overlapped_share else text
        )


class StepTimes:
    """Times of the latest steps of an epoch. At most two are running, and they end in the order in which they began."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._gaps = np.zeros(_KEPT)
        self._works = np.zeros(_KEPT)
        self._overlapped = np.zeros(_KEPT, dtype=np.bool_)
        self._count = 0
        self._began_s = 0.0
        self._ended_s: float | None = None
        self._gap_s: float | None = None
        """Gap before the oldest running step; None: it followed no other at once."""
        self._is_overlapped = False
        """True if that step began before the one before it was finished."""
        self._is_followed = False
        """True if the next step begins when that one ends."""
        self._has_ended = False
        """True if the step of the next `end` ended earlier."""

    def now(self) -> float:
        """Return the time in seconds by the clock of all steps."""
        return self._clock()

    def begin(self) -> None:
        """Record the first work of a step while no other step is running."""
        now, last = self._clock(), self._ended_s
        self._gap_s = None if last is None or now - last > IDLE_S else now - last
        self._began_s, self._is_overlapped = now, False

    def follow(self, busy_s: float | None) -> None:
        """Record the first work of a step while the one before it is not finished.

        `busy_s` is when that one was last seen running; None: it still is.
        """
        if busy_s is None:
            self._is_followed = True
            return
        now = self._clock()
        self._close(max(busy_s, self._began_s))
        self._has_ended = True
        self._begin_behind(now - busy_s, now)

    def end(self) -> None:
        """Record the end of the oldest step's last work."""
        if self._has_ended:
            self._has_ended = False
            return
        now = self._clock()
        self._close(now)
        if self._is_followed:
            self._is_followed = False
            self._begin_behind(0.0, now)

    def end_each(self, ended_s: Sequence[float]) -> None:
        """Record the ends of steps that followed one another without a gap; the first of them was begun."""
        for each_s in ended_s:
            self._close(each_s)
            self._gap_s, self._began_s = 0.0, each_s

    def _begin_behind(self, gap_s: float, now: float) -> None:
        self._gap_s = gap_s if gap_s <= IDLE_S else None
        self._began_s, self._is_overlapped = now, True

    def _close(self, ended_s: float) -> None:
        self._ended_s = ended_s
        if self._gap_s is None:
            return
        place = self._count % _KEPT
        self._gaps[place], self._works[place] = self._gap_s, ended_s - self._began_s
        self._overlapped[place] = self._is_overlapped
        self._count += 1

    def summary(self) -> GapSummary | None:
        """Return the summary; None before two steps followed one another."""
        kept = min(self._count, _KEPT)
        if not kept:
            return None
        gaps, works = self._gaps[:kept], self._works[:kept]
        return GapSummary(
            num_steps=kept,
            median_gap_s=float(np.median(gaps)),
            p90_gap_s=float(np.quantile(gaps, 0.9)),
            median_work_s=float(np.median(works)),
            gap_share=float(gaps.sum() / (gaps.sum() + works.sum())),
            overlapped_share=float(self._overlapped[:kept].mean()),
        )


MAX_STEPS: Final = 256
MAX_TRACE_BYTES: Final = 32 * 1024 * 1024
_ROWS: Final = 40


@dataclass(frozen=True, slots=True)
class StepRecord:
    """Profile of some steps."""

    table: str
    trace: bytes
    """Gzip of Chrome's format; empty if it was not asked for, or was too large, as the table then says."""


class StepRecorder:
    """Record of steps by torch's profiler, from its making to `finish`; all on one thread.

    The record is bounded: after so many steps it ends by itself, because every operator of every step takes memory
    until the report is made. A trace is sent as gzip of Chrome's format, or left out if it is larger than a message
    may be.
    """

    def __init__(
        self,
        activities: Sequence[ProfilerActivity] = (ProfilerActivity.CPU,),
        *,
        max_steps: int = MAX_STEPS,
        max_trace_bytes: int = MAX_TRACE_BYTES,
    ) -> None:
        """Start the profile of these activities."""
        self._max_steps = max_steps
        self._max_trace_bytes = max_trace_bytes
        self._num_steps = 0
        self._is_running = True
        self._profile = profile(activities=activities)
        self._profile.start()

    def count_step(self) -> None:
        """Count a step, and stop at the last one."""
        if self._is_running:
            self._num_steps += 1
            if self._num_steps >= self._max_steps:
                self.stop()

    def stop(self) -> None:
        """Stop recording. Idempotent."""
        if self._is_running:
            self._is_running = False
            self._profile.stop()

    def finish(self, *, with_trace: bool) -> StepRecord:
        """Stop and return the profile."""
        self.stop()
        table = str(self._profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=_ROWS))
        lines = [f"{self._num_steps} steps were recorded (at most {self._max_steps} are)."]
        trace = self._packed_trace() if with_trace else b""
        if len(trace) > self._max_trace_bytes:
            lines.append(
                f"The trace is left out: {len(trace)} bytes, a report holds at most {self._max_trace_bytes}. "
                "Record fewer steps."
            )
            trace = b""
        return StepRecord("\n".join([*lines, table]), trace)

    def _packed_trace(self) -> bytes:
        with tempfile.TemporaryDirectory(prefix="hetero-profile-") as folder:
            path = Path(folder) / "trace.json"
            self._profile.export_chrome_trace(str(path))
            return gzip.compress(path.read_bytes(), compresslevel=6)
