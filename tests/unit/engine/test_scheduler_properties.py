"""Whatever comes and goes, every request gets the tokens it would get alone, and no block is lost.

Hypothesis drives the scheduler with requests that share prefixes, tiny pools, small budgets, tenants, aborts and
deadlines, between steps and while one is in flight. The fake ranks compute through block tables, so a block that
is reused wrongly changes tokens.
"""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hetero_gateway.engine.errors import InvalidRequest
from hetero_gateway.engine.request import FinishReason, GenerationRequest, Request, RequestStatus
from hetero_gateway.engine.step import ScheduledStep
from tests.unit.engine.engine_setup import Bench, engine_config, generation
from tests.unit.engine.fake_ranks import tokens_alone

pytestmark = pytest.mark.unit

SMALL_VOCAB = 11
EOS = 0
STEPS_TO_END = 3000


def common_text(length: int) -> list[int]:
    """The beginning of one text, so that requests share blocks."""
    return [(7 * i * i + 3 * i) % SMALL_VOCAB for i in range(length)]


prompts = st.one_of(
    st.integers(1, 20).map(common_text),
    # Prompts that hardly share anything.
    st.lists(st.integers(1, 2), min_size=1, max_size=14),
)


class SchedulerMachine(RuleBasedStateMachine):
    """Tenants are told apart by seed as well, which the fake KV depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.bench: Bench
        self.in_flight: ScheduledStep | None = None
        self.now = 0.0
        self.requests: list[Request] = []
        self.cut_short: set[str] = set()

    @initialize(
        num_blocks=st.integers(3, 14),
        block_size=st.integers(1, 5),
        budget=st.integers(1, 24),
        max_num_seqs=st.integers(1, 5),
        caching=st.sampled_from([True, True, True, False]),
    )
    def start(self, *, num_blocks: int, block_size: int, budget: int, max_num_seqs: int, caching: bool) -> None:
        config = engine_config(
            block_size=block_size,
            max_num_batched_tokens=budget,
            max_num_seqs=max_num_seqs,
            enable_prefix_caching=caching,
            eos_token_ids=frozenset({EOS}),
            vocab_size=SMALL_VOCAB,
            max_model_len=30,
        )
        self.bench = Bench(config, num_blocks=num_blocks)

    @rule(
        prompt=prompts,
        max_tokens=st.one_of(st.none(), st.integers(1, 12)),
        tenant=st.integers(0, 1),
        ignore_eos=st.booleans(),
        stop_token_ids=st.frozensets(st.integers(1, SMALL_VOCAB - 1), max_size=1),
        patience_s=st.one_of(st.none(), st.none(), st.integers(1, 30)),
    )
    def add(
        self,
        *,
        prompt: list[int],
        max_tokens: int | None,
        tenant: int,
        ignore_eos: bool,
        stop_token_ids: frozenset[int],
        patience_s: int | None,
    ) -> None:
        asked = generation(
            f"r{len(self.requests)}",
            prompt,
            max_tokens=max_tokens,
            salt=f"tenant {tenant}",
            seed=tenant,
            ignore_eos=ignore_eos,
            stop_token_ids=stop_token_ids,
            deadline_s=None if patience_s is None else self.now + patience_s,
        )
        try:
            self.requests.append(self.bench.add(asked))
        except InvalidRequest:
            self._check_rejection(asked)

    def _check_rejection(self, asked: GenerationRequest) -> None:
        least = len(asked.prompt_token_ids) + min(
            asked.sampling.max_tokens or 1, self.bench.config.max_model_len - len(asked.prompt_token_ids)
        )
        assert least - 1 > (self.bench.num_blocks - 1) * self.bench.config.block_size

    @precondition(lambda self: self.in_flight is None)
    @rule()
    def schedule(self) -> None:
        self.now += 1
        self._expire()
        self.in_flight = self.bench.scheduler.schedule(self.now)

    @precondition(lambda self: self.in_flight is not None)
    @rule()
    def apply(self) -> None:
        assert self.in_flight is not None
        step, self.in_flight = self.in_flight, None
        assert sum(entry.num_tokens for entry in step.entries) <= self.bench.config.max_num_batched_tokens
        self.bench.take(self.bench.scheduler.apply(self.bench.ranks.execute(step.plan)))

    @rule(count=st.integers(1, 8))
    def several_steps(self, count: int) -> None:
        for _ in range(count):
            if self.in_flight is not None:
                self.apply()
            self.schedule()

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.requests))
        ended_before = request.status is RequestStatus.ENDED
        assert self.bench.scheduler.abort(request.request_id) is not ended_before
        if not ended_before:
            self.cut_short.add(request.request_id)

    @rule(wait_s=st.integers(1, 20))
    def time_passes(self, wait_s: int) -> None:
        self.now += wait_s
        self._expire()

    def _expire(self) -> None:
        for request in self.bench.scheduler.expire(self.now):
            deadline_s = request.asked.deadline_s
            assert deadline_s is not None
            assert deadline_s <= self.now
            self.cut_short.add(request.request_id)

    @invariant()
    def free_and_used_are_all(self) -> None:
        if hasattr(self, "bench"):
            self.bench.scheduler.check_integrity()
            stats = self.bench.scheduler.stats()
            assert stats.free_blocks + stats.used_blocks == stats.num_blocks == self.bench.num_blocks - 1

    @invariant()
    def used_blocks_are_those_of_requests(self) -> None:
        if hasattr(self, "bench"):
            held = {block for request in self.requests for block in request.block_ids}
            assert len(held) == self.bench.scheduler.stats().used_blocks

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            return
        for _ in range(STEPS_TO_END):
            if self.in_flight is not None:
                self.apply()
            self.schedule()
            if self.in_flight is None:
                break
        assert self.bench.scheduler.stats().used_blocks == 0, "a request never ended"
        for request in self.requests:
            self._check_output(request)

    def _check_output(self, request: Request) -> None:
        output = self.bench.outputs[request.request_id]
        alone = tokens_alone(
            request.asked.prompt_token_ids,
            seed=request.asked.sampling.seed,
            count=request.max_tokens,
            vocab_size=SMALL_VOCAB,
        )
        ends = request.asked.sampling.stop_token_ids | (set() if request.asked.sampling.ignore_eos else {EOS})
        length = next((i + 1 for i, token in enumerate(alone) if token in ends), request.max_tokens)
        if request.request_id in self.cut_short:
            assert output == alone[: len(output)]
            assert len(output) <= length
        else:
            assert output == alone[:length]
            last = self.bench.updates[request.request_id][-1]
            assert last.reason is (FinishReason.STOP if alone[length - 1] in ends else FinishReason.LENGTH)


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_machine_meets_preemptions_hits_and_chunks() -> None:
    """The setting above does reach the cases it is for: a plain run of it counts each."""
    bench = Bench(
        engine_config(block_size=3, max_num_batched_tokens=5, max_num_seqs=3, vocab_size=SMALL_VOCAB), num_blocks=9
    )
    for index in range(12):
        bench.add(
            generation(f"r{index}", [(7 * i * i + 3 * i) % SMALL_VOCAB for i in range(8 + index % 3)], max_tokens=9)
        )
    bench.run()
    stats = bench.scheduler.stats()
    assert stats.preemptions > 0
    assert stats.cached_tokens > 0
    assert stats.steps > 12
