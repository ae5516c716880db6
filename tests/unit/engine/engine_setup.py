"""Small engines and requests for the tests of this folder."""

from __future__ import annotations

from dataclasses import dataclass, field

from hetero_gateway.engine.config import EngineConfig
from hetero_gateway.engine.request import GenerationRequest, Request, SamplingConfig
from hetero_gateway.engine.scheduler import Scheduler
from hetero_gateway.engine.step import RequestUpdate, ScheduledStep
from tests.unit.engine.fake_ranks import FakeRanks

VOCAB_SIZE = 64
NO_EOS: frozenset[int] = frozenset()


def engine_config(
    *,
    max_num_seqs: int = 4,
    max_num_batched_tokens: int = 64,
    block_size: int = 4,
    max_model_len: int = 64,
    max_queued_requests: int = 100,
    enable_prefix_caching: bool = True,
    eos_token_ids: frozenset[int] = NO_EOS,
    vocab_size: int = VOCAB_SIZE,
) -> EngineConfig:
    return EngineConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        block_size=block_size,
        max_model_len=max_model_len,
        max_queued_requests=max_queued_requests,
        enable_prefix_caching=enable_prefix_caching,
        eos_token_ids=eos_token_ids,
        vocab_size=vocab_size,
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
) -> GenerationRequest:
    return GenerationRequest(
        request_id=request_id,
        prompt_token_ids=tuple(prompt),
        sampling=SamplingConfig(
            seed=seed, max_tokens=max_tokens, stop=stop, stop_token_ids=stop_token_ids, ignore_eos=ignore_eos
        ),
        cache_salt=salt,
        deadline_s=deadline_s,
    )


@dataclass
class Bench:
    """A scheduler and the fake ranks that do its plans. `outputs` are the tokens of every request, by id."""

    config: EngineConfig
    num_blocks: int
    scheduler: Scheduler = field(init=False)
    ranks: FakeRanks = field(init=False)
    outputs: dict[str, list[int]] = field(default_factory=dict)
    updates: dict[str, list[RequestUpdate]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.config, num_blocks=self.num_blocks)
        self.ranks = self.new_ranks()

    def new_ranks(self) -> FakeRanks:
        return FakeRanks(
            num_blocks=self.num_blocks,
            block_size=self.config.block_size,
            vocab_size=self.config.vocab_size,
            max_num_seqs=self.config.max_num_seqs,
        )

    def add(self, asked: GenerationRequest) -> Request:
        self.outputs[asked.request_id] = []
        return self.scheduler.add(asked, now=0.0)

    def step(self) -> ScheduledStep | None:
        """One whole step, the pool's counts checked around it."""
        step = self.scheduler.schedule(0.0)
        if step is not None:
            self.scheduler.check_integrity()
            self.take(self.scheduler.apply(self.ranks.execute(step.plan)))
            self.scheduler.check_integrity()
        return step

    def take(self, updates: list[RequestUpdate]) -> None:
        for update in updates:
            self.outputs[update.request.request_id].append(update.token_id)
            self.updates.setdefault(update.request.request_id, []).append(update)

    def run(self, *, max_steps: int = 10_000) -> None:
        for _ in range(max_steps):
            if self.step() is None:
                return
        raise TimeoutError(f"requests are still in flight after {max_steps} steps")
