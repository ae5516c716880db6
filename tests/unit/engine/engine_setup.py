"""Small engines and requests for the tests of this folder."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from hetero_api.v1 import logprobs_pb2, ranks_pb2
from hetero_gateway.engine.config import EngineConfig, SpeculationConfig
from hetero_gateway.engine.request import Completion, Constraint, GenerationRequest, Request
from hetero_gateway.engine.scheduler import Scheduler
from hetero_gateway.engine.speculation.ngram import NGramProposer
from hetero_gateway.engine.speculation.speculator import Speculator
from hetero_gateway.engine.step import CompletionUpdate, ScheduledStep, StepOutcome
from hetero_gateway.engine.steps_in_flight import StepsInFlight
from tests.unit.engine.fake_ranks import FakeRanks, PlanError

VOCAB_SIZE = 64
NO_EOS: frozenset[int] = frozenset()


def engine_config(
    *,
    max_num_seqs: int = 4,
    max_num_batched_tokens: int = 64,
    block_size: int = 4,
    max_model_len: int = 64,
    max_queued_requests: int = 100,
    max_queued_tokens: int = 1 << 22,
    enable_prefix_caching: bool = True,
    eos_token_ids: frozenset[int] = NO_EOS,
    vocab_size: int = VOCAB_SIZE,
    max_steps_in_flight: int = 2,
    pause_limit_s: float = 60.0,
    ageing_s: float = 10.0,
    lookahead_s: float = 0.0,
    keeps_states: bool = False,
    speculation: SpeculationConfig | None = None,
) -> EngineConfig:
    return EngineConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        block_size=block_size,
        max_model_len=max_model_len,
        max_queued_requests=max_queued_requests,
        max_queued_tokens=max_queued_tokens,
        enable_prefix_caching=enable_prefix_caching,
        eos_token_ids=eos_token_ids,
        vocab_size=vocab_size,
        max_steps_in_flight=max_steps_in_flight,
        pause_limit_s=pause_limit_s,
        ageing_s=ageing_s,
        lookahead_s=lookahead_s,
        keeps_states=keeps_states,
        speculation=speculation,
    )


def generation(
    request_id: str,
    prompt: list[int] | range,
    *,
    max_tokens: int | None = 4,
    salt: str = "",
    seed: int = 0,
    stop: tuple[str, ...] = (),
    stop_token_ids: frozenset[int] = frozenset(),
    ignore_eos: bool = False,
    deadline_s: float | None = None,
    n: int = 1,
    priority: int = 0,
    received: tuple[tuple[int, ...], ...] = (),
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    constraint: Constraint | None = None,
    min_tokens: int = 0,
    tenant: int = 0,
    pooling: ranks_pb2.Pooling.ValueType = ranks_pb2.POOLING_UNSPECIFIED,
) -> GenerationRequest:
    """`tenant` is where the fake ranks' KV begins."""
    return GenerationRequest(
        request_id=request_id,
        prompt_token_ids=tuple(prompt),
        sampling=ranks_pb2.Sampling(
            temperature=1.0,
            top_p=1.0,
            repetition_penalty=1.0,
            seed=seed,
            top_k=tenant,
            num_logprobs=logprobs,
            num_prompt_logprobs=prompt_logprobs,
            min_tokens=min_tokens,
            pooling=pooling,
        ),
        max_tokens=max_tokens,
        stop=stop,
        stop_token_ids=stop_token_ids,
        ignore_eos=ignore_eos,
        constraint=constraint,
        cache_salt=salt,
        deadline_s=deadline_s,
        n=n,
        priority=priority,
        received=received,
    )


class Entry(NamedTuple):
    """One completion's part of a step, whether decode or span; `slot` is that of the time of scheduling."""

    completion: Completion
    slot: int
    num_tokens: int
    sample: bool


def entries(step: ScheduledStep) -> list[Entry]:
    """Every completion that computes, in batch order."""
    decodes = zip(step.decodes.completions, step.decodes.slots, strict=True)
    return [
        *(Entry(completion, slot, 1, True) for completion, slot in decodes),
        *(Entry(span.completion, span.slot, span.end - span.begin, span.sample) for span in step.spans),
    ]


@dataclass
class Bench:
    """A scheduler and the fake ranks that do its plans, as many steps ahead as the configuration allows.

    `steps_out`: how many may be out if they only decode, where that is more. `outputs` are the tokens that were told,
    by request id or, for completions but the first, `ID/INDEX`.
    """

    config: EngineConfig
    num_blocks: int
    steps_out: int | None = None
    num_snapshots: int = 0
    proposer: NGramProposer | None = None
    scheduler: Scheduler = field(init=False)
    ranks: FakeRanks = field(init=False)
    in_flight: StepsInFlight = field(default_factory=StepsInFlight)
    outputs: dict[str, list[int]] = field(default_factory=dict)
    updates: dict[str, list[CompletionUpdate]] = field(default_factory=dict)
    prompt_logprobs: dict[str, list[logprobs_pb2.TokenLogprobs]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.block_size = self.config.block_size
        self.scheduler = Scheduler(
            self.config,
            num_blocks=self.num_blocks,
            num_snapshots=self.num_snapshots,
            speculator=Speculator(self.config.speculation, self.proposer),
        )
        self.ranks = self.new_ranks()

    def new_ranks(self) -> FakeRanks:
        return FakeRanks(
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            vocab_size=self.config.vocab_size,
            max_num_seqs=self.config.max_num_seqs,
            num_snapshots=self.num_snapshots,
            keeps_states=self.config.keeps_states,
        )

    def add(self, asked: GenerationRequest, *, now: float = 0.0) -> Request:
        request = self.scheduler.add(asked, now=now)
        for completion in request.completions:
            self.outputs[name_of(completion)] = []
            self.updates[name_of(completion)] = []
        return request

    def send(self, now: float = 0.0) -> ScheduledStep | None:
        """Schedule a step, if one can go out; ranks do it, and their result is on its way."""
        step = self.schedule(now)
        if step is not None:
            if [completion.slot for completion in step.masked] != list(step.plan.masked_slots):
                raise PlanError("masked completions and masked slots do not fit")
            if step.num_tokens > self.config.max_num_batched_tokens:
                raise PlanError(f"{step.num_tokens} tokens are more than the budget")
            sent = self.in_flight.submit(step)
            if sent.owes_masks:
                self.in_flight.send_masks(sent, ())
            self.in_flight.answer(self.ranks.execute(step.plan))
        return step

    def schedule(self, now: float = 0.0) -> ScheduledStep | None:
        """Schedule a step and send it nowhere."""
        return self.scheduler.schedule(now, in_flight=self.in_flight, steps_out=self.steps_out)

    @property
    def is_idle(self) -> bool:
        return self.scheduler.is_idle and not self.in_flight

    def receive(self) -> StepOutcome:
        """Apply the oldest result that is on its way."""
        taken = self.in_flight.take()
        assert taken is not None
        assert taken.result is not None
        outcome = self.scheduler.apply(taken.step, taken.result)
        for update in outcome.updates:
            self.outputs[name_of(update.completion)].append(update.token_id)
            self.updates[name_of(update.completion)].append(update)
        for request, positions in outcome.prompt_logprobs:
            if request.request_id in self.prompt_logprobs:
                raise PlanError(f"prompt log-probabilities of {request.request_id} came twice")
            self.prompt_logprobs[request.request_id] = positions
        return outcome

    def step(self, now: float = 0.0) -> ScheduledStep | None:
        """One whole step that computes something, after those in flight; the pool's counts are checked around it."""
        while self.in_flight:
            self.receive()
        step = self.send(now)
        self.scheduler.check_integrity()
        if step is not None:
            self.receive()
            self.scheduler.check_integrity()
        return step if step is not None and step.computes else None

    def run(self, *, max_steps: int = 10_000) -> None:
        """To the end of every request, with steps in flight."""
        for _ in range(max_steps):
            if self.send() is None:
                if not self.in_flight:
                    return
                self.receive()
                self.scheduler.check_integrity()
        raise TimeoutError(f"requests are still in flight after {max_steps} steps")

    def lose_group(self) -> None:
        """The ranks are gone, with the steps in flight."""
        self.in_flight = StepsInFlight()
        self.scheduler.lose_group()

    def open_group(self, *, num_blocks: int | None = None, block_size: int | None = None) -> list[Request]:
        """Other ranks; the requests that do not fit them."""
        self.num_blocks = num_blocks or self.num_blocks
        self.block_size = block_size or self.block_size
        self.in_flight = StepsInFlight()
        self.ranks = self.new_ranks()
        refused = self.scheduler.open_group(
            num_blocks=self.num_blocks, block_size=self.block_size, num_snapshots=self.num_snapshots
        )
        return [request for request, _ in refused]


def name_of(completion: Completion) -> str:
    """The request's id, with the index of completions but the first."""
    request_id = completion.request.request_id
    return f"{request_id}/{completion.index}" if completion.index else request_id


def has_requests(scheduler: Scheduler) -> bool:
    """Whether there is a request that has not ended."""
    return bool(scheduler._requests)
