"""The scheduler's property run finds the faults it is for: each mutant is one, put in on purpose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from hetero_gateway.engine import request as requests
from hetero_gateway.engine import running_batch, step
from hetero_gateway.engine.block_pool import BlockDigests, BlockPool
from hetero_gateway.engine.request import Completion, Request
from hetero_gateway.engine.running_batch import BatchSlots, DecodeBatch, RunningBatch
from hetero_gateway.engine.scheduler import Scheduler
from hetero_gateway.engine.step import CompletionUpdate, DecodeView, SpanEntry
from hetero_gateway.engine.step_planner import StepDraft, StepPlanner
from hetero_gateway.engine.waiting import WaitingLine
from tests.unit.engine.scheduler_machine import SchedulerMachine

pytestmark = pytest.mark.unit

Mutate = Callable[[pytest.MonkeyPatch], None]


def swap_two_block_ids(patch: pytest.MonkeyPatch) -> None:
    add_blocks = StepDraft.add_blocks

    def mutant(self: StepDraft, completion: Completion, block_ids: list[int]) -> None:
        add_blocks(self, completion, block_ids)
        if len(block_ids) >= 2:
            self.block_ids[-1], self.block_ids[-2] = self.block_ids[-2], self.block_ids[-1]

    patch.setattr(StepDraft, "add_blocks", mutant)


def skip_recompute_of_last_token(patch: pytest.MonkeyPatch) -> None:
    def mutant(self: RunningBatch, completion: Completion) -> list[int]:
        num_blocks = completion.num_tokens // self.cache.block_size
        return self.pool.lookup(completion.digests.upto(num_blocks, completion.token_ids))

    patch.setattr(RunningBatch, "find_prefix", mutant)


def register_before_computed(patch: pytest.MonkeyPatch) -> None:
    start = RunningBatch.start

    def mutant(self: RunningBatch, completion: Completion, prefix: list[int]) -> list[int]:
        blocks = start(self, completion, prefix)
        self.register(completion, completion.num_tokens // self.cache.block_size)
        return blocks

    patch.setattr(RunningBatch, "start", mutant)


def register_one_block_too_many(patch: pytest.MonkeyPatch) -> None:
    register = RunningBatch.register

    def mutant(self: RunningBatch, completion: Completion, num_full_blocks: int) -> None:
        known = completion.num_tokens // self.cache.block_size
        register(self, completion, min(num_full_blocks + 1, known, len(completion.block_ids)))

    patch.setattr(RunningBatch, "register", mutant)


def forget_salt(patch: pytest.MonkeyPatch) -> None:
    init = BlockDigests.__init__

    def mutant(self: BlockDigests, *, cache_salt: str, block_size: int) -> None:
        init(self, cache_salt="", block_size=block_size)

    patch.setattr(BlockDigests, "__init__", mutant)


def forget_parent_block(patch: pytest.MonkeyPatch) -> None:
    def mutant(self: BlockDigests, num_blocks: int, token_ids: list[int]) -> None:
        size = self._block_size
        for i in range(len(self._chain), num_blocks):
            self._chain.append(self._root + repr(token_ids[i * size : (i + 1) * size]).encode())

    patch.setattr(BlockDigests, "_extend", mutant)


def keep_digest_of_block_that_is_handed_out(patch: pytest.MonkeyPatch) -> None:
    def mutant(self: BlockPool) -> int:
        block_id, _ = self._free.popitem(last=False)
        self._num_cached -= self._digests[block_id] is not None
        self._num_refs[block_id] = 1
        return block_id

    patch.setattr(BlockPool, "_take_oldest", mutant)


def free_shared_block_with_its_first_user(patch: pytest.MonkeyPatch) -> None:
    def mutant(self: BlockPool, block_ids: list[int]) -> None:
        for block_id in reversed(block_ids):
            if self._num_refs[block_id]:
                self._num_refs[block_id] = 0
                self._put_back(block_id)

    patch.setattr(BlockPool, "release", mutant)


def reuse_blocks_in_the_plan_that_writes_them(patch: pytest.MonkeyPatch) -> None:
    grow_decodes = StepPlanner._grow_decodes

    def mutant(self: StepPlanner, draft: StepDraft) -> None:
        grow_decodes(self, draft)
        for completion in self._batch.decodes.view().completions[:1]:
            if len(completion.block_ids) > 1:
                self._batch.pool.release(completion.block_ids[-1:])
                completion.block_ids.pop()

    patch.setattr(StepPlanner, "_grow_decodes", mutant)


def lose_token_on_preemption(patch: pytest.MonkeyPatch) -> None:
    preempt = StepPlanner._preempt

    def mutant(self: StepPlanner, completion: Completion) -> None:
        preempt(self, completion)
        if completion.num_output_tokens:
            completion.token_ids.pop()

    patch.setattr(StepPlanner, "_preempt", mutant)


def forget_the_preempted_with_pending_tokens(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WaitingLine, "tokens_came", lambda self, completions: self._num_pending.clear())


def double_token_on_lost_group(patch: pytest.MonkeyPatch) -> None:
    lose_group = Scheduler.lose_group

    def mutant(self: Scheduler) -> None:
        for completion in self._batch.running:
            if completion.num_output_tokens > completion.num_received:
                completion.token_ids.pop()
        lose_group(self)

    patch.setattr(Scheduler, "lose_group", mutant)


def report_samples_of_the_ended(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(step, "_ended_of", lambda completion: False)


def draw_past_max_tokens(patch: pytest.MonkeyPatch) -> None:
    def mutant(self: DecodeBatch) -> tuple[Completion, ...]:
        last_draws = self._last_draw_days.on(self._day)
        self._day += 1
        return tuple(last_draws)

    patch.setattr(DecodeBatch, "advance", mutant)


def forget_to_release_slots(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BatchSlots, "take_released", lambda self: [])


def share_tail_of_prompt(patch: pytest.MonkeyPatch) -> None:
    shareable = RunningBatch.shareable_blocks

    def mutant(self: RunningBatch, completion: Completion) -> int:
        return min(shareable(self, completion) + 1, self.cache.blocks_of(completion.num_prompt_tokens))

    patch.setattr(RunningBatch, "shareable_blocks", mutant)


def start_siblings_before_their_blocks_are_computed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RunningBatch, "_num_filled", lambda self, completion: completion.num_tokens - 1)
    enter = WaitingLine.enter

    def mutant(self: WaitingLine, request: Request, *, shares_blocks: bool) -> None:
        enter(self, request, shares_blocks=False)

    patch.setattr(WaitingLine, "enter", mutant)


def give_siblings_one_seed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(requests, "derived_seed", lambda seed, index: seed)


def serve_the_newest_first(patch: pytest.MonkeyPatch) -> None:
    def mutant(self: WaitingLine, completion: Completion) -> None:
        self.line.push(tuple(-part for part in completion.urgency), completion)

    patch.setattr(WaitingLine, "_push", mutant)


def preempt_the_most_urgent(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RunningBatch, "least_urgent", lambda self: min(self.running, key=lambda c: c.urgency))


def skip_prompt_positions_that_are_cached(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(running_batch, "computes_prompt_logprobs", lambda completion: False)


def drop_prompt_logprobs_of_the_preempted(patch: pytest.MonkeyPatch) -> None:
    is_collected = step._is_collected

    def mutant(span: SpanEntry) -> bool:
        return is_collected(span) and span.completion.residency == span.residency

    patch.setattr(step, "_is_collected", mutant)


def forget_masks_of_decodes(patch: pytest.MonkeyPatch) -> None:
    view = DecodeBatch.view

    def mutant(self: DecodeBatch) -> DecodeView:
        full = view(self)
        return DecodeView(full.completions, full.slots, full.token_ids, full.end_token_ids, (), full.has_logprobs)

    patch.setattr(DecodeBatch, "view", mutant)


def tell_received_tokens_again(patch: pytest.MonkeyPatch) -> None:
    new_completion = requests._new_completion

    def mutant(request: Request, index: int, **more: Any) -> Completion:
        completion = new_completion(request, index, **more)
        del completion.token_ids[completion.num_prompt_tokens :]
        return completion

    patch.setattr(requests, "_new_completion", mutant)


def leave_expired_requests_alone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Scheduler, "expire", lambda self, now: [])


def forget_blocks_of_the_ended(patch: pytest.MonkeyPatch) -> None:
    release = BlockPool.release

    def mutant(self: BlockPool, block_ids: list[int]) -> None:
        release(self, block_ids[1:])

    patch.setattr(BlockPool, "release", mutant)


def ignore_stop_tokens(patch: pytest.MonkeyPatch) -> None:
    def mutant(updates: list[CompletionUpdate], is_end: list[bool]) -> list[int]:
        return []

    patch.setattr(step, "_mark_stops", mutant)


MUTANTS: list[Mutate] = [
    swap_two_block_ids,
    skip_recompute_of_last_token,
    register_before_computed,
    register_one_block_too_many,
    forget_salt,
    forget_parent_block,
    keep_digest_of_block_that_is_handed_out,
    free_shared_block_with_its_first_user,
    reuse_blocks_in_the_plan_that_writes_them,
    lose_token_on_preemption,
    forget_the_preempted_with_pending_tokens,
    double_token_on_lost_group,
    report_samples_of_the_ended,
    draw_past_max_tokens,
    forget_to_release_slots,
    share_tail_of_prompt,
    start_siblings_before_their_blocks_are_computed,
    give_siblings_one_seed,
    serve_the_newest_first,
    preempt_the_most_urgent,
    skip_prompt_positions_that_are_cached,
    forget_masks_of_decodes,
    drop_prompt_logprobs_of_the_preempted,
    tell_received_tokens_again,
    leave_expired_requests_alone,
    forget_blocks_of_the_ended,
    ignore_stop_tokens,
]


def run_properties() -> None:
    """As tests/unit/engine/test_scheduler_properties.py does it; a failure is enough, the smallest is not searched."""
    run_state_machine_as_test(
        SchedulerMachine,
        settings=settings(
            max_examples=1200,  # what is caught ends the run; which examples come depends on the process's hashes
            stateful_step_count=60,
            phases=(Phase.generate,),
            derandomize=True,
            database=None,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.parametrize("mutate", MUTANTS, ids=lambda mutate: mutate.__name__)
def test_property_run_catches(mutate: Mutate, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(monkeypatch)
    with pytest.raises(Exception):  # noqa: B017, PT011 - a mutant may break anything
        run_properties()
