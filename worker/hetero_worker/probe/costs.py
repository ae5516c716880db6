"""What the parts of a model cost on this rank, measured with its own kernels on the model's own shapes.

Decode is measured for few rows and for many, at two contexts; prompts at lengths for which products of matrices set
the pace. Each is measured with two numbers of units, which tells apart what a part costs anyway and what a unit adds.
All of it takes about a second, and no more memory for weights than it is given.

Known limits: all ranks of a host measure at about the same time, as they will compute, so a plan that leaves some idle
may be faster than predicted; experts are measured with tokens that spread over them evenly.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import cycle
from typing import Final

import torch

from hetero_api.model_config import ModelConfig
from hetero_api.v1 import ranks_pb2
from hetero_worker.layers.rotary import RotaryTables
from hetero_worker.probe.clock import Clock, Work
from hetero_worker.probe.ends import HeadProbe, StepProbe
from hetero_worker.probe.fit import Laps, Point, typical
from hetero_worker.probe.layers import LayerStack, Site, TimedWork, make_step, positions_of
from hetero_worker.probe.plans import PlanProbe
from hetero_worker.probe.sizes import ProbeSize, probe_size

DECODE_ROWS: Final = (1, 4, 8, 32)
CONTEXTS: Final = (64, 512)
PROMPT_ROWS: Final = (64, 256, 512)
_STEP_S: Final = 0.02
"""A step's laps go on for at least so long ..."""
_MIN_LAPS: Final = 4
"""... and until there are so many of everything, the first of which only warms up ..."""
_LONG_STEP_S: Final = 0.08
"""... but only until there are two of everything where so much time was spent."""


def measure_costs(
    config: ModelConfig, site: Site, *, clock: Clock, weight_bytes: int
) -> tuple[ranks_pb2.PartCost, ...]:
    """Of every part that the model has. At most about `weight_bytes` of weights are made."""
    with torch.inference_mode():
        measurement = _Measurement(config, site, clock, probe_size(config, site.dtype.itemsize, weight_bytes))
        measurement.layers()
        measurement.ends()
    return measurement.laps.costs()


class _Measurement:
    """One run, and what it has found so far."""

    def __init__(self, config: ModelConfig, site: Site, clock: Clock, size: ProbeSize) -> None:
        self.laps = Laps()
        self._config = config
        self._site = site
        self._clock = clock
        self._size = size
        longest = min(max(*CONTEXTS, *PROMPT_ROWS), config.max_position)
        self._rotary = RotaryTables(
            config.ropes, head_dim=config.head_dim, max_length=longest, dtype=site.dtype, device=site.device
        )
        self._steps = [
            make_step(config, site, self._rotary, rows=rows, context=context)
            for rows, context in step_shapes(config.max_position)
        ]
        self._preparing_s: dict[int, float] = {}
        """By rows: what a step's first attention prepares for all layers."""

    def layers(self) -> None:
        size = self._size
        positions = max(positions_of(step.rows, step.context) for step in self._steps)
        sizes = {size.few: size.copies_of_few, size.many: size.copies_of_many}
        for layer, copies in sizes.items():
            stack = LayerStack(self._config, layer, copies=copies, positions=positions, site=self._site)
            for step in self._steps:
                seconds = self._time(stack.works(step))
                first_s = typical(self._clock.laps([stack.first_attention(step, self._site)] * _MIN_LAPS)[1:])
                self._preparing_s[step.rows] = max(0.0, first_s - seconds[step.attention_point, layer.heads])
            del stack
            self._site.backend.release()

    def ends(self) -> None:
        """Once for each number of rows. Of a prompt only the last row's token is drawn, which decoding has told."""
        head = HeadProbe(self._config, self._site, units=self._size.head)
        look_up = StepProbe.make(self._config, self._site, self._rotary)
        plans = PlanProbe(self._config, rows=max(DECODE_ROWS))
        before, *_ = head.works(self._steps[0])
        for step in {step.rows: step for step in self._steps}.values():
            works = [look_up.work(step)]
            if step.context:
                self._time(head.works(step))
                works.append(plans.work(step.rows))
            point = Point(ranks_pb2.MODEL_PART_STEP, step.rows)
            for seconds in self._after(before.work, works):
                self.laps.add(point, 0, seconds + self._preparing_s[step.rows])

    def _after(self, before: Work, works: Sequence[Work]) -> Iterator[float]:
        """Seconds of some works together, some times over. They find the caches as a step leaves them: not theirs."""
        for i in range(_MIN_LAPS):
            _, *laps = self._clock.laps([before, *works])
            if i:
                yield sum(laps)

    def _time(self, works: Sequence[TimedWork]) -> dict[tuple[Point, float], float]:
        """Do them in turn until the times can be trusted; note them, and tell typical ones."""
        seconds_of = {}
        for (point, units), laps in _take_turns(works, self._clock).items():
            for seconds in laps[1:]:
                self.laps.add(point, units, seconds)
            seconds_of[point, units] = typical(laps[1:])
        return seconds_of


def step_shapes(max_position: int) -> Iterator[tuple[int, int]]:
    """(rows, context) of the steps that are measured; context 0: one prompt of so many rows."""
    contexts = sorted({min(context, max_position) for context in CONTEXTS})
    yield from ((rows, context) for rows in DECODE_ROWS for context in contexts)
    yield from ((rows, 0) for rows in sorted({min(rows, max_position) for rows in PROMPT_ROWS}))


def _take_turns(works: Sequence[TimedWork], clock: Clock) -> dict[tuple[Point, float], list[float]]:
    times: dict[tuple[Point, float], list[float]] = {(timed.point, timed.units): [] for timed in works}
    begun_s = time.perf_counter()
    for timed in cycle(works):
        times[timed.point, timed.units] += clock.laps([timed.work])
        spent_s = time.perf_counter() - begun_s
        fewest = min(map(len, times.values()))
        if (spent_s > _STEP_S and fewest >= _MIN_LAPS) or (spent_s > _LONG_STEP_S and fewest > 1):
            break
    return times
