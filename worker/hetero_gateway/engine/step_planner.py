"""StepPlanner: decides what the next step computes, on one cache.

One budget of tokens is spent on decodes, then on running prefills, then on completions that start. The scheduler's
docstring says what must hold of that; here it is made true. A planner lives as long as its cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from hetero_api.v1 import ranks_pb2
from hetero_api.v1.admin_pb2 import GetStatsResponse
from hetero_gateway.engine.config import EngineConfig
from hetero_gateway.engine.request import Completion, PooledStates
from hetero_gateway.engine.running_batch import RunningBatch, computes_prompt_logprobs
from hetero_gateway.engine.speculation.speculator import Speculator
from hetero_gateway.engine.step import NO_DECODES, DecodeView, GrownEntry, ScheduledStep, SpanEntry, TakenSnapshot
from hetero_gateway.engine.waiting import WaitingLine


class StepPlanner:
    """Makes steps of the running batch, and moves completions between the line and the batch for that."""

    def __init__(
        self, config: EngineConfig, *, batch: RunningBatch, waiting: WaitingLine, counts: GetStatsResponse
    ) -> None:
        self._max_num_tokens = config.max_num_batched_tokens
        self._batch = batch
        self._waiting = waiting
        self._counts = counts
        self._blocked: tuple[Completion, int] | None = None
        """The first in line that did not fit, and how many blocks were free then."""

    def plan(self, now: float, *, speculator: Speculator | None = None) -> ScheduledStep | None:
        """Return the next step; None if there is nothing to compute now. With a `speculator` no step is out."""
        draft = StepDraft()
        if self._batch.snapshots is not None:
            self._batch.snapshots.begin_plan()
        num_preempted = self._counts.preemptions
        self._grow_decodes(draft)
        decodes = self._batch.decodes.view()
        budget = self._continue_prefills(draft, budget=self._max_num_tokens - len(decodes.slots))
        # A preempted completion goes before those that are less urgent, and may not be in line yet.
        if self._counts.preemptions == num_preempted and not self._waiting.has_returning:
            budget = self._admit(draft, budget=budget, now=now)
        if speculator is not None:
            self._propose(draft, speculator, decodes.completions, budget=budget)
        if not decodes.slots and not draft.spans:
            return None
        last_draws = self._batch.decodes.advance() if decodes.slots else ()
        last_draws += self._let_prefilled_decode(draft)
        return draft.step(
            decodes=decodes,
            last_draws=last_draws,
            released_slots=self._batch.slots.take_released(),
            proposal_snapshots=self._batch.proposal_snapshots,
        )

    def plan_release(self) -> ScheduledStep | None:
        """Return a step that computes nothing: ranks drop the slots of what has ended. None if there are none."""
        slots = self._batch.slots
        if not slots.has_released:
            return None
        return StepDraft().step(decodes=NO_DECODES, last_draws=(), released_slots=slots.take_released())

    def _grow_decodes(self, draft: StepDraft) -> None:
        """Give a block to each decode whose blocks are full, the most urgent first."""
        batch = self._batch
        due = batch.decodes.due_for_block()
        if len(due) <= batch.pool.free_blocks:
            for completion, block_id in zip(due, batch.pool.allocate(len(due)), strict=True):
                self._grow(draft, completion, block_id)
            return
        for completion in sorted(due, key=lambda completion: completion.urgency):
            # An earlier one may have preempted it.
            if completion.slot >= 0 and self._make_room(completion):
                self._grow(draft, completion, batch.pool.allocate(1)[0])

    def _grow(self, draft: StepDraft, completion: Completion, block_id: int) -> None:
        draft.grown.append(GrownEntry(completion, completion.residency, len(completion.block_ids)))
        draft.block_slots.append(completion.slot)
        draft.block_ids.append(block_id)
        completion.block_ids.append(block_id)
        self._batch.decodes.grew(completion)

    def _make_room(self, completion: Completion) -> bool:
        """Preempt until `completion` can have a block; return False if that took the completion itself."""
        while not self._batch.pool.can_allocate(1):
            victim = self._batch.least_urgent()
            self._preempt(victim)
            if victim is completion:
                return False
        return True

    def _preempt(self, completion: Completion) -> None:
        self._batch.leave(completion)
        num_pending = max(0, completion.num_scheduled + 1 - completion.num_tokens)
        self._waiting.put_back(completion, num_pending=num_pending)
        self._counts.preemptions += 1
        if (trace := completion.request.trace) is not None:
            trace.event("preempted", completion=completion.index)

    def _continue_prefills(self, draft: StepDraft, *, budget: int) -> int:
        """Add chunks of running prefills, the most urgent first; return what is left of the budget."""
        prefilling = self._batch.prefilling
        for completion in sorted(prefilling, key=lambda completion: completion.urgency):
            if budget == 0:
                break
            budget -= self._add_chunk(draft, completion, budget=budget)
        return budget

    def _propose(
        self, draft: StepDraft, speculator: Speculator, completions: Sequence[Completion], *, budget: int
    ) -> None:
        """Add proposals of tokens for completions that decode, as far as draws, budget and blocks go."""
        draws = len(completions) + sum(span.sample for span in draft.spans)
        most = min(budget, self._batch.max_draws - draws, self._batch.max_proposed)
        for completion, proposed in speculator.proposals(completions, most=most).items():
            tokens = self._batch.fitting(completion, proposed)
            if tokens:
                new_block_ids = self._batch.extend(completion, num_tokens=completion.num_tokens + len(tokens))
                draft.add_blocks(completion, new_block_ids)
                draft.proposals[completion.slot] = tokens
        most = min(self._max_num_tokens, self._batch.max_draws) - len(completions)
        if num_drafts := speculator.num_drafts(completions, most=most):
            self._let_draft(draft, completions, num_drafts)

    def _let_draft(self, draft: StepDraft, completions: Sequence[Completion], num_drafts: int) -> None:
        """Have tokens drafted behind the step's, with blocks for as many as there are blocks left."""
        for completion in completions:
            reach = completion.num_tokens + 1 + len(draft.proposals.get(completion.slot, ()))
            if reach + 1 < completion.max_num_tokens:
                most = min(reach + num_drafts, completion.max_num_tokens)
                draft.add_blocks(completion, self._batch.extend_as_possible(completion, num_tokens=most))
                draft.plan.draft_slots.append(completion.slot)
        draft.plan.num_drafts = num_drafts if draft.plan.draft_slots else 0

    def _admit(self, draft: StepDraft, *, budget: int, now: float) -> int:
        """Start waiting completions, in order, while budget, slots and blocks last; return what is left of it."""
        while budget > 0 and self._batch.num_startable > 0:
            completion = self._waiting.line.first()
            if completion is None or self._is_blocked(completion):
                break
            prefix = self._batch.find_prefix(completion)
            if not self._batch.can_start(completion, prefix):
                self._blocked = completion, self._batch.pool.free_blocks
                break
            self._waiting.line.pop()
            self._start(draft, completion, prefix, now=now)
            from_snapshot = self._batch.states_of_prefix(completion, prefix)
            budget -= self._add_chunk(draft, completion, budget=budget, from_snapshot=from_snapshot)
        return budget

    def _is_blocked(self, completion: Completion) -> bool:
        """Return whether it did not fit and no more blocks are free since: its prefix need not be looked up again."""
        if self._blocked is None or self._blocked[0] is not completion:
            return False
        return self._batch.pool.free_blocks <= self._blocked[1]

    def _start(self, draft: StepDraft, completion: Completion, prefix: list[int], *, now: float) -> None:
        request = completion.request
        if computes_prompt_logprobs(completion):
            request.prompt_logprobs, request.prompt_logprobs_source = [], (completion, completion.residency)
        new_block_ids = self._batch.start(completion, prefix)
        if request.asked.sampling.pooling:
            request.pooled = PooledStates(completion.residency)
        if request.first_scheduled_s is None:
            request.first_scheduled_s = now
            request.num_cached_tokens = min(completion.num_scheduled, request.num_prompt_tokens)
            self._counts.cached_tokens += request.num_cached_tokens
        draft.bind(completion, prefix)
        draft.add_blocks(completion, new_block_ids)

    def _add_chunk(
        self, draft: StepDraft, completion: Completion, *, budget: int, from_snapshot: int | None = None
    ) -> int:
        begin = completion.num_scheduled
        num_tokens = min(completion.num_tokens - begin, budget)
        snapshots = self._batch.take_snapshots(completion, begin, begin + num_tokens)
        draft.add_span(completion, num_tokens=num_tokens, from_snapshot=from_snapshot, snapshots=snapshots)
        return num_tokens

    def _let_prefilled_decode(self, draft: StepDraft) -> tuple[Completion, ...]:
        """Move completions whose known tokens are all scheduled on to decoding; return those that draw their last."""
        last_draws: list[Completion] = []
        for span in draft.spans:
            if span.sample:
                del self._batch.prefilling[span.completion]
                if span.end + 1 == span.completion.max_num_tokens:
                    last_draws.append(span.completion)
                else:
                    self._batch.decodes.join(span.completion)
        return tuple(last_draws)


class StepDraft:
    """A step in the making: its plan, and the completions in it."""

    def __init__(self) -> None:
        self.plan = ranks_pb2.StepPlan()
        self.spans: list[SpanEntry] = []
        self.grown: list[GrownEntry] = []
        self.block_slots: list[int] = []
        """Slots that get another block each, and below the blocks: lists are faster to append to than messages."""
        self.block_ids: list[int] = []
        self.proposals: dict[int, Sequence[int]] = {}

    def bind(self, completion: Completion, prefix: list[int]) -> None:
        """Bind a completion which has just started behind the blocks `prefix` to its slot."""
        sequence = self.plan.new_sequences.add(
            slot=completion.slot,
            token_ids=completion.token_ids,
            num_computed_tokens=completion.num_scheduled,
            block_ids=prefix,
            sampling=completion.request.asked.sampling,
            num_prompt_tokens=completion.num_prompt_tokens,
            adapter=completion.request.asked.adapter,
        )
        # The request's sampling with what is the completion's own.
        sampling = sequence.sampling
        sampling.seed = completion.seed
        if sampling.min_tokens:
            sampling.end_token_ids.extend(sorted(completion.end_token_ids))
        if not computes_prompt_logprobs(completion):
            sampling.ClearField("num_prompt_logprobs")

    def add_blocks(self, completion: Completion, block_ids: list[int]) -> None:
        """Append blocks to the completion's block table, in order."""
        self.block_slots.extend([completion.slot] * len(block_ids))
        self.block_ids.extend(block_ids)

    def add_span(
        self,
        completion: Completion,
        *,
        num_tokens: int,
        from_snapshot: int | None = None,
        snapshots: Sequence[TakenSnapshot] = (),
    ) -> None:
        """Compute the completion's next `num_tokens` known tokens, and sample behind the last known one.

        Its states begin with the snapshot `from_snapshot`, if there is one; `snapshots` are taken of them.
        """
        begin = completion.num_scheduled
        end = completion.num_scheduled = begin + num_tokens
        sample = end == completion.num_tokens
        entry = SpanEntry(completion, completion.slot, completion.residency, begin, end, sample, tuple(snapshots))
        self.spans.append(entry)
        span = self.plan.spans.add(
            slot=completion.slot, num_tokens=num_tokens, sample=sample, from_snapshot=from_snapshot
        )
        for taken in snapshots:
            span.snapshots.add(num_tokens=taken.num_tokens, snapshot=taken.snapshot)

    def step(
        self,
        *,
        decodes: DecodeView,
        last_draws: tuple[Completion, ...],
        released_slots: list[int],
        proposal_snapshots: Sequence[int] = (),
    ) -> ScheduledStep:
        """Return the complete step. Its plan gets an id when it is sent. Each proposed token has a snapshot, if any."""
        sampling = [span.completion for span in self.spans if span.sample]
        masked = (*decodes.masked, *(completion for completion in sampling if completion.is_masked))
        self.plan.released_slots.extend(released_slots)
        self.plan.block_slots.extend(self.block_slots)
        self.plan.block_ids.extend(self.block_ids)
        self.plan.decode_slots.extend(decodes.slots)
        self.plan.masked_slots.extend(completion.slot for completion in masked)
        snapshots = iter(proposal_snapshots)
        for slot, token_ids in self.proposals.items():
            self.plan.proposals.add(slot=slot, token_ids=token_ids, snapshots=islice(snapshots, len(token_ids)))
        return ScheduledStep(
            plan=self.plan,
            decodes=decodes,
            spans=tuple(self.spans),
            grown=tuple(self.grown),
            last_draws=last_draws,
            masked=masked,
            proposals=self.proposals,
        )
