"""An engine core over ranks in memory, for the tests of this folder."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import pytest

from hetero_api.v1 import inference_pb2, ranks_pb2
from hetero_api.v1.logprobs_pb2 import TokenLogprobs
from hetero_gateway.engine.config import EngineConfig
from hetero_gateway.engine.core import EngineCore
from hetero_gateway.engine.errors import EngineError, GroupLost
from hetero_gateway.engine.request import GenerationRequest, derived_seed
from hetero_gateway.engine.speculation.ngram import NGramProposer
from hetero_gateway.engine.steps_in_flight import StepInFlight, StepsInFlight
from hetero_gateway.engine.stream import RequestStream
from hetero_gateway.engine.text.tokenizer import TextTokenizer
from tests.unit.engine.engine_setup import engine_config
from tests.unit.engine.fake_ranks import FakeRanks, tokens_alone
from tests.unit.engine.tiny_tokenizers import byte_level_tokenizer

TOKENIZER = TextTokenizer(byte_level_tokenizer(), byte_level=True, chat_template=None)
VOCAB_SIZE = TOKENIZER.vocab_size
NUM_BLOCKS = 40
LIMIT_S = 20.0


class RanksInMemory:
    """Ranks behind a record of steps. With `hold`, steps are taken but done only after `let_go`; `do_one` does one."""

    def __init__(self, config: EngineConfig, *, num_blocks: int = NUM_BLOCKS) -> None:
        self._config = config
        self.reset_cache(num_blocks=num_blocks, block_size=config.block_size)
        self.in_flight = StepsInFlight(send=self._take, send_masks=self._take_masks)
        self._is_holding = False
        self._lost: str | None = None
        self.steps = 0
        """Plans that came."""
        self.most_out = 0
        self.spoil: Callable[[ranks_pb2.StepResult], object] = lambda result: None

    def hold(self) -> None:
        self._is_holding = True

    def let_go(self) -> None:
        self._is_holding = False
        while self.can_do:
            self.do_one()

    def reset_cache(self, *, num_blocks: int, block_size: int) -> None:
        """An empty cache."""
        self._ranks = FakeRanks(
            num_blocks=num_blocks,
            block_size=block_size,
            vocab_size=self._config.vocab_size,
            max_num_seqs=self._config.max_num_seqs,
        )

    @property
    def num_out(self) -> int:
        return sum(each.result is None for each in self.in_flight)

    @property
    def num_bound_slots(self) -> int:
        return self._ranks.num_bound_slots

    def lose(self, reason: str) -> None:
        """What is out, and what comes later, raises GroupLost."""
        self._lost = reason
        self.in_flight.fail(GroupLost(reason))

    # --- what comes from the core -----------------------------------------------------------------------

    def _take(self, step: StepInFlight) -> None:
        self.steps += 1
        self.most_out = max(self.most_out, self.num_out)
        if not self._is_holding:
            self.let_go()

    def _take_masks(self, step: StepInFlight) -> None:
        proposed = sum(len(step.step.proposals.get(slot, ())) for slot in step.step.plan.masked_slots)
        assert len(step.masks) == len(step.step.plan.masked_slots) + proposed
        assert list(self.in_flight) == [step], "masks came before the results that they follow from"
        if not self._is_holding:
            self.let_go()

    # --- what the ranks do ------------------------------------------------------------------------------

    @property
    def can_do(self) -> bool:
        """Whether the oldest plan could be done now."""
        awaited = self.in_flight.awaited
        return self._lost is None and awaited is not None and not awaited.owes_masks

    def do_one(self) -> None:
        """Do the oldest plan and answer it."""
        awaited = self.in_flight.awaited
        assert awaited is not None
        plan = ranks_pb2.StepPlan.FromString(awaited.step.plan.SerializeToString())
        try:
            result = self._ranks.execute(plan, masks=awaited.masks)
            self.spoil(result)
        except Exception as error:
            self._lost = str(error)
            self.in_flight.fail(error)
        else:
            self.in_flight.answer(result)


@dataclass
class Engine:
    core: EngineCore
    ranks: RanksInMemory
    config: EngineConfig
    broken: list[str] = field(default_factory=list)

    def new_group(self, *, num_blocks: int = NUM_BLOCKS) -> None:
        self.ranks = RanksInMemory(self.config, num_blocks=num_blocks)
        self.open(num_blocks=num_blocks)

    def open(self, *, num_blocks: int = NUM_BLOCKS) -> None:
        self.core.open(
            self.ranks.in_flight, num_blocks=num_blocks, block_size=self.config.block_size, on_broken=self.broken.append
        )


@contextlib.asynccontextmanager
async def engine(
    config: EngineConfig | None = None,
    *,
    clock: Callable[[], float] = time.monotonic,
    proposer: NGramProposer | None = None,
) -> AsyncIterator[Engine]:
    config = config or engine_config(vocab_size=VOCAB_SIZE)
    core = EngineCore(config, new_detokenizer=TOKENIZER.detokenizer, clock=clock, proposer=proposer)
    running = Engine(core, RanksInMemory(config), config)
    running.open()
    task = asyncio.create_task(core.run())
    try:
        async with asyncio.timeout(LIMIT_S):
            yield running
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    assert core.stats().used_blocks == 0
    assert core.is_idle


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop turn until `condition` holds; the engine's own limit bounds it."""
    while not condition():  # noqa: ASYNC110 - the conditions are counts, no events
        await asyncio.sleep(0)


async def turn_loop(times: int = 10) -> None:
    for _ in range(times):
        await asyncio.sleep(0)


@dataclass
class Answer:
    """All that a stream said; token ids, text and logprobs by completion."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: list[TokenLogprobs] | None = None
    ends: dict[int, inference_pb2.Finished] = field(default_factory=dict)
    error: EngineError | None = None
    num_events: int = 0

    @property
    def token_ids(self) -> list[int]:
        return self.tokens.get(0, [])

    @property
    def text(self) -> str:
        return self.texts.get(0, "")

    @property
    def finished(self) -> inference_pb2.Finished:
        assert self.error is None, self.error
        return self.ends[0]


async def read(stream: RequestStream, answer: Answer | None = None) -> Answer:
    """Read a stream to its end, and check that there is one, and nothing after it. Goes on with `answer` if given."""
    answer = answer or Answer()
    try:
        async for event in stream:
            _note(answer, event)
    except EngineError as error:
        answer.error = error
    assert answer.error is not None or len(answer.ends) == len(stream.feeds)
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    return answer


def _note(answer: Answer, event: inference_pb2.Delta | inference_pb2.PromptLogprobs | inference_pb2.Finished) -> None:
    if isinstance(event, inference_pb2.PromptLogprobs):
        assert answer.prompt_logprobs is None
        assert not answer.num_events
        answer.prompt_logprobs = list(event.positions)
        return
    assert event.index not in answer.ends, "an event after the completion's end"
    if isinstance(event, inference_pb2.Finished):
        answer.ends[event.index] = event
        return
    answer.num_events += 1
    answer.tokens.setdefault(event.index, []).extend(event.token_ids)
    answer.texts[event.index] = answer.texts.get(event.index, "") + event.text
    answer.logprobs.setdefault(event.index, []).extend(event.logprobs)


def alone(asked: GenerationRequest, count: int, *, index: int = 0) -> list[int]:
    """The first tokens of a completion as nothing but the request decides them."""
    seed = derived_seed(asked.sampling.seed, index)
    return tokens_alone(asked.prompt_token_ids, seed=seed, count=count, vocab_size=VOCAB_SIZE)
