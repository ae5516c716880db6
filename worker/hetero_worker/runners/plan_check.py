"""Does a plan fit this rank's state? Checked as a whole, before anything of it is applied.

The gateway's scheduler is trusted to be fair, not to be free of bugs: a wrong block id would silently read or
overwrite another request's cache. Every violation is a ProtocolError that names the step, the slot and the
numbers that disagree.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hetero_api.v1 import ranks_pb2
from hetero_worker.errors import ProtocolError
from hetero_worker.runners.slots import SlotTable


@dataclass(frozen=True, slots=True)
class PlanBounds:
    """Limits that the epoch's messages set."""

    max_num_batched_tokens: int
    max_model_len: int
    vocab_size: int
    num_blocks: int
    block_size: int


@dataclass(slots=True)
class _Extent:
    """A slot's counts, as they would be while the plan is applied."""

    num_tokens: int
    num_computed: int
    num_blocks: int


def check_plan(plan: ranks_pb2.StepPlan, slots: SlotTable, bounds: PlanBounds, *, last_step_id: int) -> None:
    """Raise ProtocolError unless the plan follows `last_step_id` and fits the slots and the bounds."""
    _PlanCheck(plan, slots, bounds).run(last_step_id)


class _PlanCheck:
    def __init__(self, plan: ranks_pb2.StepPlan, slots: SlotTable, bounds: PlanBounds) -> None:
        self._plan = plan
        self._slots = slots
        self._bounds = bounds
        self._released = set(plan.released_slots)
        self._new: dict[int, _Extent] = {}

    def run(self, last_step_id: int) -> None:
        if self._plan.step_id != last_step_id + 1:
            raise self._error(f"expected step {last_step_id + 1}")
        for slot in self._plan.released_slots:
            if self._slots.get(slot) is None:
                raise self._error(f"releases slot {slot}, which is not in use")
        for sequence in self._plan.new_sequences:
            self._check_new(sequence)
        if len({scheduled.slot for scheduled in self._plan.scheduled}) != len(self._plan.scheduled):
            raise self._error("schedules a slot twice")
        total = sum(scheduled.num_tokens for scheduled in self._plan.scheduled)
        if total > self._bounds.max_num_batched_tokens:
            raise self._error(f"computes {total} tokens, at most {self._bounds.max_num_batched_tokens} are allowed")
        for scheduled in self._plan.scheduled:
            self._check_scheduled(scheduled)

    def _check_new(self, sequence: ranks_pb2.NewSequence) -> None:
        slot, known = sequence.slot, len(sequence.token_ids)
        if slot >= len(self._slots):
            raise self._error(f"binds slot {slot}, there are {len(self._slots)}")
        if slot in self._new or (self._slots.get(slot) is not None and slot not in self._released):
            raise self._error(f"binds slot {slot}, which is in use")
        if not 0 < known <= self._bounds.max_model_len:
            raise self._error(f"slot {slot} begins with {known} tokens, 1 to {self._bounds.max_model_len} are allowed")
        if max(sequence.token_ids) >= self._bounds.vocab_size:
            raise self._error(f"slot {slot} has a token id beyond the vocabulary of {self._bounds.vocab_size}")
        if sequence.num_computed_tokens >= known:
            raise self._error(f"slot {slot} has {known} tokens, all computed: one must be left")
        self._check_blocks(slot, sequence.block_ids, before=0, needed=sequence.num_computed_tokens)
        self._new[slot] = _Extent(known, sequence.num_computed_tokens, len(sequence.block_ids))

    def _check_scheduled(self, scheduled: ranks_pb2.ScheduledSequence) -> None:
        slot = scheduled.slot
        extent = self._extent(slot)
        reached = extent.num_computed + scheduled.num_tokens
        if not 0 < scheduled.num_tokens <= extent.num_tokens - extent.num_computed:
            raise self._error(
                f"computes {scheduled.num_tokens} tokens of slot {slot}, of which "
                f"{extent.num_computed} of {extent.num_tokens} are computed"
            )
        if reached > self._bounds.max_model_len:
            raise self._error(f"slot {slot} reaches {reached} tokens, max_model_len is {self._bounds.max_model_len}")
        if scheduled.sample != (reached == extent.num_tokens):
            raise self._error(
                f"slot {slot} reaches {reached} of {extent.num_tokens} tokens, but sample is {scheduled.sample}"
            )
        self._check_blocks(slot, scheduled.new_block_ids, before=extent.num_blocks, needed=reached)

    def _extent(self, slot: int) -> _Extent:
        if slot in self._new:
            return self._new[slot]
        state = None if slot in self._released else self._slots.get(slot)
        if state is None:
            raise self._error(f"schedules slot {slot}, which is not in use")
        return _Extent(len(state.token_ids), state.num_computed, state.num_blocks)

    def _check_blocks(self, slot: int, block_ids: Iterable[int], *, before: int, needed: int) -> None:
        ids = list(block_ids)
        if ids and not (min(ids) > 0 and max(ids) < self._bounds.num_blocks):
            raise self._error(f"gives slot {slot} a block outside [1, {self._bounds.num_blocks})")
        have = before + len(ids)
        if have > self._slots.max_blocks:
            raise self._error(f"gives slot {slot} {have} blocks, at most {self._slots.max_blocks} are allowed")
        if have * self._bounds.block_size < needed:
            raise self._error(f"slot {slot} has {have} blocks of {self._bounds.block_size} for {needed} tokens")

    def _error(self, problem: str) -> ProtocolError:
        return ProtocolError(f"step plan {self._plan.step_id}: {problem}")
