"""The life of a scheduler under Hypothesis, and what must be true of it.

Requests come with shared prefixes, siblings, tenants, priorities, deadlines, forms and tokens that their client has
already; pools are tiny, budgets small; completions are aborted and finished, and groups lost and opened, with steps in
flight. The fake ranks compute through block tables, so a block that is reused wrongly changes tokens.
"""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hetero_gateway.engine.config import SpeculationConfig
from hetero_gateway.engine.errors import InvalidRequest
from hetero_gateway.engine.request import (
    Completion,
    Constraint,
    ConstraintKind,
    FinishReason,
    GenerationRequest,
    Request,
    derived_seed,
)
from hetero_gateway.engine.step import ScheduledStep, StepOutcome
from tests.unit.engine.engine_setup import Bench, engine_config, entries, generation, has_requests, name_of
from tests.unit.engine.fake_ranks import logprobs_alone, tokens_alone
from tests.unit.engine.oracle import fake_oracle

SMALL_VOCAB = 11
MAX_MODEL_LEN = 30
EOS = 0
STEPS_TO_END = 5000


def common_text(length: int) -> list[int]:
    """The beginning of one text, so that requests share blocks."""
    return [(7 * i * i + 3 * i) % SMALL_VOCAB for i in range(length)]


prompts = st.one_of(
    st.integers(1, 20).map(common_text),
    st.sampled_from([9, 12, 16]).map(common_text),
    # The same blocks behind other ones.
    st.tuples(st.integers(0, 3), st.integers(1, 3)).map(lambda shape: [1, 2] * shape[0] + [1, 2, 2, 1] * shape[1]),
    # Prompts that hardly share anything.
    st.lists(st.integers(1, 2), min_size=1, max_size=14),
)


class SchedulerMachine(RuleBasedStateMachine):
    """Drives a Bench. Whatever it does, `teardown` finds that every completion got the tokens it would get alone."""

    def __init__(self) -> None:
        super().__init__()
        self.bench: Bench
        self.is_open = True
        self.now = 0.0
        self.requests: list[Request] = []
        self.cut_short: set[Completion] = set()

    @initialize(
        num_blocks=st.integers(3, 24),
        block_size=st.integers(1, 5),
        budget=st.integers(1, 24),
        max_num_seqs=st.integers(1, 5),
        caching=st.sampled_from([True, True, True, False]),
        steps=st.sampled_from([2, 2, 1]),
        ageing_s=st.sampled_from([0.5, 10.0]),
        num_snapshots=st.sampled_from([None, None, 0, 1, 2, 5]),
        rate=st.sampled_from([None, 0.5, 0.9, 1.0]),
    )
    def start(
        self,
        *,
        num_blocks: int,
        block_size: int,
        budget: int,
        max_num_seqs: int,
        caching: bool,
        steps: int,
        ageing_s: float,
        num_snapshots: int | None,
        rate: float | None,
    ) -> None:
        """`num_snapshots` None: a model that keeps no states. `rate`: how often proposed tokens are right; None: there
        are none, nor for a model that keeps states."""
        proposes = rate is not None and num_snapshots is None
        config = engine_config(
            block_size=block_size,
            max_num_batched_tokens=budget,
            max_num_seqs=max_num_seqs,
            enable_prefix_caching=caching,
            eos_token_ids=frozenset({EOS}),
            vocab_size=SMALL_VOCAB,
            max_model_len=MAX_MODEL_LEN,
            max_steps_in_flight=steps,
            ageing_s=ageing_s,
            keeps_states=num_snapshots is not None,
            speculation=SpeculationConfig(max_tokens=5) if proposes else None,
        )
        proposer = fake_oracle(rate=rate or 0.0, vocab_size=SMALL_VOCAB)
        self.bench = Bench(config, num_blocks=num_blocks, num_snapshots=num_snapshots or 0, proposer=proposer)

    # --- what happens -----------------------------------------------------------------------------------

    @rule(
        prompt=prompts,
        max_tokens=st.one_of(st.none(), st.integers(1, 12)),
        tenant=st.integers(0, 1),
        ignore_eos=st.booleans(),
        stop_token_ids=st.frozensets(st.integers(1, SMALL_VOCAB - 1), max_size=1),
        patience_s=st.one_of(st.none(), st.none(), st.integers(1, 30)),
        n=st.sampled_from([1, 1, 2, 3]),
        priority=st.sampled_from([0, 0, -2, 3]),
        num_received=st.one_of(st.just(()), st.lists(st.integers(0, 6), max_size=3)),
        asks=st.tuples(st.booleans(), st.booleans(), st.booleans()),
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
        n: int,
        priority: int,
        num_received: list[int],
        asks: tuple[bool, bool, bool],
    ) -> None:
        logprobs, prompt_logprobs, constrained = asks
        seed = 17 * len(self.requests)
        ends = stop_token_ids | (set() if ignore_eos else {EOS})
        received = []
        for index, count in enumerate(num_received[:n]):
            alone = tokens_alone(
                prompt, seed=derived_seed(seed, index), count=count, vocab_size=SMALL_VOCAB, tenant=tenant
            )
            received.append(tuple(alone[: length_of(alone, ends)][: max_tokens or count]))
        asked = generation(
            f"r{len(self.requests)}",
            prompt,
            max_tokens=max_tokens,
            salt=f"tenant {tenant}",
            tenant=tenant,
            seed=seed,
            ignore_eos=ignore_eos,
            stop_token_ids=stop_token_ids,
            deadline_s=None if patience_s is None else self.now + patience_s,
            n=n,
            priority=priority,
            received=tuple(received),
            logprobs=1 if logprobs else None,
            prompt_logprobs=1 if prompt_logprobs else None,
            constraint=Constraint(ConstraintKind.REGEX, ".*") if constrained else None,
        )
        self.add_one(asked)

    @rule(prompt=prompts, max_tokens=st.integers(1, 12), tenant=st.integers(0, 1), count=st.integers(1, 3))
    def add_alike(self, *, prompt: list[int], max_tokens: int, tenant: int, count: int) -> None:
        """Plain requests of one prompt, at once."""
        for _ in range(count):
            self.add_one(
                generation(
                    f"r{len(self.requests)}",
                    prompt,
                    max_tokens=max_tokens,
                    salt=f"tenant {tenant}",
                    tenant=tenant,
                    seed=17 * len(self.requests),
                )
            )

    def add_one(self, asked: GenerationRequest) -> None:
        try:
            self.requests.append(self.bench.add(asked, now=self.now))
        except InvalidRequest:
            if self._fits(asked):
                raise

    def _fits(self, asked: GenerationRequest) -> bool:
        num_prompt, size = len(asked.prompt_token_ids), self.bench.block_size
        length = min(asked.max_tokens or 1, MAX_MODEL_LEN - num_prompt)
        if any(len(received) > length for received in asked.received):
            return False
        at_once = min(asked.n, self.bench.config.max_num_seqs, self.bench.config.max_num_batched_tokens)
        shared = 0 if self.bench.config.keeps_states else (num_prompt - 1) // size
        own = -(-(num_prompt + length - 1) // size) - shared
        return shared + at_once * own < self.bench.num_blocks

    @rule()
    def send(self) -> None:
        self.now += 0.25
        self._expire()
        scheduler = self.bench.scheduler
        running = [c for request in self.requests for c in request.completions if c.slot >= 0]
        returning = scheduler._waiting.has_returning
        step = self.bench.send(self.now)
        assert step is None or self.is_open
        if running:
            assert min(running, key=lambda c: c.urgency).slot >= 0, "the most urgent was preempted"
        if step is not None:
            self._check_starts(step, allowed=not returning)
            self._check_nobody_pauses(step)
            sampling = [entry.completion for entry in entries(step) if entry.sample]
            assert set(step.masked) == {c for c in sampling if c.request.asked.constraint is not None}

    @precondition(lambda self: self.bench.in_flight)
    @rule()
    def receive(self) -> None:
        self._check_outcome(self.bench.receive())

    @rule(count=st.integers(1, 8))
    def several_steps(self, *, count: int) -> None:
        for _ in range(count):
            self.send()
            if len(self.bench.in_flight) == self.bench.config.max_steps_in_flight:
                self.receive()

    @precondition(lambda self: self.requests)
    @rule(
        what=st.sampled_from(["abort", "abort", "finish", "finish", "wait", "lose_group", "open_group"]), data=st.data()
    )
    def interrupt(self, *, what: str, data: st.DataObject) -> None:
        {
            "abort": self.abort,
            "finish": self.finish,
            "wait": self.wait,
            "lose_group": self.lose_group,
            "open_group": self.open_group,
        }[what](data)

    def abort(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.requests))
        ended = request.ended
        self.cut_short.update(completion for completion in request.completions if not completion.ended)
        assert self.bench.scheduler.abort(request.request_id) is not ended

    def finish(self, data: st.DataObject) -> None:
        completion = data.draw(st.sampled_from(data.draw(st.sampled_from(self.requests)).completions))
        if not completion.ended:
            self.cut_short.add(completion)
            self.bench.scheduler.finish(completion)
            assert completion.ended

    def wait(self, data: st.DataObject) -> None:
        self.now += data.draw(st.integers(1, 20))
        self._expire()

    def lose_group(self, data: st.DataObject) -> None:
        self.bench.lose_group()
        self.is_open = False

    def open_group(self, data: st.DataObject) -> None:
        if data.draw(st.booleans()):
            self._open_group(num_blocks=None, block_size=None)
        else:
            self._open_group(num_blocks=data.draw(st.integers(3, 24)), block_size=data.draw(st.integers(1, 5)))

    def _open_group(self, *, num_blocks: int | None, block_size: int | None) -> None:
        open_before = [c for request in self.requests for c in request.completions if not c.ended]
        refused = self.bench.open_group(num_blocks=num_blocks, block_size=block_size)
        assert all(request.ended for request in refused)
        self.cut_short.update(completion for completion in open_before if completion.ended)
        self.is_open = True

    def _expire(self) -> None:
        open_before = [c for request in self.requests for c in request.completions if not c.ended]
        for request in self.bench.scheduler.expire(self.now):
            deadline_s = request.asked.deadline_s
            assert deadline_s is not None
            assert deadline_s <= self.now
        self.cut_short.update(completion for completion in open_before if completion.ended)
        for request in self.requests:
            assert request.ended or (request.asked.deadline_s or self.now + 1) > self.now, "it outlived its deadline"

    # --- what must be true ------------------------------------------------------------------------------

    def _check_starts(self, step: ScheduledStep, *, allowed: bool) -> None:
        """Nobody starts past somebody more urgent who could start."""
        bound = {new.slot for new in step.plan.new_sequences}
        started = [entry.completion for entry in entries(step) if entry.slot in bound]
        assert len(started) == len(bound)
        assert allowed or not started
        if started:
            last = max(completion.urgency for completion in started)
            for request in self.requests:
                for completion in request.completions:
                    waits = completion.slot < 0 and not completion.ended and completion not in request.parked
                    assert not (waits and completion.urgency < last), "somebody was passed"

    def _check_nobody_pauses(self, step: ScheduledStep) -> None:
        """Whoever runs computes: decodes always, prefills while the budget lasts, the most urgent of them always."""
        computing = {entry.completion for entry in entries(step)}
        running = [c for request in self.requests for c in request.completions if c.slot >= 0]
        left_out = [c for c in running if c not in computing and c.num_scheduled + 1 != c.max_num_tokens]
        prefills = sorted((span.completion for span in step.spans), key=lambda c: c.urgency)
        for completion in left_out:
            assert completion.num_scheduled < completion.num_tokens, "a decode got no token"
            assert step.num_tokens == self.bench.config.max_num_batched_tokens
            assert prefills, "no prefill advances"
            assert prefills[0].urgency < completion.urgency, "a less urgent prefill goes first"

    def _check_outcome(self, outcome: StepOutcome) -> None:
        for update in outcome.updates:
            request = update.completion.request
            is_told = request.prompt_logprobs is None or request.completions[0] in self.cut_short
            assert is_told, "a token comes before the prompt's log-probabilities"
        for update in outcome.updates:
            completion = update.completion
            assert completion not in self.cut_short
            assert (update.reason is FinishReason.LENGTH) <= (
                completion.num_output_tokens == completion.request.max_tokens
            )
            if completion.has_logprobs:
                tenant, begin = completion.request.asked.sampling.top_k, completion.num_tokens - 1
                # Of the updates of one completion this is the last, or a proposed token comes behind it.
                behind = [each for each in outcome.updates if each.completion is completion]
                begin -= len(behind) - 1 - next(i for i, each in enumerate(behind) if each is update)
                assert update.logprobs == logprobs_alone(completion.token_ids, begin=begin, tenant=tenant)[0]
            else:
                assert update.logprobs is None

    @invariant()
    def free_and_used_are_all(self) -> None:
        if hasattr(self, "bench"):
            self.bench.scheduler.check_integrity()
            stats = self.bench.scheduler.stats()
            assert stats.free_blocks + stats.used_blocks == stats.num_blocks
            assert stats.num_blocks == (self.bench.num_blocks - 1 if self.is_open else 0)

    @invariant()
    def used_blocks_are_those_of_completions(self) -> None:
        if hasattr(self, "bench"):
            completions = [completion for request in self.requests for completion in request.completions]
            held = {block for completion in completions for block in completion.block_ids}
            assert len(held) == self.bench.scheduler.stats().used_blocks

    @invariant()
    def counts_are_of_requests(self) -> None:
        if hasattr(self, "bench"):
            stats = self.bench.scheduler.stats()
            running = sum(any(c.slot >= 0 for c in request.completions) for request in self.requests)
            assert stats.running_requests == running
            assert running + stats.waiting_requests == sum(not request.ended for request in self.requests)

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            return
        if not self.is_open:
            self._open_group(num_blocks=None, block_size=None)
        self._run_to_end()
        assert self.bench.scheduler.is_idle, "a request never ended, or ranks were not told"
        assert self.bench.scheduler.stats().used_blocks == 0
        assert self.bench.ranks.num_bound_slots == 0
        for request in self.requests:
            self._check_prompt_logprobs(request)
            for completion in request.completions:
                self._check_output(completion)

    def _run_to_end(self) -> None:
        for _ in range(STEPS_TO_END):
            self.send()
            if self.bench.in_flight:
                self.receive()
            elif not has_requests(self.bench.scheduler):
                return
        raise AssertionError("a request never ended")

    def _check_output(self, completion: Completion) -> None:
        asked = completion.request.asked
        received = asked.received[completion.index] if completion.index < len(asked.received) else ()
        output = [*received, *self.bench.outputs[name_of(completion)]]
        alone = tokens_alone(
            asked.prompt_token_ids,
            seed=derived_seed(asked.sampling.seed, completion.index),
            count=len(output),
            vocab_size=SMALL_VOCAB,
            tenant=asked.sampling.top_k,
        )
        assert output == alone, "not the tokens that it gets alone"
        ends = asked.stop_token_ids | (set() if asked.ignore_eos else {EOS})
        assert length_of(output, ends) == len(output), "it went on behind its end"
        assert completion.ended
        stopped = bool(output) and output[-1] in ends
        if completion not in self.cut_short:
            assert completion.reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)
            assert completion.stop_token_id == (output[-1] if stopped else None)
            updates = self.bench.updates[name_of(completion)]
            assert all(update.reason is None for update in updates[:-1])
            assert not updates or updates[-1].reason is completion.reason

    def _check_prompt_logprobs(self, request: Request) -> None:
        asked = request.asked
        told = self.bench.prompt_logprobs.get(request.request_id)
        began = any(self.bench.outputs[name_of(completion)] for completion in request.completions)
        if not asked.sampling.HasField("num_prompt_logprobs") or any(asked.received):
            assert told is None
        elif told is not None:
            assert told == logprobs_alone(asked.prompt_token_ids, begin=1, tenant=asked.sampling.top_k)
        else:
            assert not began or request.completions[0] in self.cut_short


def length_of(tokens: list[int], ends: set[int] | frozenset[int]) -> int:
    """Tokens up to the first that ends, or all."""
    return next((index + 1 for index, token in enumerate(tokens) if token in ends), len(tokens))
