"""The engine core without a group: streams pause and go on, wait no longer than they may, end when none will come."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable

import pytest

from hetero_api.v1 import inference_pb2, ranks_pb2
from hetero_gateway.engine import core
from hetero_gateway.engine.core import EngineCore
from hetero_gateway.engine.errors import (
    DeadlineExceeded,
    EngineFault,
    EngineUnavailable,
    GroupLost,
    InvalidRequest,
    QueueFull,
)
from hetero_gateway.engine.request import GenerationRequest
from hetero_gateway.engine.stream import RequestStream
from tests.unit.engine.core_setup import (
    NUM_BLOCKS,
    TOKENIZER,
    VOCAB_SIZE,
    Answer,
    Engine,
    alone,
    engine,
    read,
    turn_loop,
    until,
)
from tests.unit.engine.engine_setup import engine_config, generation

pytestmark = pytest.mark.unit

COUNT = 20


class Clock:
    """Time that passes when the test says so."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def some_requests() -> list[GenerationRequest]:
    """More than run at once."""
    return [generation(f"r{index}", range(3 + index), max_tokens=COUNT, seed=index) for index in range(7)]


async def start(it: Engine, asked: list[GenerationRequest], *, steps: int = 0) -> list[RequestStream]:
    """Submit, let ranks do `steps`, and leave the rest in flight."""
    it.ranks.hold()
    streams = [it.core.submit(request) for request in asked]
    for _ in range(steps):
        await until(lambda: it.ranks.num_out > 0)
        it.ranks.do_one()
        await turn_loop(4)
    await until(lambda: it.ranks.num_out == 2)
    return streams


def assert_whole(asked: GenerationRequest, answer: Answer) -> None:
    expected = alone(asked, COUNT)
    assert answer.token_ids == expected
    assert answer.text == TOKENIZER.decode(expected)
    assert answer.finished.usage.completion_tokens == COUNT


@pytest.mark.parametrize("steps", [0, 1, 4, 11])
async def test_streams_go_on_in_the_next_epoch_without_a_lost_or_doubled_token(steps: int) -> None:
    async with engine() as it:
        asked = some_requests()
        streams = await start(it, asked, steps=steps)
        reading = [asyncio.create_task(read(stream)) for stream in streams]
        it.core.lose("rank 1 died")
        assert it.core.paused_requests == 7
        assert not it.core.is_serving
        await turn_loop()
        it.new_group()
        for request, answer in zip(asked, await asyncio.gather(*reading), strict=True):
            assert_whole(request, answer)
        assert it.core.paused_requests == 0
        assert it.core.recoveries == 1
        assert it.broken == []


async def test_a_request_that_breaks_every_group_ends_and_those_that_wait_do_not() -> None:
    async with engine() as it:
        asked = some_requests()
        streams = [it.core.submit(request) for request in asked[:1]]
        for loss in range(core.MOST_LOSSES):
            if loss:
                it.new_group()
            it.ranks.hold()
            await until(lambda: it.ranks.num_out > 0)
            late = it.core.submit(asked[1 + loss])  # it waits for its first step
            it.core.lose("rank 0 failed: no")
            streams.append(late)
        error = (await read(streams[0])).error
        assert isinstance(error, InvalidRequest)
        assert error.problem == "ranks were lost 3 times in a row while they computed this: rank 0 failed: no"
        reading = [asyncio.create_task(read(stream)) for stream in streams[1:]]
        it.new_group()
        for request, answer in zip(asked[1:], await asyncio.gather(*reading), strict=False):
            assert_whole(request, answer)


async def test_losses_between_which_a_request_gets_on_are_not_its_fault() -> None:
    async with engine() as it:
        asked = some_requests()[0]
        stream = it.core.submit(asked)
        for _ in range(2 * core.MOST_LOSSES):
            it.ranks.hold()
            await until(lambda: it.ranks.num_out > 0)
            it.ranks.do_one()
            await turn_loop(4)
            await until(lambda: it.ranks.num_out > 0)
            it.core.lose("rank 1 died")
            it.new_group()
        assert_whole(asked, await read(stream))


async def test_a_result_of_a_lost_group_counts_for_nothing() -> None:
    async with engine() as it:
        asked = some_requests()
        streams = await start(it, asked, steps=2)
        old = it.ranks
        it.core.lose("rank 1 died")
        old.let_go()
        await turn_loop()
        it.new_group()
        for request, stream in zip(asked, streams, strict=True):
            assert_whole(request, await read(stream))


async def test_a_result_that_came_just_before_the_loss_was_seen_is_not_taken_twice() -> None:
    async with engine() as it:
        asked = some_requests()
        streams = await start(it, asked, steps=2)
        it.ranks.do_one()
        it.core.lose("rank 1 died")
        it.new_group()
        for request, stream in zip(asked, streams, strict=True):
            assert_whole(request, await read(stream))


async def test_requests_queue_while_there_is_no_group_and_the_queue_stays_bounded() -> None:
    config = engine_config(vocab_size=VOCAB_SIZE, max_num_seqs=2, max_queued_requests=1)
    async with engine(config) as it:
        it.core.lose("rank 1 died")
        asked = some_requests()
        streams = [it.core.submit(request) for request in asked[:3]]
        with pytest.raises(QueueFull):
            it.core.submit(asked[3])
        it.new_group()
        for request, stream in zip(asked[:3], streams, strict=True):
            assert_whole(request, await read(stream))


async def test_who_has_waited_too_long_for_a_group_ends_unavailable() -> None:
    clock = Clock()
    async with engine(engine_config(vocab_size=VOCAB_SIZE, pause_limit_s=0.02), clock=clock) as it:
        asked = some_requests()
        early = await start(it, asked[:2], steps=3)
        it.core.lose("rank 1 died")
        clock.now_s += 0.015
        late = it.core.submit(asked[2])
        clock.now_s += 0.006
        for request, stream in zip(asked[:2], early, strict=True):
            answer = await read(stream)
            assert isinstance(answer.error, EngineUnavailable)
            assert "did not come back in time: rank 1 died" in str(answer.error)
            assert answer.token_ids == alone(request, 3)[: len(answer.token_ids)]
        assert it.core.paused_requests == 1
        it.new_group()
        clock.now_s += 1.0
        assert_whole(asked[2], await read(late))


async def test_a_pause_that_ended_in_time_does_not_count_for_the_next() -> None:
    clock = Clock()
    async with engine(engine_config(vocab_size=VOCAB_SIZE, pause_limit_s=10.0), clock=clock) as it:
        asked = some_requests()
        streams = await start(it, asked)
        for _ in range(3):
            it.core.lose("rank 1 died")
            clock.now_s += 9.0
            await turn_loop()
            it.new_group()
            it.ranks.hold()
        it.ranks.let_go()
        for request, stream in zip(asked, streams, strict=True):
            assert_whole(request, await read(stream))


async def test_deadlines_run_on_while_streams_are_paused() -> None:
    async with engine() as it:
        it.ranks.hold()
        now_s = asyncio.get_running_loop().time()
        stream = it.core.submit(generation("r", range(3), max_tokens=COUNT, deadline_s=now_s + 0.02))
        other = it.core.submit(generation("s", range(3), max_tokens=COUNT))
        it.core.lose("rank 1 died")
        assert isinstance((await read(stream)).error, DeadlineExceeded)
        it.new_group()
        assert len((await read(other)).token_ids) == COUNT


async def test_an_abort_ends_a_paused_request() -> None:
    async with engine() as it:
        asked = some_requests()
        streams = await start(it, asked, steps=3)
        it.core.lose("rank 1 died")
        assert it.core.abort("r0")
        answer = await read(streams[0])
        assert answer.finished.reason == inference_pb2.FINISH_REASON_ABORT
        assert answer.token_ids == alone(asked[0], len(answer.token_ids))
        it.new_group()
        for request, stream in zip(asked[1:], streams[1:], strict=True):
            assert_whole(request, await read(stream))


async def test_when_there_will_be_no_group_every_stream_ends_and_requests_are_refused() -> None:
    async with engine() as it:
        streams = await start(it, some_requests(), steps=1)
        it.core.lose("rank 1 died")
        it.core.fail("rank 1 died 5 times; the restart budget is used up")
        for stream in streams:
            answer = await read(stream)
            assert isinstance(answer.error, EngineUnavailable)
            assert "restart budget" in str(answer.error)
        with pytest.raises(EngineUnavailable, match="restart budget"):
            it.core.submit(generation("next", range(3)))
        # Ranks that were given up may come back mended.
        it.new_group()
        assert len((await read(it.core.submit(generation("next", range(3))))).token_ids) == 4


async def test_a_group_that_says_it_is_lost_pauses_its_streams_and_is_told_once() -> None:
    async with engine() as it:
        asked = some_requests()
        streams = await start(it, asked, steps=1)
        it.ranks.lose("rank 0: out of memory")
        await until(lambda: it.broken != [])
        assert it.broken == ["rank 0: out of memory"]
        assert it.core.paused_requests == 7
        it.new_group()
        for request, stream in zip(asked, streams, strict=True):
            assert_whole(request, await read(stream))
        assert len(it.broken) == 1


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda result: setattr(result, "step_id", 9), "the result is of step 9"),
        (lambda result: result.slots.__setitem__(0, 3), "had to sample"),
        (lambda result: result.token_ids.pop(), "tokens came"),
    ],
    ids=["wrong step", "unknown slot", "missing token"],
)
async def test_an_answer_that_does_not_fit_its_plan_loses_the_group(
    spoil: Callable[[ranks_pb2.StepResult], object], problem: str
) -> None:
    async with engine() as it:
        asked = some_requests()
        streams = await start(it, asked)
        it.ranks.spoil = spoil
        it.ranks.do_one()
        await until(lambda: it.broken != [])
        assert len(it.broken) == 1
        assert problem in it.broken[0]
        it.new_group()
        for request, stream in zip(asked, streams, strict=True):
            assert_whole(request, await read(stream))


async def test_a_group_opened_over_another_takes_its_streams() -> None:
    async with engine() as it:
        asked = some_requests()
        streams = await start(it, asked, steps=2)
        it.new_group()
        for request, stream in zip(asked, streams, strict=True):
            assert_whole(request, await read(stream))


async def test_a_new_group_hits_nothing_that_an_old_one_cached() -> None:
    async with engine() as it:
        await read(it.core.submit(generation("r", range(9))))
        it.core.lose("gone")
        it.new_group()
        answer = await read(it.core.submit(generation("again", range(9))))
        assert answer.finished.usage.cached_tokens == 0


async def test_a_request_that_a_smaller_cache_cannot_hold_any_more_ends_with_the_arithmetic() -> None:
    async with engine() as it:
        asked = [generation("big", range(9), max_tokens=50), generation("small", range(3), max_tokens=COUNT)]
        big, small = await start(it, asked)
        it.core.lose("rank 1 died")
        it.new_group(num_blocks=8)
        answer = await read(big)
        assert isinstance(answer.error, InvalidRequest)
        assert "the KV cache has 7" in str(answer.error)
        assert_whole(asked[1], await read(small))


async def test_requests_are_refused_before_the_first_group() -> None:
    core = EngineCore(engine_config(vocab_size=VOCAB_SIZE), new_detokenizer=TOKENIZER.detokenizer)
    with pytest.raises(EngineUnavailable, match="no group"):
        core.submit(generation("r", range(3)))
    with pytest.raises(GroupLost, match="none has formed yet"):
        async with core.hold():
            raise AssertionError


async def test_losing_a_group_leaves_no_error_that_nobody_looked_at(caplog: pytest.LogCaptureFixture) -> None:
    async with engine() as it:
        streams = await start(it, some_requests())
        old = it.ranks
        it.core.lose("rank 1 died")
        old.lose("rank 1 died")
        it.new_group()
        await asyncio.gather(*map(read, streams))
    gc.collect()
    assert "never retrieved" not in caplog.text


# --- holds, and whether requests are accepted -----------------------------------------------------------


async def test_a_hold_waits_for_the_steps_that_are_out_and_lets_none_go_out() -> None:
    async with engine() as it:
        asked = some_requests()
        streams = await start(it, asked)
        entered, leave = asyncio.Event(), asyncio.Event()

        async def hold() -> None:
            async with it.core.hold():
                entered.set()
                await leave.wait()

        holding = asyncio.create_task(hold())
        await turn_loop()
        assert not entered.is_set()
        it.ranks.let_go()
        await entered.wait()
        steps = it.ranks.steps
        late = it.core.submit(generation("late", range(3), max_tokens=COUNT))
        await turn_loop(50)
        assert (it.ranks.steps, it.ranks.num_out) == (steps, 0)
        leave.set()
        await holding
        for request, stream in zip([*asked, generation("late", range(3))], [*streams, late], strict=True):
            assert_whole(request, await read(stream))


async def test_a_hold_that_nobody_waits_for_any_more_lets_steps_go_on() -> None:
    async with engine() as it:
        asked = some_requests()
        streams = await start(it, asked)

        async def hold() -> None:
            async with it.core.hold():
                raise AssertionError("steps are out")

        holding = asyncio.create_task(hold())
        await turn_loop()
        for _ in range(2):
            it.ranks.do_one()
            holding.cancel()
            await turn_loop()
        it.ranks.let_go()
        for request, stream in zip(asked, streams, strict=True):
            assert_whole(request, await read(stream))


async def test_a_hold_of_a_group_that_is_lost_meanwhile_is_told_so() -> None:
    async with engine() as it:
        streams = await start(it, some_requests())

        async def hold() -> None:
            async with it.core.hold():
                raise AssertionError("there is no group to hold")

        holding = asyncio.create_task(hold())
        await turn_loop()
        it.core.lose("rank 1 died")
        with pytest.raises(GroupLost, match="rank 1 died"):
            await holding
        it.new_group()
        await asyncio.gather(*map(read, streams))


async def test_a_cache_is_reset_within_a_hold_and_requests_that_queued_go_on() -> None:
    async with engine() as it:
        await read(it.core.submit(generation("r", range(9))))
        async with it.core.hold():
            assert it.core.is_idle
            queued = it.core.submit(generation("queued", range(9), max_tokens=COUNT))
            it.ranks.reset_cache(num_blocks=20, block_size=8)
            it.core.reset_cache(num_blocks=20, block_size=8)
        assert it.core.stats().num_blocks == 19
        answer = await read(queued)
        assert answer.token_ids == alone(generation("r", range(9)), COUNT)
        assert answer.finished.usage.cached_tokens == 0
        with pytest.raises(EngineFault, match="only while steps are held"):
            it.core.reset_cache(num_blocks=NUM_BLOCKS, block_size=4)


async def test_a_closed_intake_refuses_and_an_opened_one_accepts_again() -> None:
    async with engine() as it:
        stream = it.core.submit(generation("r", range(3)))
        it.core.close_intake("the group is asleep")
        assert not it.core.is_serving
        with pytest.raises(EngineUnavailable, match="asleep"):
            it.core.submit(generation("s", range(3)))
        assert len((await read(stream)).token_ids) == 4
        it.core.open_intake()
        assert len((await read(it.core.submit(generation("s", range(3))))).token_ids) == 4


async def test_waiting_for_idleness_ends_with_the_last_request() -> None:
    async with engine() as it:
        await it.core.wait_idle()
        streams = await start(it, some_requests())
        waiting = asyncio.create_task(it.core.wait_idle())
        await turn_loop()
        assert not waiting.done()
        it.ranks.let_go()
        await waiting
        assert it.core.is_idle
        await asyncio.gather(*map(read, streams))


async def test_another_group_is_timed_by_itself() -> None:
    async with engine() as it:
        await read(it.core.submit(generation("r", range(3), max_tokens=4)))
        assert it.core.tokens_per_second > 0
        assert list(it.core.decode_pace.sizes())
        it.new_group()
        assert it.core.tokens_per_second == 0
        assert list(it.core.decode_pace.sizes()) == []
