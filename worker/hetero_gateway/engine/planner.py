"""The planner: what the next step computes, on one cache.

One budget of tokens is spent on decodes, then on running prefills, then on completions that start. What must be true of
that is told in scheduler.py; the planner is where it is made true. It lives as long as the cache.
"""

from __future__ import annotations

from hetero_gateway.engine.config import EngineConfig
from hetero_gateway.engine.counts import Counts
from hetero_gateway.engine.plan_draft import PlanDraft, new_sequence
from hetero_gateway.engine.request import Completion
from hetero_gateway.engine.residents import Residents, computes_prompt_logprobs
from hetero_gateway.engine.step import NO_DECODES, GrownEntry, ScheduledStep
from hetero_gateway.engine.waiting import WaitingLine


class Planner:
    """Makes steps of who is resident, and moves completions between the line and the cache for that."""

    def __init__(self, config: EngineConfig, *, residents: Residents, waiting: WaitingLine, counts: Counts) -> None:
        self._max_num_tokens = config.max_num_batched_tokens
        self._residents = residents
        self._waiting = waiting
        self._counts = counts
        # Who was the first in line and did not fit, and how many blocks were free then.
        self._blocked: tuple[Completion, int] | None = None

    def plan(self, now: float) -> ScheduledStep | None:
        """The next step; None if there is nothing to compute now."""
        draft = PlanDraft()
        num_preempted = self._counts.preemptions
        self._grow_decodes(draft)
        decodes = self._residents.decodes.view()
        budget = self._continue_prefills(draft, budget=self._max_num_tokens - len(decodes.slots))
        # Whoever was preempted goes before those that are less urgent, and may not be in line yet.
        if self._counts.preemptions == num_preempted and not self._waiting.has_returning:
            self._admit(draft, budget=budget, now=now)
        if not decodes.slots and not draft.spans:
            return None
        last_draws = self._residents.decodes.advance() if decodes.slots else ()
        last_draws += self._let_prefilled_decode(draft)
        return draft.step(
            decodes=decodes,
            last_draws=last_draws,
            released_slots=self._residents.slots.take_released(),
        )

    def plan_release(self) -> ScheduledStep | None:
        """A step that computes nothing: ranks drop the slots of what has ended. None if there are none."""
        slots = self._residents.slots
        if not slots.has_released:
            return None
        released_slots = slots.take_released()
        return PlanDraft().step(decodes=NO_DECODES, last_draws=(), released_slots=released_slots)

    def _grow_decodes(self, draft: PlanDraft) -> None:
        """A block for each of the decodes whose blocks are full, the most urgent first."""
        residents = self._residents
        due = residents.decodes.due_for_block()
        if len(due) <= residents.pool.free_blocks:
            for completion, block_id in zip(due, residents.pool.allocate(len(due)), strict=True):
                self._grow(draft, completion, block_id)
            return
        for completion in sorted(due, key=lambda completion: completion.urgency):
            # An earlier one may have preempted it.
            if completion.slot >= 0 and self._make_room(completion):
                self._grow(draft, completion, residents.pool.allocate(1)[0])

    def _grow(self, draft: PlanDraft, completion: Completion, block_id: int) -> None:
        draft.grown.append(GrownEntry(completion, completion.residency, len(completion.block_ids)))
        draft.add_block(completion, block_id)
        completion.block_ids.append(block_id)
        self._residents.decodes.grew(completion)

    def _make_room(self, completion: Completion) -> bool:
        """Preempt until `completion` can have a block; False if that took the completion itself."""
        while not self._residents.pool.can_allocate(1):
            victim = self._residents.least_urgent()
            self._preempt(victim)
            if victim is completion:
                return False
        return True

    def _preempt(self, completion: Completion) -> None:
        self._residents.leave(completion)
        num_pending = max(0, completion.num_scheduled + 1 - completion.num_tokens)
        self._waiting.put_back(completion, num_pending=num_pending)
        self._counts.preemptions += 1

    def _continue_prefills(self, draft: PlanDraft, *, budget: int) -> int:
        """Chunks of running prefills, the most urgent first; what is left of the budget."""
        prefilling = self._residents.prefilling
        for completion in sorted(prefilling, key=lambda completion: completion.urgency):
            if budget == 0:
                break
            budget -= self._add_chunk(draft, completion, budget=budget)
        return budget

    def _admit(self, draft: PlanDraft, *, budget: int, now: float) -> None:
        """Start waiting completions, in order, while budget, slots and blocks last."""
        while budget > 0 and self._residents.num_startable > 0:
            completion = self._waiting.first()
            if completion is None or self._is_blocked(completion):
                return
            prefix = self._residents.find_prefix(completion)
            if not self._residents.can_start(completion, prefix):
                self._blocked = completion, self._residents.pool.free_blocks
                return
            self._waiting.pop()
            self._start(draft, completion, prefix, now=now)
            budget -= self._add_chunk(draft, completion, budget=budget)

    def _is_blocked(self, completion: Completion) -> bool:
        """Whether it did not fit, and no more blocks are free since: looking up its prefix again would be in vain."""
        if self._blocked is None or self._blocked[0] is not completion:
            return False
        return self._residents.pool.free_blocks <= self._blocked[1]

    def _start(self, draft: PlanDraft, completion: Completion, prefix: list[int], *, now: float) -> None:
        request = completion.request
        if computes_prompt_logprobs(completion):
            request.prompt_logprobs, request.prompt_logprobs_source = [], (completion, completion.residency)
        new_block_ids = self._residents.start(completion, prefix)
        if request.first_scheduled_s is None:
            request.first_scheduled_s = now
            request.num_cached_tokens = min(completion.num_scheduled, request.num_prompt_tokens)
            self._counts.cached_tokens += request.num_cached_tokens
        draft.new_sequences.append(new_sequence(completion, prefix))
        draft.add_blocks(completion, new_block_ids)

    def _add_chunk(self, draft: PlanDraft, completion: Completion, *, budget: int) -> int:
        num_tokens = min(completion.num_tokens - completion.num_scheduled, budget)
        draft.add_span(completion, num_tokens=num_tokens)
        return num_tokens

    def _let_prefilled_decode(self, draft: PlanDraft) -> tuple[Completion, ...]:
        """Completions whose known tokens are all scheduled decode from the next step on; those that draw their last."""
        last_draws: list[Completion] = []
        for span in draft.spans:
            if span.sample:
                del self._residents.prefilling[span.completion]
                if span.end + 1 == span.completion.max_num_tokens:
                    last_draws.append(span.completion)
                else:
                    self._residents.decodes.join(span.completion)
        return tuple(last_draws)
