"""Many works, each measured a little at a time and often, over all of the time that measuring takes.

A machine that others use too is faster now and slower then, for tenths of a second or for seconds. Works that were each
measured in one go would be told apart by when it was; so all are visited in turn, several times, and what counts are
means over the visits: a step is the sum of its parts, stragglers included.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Final

from hetero_worker.probe.clock import Clock
from hetero_worker.probe.fit import Laps
from hetero_worker.probe.layers import TimedWork

VISITS: Final = 4
"""Of each series, after one that only warms up."""
_FEWEST: Final = 2
_VISIT_S: Final = 0.01
"""A visit goes on for about so long, if one turn of what it measures is not longer."""
_SERIES_S: Final = 0.12
"""A series that has taken so long is visited no more, once it has been visited twice."""


class Series:
    """Works that follow one another, again and again; a visit goes on where the last one ended.

    `turn` is how many of them have one of each point in them.
    """

    def __init__(self, works: Sequence[TimedWork], *, turn: int) -> None:
        self._works = works
        self._turn = turn
        self._next = 0
        self._chunk = turn
        self._visits = 0
        self._spent_s = 0.0

    def visit(self, clock: Clock, laps: Laps) -> None:
        """Measure some of it, unless enough was. Nothing of the first visit counts."""
        if self._visits > _FEWEST and self._spent_s > _SERIES_S:
            return
        works = [self._works[(self._next + i) % len(self._works)] for i in range(self._chunk)]
        seconds = clock.laps([timed.work for timed in works])
        if self._visits:
            self._note(works, seconds, laps)
        self._visits += 1
        self._spent_s += sum(seconds)
        self._next = (self._next + self._chunk) % len(self._works)
        turn_s = sum(seconds[-self._turn :])
        self._chunk = self._turn * max(1, min(len(self._works) // self._turn, round(_VISIT_S / max(turn_s, 1e-9))))

    def _note(self, works: Sequence[TimedWork], seconds: Sequence[float], laps: Laps) -> None:
        found: dict[tuple[object, float], list[float]] = {}
        for timed, lap_s in zip(works, seconds, strict=True):
            found.setdefault((timed.point, timed.units), []).append(lap_s)
        for timed in works[: self._turn]:
            laps.add(timed.point, timed.units, fmean(found[timed.point, timed.units]))
