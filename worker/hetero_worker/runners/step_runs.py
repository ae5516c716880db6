"""Runs: steps that draw by themselves, one after another, with nothing in between.

A step is *plain* if it only decodes, and all its draws are the largest logits as they are. A rank whose steps are
recorded natively makes a plain step with its draws in one call (`native_draws`). When plans have come that go on with
the same sequences, they are a *run*: all are checked, and their blocks appended, before the first; the inputs are made
once; each step is a call; and the slots are brought up to date at the end. What a step between two others costs the
host, which comes back to it with cold caches each time, is then paid once.

A run is what its steps are one by one, to the last bit. A step meets other ranks in the same rounds in a run and by
itself: so ranks need not agree on where runs begin and end. On *which* steps draw by themselves they must, and what one
can do another may not (a library is missing, torch computes a part of its model). All know which steps are plain. The
first with a number of rows is made, and recorded, like any other; before the second they vote, and keep to the outcome
while the epoch lasts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch

from hetero_api.v1 import ranks_pb2
from hetero_worker.layers.sampler import sample_tokens
from hetero_worker.runners.base import SampledToken, StepOutput
from hetero_worker.runners.begun_step import StepMeans
from hetero_worker.runners.native_draws import MAX_STEPS
from hetero_worker.runners.runner_device import DrawingParts
from hetero_worker.runners.slots import SlotCounts, SlotTable
from hetero_worker.runners.voting import all_can
from hetero_worker.sampling.decision import check_finite


def may_lead(plan: ranks_pb2.StepPlan) -> bool:
    """Whether a run may begin with the plan, as far as that can be seen from it alone."""
    return bool(plan.decode_slots) and not (plan.spans or plan.masked_slots or plan.HasField("command"))


def may_follow(plan: ranks_pb2.StepPlan, first: ranks_pb2.StepPlan) -> bool:
    """Whether the plan goes on with a run that began with another."""
    if plan.released_slots or plan.new_sequences or not may_lead(plan):
        return False
    return plan.decode_slots == first.decode_slots


def is_plain(plan: ranks_pb2.StepPlan, slots: SlotTable) -> bool:
    """Whether the step, whose plan has been applied, is plain. The same on every rank."""
    return may_lead(plan) and all(slots.sampling(slot).is_plain for slot in plan.decode_slots)


class StepRuns:
    """Which plain steps draw by themselves. Of one runner, which asks before each that begins behind no other."""

    def __init__(self) -> None:
        self._agreed: dict[int, bool | None] = {}
        """By the number of rows, what the ranks have agreed on; None: one such step was made."""

    def begin(self, plan: ranks_pb2.StepPlan, means: StepMeans) -> StepRun | None:
        """A run from the plan of a plain step on; None if that does not draw by itself.

        Raises as the exchange does.
        """
        cache, rows = means.cache, len(plan.decode_slots)
        if rows not in self._agreed:
            self._agreed[rows] = None
            return None
        if self._agreed[rows] is None:
            self._agreed[rows] = all_can(means.exchange, _can_draw(plan, means))
        if not self._agreed[rows]:
            return None
        assert cache.drawing is not None, "this rank has said that it can"
        return StepRun(plan, means, cache.drawing)

    def forget(self) -> None:
        """Ranks, or what they compute, are others from now on."""
        self._agreed.clear()


def _can_draw(plan: ranks_pb2.StepPlan, means: StepMeans) -> bool:
    """Whether this rank has recorded steps like the plan's with all that their draws need.

    Another sampler than ours, which somebody has given the runner, is to be asked for every draw.
    """
    cache = means.cache
    if cache.drawing is None or means.sample is not sample_tokens:
        return False
    batch = cache.drawing.inputs.fill(plan, cache.slots)
    return cache.drawing.forward.can_draw(
        means.decoder, batch, caches=cache.layers, exchange=means.exchange, head_ranges=means.head_ranges
    )


class StepRun:
    """Plain steps that draw by themselves; the plan of the first has been checked and applied."""

    def __init__(self, first: ranks_pb2.StepPlan, means: StepMeans, drawing: DrawingParts) -> None:
        self._first = first
        self._means = means
        self._drawing = drawing
        self._num_steps = 1
        self._ahead: _Ahead | None = None

    @property
    def has_room(self) -> bool:
        """Whether it may be extended."""
        return self._num_steps < MAX_STEPS

    def extend(self, plan: ranks_pb2.StepPlan) -> None:
        """By a plan that may follow. Raises ProtocolError, with nothing changed, if it does not fit behind the rest."""
        cache = self._means.cache
        if self._ahead is None:
            self._ahead = _Ahead(self._first, cache.slots.counts)
        cache.check.run(plan, self._ahead.counts)
        cache.slots.apply(plan)
        self._ahead.step(cache.slots.counts)
        self._num_steps += 1

    def outputs(self, on_step: Callable[[], None]) -> Iterator[StepOutput]:
        """Make the steps, with `on_step` after each, and then tell what became of them, in their order.

        Raises as the exchange does, before it tells anything; ModelError in place of a step whose logits are not
        finite. Only rank 0 looks: the group's abort frees the others from their next round.
        """
        means, slots, times = self._means, self._means.cache.slots, self._means.times
        batch = self._drawing.inputs.fill_run(self._first, slots, steps=self._num_steps)
        ended_s: list[float] = []

        def end_step() -> None:
            ended_s.append(times.now())
            on_step()

        with torch.inference_mode():
            draws = self._drawing.forward.draw(
                means.decoder,
                batch,
                caches=means.cache.layers,
                exchange=means.exchange,
                head_ranges=means.head_ranges,
                steps=self._num_steps,
                on_step=end_step,
            )
        times.end_each(ended_s)
        slots.append_steps(batch.draw_slots, draws.token_ids)
        drawing = batch.draw_slots.tolist()
        for tokens, scores in zip(draws.token_ids.tolist(), draws.scores.tolist(), strict=True):
            if means.exchange.rank == 0:
                for score in scores:
                    check_finite(score)
            yield StepOutput(sampled=list(map(SampledToken, drawing, tokens)))


class _Ahead:
    """The slots' counts as they are when the steps of a run so far are done."""

    def __init__(self, first: ranks_pb2.StepPlan, counts: SlotCounts) -> None:
        """`counts` are those before the run's first step, whose plan has been applied."""
        self._slots = np.array(first.decode_slots, dtype=np.int64)
        self.counts = SlotCounts(len(counts))
        self.counts.copy_from(counts)
        self.counts.go_on(self._slots)

    def step(self, counts: SlotCounts) -> None:
        """One more; its blocks have been appended in `counts`."""
        np.copyto(self.counts.num_blocks, counts.num_blocks)
        self.counts.go_on(self._slots)
