"""Times work on a rank's device.

Work is timed in *laps*, one after another, as it comes in a step: what a lap costs is what it adds to the laps before
it. On the host a lap ends when it returns. On a CUDA device it is queued, so laps are told apart by events that are
recorded between them, and read when all are done: that is what a lap adds to the device's time, or to the host's
where that is slower in queueing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Protocol

import torch

Work = Callable[[], object]


class Clock(Protocol):
    """Tells what laps take."""

    def laps(self, works: Sequence[Work]) -> list[float]:
        """Do each once, in order; seconds of each."""
        ...


class HostClock:
    """For devices whose work is done when the call returns."""

    def laps(self, works: Sequence[Work]) -> list[float]:
        marks = [time.perf_counter()]
        for work in works:
            work()
            marks.append(time.perf_counter())
        return [end - begin for begin, end in pairwise(marks)]


class CudaClock:
    """For a CUDA device, on the current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def laps(self, works: Sequence[Work]) -> list[float]:
        marks = [torch.Event(device=self._device, enable_timing=True) for _ in range(len(works) + 1)]
        torch.cuda.synchronize(self._device)
        marks[0].record()
        for work, mark in zip(works, marks[1:], strict=True):
            work()
            mark.record()
        torch.cuda.synchronize(self._device)
        return [begin.elapsed_time(end) * 1e-3 for begin, end in pairwise(marks)]


def clock_of(device: torch.device) -> Clock:
    """The one that tells the time of this device's work."""
    return CudaClock(device) if device.type == "cuda" else HostClock()
