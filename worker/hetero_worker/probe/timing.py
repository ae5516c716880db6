"""Times work on a rank's device.

Work is timed in *laps*, one after another, as it comes in a step: what a lap costs is what it adds to the laps before
it. On the host a lap ends when it returns. On a GPU it is queued, so laps are told apart by events that are
recorded between them, and read when all are done: that is what a lap adds to the device's time, or to the host's
where that is slower in queueing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Protocol

from hetero_api.v1 import ranks_pb2

Work = Callable[[], object]


class Clock(Protocol):
    """Clock of one device: a DeviceBackend, or a played one."""

    def laps(self, works: Sequence[Work]) -> list[float]:
        """Do each once, in order; return the seconds of each."""
        ...


@dataclass(frozen=True, slots=True)
class Point:
    """Where a part's cost is measured; see ranks.proto's PartCost."""

    part: ranks_pb2.ModelPart.ValueType
    rows: int
    context: int = 0


class Laps:
    """Times of points at numbers of units, as they were measured."""

    def __init__(self) -> None:
        self._seconds: dict[Point, dict[float, list[float]]] = {}

    def add(self, point: Point, units: float, seconds: float) -> None:
        """Add the time of one lap."""
        self._seconds.setdefault(point, {}).setdefault(units, []).append(seconds)

    def typical(self, point: Point, units: float) -> float:
        """Return the typical time of a point that was measured with so many units."""
        return typical(self._seconds[point][units])

    def costs(self) -> tuple[ranks_pb2.PartCost, ...]:
        """Fit a line through each point's typical times, in the order of the points' first laps."""
        return tuple(
            _cost(point, {units: typical(laps) for units, laps in of_units.items()})
            for point, of_units in self._seconds.items()
        )


def typical(laps: Sequence[float]) -> float:
    """Return a lap's time on a shared machine: the mean, in which no lap counts more than twice the median.

    Not the median: what disturbs laps disturbs steps as well, and a stream takes as long as all of its steps together.
    """
    most = 2 * median(laps)
    return fmean(min(lap, most) for lap in laps)


def _cost(point: Point, seconds: dict[float, float]) -> ranks_pb2.PartCost:
    fixed_s, unit_s = line(sorted(seconds.items()))
    return ranks_pb2.PartCost(part=point.part, rows=point.rows, context=point.context, fixed_s=fixed_s, unit_s=unit_s)


def line(times: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return (fixed, unit) seconds through the first and the last of (units, seconds), ascending in units.

    Neither is less than 0: noise must not make a part that gains from work. A single time counts as units' alone (with
    0 units: as fixed), since nothing tells them apart.
    """
    (few, few_s), (many, many_s) = times[0], times[-1]
    if many == 0:
        return many_s, 0.0
    if few == many:
        return 0.0, many_s / many
    unit_s = max(0.0, (many_s - few_s) / (many - few))
    fixed_s = many_s - many * unit_s
    return (fixed_s, unit_s) if fixed_s >= 0.0 else (0.0, many_s / many)
