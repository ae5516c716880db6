"""Multi-step decode: plain steps one after another, with nothing in between.

A step is *plain* if it only decodes and all its draws are from unedited logits: the largest one, or one with noise, of
what filters leave. A rank whose steps are recorded natively makes a plain
step with its draws in one call (`recorded.sampling`). Plans that have come together and continue the same sequences
become one multi-step: all are checked, and their blocks appended, before the first step; the inputs are made once; each
step is a call; and the slots are brought up to date at the end. The host then pays once for coming back between steps
with cold caches.

A multi-step equals its single steps to the last bit. A step meets other ranks in the same rounds either way, so ranks
need not agree on where multi-steps begin and end. They must agree on *which* steps draw by themselves, and one rank may
be unable to (a library is missing, torch computes a part of its model). All know which steps are plain. The first step
with a number of rows is made, and recorded, like any other. Before the second the ranks vote, and keep to the outcome
for the rest of the epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch

from hetero_api.v1 import ranks_pb2
from hetero_worker.distributed.exchange import all_can
from hetero_worker.layers.sampler import sample_tokens
from hetero_worker.runners.base import SampledToken, StepOutput
from hetero_worker.runners.recorded.sampling import MAX_STEPS
from hetero_worker.runners.running_step import StepContext
from hetero_worker.runners.slots import SlotCounts
from hetero_worker.runners.step_parts import MultiStepParts
from hetero_worker.sampling.decision import check_finite


def may_lead(plan: ranks_pb2.StepPlan) -> bool:
    """Return whether a multi-step may begin with the plan, as far as the plan itself tells."""
    others = plan.spans or plan.masked_slots or plan.proposals or plan.draft_slots or plan.HasField("command")
    return bool(plan.decode_slots) and not others


def may_follow(plan: ranks_pb2.StepPlan, first: ranks_pb2.StepPlan) -> bool:
    """Return whether the plan continues a multi-step that began with another plan."""
    if plan.released_slots or plan.new_sequences or not may_lead(plan):
        return False
    return plan.decode_slots == first.decode_slots


def is_plain(plan: ranks_pb2.StepPlan, context: StepContext) -> bool:
    """Return whether the step of an applied plan is plain. The answer is the same on every rank."""
    if not may_lead(plan):
        return False
    return all(context.cache.slots.sampling(slot).is_plain for slot in plan.decode_slots)


class MultiStepDecode:
    """One runner's agreement with its group on which plain steps draw by themselves."""

    def __init__(self) -> None:
        self._agreed: dict[tuple[int, bool], bool | None] = {}
        """The ranks' agreement by number of rows, and whether some have adapters; None: one such step was made."""

    def begin(self, plan: ranks_pb2.StepPlan, context: StepContext) -> MultiStep | None:
        """Begin a multi-step with the plan of a plain step; None if that does not draw by itself.

        Called once for each plain step that begins while none is running. Raises as the exchange does.
        """
        cache = context.cache
        kind = len(plan.decode_slots), cache.slots.have_adapters(plan.decode_slots)
        if kind not in self._agreed:
            self._agreed[kind] = None
            return None
        if self._agreed[kind] is None:
            self._agreed[kind] = all_can(context.exchange, _can_draw(plan, context))
        if not self._agreed[kind]:
            return None
        assert cache.multi_step is not None, "this rank has said that it can"
        return MultiStep(plan, context, cache.multi_step)

    def forget(self) -> None:
        """Drop all agreements: the ranks or their work change."""
        self._agreed.clear()


def _can_draw(plan: ranks_pb2.StepPlan, context: StepContext) -> bool:
    """Return whether this rank has recorded steps like the plan's with all that their draws need.

    A sampling function that the runner's owner replaced has to be called for every draw.
    """
    cache = context.cache
    if cache.multi_step is None or context.sample is not sample_tokens:
        return False
    batch = cache.multi_step.inputs.fill(plan, cache.slots)
    return cache.multi_step.forward.can_draw(
        context.decoder, batch, caches=cache.layers, exchange=context.exchange, head_ranges=context.head_ranges
    )


class MultiStep:
    """Plain steps that draw by themselves; the plan of the first has been checked and applied."""

    def __init__(self, first: ranks_pb2.StepPlan, context: StepContext, parts: MultiStepParts) -> None:
        self._first = first
        self._context = context
        self._parts = parts
        self._num_steps = 1
        self._ahead: _Ahead | None = None

    @property
    def has_room(self) -> bool:
        """True if it may be extended."""
        return self._num_steps < MAX_STEPS

    def extend(self, plan: ranks_pb2.StepPlan) -> None:
        """Add a plan that may follow. Raises ProtocolError, with nothing changed, if it does not fit."""
        cache = self._context.cache
        if self._ahead is None:
            self._ahead = _Ahead(self._first, cache.slots.counts)
        cache.check.run(plan, self._ahead.counts)
        cache.slots.apply(plan)
        self._ahead.step(cache.slots.counts)
        self._num_steps += 1

    def outputs(self, on_step: Callable[[], None]) -> Iterator[StepOutput]:
        """Compute the steps, with `on_step` after each, and then yield their outputs in order.

        Raises the exchange's errors before the first output, and ModelError in place of a step whose logits are not
        finite. Only rank 0 checks that; the group's abort frees the others from their next round.
        """
        context, slots, times = self._context, self._context.cache.slots, self._context.times
        batch = self._parts.inputs.fill_multi_step(self._first, slots, steps=self._num_steps)
        drawing = batch.draw_slots.tolist()
        ended_s: list[float] = []

        def end_step() -> None:
            ended_s.append(times.now())
            on_step()

        with torch.inference_mode():
            draws = self._parts.forward.draw(
                context.decoder,
                batch,
                caches=context.cache.layers,
                exchange=context.exchange,
                head_ranges=context.head_ranges,
                rows=[slots.sampling(slot).draw() for slot in drawing],
                steps=self._num_steps,
                on_step=end_step,
            )
        times.end_each(ended_s)
        slots.append_steps(batch.draw_slots, draws.token_ids)
        for tokens, scores in zip(draws.token_ids.tolist(), draws.scores.tolist(), strict=True):
            if context.exchange.rank == 0:
                for score in scores:
                    check_finite(score)
            yield StepOutput(sampled=list(map(SampledToken, drawing, tokens)))


class _Ahead:
    """The slots' counts after the steps so far."""

    def __init__(self, first: ranks_pb2.StepPlan, counts: SlotCounts) -> None:
        """Start from the counts before the first step, whose plan has been applied."""
        self._slots = np.array(first.decode_slots, dtype=np.int64)
        self.counts = SlotCounts(len(counts))
        self.counts.copy_from(counts)
        self.counts.decode(self._slots)

    def step(self, counts: SlotCounts) -> None:
        """Count one more step, whose blocks have been appended in `counts`."""
        np.copyto(self.counts.num_blocks, counts.num_blocks)
        self.counts.decode(self._slots)
