"""The engine core over ranks in memory: streams, ends, deadlines, overlap."""

from __future__ import annotations

import asyncio
import time

import pytest

from hetero_api.v1 import inference_pb2, ranks_pb2
from hetero_gateway.engine.core import EngineCore
from hetero_gateway.engine.errors import (
    DeadlineExceeded,
    DuplicateRequest,
    EngineFault,
    EngineUnavailable,
    InvalidRequest,
    QueueFull,
)
from hetero_gateway.engine.stream import RequestStream
from tests.unit.engine.core_setup import TOKENIZER, VOCAB_SIZE, Engine, alone, engine, read, turn_loop, until
from tests.unit.engine.engine_setup import engine_config, generation

pytestmark = pytest.mark.unit


async def test_mixed_requests_all_get_what_they_would_get_alone() -> None:
    config = engine_config(vocab_size=VOCAB_SIZE, max_num_seqs=6, max_num_batched_tokens=16)
    async with engine(config) as it:
        asked = [
            generation(f"r{index}", range(index % 5, index % 5 + 1 + 3 * index % 29), max_tokens=1 + index % 13)
            for index in range(32)
        ]
        answers = await asyncio.gather(*(read(it.core.submit(request)) for request in asked))
        for request, answer in zip(asked, answers, strict=True):
            expected = alone(request, request.max_tokens or 0)
            assert answer.token_ids == expected
            assert answer.text == TOKENIZER.decode(expected)
            assert answer.finished.reason == inference_pb2.FINISH_REASON_LENGTH
            assert answer.finished.usage.prompt_tokens == len(request.prompt_token_ids)
            assert answer.finished.usage.completion_tokens == len(expected)
        assert it.core.stats().finished_requests == 32
        assert it.core.stats().used_blocks == 0


async def test_timings_are_in_order() -> None:
    async with engine() as it:
        timings = (await read(it.core.submit(generation("r", range(3))))).finished.timings
        assert timings.HasField("queued")
        assert timings.HasField("first_token")
        queued, first_token, total = (
            each.ToNanoseconds() for each in (timings.queued, timings.first_token, timings.total)
        )
        assert 0 <= queued <= first_token <= total


async def test_usage_tells_cached_tokens() -> None:
    async with engine() as it:
        await read(it.core.submit(generation("first", range(9))))
        assert (await read(it.core.submit(generation("second", range(9))))).finished.usage.cached_tokens == 8


async def test_an_abort_ends_one_request_and_no_other() -> None:
    async with engine() as it:
        it.ranks.hold()
        stream = it.core.submit(generation("r", range(9), max_tokens=40))
        other = it.core.submit(generation("other", range(20, 23), max_tokens=6))
        for _ in range(3):
            await until(lambda: it.ranks.num_out > 0)
            it.ranks.do_one()
            await turn_loop()
        assert it.core.abort("r")
        assert not it.core.abort("r")
        answer = await read(stream)
        assert answer.finished.reason == inference_pb2.FINISH_REASON_ABORT
        assert answer.token_ids == alone(generation("r", range(9)), 3)
        assert answer.text == TOKENIZER.decode(answer.token_ids)
        it.ranks.let_go()
        assert len((await read(other)).token_ids) == 6


async def test_cancelled_stream_ends_its_own_request_only() -> None:
    async with engine() as it:
        first = it.core.submit(generation("r", range(3), max_tokens=40))
        first.cancel()
        second = it.core.submit(generation("r", range(3), max_tokens=4))
        first.cancel()
        assert (await read(first)).finished.reason == inference_pb2.FINISH_REASON_ABORT
        assert (await read(second)).finished.reason == inference_pb2.FINISH_REASON_LENGTH


async def test_slow_reader_gets_everything_in_one_piece() -> None:
    async with engine() as it:
        stream = it.core.submit(generation("r", range(3), max_tokens=30))
        await until(lambda: it.core.stats().finished_requests == 1)
        answer = await read(stream)
        assert answer.num_events == 1
        assert len(answer.token_ids) == 30


async def test_reader_that_keeps_up_gets_each_token() -> None:
    async with engine() as it:
        it.ranks.hold()
        stream = it.core.submit(generation("r", range(3), max_tokens=5))
        for _ in range(5):
            await until(lambda: it.ranks.num_out > 0)
            it.ranks.do_one()
            event = await anext(stream)
            assert isinstance(event, inference_pb2.Delta)
            assert len(event.token_ids) == 1
        assert isinstance(await anext(stream), inference_pb2.Finished)
        it.ranks.let_go()


@pytest.mark.parametrize("most", [1, 2])
async def test_the_next_plan_goes_out_before_the_last_result_came_if_the_configuration_says_so(most: int) -> None:
    async with engine(engine_config(vocab_size=VOCAB_SIZE, max_steps_in_flight=most)) as it:
        it.ranks.hold()
        asked = generation("r", range(3), max_tokens=9)
        stream = it.core.submit(asked)
        await until(lambda: it.ranks.num_out == most)
        await turn_loop()
        assert it.ranks.num_out == most
        it.ranks.let_go()
        assert (await read(stream)).token_ids == alone(asked, 9)
        assert it.ranks.most_out == most


async def test_a_request_that_comes_while_a_step_is_out_goes_out_at_once() -> None:
    async with engine() as it:
        it.ranks.hold()
        first = it.core.submit(generation("r", range(3), max_tokens=1))
        await until(lambda: it.ranks.num_out == 1)
        second = it.core.submit(generation("s", range(3), max_tokens=1))
        await until(lambda: it.ranks.num_out == 2)
        it.ranks.let_go()
        await asyncio.gather(read(first), read(second))


async def test_ranks_are_told_to_drop_every_slot_before_a_hold_begins() -> None:
    async with engine() as it:
        stream = it.core.submit(generation("r", range(3), max_tokens=2))
        await read(stream)
        async with it.core.hold():
            assert it.ranks.num_bound_slots == 0


async def test_a_hold_waits_until_ranks_have_dropped_the_slots_of_what_ended_though_others_run() -> None:
    """Else an adapter could not be replaced right behind the last request of its own."""
    async with engine() as it:

        async def look() -> tuple[int, int]:
            async with it.core.hold():
                return it.ranks.num_bound_slots, it.core.stats().running_requests

        it.ranks.hold()
        ending = it.core.submit(generation("ends", range(3), max_tokens=2))
        running = it.core.submit(generation("runs", range(5), max_tokens=30))
        await until(lambda: it.ranks.num_out == 2)
        looking = asyncio.create_task(look())
        while not looking.done():
            await turn_loop()
            if it.ranks.num_out:
                it.ranks.do_one()
        assert len((await read(ending)).token_ids) == 2
        assert looking.result() == (1, 1)
        it.ranks.let_go()
        assert len((await read(running)).token_ids) == 30


async def test_an_aborted_request_frees_its_blocks_and_slot_though_a_step_with_it_is_out() -> None:
    async with engine() as it:
        it.ranks.hold()
        stream = it.core.submit(generation("r", range(9), max_tokens=20))
        await until(lambda: it.ranks.num_out == 2)
        assert it.core.abort("r")
        assert it.core.stats().used_blocks == 0
        it.ranks.let_go()
        answer = await read(stream)
        assert answer.finished.reason == inference_pb2.FINISH_REASON_ABORT
        assert answer.token_ids == []
        await until(lambda: it.ranks.num_bound_slots == 0)


async def test_waiting_request_ends_at_its_deadline_without_being_computed() -> None:
    async with engine(engine_config(vocab_size=VOCAB_SIZE, max_num_seqs=1)) as it:
        it.ranks.hold()
        running = it.core.submit(generation("running", range(3), max_tokens=2))
        await until(lambda: it.ranks.num_out == 2)
        waiting = it.core.submit(generation("late", range(20, 23), deadline_s=time.monotonic() + 0.02))
        answer = await read(waiting)
        assert isinstance(answer.error, DeadlineExceeded)
        assert "while it waited" in str(answer.error)
        assert answer.token_ids == []
        it.ranks.let_go()
        await read(running)
        assert it.core.stats().prompt_tokens == 3


async def test_running_request_ends_at_its_deadline_and_frees_its_blocks() -> None:
    async with engine() as it:
        it.ranks.hold()
        stream = it.core.submit(generation("r", range(3), max_tokens=40, deadline_s=time.monotonic() + 0.02))
        answer = await read(stream)
        assert isinstance(answer.error, DeadlineExceeded)
        it.ranks.let_go()
        await until(lambda: it.core.stats().used_blocks == 0)


async def test_later_deadline_still_wakes_after_a_sooner_one() -> None:
    async with engine() as it:
        it.ranks.hold()
        now = time.monotonic()
        later = it.core.submit(generation("later", range(3), max_tokens=40, deadline_s=now + 0.04))
        sooner = it.core.submit(generation("sooner", range(3), max_tokens=40, deadline_s=now + 0.02))
        assert isinstance((await read(sooner)).error, DeadlineExceeded)
        assert isinstance((await read(later)).error, DeadlineExceeded)


async def start_some(it: Engine) -> list[RequestStream]:
    """Running and waiting requests, with steps in flight."""
    it.ranks.hold()
    streams = [it.core.submit(generation(f"r{index}", range(3 + index), max_tokens=20)) for index in range(7)]
    await until(lambda: it.ranks.num_out == 2)
    return streams


async def test_bug_in_a_step_ends_every_stream_as_a_fault(caplog: pytest.LogCaptureFixture) -> None:
    async with engine() as it:
        streams = await start_some(it)

        def spoil(result: ranks_pb2.StepResult) -> None:
            raise KeyError("oops")

        it.ranks.spoil = spoil
        it.ranks.let_go()
        for stream in streams:
            assert isinstance((await read(stream)).error, EngineFault)
        assert len(it.broken) == 1
        assert "engine fault in a step" in caplog.text
        it.new_group()
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
        assert isinstance(answer.error, EngineUnavailable)
        assert "shutting down" in str(answer.error)


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
        assert answer.finished.reason == inference_pb2.FINISH_REASON_STOP
        assert (answer.finished.WhichOneof("matched_stop"), answer.finished.stop_text) == ("stop_text", stop)
        assert len(answer.token_ids) < 40
        assert answer.finished.usage.completion_tokens == len(answer.token_ids)
        await turn_loop(10)
        stats = it.core.stats()
        assert (stats.used_blocks, stats.running_requests) == (0, 0)
        assert stats.generated_tokens == len(answer.token_ids)
        assert it.core.is_serving


@pytest.mark.parametrize("received", [0, 5])
async def test_a_stop_string_is_met_behind_min_tokens_only(received: int) -> None:
    full = alone(generation("r", range(3), max_tokens=40, seed=5), 40)
    stop = TOKENIZER.decode(full)[12]
    first = next(n for n in range(1, 40) if stop in TOKENIZER.decode(full[:n]))
    for least in (0, first - 1, first, 39, 40):
        known = (tuple(full[:received]),) if received else ()
        asked = generation("r", range(3), max_tokens=40, seed=5, stop=(stop,), received=known, min_tokens=least)
        async with engine() as it:
            answer = await read(it.core.submit(asked))
        number = answer.finished.usage.completion_tokens
        texts = [TOKENIZER.decode(full[:n]) for n in range(41)]
        met = (n for n in range(least + 1, 41) if stop in texts[n][len(texts[n - 1]) :])
        assert number == next(met, 40), least


async def test_text_held_for_a_stop_string_is_shown_at_the_end() -> None:
    asked = generation("r", range(3), max_tokens=6)
    full = TOKENIZER.decode(alone(asked, 6))
    async with engine() as it:
        stop = full[-1] + "never comes"
        answer = await read(it.core.submit(generation("r", range(3), max_tokens=6, stop=(stop,))))
        assert answer.text == full
        assert answer.finished.reason == inference_pb2.FINISH_REASON_LENGTH
        assert answer.finished.WhichOneof("matched_stop") is None


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
