"""The engine core over ranks in memory: streams, ends, deadlines, group loss."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import pytest

from hetero_api.v1 import ranks_pb2
from hetero_gateway.engine.config import EngineConfig
from hetero_gateway.engine.core import EngineCore
from hetero_gateway.engine.errors import (
    DeadlineExceeded,
    DuplicateRequest,
    EngineError,
    EngineFault,
    EngineUnavailable,
    GroupLost,
    InvalidRequest,
    QueueFull,
)
from hetero_gateway.engine.request import FinishReason, GenerationRequest
from hetero_gateway.engine.stream import FinishedEvent, RequestStream, TokensEvent
from hetero_gateway.engine.tokenizer import TextTokenizer
from tests.unit.engine.engine_setup import engine_config, generation
from tests.unit.engine.fake_ranks import FakeRanks, tokens_alone
from tests.unit.engine.tiny_tokenizers import byte_level_tokenizer

pytestmark = pytest.mark.unit

TOKENIZER = TextTokenizer(byte_level_tokenizer(), byte_level=True, chat_template=None)
VOCAB_SIZE = TOKENIZER.vocab_size
NUM_BLOCKS = 40
LIMIT_S = 20.0


class RanksInMemory:
    """A StepExecutor. With `hold`, a step is computed but its answer waits for `let_go`."""

    def __init__(self, config: EngineConfig, *, num_blocks: int = NUM_BLOCKS) -> None:
        self._ranks = FakeRanks(
            num_blocks=num_blocks,
            block_size=config.block_size,
            vocab_size=config.vocab_size,
            max_num_seqs=config.max_num_seqs,
        )
        self._may_answer = asyncio.Event()
        self._may_answer.set()
        self.steps = 0
        self.cancelled = False
        self.spoil: Callable[[ranks_pb2.StepResult], object] = lambda result: None

    def hold(self) -> None:
        self._may_answer.clear()

    def let_go(self) -> None:
        self._may_answer.set()

    async def execute(self, plan: ranks_pb2.StepPlan) -> ranks_pb2.StepResult:
        result = self._ranks.execute(plan)
        self.steps += 1
        try:
            await self._may_answer.wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        self.spoil(result)
        return result


@dataclass
class Engine:
    core: EngineCore
    ranks: RanksInMemory
    config: EngineConfig
    broken: list[str] = field(default_factory=list)

    def new_group(self) -> None:
        self.ranks = RanksInMemory(self.config)
        self.core.open(self.ranks, num_blocks=NUM_BLOCKS, on_broken=self.broken.append)


@contextlib.asynccontextmanager
async def engine(
    config: EngineConfig | None = None, *, clock: Callable[[], float] = time.monotonic
) -> AsyncIterator[Engine]:
    config = config or engine_config(vocab_size=VOCAB_SIZE)
    core = EngineCore(config, new_detokenizer=TOKENIZER.detokenizer, clock=clock)
    running = Engine(core, RanksInMemory(config), config)
    running.new_group()
    task = asyncio.create_task(core.run())
    try:
        async with asyncio.timeout(LIMIT_S):
            yield running
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    assert core.stats().used_blocks == 0


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop turn until `condition` holds; the engine's own limit bounds it."""
    while not condition():  # noqa: ASYNC110 - the conditions are counts, no events
        await asyncio.sleep(0)


@dataclass
class Answer:
    token_ids: list[int]
    text: str
    end: FinishedEvent | EngineError
    num_events: int

    @property
    def finished(self) -> FinishedEvent:
        assert isinstance(self.end, FinishedEvent), self.end
        return self.end


async def read(stream: RequestStream) -> Answer:
    """Read a stream to its end, and check that there is one, and nothing after it."""
    tokens: list[int] = []
    text: list[str] = []
    ends: list[FinishedEvent | EngineError] = []
    num_events = 0
    try:
        async for event in stream:
            assert not ends
            if isinstance(event, TokensEvent):
                num_events += 1
                tokens.extend(event.token_ids)
                text.append(event.text)
            else:
                ends.append(event)
    except EngineError as error:
        ends.append(error)
    assert len(ends) == 1
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    return Answer(tokens, "".join(text), ends[0], num_events)


def alone(asked: GenerationRequest, count: int) -> list[int]:
    return tokens_alone(asked.prompt_token_ids, seed=asked.sampling.seed, count=count, vocab_size=VOCAB_SIZE)


async def test_mixed_requests_all_get_what_they_would_get_alone() -> None:
    config = engine_config(vocab_size=VOCAB_SIZE, max_num_seqs=6, max_num_batched_tokens=16)
    async with engine(config) as it:
        asked = [
            generation(f"r{index}", range(index % 5, index % 5 + 1 + 3 * index % 29), max_tokens=1 + index % 13)
            for index in range(32)
        ]
        answers = await asyncio.gather(*(read(it.core.submit(request)) for request in asked))
        for request, answer in zip(asked, answers, strict=True):
            expected = alone(request, request.sampling.max_tokens or 0)
            assert answer.token_ids == expected
            assert answer.text == TOKENIZER.decode(expected)
            assert answer.finished.reason is FinishReason.LENGTH
            assert answer.finished.usage.prompt_tokens == len(request.prompt_token_ids)
            assert answer.finished.usage.completion_tokens == len(expected)
        assert it.core.stats().finished_requests == 32
        assert it.core.stats().used_blocks == 0


async def test_timings_are_in_order() -> None:
    async with engine() as it:
        timings = (await read(it.core.submit(generation("r", range(3))))).finished.timings
        assert timings.queued_s is not None
        assert timings.first_token_s is not None
        assert 0 <= timings.queued_s <= timings.first_token_s <= timings.total_s


async def test_usage_tells_cached_tokens() -> None:
    async with engine() as it:
        await read(it.core.submit(generation("first", range(9))))
        assert (await read(it.core.submit(generation("second", range(9))))).finished.usage.cached_tokens == 8


async def test_abort_frees_blocks_within_one_step() -> None:
    async with engine() as it:
        stream = it.core.submit(generation("r", range(9), max_tokens=40))
        other = it.core.submit(generation("other", range(20, 23), max_tokens=6))
        await until(lambda: it.ranks.steps >= 3)
        it.ranks.hold()
        steps = it.ranks.steps
        await until(lambda: it.ranks.steps > steps)
        assert it.core.abort("r")
        assert not it.core.abort("r")
        answer = await read(stream)
        assert answer.finished.reason is FinishReason.ABORT
        assert answer.token_ids == alone(generation("r", range(9)), len(answer.token_ids))
        assert answer.text == TOKENIZER.decode(answer.token_ids)
        held = it.core.stats().used_blocks
        steps = it.ranks.steps
        it.ranks.let_go()
        await until(lambda: it.ranks.steps > steps)
        assert it.core.stats().used_blocks < held
        assert it.core.stats().used_blocks <= 3
        assert len((await read(other)).token_ids) == 6


async def test_cancelled_stream_ends_its_own_request_only() -> None:
    async with engine() as it:
        first = it.core.submit(generation("r", range(3), max_tokens=40))
        first.cancel()
        second = it.core.submit(generation("r", range(3), max_tokens=4))
        first.cancel()
        assert (await read(first)).finished.reason is FinishReason.ABORT
        assert (await read(second)).finished.reason is FinishReason.LENGTH


async def test_slow_reader_gets_everything_in_one_piece() -> None:
    async with engine() as it:
        stream = it.core.submit(generation("r", range(3), max_tokens=30))
        await until(lambda: it.core.stats().finished_requests == 1)
        answer = await read(stream)
        assert answer.num_events == 1
        assert len(answer.token_ids) == 30


async def test_reader_that_keeps_up_gets_each_token() -> None:
    async with engine() as it:
        stream = it.core.submit(generation("r", range(3), max_tokens=5))
        it.ranks.hold()
        for _ in range(5):
            it.ranks.let_go()
            event = await anext(stream)
            assert isinstance(event, TokensEvent)
            assert len(event.token_ids) == 1
        assert isinstance(await anext(stream), FinishedEvent)


async def test_waiting_request_ends_at_its_deadline_without_being_computed() -> None:
    async with engine(engine_config(vocab_size=VOCAB_SIZE, max_num_seqs=1)) as it:
        it.ranks.hold()
        running = it.core.submit(generation("running", range(3), max_tokens=2))
        await until(lambda: it.ranks.steps == 1)
        waiting = it.core.submit(generation("late", range(20, 23), deadline_s=time.monotonic() + 0.02))
        answer = await read(waiting)
        assert isinstance(answer.end, DeadlineExceeded)
        assert "while it waited" in str(answer.end)
        assert answer.token_ids == []
        it.ranks.let_go()
        await read(running)
        assert it.core.stats().prompt_tokens == 3


async def test_running_request_ends_at_its_deadline_and_frees_its_blocks() -> None:
    async with engine() as it:
        it.ranks.hold()
        stream = it.core.submit(generation("r", range(3), max_tokens=40, deadline_s=time.monotonic() + 0.02))
        answer = await read(stream)
        assert isinstance(answer.end, DeadlineExceeded)
        it.ranks.let_go()
        await until(lambda: it.core.stats().used_blocks == 0)


async def test_later_deadline_still_wakes_after_a_sooner_one() -> None:
    async with engine() as it:
        it.ranks.hold()
        now = time.monotonic()
        later = it.core.submit(generation("later", range(3), max_tokens=40, deadline_s=now + 0.04))
        sooner = it.core.submit(generation("sooner", range(3), max_tokens=40, deadline_s=now + 0.02))
        assert isinstance((await read(sooner)).end, DeadlineExceeded)
        assert isinstance((await read(later)).end, DeadlineExceeded)


async def start_some(it: Engine) -> list[RequestStream]:
    """Running and waiting requests, with a step in flight."""
    it.ranks.hold()
    streams = [it.core.submit(generation(f"r{index}", range(3 + index), max_tokens=20)) for index in range(7)]
    await until(lambda: it.ranks.steps == 1)
    return streams


async def assert_all_lost(it: Engine, streams: list[RequestStream], *, reason: str) -> None:
    for stream in streams:
        answer = await read(stream)
        assert isinstance(answer.end, EngineUnavailable)
        assert reason in str(answer.end)
    assert not it.core.is_serving
    assert it.core.stats().num_blocks == 0
    with pytest.raises(EngineUnavailable, match=reason):
        it.core.submit(generation("next", range(3)))


async def test_lost_group_ends_every_stream_once_and_cancels_its_step() -> None:
    async with engine() as it:
        streams = await start_some(it)
        it.core.lose("rank 1 died")
        it.core.lose("told twice")
        await assert_all_lost(it, streams, reason="rank 1 died")
        await until(lambda: it.ranks.cancelled)
        assert it.broken == []


async def test_error_of_a_lost_groups_step_is_left_aside(caplog: pytest.LogCaptureFixture) -> None:
    class Sulking(RanksInMemory):
        async def execute(self, plan: ranks_pb2.StepPlan) -> ranks_pb2.StepResult:
            try:
                return await super().execute(plan)
            except asyncio.CancelledError:
                raise GroupLost("cancelled") from None

    async with engine() as it:
        it.ranks = Sulking(it.config)
        it.core.open(it.ranks, num_blocks=NUM_BLOCKS, on_broken=it.broken.append)
        streams = await start_some(it)
        it.core.lose("rank 1 died")
        it.new_group()
        for stream in streams:
            assert isinstance((await read(stream)).end, EngineUnavailable)
        assert len((await read(it.core.submit(generation("r", range(3))))).token_ids) == 4
        assert it.broken == []
    gc.collect()
    assert "never retrieved" not in caplog.text


async def test_group_that_says_it_is_lost_ends_every_stream_once() -> None:
    async with engine() as it:
        streams = await start_some(it)

        def spoil(result: ranks_pb2.StepResult) -> None:
            raise GroupLost("rank 0: out of memory")

        it.ranks.spoil = spoil
        it.ranks.let_go()
        await assert_all_lost(it, streams, reason="out of memory")
        assert it.broken == ["rank 0: out of memory"]


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda result: setattr(result, "step_id", 9), "the result is of step 9"),
        (lambda result: result.slots.__setitem__(0, 3), "had to sample"),
        (lambda result: result.token_ids.pop(), "tokens came"),
    ],
    ids=["wrong step", "unknown slot", "missing token"],
)
async def test_answer_that_does_not_fit_its_plan_loses_the_group(
    spoil: Callable[[ranks_pb2.StepResult], object], problem: str
) -> None:
    async with engine() as it:
        streams = await start_some(it)
        it.ranks.spoil = spoil
        it.ranks.let_go()
        await assert_all_lost(it, streams, reason=problem)
        assert len(it.broken) == 1
        assert problem in it.broken[0]


async def test_bug_in_a_step_ends_every_stream_as_a_fault(caplog: pytest.LogCaptureFixture) -> None:
    async with engine() as it:
        streams = await start_some(it)

        def spoil(result: ranks_pb2.StepResult) -> None:
            raise KeyError("oops")

        it.ranks.spoil = spoil
        it.ranks.let_go()
        for stream in streams:
            assert isinstance((await read(stream)).end, EngineFault)
        assert len(it.broken) == 1
        assert "engine fault in a step" in caplog.text
        it.new_group()
        assert len((await read(it.core.submit(generation("r", range(3))))).token_ids) == 4


async def test_new_group_serves_after_a_loss_and_hits_nothing_old() -> None:
    async with engine() as it:
        await read(it.core.submit(generation("r", range(9))))
        streams = await start_some_more(it)
        it.core.lose("gone")
        it.new_group()
        assert it.core.is_serving
        asked = generation("again", range(9))
        answer = await read(it.core.submit(asked))
        assert answer.token_ids == alone(asked, 4)
        assert answer.finished.usage.cached_tokens == 0
        for stream in streams:
            assert isinstance((await read(stream)).end, EngineUnavailable)


async def start_some_more(it: Engine) -> list[RequestStream]:
    it.ranks.hold()
    steps = it.ranks.steps
    stream = it.core.submit(generation("held", range(9), max_tokens=20))
    await until(lambda: it.ranks.steps > steps)
    return [stream]


async def test_group_opened_over_another_ends_the_old_ones_streams() -> None:
    async with engine() as it:
        streams = await start_some(it)
        it.new_group()
        for stream in streams:
            assert isinstance((await read(stream)).end, EngineUnavailable)
        assert len((await read(it.core.submit(generation("r", range(3))))).token_ids) == 4


async def test_requests_are_refused_before_the_first_group() -> None:
    core = EngineCore(engine_config(vocab_size=VOCAB_SIZE), new_detokenizer=TOKENIZER.detokenizer)
    with pytest.raises(EngineUnavailable, match="no group"):
        core.submit(generation("r", range(3)))


async def test_shutdown_ends_every_stream() -> None:
    async with engine() as it:
        streams = await start_some(it)
    for stream in streams:
        answer = await read(stream)
        assert isinstance(answer.end, EngineUnavailable)
        assert "shutting down" in str(answer.end)


async def test_draining_finishes_what_it_has_and_accepts_nothing() -> None:
    async with engine() as it:
        stream = it.core.submit(generation("r", range(3), max_tokens=6))
        it.core.drain()
        with pytest.raises(EngineUnavailable, match="draining"):
            it.core.submit(generation("next", range(3)))
        assert len((await read(stream)).token_ids) == 6


async def test_refused_requests_leave_nothing_behind() -> None:
    async with engine(engine_config(vocab_size=VOCAB_SIZE, max_num_seqs=1, max_queued_requests=1)) as it:
        first = it.core.submit(generation("r", range(3)))
        with pytest.raises(DuplicateRequest):
            it.core.submit(generation("r", range(3)))
        with pytest.raises(InvalidRequest):
            it.core.submit(generation("empty", []))
        second = it.core.submit(generation("second", range(3)))
        with pytest.raises(QueueFull):
            it.core.submit(generation("third", range(3)))
        assert not it.core.abort("third")
        assert [len((await read(stream)).token_ids) for stream in (first, second)] == [4, 4]


async def test_stop_string_cuts_the_text_and_frees_the_request() -> None:
    asked = generation("r", range(3), max_tokens=40, seed=5)
    full = TOKENIZER.decode(alone(asked, 40))
    stop = full[12:15]
    where = full.index(stop)
    async with engine() as it:
        answer = await read(it.core.submit(generation("r", range(3), max_tokens=40, seed=5, stop=(stop,))))
        assert answer.text == full[:where]
        assert answer.finished.reason is FinishReason.STOP
        assert (answer.finished.stop_text, answer.finished.stop_token_id) == (stop, None)
        assert len(answer.token_ids) < 40
        assert answer.finished.usage.completion_tokens == len(answer.token_ids)
        await turn_loop(10)
        stats = it.core.stats()
        assert (stats.used_blocks, stats.running_requests) == (0, 0)
        assert stats.generated_tokens == len(answer.token_ids)
        assert it.core.is_serving


async def test_text_held_for_a_stop_string_is_shown_at_the_end() -> None:
    asked = generation("r", range(3), max_tokens=6)
    full = TOKENIZER.decode(alone(asked, 6))
    async with engine() as it:
        stop = full[-1] + "never comes"
        answer = await read(it.core.submit(generation("r", range(3), max_tokens=6, stop=(stop,))))
        assert answer.text == full
        assert answer.finished.reason is FinishReason.LENGTH
        assert answer.finished.stop_text is None


async def test_stop_token_is_reported_and_is_no_text() -> None:
    asked = generation("r", range(3), max_tokens=20)
    tokens = alone(asked, 4)
    stop = frozenset({tokens[3]})
    assert tokens[3] not in tokens[:3]
    async with engine() as it:
        answer = await read(it.core.submit(generation("r", range(3), max_tokens=20, stop_token_ids=stop)))
        assert answer.token_ids == tokens
        assert answer.text == TOKENIZER.decode(tokens[:3])
        assert answer.finished.stop_token_id == tokens[3]


async def test_idle_engine_does_nothing_until_the_next_request() -> None:
    calls = 0

    def clock() -> float:
        nonlocal calls
        calls += 1
        return time.monotonic()

    async with engine(clock=clock) as it:
        await read(it.core.submit(generation("r", range(3))))
        await turn_loop(10)
        calls = 0
        await turn_loop(1000)
        assert calls == 0
        assert len((await read(it.core.submit(generation("again", range(3))))).token_ids) == 4


async def turn_loop(times: int) -> None:
    for _ in range(times):
        await asyncio.sleep(0)
