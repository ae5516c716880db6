"""The best plan that deals whole layers: how many layers in a row each rank gets.

Ranks that are alike get as many, give or take one, or nothing. Where there are few ways to deal, all are looked at;
else one starts by speed and moves layers between ranks as long as that helps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain, pairwise, permutations
from typing import Final

from hetero_api.sharding import ShardPlan
from hetero_placement.cost_model import CostModel
from hetero_placement.memory_model import MemoryModel
from hetero_placement.part_costs import PartCosts
from hetero_placement.search import EXHAUSTIVE, SAME, every_deal, moved
from hetero_placement.shard_plans import UNIT, largest_remainder, num_apart, plan_of_layers, shard_of_layers
from hetero_placement.steps import Repeated, Step, micro_batches

_APART: Final = 1 << 60
"""More bytes than any rank can be over."""


class LayerSearch:
    """Over one model, group and workload."""

    def __init__(
        self,
        model: CostModel,
        memory: MemoryModel,
        steps: Sequence[Repeated],
        *,
        all_ranks: bool = False,
        exhaustive: int = EXHAUSTIVE,
    ) -> None:
        """`all_ranks`: each rank must get a layer."""
        self._model = model
        self._memory = memory
        self._steps = steps
        self._least = int(all_ranks)
        self._exhaustive = exhaustive
        self._world = len(model.hardware.ranks)
        self._layers = model.config.num_layers
        self._first_inseparable = model.config.first_inseparable
        self._class_of = {r: number for number, alike in enumerate(model.hardware.classes()) for r in alike}
        self._until_of: dict[tuple[int, Step, bool], list[float]] = {}
        self._need_of: dict[tuple[int, int, int], int] = {}

    def plan(self) -> ShardPlan | None:
        """Return the plan whose predicted time is least; None if none fits."""
        counts = self._best()
        return plan_of_layers(self._model.config, counts) if counts is not None else None

    def _best(self) -> tuple[int, ...] | None:
        free = self._layers - self._least * self._world
        if free < 0:
            return None
        if math.comb(free + self._world - 1, self._world - 1) <= self._exhaustive:
            candidates = every_deal(self._layers, [self._least] * self._world, [self._layers] * self._world)
            fitting = (counts for counts in candidates if self._excess(counts) == 0)
            return min(fitting, key=lambda counts: (self._seconds(counts), counts[::-1]), default=None)
        found = [self._descend(start) for start in self._starts()]
        fitting = (counts for counts in found if self._excess(counts) == 0)
        return min(fitting, key=self._seconds, default=None)

    def _starts(self) -> Iterator[tuple[int, ...]]:
        """Even, by speed in each kind of step, by memory, and all on one rank."""
        ranks = self._model.hardware.ranks
        slowness = [[self._layer_s(costs, 0, step) for costs in self._model.ranks] for step, _ in self._steps]
        weights: list[list[float]] = [
            [1.0] * self._world,
            [float(rank.memory_bytes) for rank in ranks],
            *([1 / seconds for seconds in kind] for kind in slowness),
            *([float(rank == only) for rank in range(self._world)] for only, *_ in self._model.hardware.classes()),
        ]
        free = self._layers - self._least * self._world
        for each in weights:
            yield tuple(count + self._least for count in largest_remainder(free, each))

    def _descend(self, counts: tuple[int, ...]) -> tuple[int, ...]:
        best = self._excess(counts), self._seconds(counts)
        for amount in [1 << bit for bit in range(self._layers.bit_length() - 1, -1, -1)]:
            improved = True
            while improved:
                improved = False
                for changed in self._moved(counts, amount):
                    found = self._excess(changed), self._seconds(changed)
                    if found[0] < best[0] or (found[0] == best[0] and found[1] < best[1] * (1 - SAME)):
                        counts, best, improved = changed, found, True
                        break
        return counts

    def _moved(self, counts: tuple[int, ...], amount: int) -> Iterator[tuple[int, ...]]:
        """Move `amount` layers from one rank to another.

        Of ranks that are alike and have as many, one stands for all, except for moves among these themselves.
        """
        kinds = {(self._class_of[rank], count): rank for rank, count in reversed(list(enumerate(counts)))}
        equal = (pair for alike in self._model.hardware.classes() for pair in pairwise(alike))
        within = (pair for pair in equal if counts[pair[0]] == counts[pair[1]])
        for source, target in chain(permutations(kinds.values(), 2), within):
            if counts[source] - amount >= self._least:
                yield moved(counts, source, target, amount)

    def _seconds(self, counts: Sequence[int]) -> float:
        """As CostModel.step_s of the plan that it makes, for all steps of the workload."""
        owners = [rank for rank, count in enumerate(counts) if count]
        return sum(times * self._step_s(counts, owners, step) for step, times in self._steps)

    def _step_s(self, counts: Sequence[int], owners: Sequence[int], step: Step) -> float:
        model = self._model
        number = micro_batches(step.rows, len(owners))
        part = step.part(number)
        stages = self._stages_s(counts, owners, part, overlapped=number > 1)
        num_bytes = model.hidden_bytes(part.rows)
        hops = sum(model.exchange.there_s(a, [b], num_bytes) for a, b in pairwise(owners))
        head = 0.0
        if step.draws:
            rows = model.config.vocab_size / UNIT
            head = model.head_part_s(owners[-1], rows, step, owners=owners[-1:]) + model.draw_s(step)
        overhead = max(rank.step_s(step.rows) for rank in model.ranks)
        return sum(stages) + (number - 1) * max(stages) + hops + head + overhead

    def _stages_s(self, counts: Sequence[int], owners: Sequence[int], step: Step, *, overlapped: bool) -> list[float]:
        times, begin = [], 0
        for rank in owners:
            end = begin + counts[rank]
            until = self._until(rank, step, overlapped=overlapped)
            times.append(until[end] - until[begin])
            begin = end
        return times

    def _until(self, rank: int, step: Step, *, overlapped: bool) -> list[float]:
        """Seconds of the layers before each layer, if the rank has them all; ranks that are alike share it."""
        key = (self._class_of[rank], step, overlapped)
        if key not in self._until_of:
            costs = self._model.costs(rank, [rank], overlapped=overlapped)
            layers = (self._layer_s(costs, layer, step) for layer in range(self._layers))
            self._until_of[key] = list(accumulate(layers, initial=0.0))
        return self._until_of[key]

    def _layer_s(self, costs: PartCosts, layer: int, step: Step) -> float:
        config = self._model.config
        attention = costs.attention(step, config.windows[layer]).of(config.num_kv_heads)
        mlp = costs.mlp(step.rows).of(config.mlp_columns(layer) / UNIT)
        experts = costs.experts(step.rows).of(config.num_experts) if layer in config.expert_layers else 0.0
        return attention + mlp + experts

    def _excess(self, counts: Sequence[int]) -> int:
        """Bytes by which ranks are over, together; far more for each layer that is apart from others it belongs to."""
        over, begin = _APART * num_apart(counts, first_inseparable=self._first_inseparable), 0
        for rank, count in enumerate(counts):
            if count:
                over += max(0, self._need(rank, begin, begin + count) - self._model.hardware.ranks[rank].memory_bytes)
            begin += count
        return over

    def _need(self, rank: int, begin: int, end: int) -> int:
        key = (rank, begin, end)
        if key not in self._need_of:
            self._need_of[key] = self._memory.need(rank, shard_of_layers(self._model.config, begin, end)).total
        return self._need_of[key]
