"""How long a rank computes in a step, and how long it then waits for the next one.

The gap is the time between the end of a step's last work (the draw, with its collectives) and the beginning of the
next one's first: what overlapped scheduling is to make small. It counts waiting for the plan, and taking it in. A rank
whose group has nothing to do waits as well: gaps of over a quarter of a second are that, and are left out.

Where a step begins while the one before is under way, the device goes from one to the other by itself, and there is no
gap; the step's work is then the time from the other one's end to its own. If the device has run out of work meanwhile,
nobody saw when: the gap is counted from when it was last seen at work, so that it is told too long rather than too
short. What a device waits for within a step, for kernels that the host is slow to give it, is work here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

IDLE_S: Final = 0.25
_KEPT: Final = 4096
"""Steps that are remembered, the latest ones."""


@dataclass(frozen=True, slots=True)
class GapSummary:
    """Over the steps that followed another at once; seconds."""

    num_steps: int
    median_gap_s: float
    p90_gap_s: float
    median_work_s: float
    gap_share: float
    """Of the time of these steps, gap and work together."""
    chained_share: float
    """Of these steps, those that began before the one before had been finished."""
    num_remade: int
    """Steps of the epoch that were begun with a wrong token, and then begun anew."""

    def __str__(self) -> str:
        told = (
            f"{self.num_steps} steps: gap before a step median {self.median_gap_s * 1e3:.2f} ms, "
            f"p90 {self.p90_gap_s * 1e3:.2f} ms; work median {self.median_work_s * 1e3:.2f} ms; "
            f"gaps are {self.gap_share:.1%} of the time"
        )
        if not self.chained_share:
            return told
        return f"{told}; {self.chained_share:.1%} began behind another, and {self.num_remade} had to begin anew"


class StepTimes:
    """The latest steps of an epoch. At most two are under way, and they end in the order in which they began."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._gaps = np.zeros(_KEPT)
        self._works = np.zeros(_KEPT)
        self._chained = np.zeros(_KEPT, dtype=np.bool_)
        self._count = 0
        self._num_remade = 0
        self._began_s = 0.0
        self._ended_s: float | None = None
        self._gap_s: float | None = None
        """Before the oldest step under way; None: it followed no other at once."""
        self._is_chained = False
        """Whether that step began behind another."""
        self._is_followed = False
        """Whether the next step begins when that one ends."""
        self._has_ended = False
        """Whether the step that `end` will be told of next had ended before."""

    def now(self) -> float:
        """Seconds, of the clock that steps are timed by."""
        return self._clock()

    def begin(self) -> None:
        """A step's first work begins, and no other step is under way."""
        now, last = self._clock(), self._ended_s
        self._gap_s = None if last is None or now - last > IDLE_S else now - last
        self._began_s, self._is_chained = now, False

    def follow(self, busy_s: float | None) -> None:
        """A step has got its first work, and the one before it has not been finished.

        `busy_s` is when that one was last seen under way; None: it still is.
        """
        if busy_s is None:
            self._is_followed = True
            return
        now = self._clock()
        self._close(max(busy_s, self._began_s))
        self._has_ended = True
        self._begin_behind(now - busy_s, now)

    def end(self) -> None:
        """The oldest step's last work is done."""
        if self._has_ended:
            self._has_ended = False
            return
        now = self._clock()
        self._close(now)
        if self._is_followed:
            self._is_followed = False
            self._begin_behind(0.0, now)

    def end_each(self, ended_s: Sequence[float]) -> None:
        """Steps that followed one another without a gap, of which the first was begun, were done at these times."""
        for each_s in ended_s:
            self._close(each_s)
            self._gap_s, self._began_s = 0.0, each_s

    def remade(self) -> None:
        """A step was begun anew."""
        self._num_remade += 1

    def _begin_behind(self, gap_s: float, now: float) -> None:
        self._gap_s = gap_s if gap_s <= IDLE_S else None
        self._began_s, self._is_chained = now, True

    def _close(self, ended_s: float) -> None:
        self._ended_s = ended_s
        if self._gap_s is None:
            return
        place = self._count % _KEPT
        self._gaps[place], self._works[place] = self._gap_s, ended_s - self._began_s
        self._chained[place] = self._is_chained
        self._count += 1

    def summary(self) -> GapSummary | None:
        """None before two steps followed one another."""
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
            chained_share=float(self._chained[:kept].mean()),
            num_remade=self._num_remade,
        )
