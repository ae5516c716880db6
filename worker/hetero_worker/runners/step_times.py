"""How long a rank computes in a step, and how long it then waits for the next one.

The gap is the time between the end of a step's last work (the draw, with its collectives) and the beginning of the
next one's first: what overlapped scheduling is to make small. It counts waiting for the plan, and taking it in. A rank
whose group has nothing to do waits as well: gaps of over a quarter of a second are that, and are left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable
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

    def __str__(self) -> str:
        return (
            f"{self.num_steps} steps: gap before a step median {self.median_gap_s * 1e3:.2f} ms, "
            f"p90 {self.p90_gap_s * 1e3:.2f} ms; work median {self.median_work_s * 1e3:.2f} ms; "
            f"gaps are {self.gap_share:.1%} of the time"
        )


class StepTimes:
    """The latest steps of an epoch."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._gaps = np.zeros(_KEPT)
        self._works = np.zeros(_KEPT)
        self._count = 0
        self._began_s = 0.0
        self._ended_s: float | None = None

    def begin(self) -> None:
        """A step's first work begins."""
        self._began_s = self._clock()

    def end(self) -> None:
        """A step's last work is done."""
        now, last = self._clock(), self._ended_s
        self._ended_s = now
        if last is None or self._began_s - last > IDLE_S:
            return
        self._gaps[self._count % _KEPT] = self._began_s - last
        self._works[self._count % _KEPT] = now - self._began_s
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
        )
