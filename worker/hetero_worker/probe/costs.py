"""Costs of the model's parts on this rank, measured with its own kernels on the model's own shapes.

Decode is measured for few rows and for many, at two contexts; prompts at lengths for which products of matrices set
the pace. Each is measured with two numbers of units, which separates the fixed cost of a part from the cost of a unit.
All of it takes about two seconds, and no more memory for weights than it is given.

A machine that other programs use too is faster now and slower then, for tenths of a second or for seconds. Works that
were each measured in one go would differ by when that was. So all are visited in turn, several times, and means over
the visits count: a step is the sum of its parts, stragglers included.

All ranks of a group measure the same at the same time. They also measure their wait for one another after each half of
a layer, which no rank knows by itself, and how much faster one is while the others are idle.

Known limit: experts are measured with tokens that spread over them evenly.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, cycle, islice
from statistics import fmean, median
from typing import Final

import torch

from hetero_api.model_config import ModelConfig
from hetero_api.v1 import ranks_pb2
from hetero_worker.distributed.coordinator import GroupCoordinator
from hetero_worker.layers.rotary import RotaryTables
from hetero_worker.memory.streams import HOST
from hetero_worker.probe.ends import HeadProbe, PlanProbe, StepProbe
from hetero_worker.probe.layers import LayerStack, Site, SyntheticStep, TimedWork, make_step, positions_of
from hetero_worker.probe.sizes import LayerSize, probe_size
from hetero_worker.probe.timing import Clock, Laps, Point, Work, typical
from hetero_worker.runners.base import WorkProgress

DECODE_ROWS: Final = (1, 8, 32)
CONTEXTS: Final = (64, 512)
PROMPT_ROWS: Final = (64, 256, 512)
MEETINGS: Final = 8
"""Halves of layers in a row that ranks meet after, or compute alone. The same on all ranks, whatever they measure."""
_ROUNDS: Final = 3
_STEP_LAPS: Final = 4
"""Laps of a step's cost beside layers and head; the first one only warms up."""


@dataclass(frozen=True, slots=True)
class MeasuredCosts:
    """Measured costs of one rank."""

    parts: tuple[ranks_pb2.PartCost, ...]
    meeting_s: float
    """How much longer a half of a layer and a round take than the half by itself: the round of one row, and what ranks
    wait for one another before it. 0 where this rank meets nobody on the host."""
    lone_gain: float
    """How many times as fast it decodes one row while the others are idle; at least 1."""


def measure_costs(
    config: ModelConfig, site: Site, *, clock: Clock, weight_bytes: int, peers: GroupCoordinator, progress: WorkProgress
) -> MeasuredCosts:
    """Measure every part that the model has. At most about `weight_bytes` of weights are made. Collective."""
    with torch.inference_mode():
        return _Measurement(config, site, clock, peers, weight_bytes).run(progress)


class _Measurement:
    """One run, and what it has found so far."""

    def __init__(
        self, config: ModelConfig, site: Site, clock: Clock, peers: GroupCoordinator, weight_bytes: int
    ) -> None:
        self._laps = Laps()
        self._config = config
        self._site = site
        self._clock = clock
        self._peers = peers
        longest = min(max(*CONTEXTS, *PROMPT_ROWS), config.max_position)
        self._rotary = RotaryTables(
            config.ropes, head_dims=config.rotary_widths, max_length=longest, dtype=site.dtype, device=site.device
        )
        self._steps = [
            make_step(config, site, self._rotary, rows=rows, context=context)
            for rows, context in step_shapes(config.max_position)
        ]
        self._size = size = probe_size(config, site.dtype.itemsize, weight_bytes)
        self._few = self._stack(size.few, copies=size.copies_of_few)
        self._many = self._stack(size.many, copies=size.copies_of_many)
        self._head = HeadProbe(config, site, units=size.head)
        self._first_s: dict[int, list[float]] = {}
        """By rows: attention that prepares for all layers what they share."""

    def _stack(self, layer: LayerSize, *, copies: int) -> LayerStack:
        positions = max(positions_of(step.rows, step.context) for step in self._steps)
        slots = max(step.rows for step in self._steps)
        return LayerStack(self._config, layer, copies=copies, positions=positions, slots=slots, site=self._site)

    def run(self, progress: WorkProgress) -> MeasuredCosts:
        visited = list(chain.from_iterable(self._rounds()))
        with progress.of("measuring", (1 + VISITS) * len(visited), "visits") as on_visits:
            for _ in range(1 + VISITS):
                for series in visited:
                    self._peers.meet()
                    series.visit(self._clock, self._laps)
                    on_visits(1)
                self._first_attention()
        self._beside_layers()
        meeting_s, lone_gain = self._meet_others() if self._peers.num_ranks > 1 else (0.0, 1.0)
        return MeasuredCosts(self._laps.costs(), meeting_s=meeting_s, lone_gain=lone_gain)

    def _rounds(self) -> Iterator[list[Series]]:
        """Yield the series to visit in turn, as many on every rank of a group.

        A single row is in each round: most streams decode so, and its times are short and hardest to tell apart.
        """
        single = list(self._series([step for step in self._steps if step.rows == 1]))
        others = list(self._series([step for step in self._steps if step.rows > 1]))
        for number in range(_ROUNDS):
            yield [*single, *others[number::_ROUNDS]]

    def _series(self, steps: Sequence[SyntheticStep]) -> Iterator[Series]:
        for stack, step in ((stack, step) for step in steps for stack in (self._few, self._many)):
            yield Series(stack.works(step), turn=stack.halves)
        for step in _by_rows(steps):
            if step.context:  # of a prompt only the last row's token is drawn, which decoding has told
                works = self._head.works(step)
                yield Series(works, turn=len(works))

    def _first_attention(self) -> None:
        for step in _by_rows(self._steps):
            _, seconds = self._clock.laps([self._many.first_attention(step, self._site)] * 2)
            self._first_s.setdefault(step.rows, []).append(seconds)

    def _beside_layers(self) -> None:
        """Once for each number of rows."""
        look_up = StepProbe(self._config, self._site, self._rotary)
        plans = PlanProbe(self._config, rows=max(DECODE_ROWS))
        before, *_ = self._head.works(self._steps[0])
        for step in _by_rows(self._steps):
            works = [look_up.work(step)]
            if step.context:
                works.append(plans.work(step.rows))
            attention_s = self._laps.typical(step.attention_point, self._size.many.heads)
            preparing_s = max(0.0, typical(self._first_s[step.rows][1:]) - attention_s)
            for seconds in self._after(before.work, works):
                self._laps.add(Point(ranks_pb2.MODEL_PART_STEP, step.rows), 0, seconds + preparing_s)

    def _after(self, before: Work, works: Sequence[Work]) -> Iterator[float]:
        """Seconds of some works together, some times over. They find the caches as a step leaves them: not theirs."""
        for i in range(_STEP_LAPS):
            _, *laps = self._clock.laps([before, *works])
            if i:
                yield sum(laps)

    def _meet_others(self) -> tuple[float, float]:
        """Return the seconds of a meeting on the way through layers, and how much faster layers go while others are
        idle.

        Both compare with what was measured just before: as fast, or slow, as the machine was then. Each time it is
        other halves, for those that were just computed are in a cache.
        """
        halves, sums = self._halves(), self._peers.host_round()
        row = torch.zeros(1, self._config.hidden_size, dtype=self._site.dtype, device=HOST)
        rounds: list[Work] = [] if sums is None else [lambda: sums(row)] * MEETINGS
        meetings, gains = [], []
        for _ in range(1 + 3 * VISITS):
            self._peers.meet()
            together_s = self._seconds(islice(halves, MEETINGS))
            self._peers.meet()
            both_s = self._seconds(_alternating(list(islice(halves, MEETINGS)), rounds))
            alone_s = self._peers.in_turn(lambda: self._seconds(islice(halves, MEETINGS)))
            meetings.append((both_s - together_s) / MEETINGS if rounds else 0.0)
            gains.append(together_s / alone_s)
        return max(0.0, typical(meetings[1:])), max(1.0, median(gains[1:]))

    def _seconds(self, works: Iterable[Work]) -> float:
        return sum(self._clock.laps(list(works)))

    def _halves(self) -> Iterator[Work]:
        """Yield halves of layers in which one row decodes, one after another."""
        return cycle([timed.work for timed in self._many.works(self._steps[0])])


def _alternating(works: Sequence[Work], others: Sequence[Work]) -> list[Work]:
    """One of each in turn; the works alone if there are no others."""
    return list(chain(*zip(works, others, strict=True))) if others else list(works)


def _by_rows(steps: Sequence[SyntheticStep]) -> list[SyntheticStep]:
    """One for each number of rows, the last of its kind."""
    return list({step.rows: step for step in steps}.values())


def step_shapes(max_position: int) -> Iterator[tuple[int, int]]:
    """(rows, context) of the steps that are measured; context 0: one prompt of so many rows."""
    contexts = sorted({min(context, max_position) for context in CONTEXTS})
    yield from ((rows, context) for rows in DECODE_ROWS for context in contexts)
    yield from ((rows, 0) for rows in sorted({min(rows, max_position) for rows in PROMPT_ROWS}))


VISITS: Final = 4
"""Visits of each series, after one that only warms up."""
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
