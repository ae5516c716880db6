"""Several completions a request, log-probabilities, and streams that are taken up again."""

from __future__ import annotations

import asyncio

import pytest

from hetero_api.v1 import inference_pb2
from hetero_gateway.engine.errors import DuplicateRequest, InvalidRequest
from tests.unit.engine.core_setup import TOKENIZER, VOCAB_SIZE, alone, engine, read, turn_loop, until
from tests.unit.engine.engine_setup import engine_config, generation
from tests.unit.engine.fake_ranks import logprobs_alone

pytestmark = pytest.mark.unit


async def test_each_completion_has_its_own_tokens_text_end_and_usage() -> None:
    asked = generation("r", range(9), max_tokens=12, n=3, seed=5)
    async with engine() as it:
        answer = await read(it.core.submit(asked))
    for index in range(3):
        expected = alone(asked, 12, index=index)
        assert answer.tokens[index] == expected
        assert answer.texts[index] == TOKENIZER.decode(expected)
        assert answer.ends[index].reason == inference_pb2.FINISH_REASON_LENGTH
        assert answer.ends[index].usage.completion_tokens == 12
        assert answer.ends[index].usage.prompt_tokens == 9
    assert len({tuple(tokens) for tokens in answer.tokens.values()}) == 3


async def test_a_completion_that_ends_early_does_not_end_the_others() -> None:
    plain = generation("r", range(9), max_tokens=20, n=2, seed=5)
    second = alone(plain, 20, index=1)
    stop = TOKENIZER.decode(second)[3:7]
    assert stop not in TOKENIZER.decode(alone(plain, 20))
    async with engine() as it:
        answer = await read(it.core.submit(generation("r", range(9), max_tokens=20, n=2, seed=5, stop=(stop,))))
    assert answer.ends[0].reason == inference_pb2.FINISH_REASON_LENGTH
    assert answer.tokens[0] == alone(plain, 20)
    assert (answer.ends[1].reason, answer.ends[1].stop_text) == (inference_pb2.FINISH_REASON_STOP, stop)
    assert answer.texts[1] == TOKENIZER.decode(second)[:3]


async def test_an_abort_ends_every_completion() -> None:
    async with engine() as it:
        it.ranks.hold()
        stream = it.core.submit(generation("r", range(9), max_tokens=20, n=3))
        await until(lambda: it.ranks.num_out > 0)
        assert it.core.abort("r")
        answer = await read(stream)
        assert [answer.ends[index].reason for index in range(3)] == [inference_pb2.FINISH_REASON_ABORT] * 3
        it.ranks.let_go()


async def test_slow_reader_of_several_completions_gets_each_in_one_piece() -> None:
    async with engine() as it:
        stream = it.core.submit(generation("r", range(3), max_tokens=30, n=3))
        await it.core.wait_idle()
        assert (await read(stream)).num_events == 3


async def test_log_probabilities_come_with_their_tokens_and_once() -> None:
    asked = generation("r", range(9), max_tokens=12, n=2, logprobs=0, prompt_logprobs=0)
    async with engine() as it:
        answer = await read(it.core.submit(asked))
        plain = await read(it.core.submit(generation("plain", range(9))))
    assert answer.prompt_logprobs == logprobs_alone(range(9), begin=1)
    for index in range(2):
        tokens = [*range(9), *answer.tokens[index]]
        assert answer.logprobs[index] == logprobs_alone(tokens, begin=9)
    assert plain.logprobs == {0: []}
    assert plain.prompt_logprobs is None


async def test_log_probabilities_go_on_in_the_next_epoch() -> None:
    async with engine() as it:
        it.ranks.hold()
        stream = it.core.submit(generation("r", range(9), max_tokens=12, logprobs=0, prompt_logprobs=0))
        for _ in range(5):
            await until(lambda: it.ranks.num_out > 0)
            it.ranks.do_one()
            await turn_loop(4)
        it.core.lose("rank 1 died")
        it.new_group()
        answer = await read(stream)
    assert answer.prompt_logprobs == logprobs_alone(range(9), begin=1)
    assert answer.logprobs[0] == logprobs_alone([*range(9), *answer.token_ids], begin=9)


# --- received -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", range(0, 20, 3))
async def test_a_stream_goes_on_behind_what_was_received(count: int) -> None:
    asked = generation("r", range(9), max_tokens=20, seed=3)
    whole = alone(asked, 20)
    before = TOKENIZER.detokenizer().push(whole[:count])
    async with engine() as it:
        resumed = generation("r", range(9), max_tokens=20, seed=3, received=(tuple(whole[:count]),))
        answer = await read(it.core.submit(resumed))
    assert answer.token_ids == whole[count:]
    assert before + answer.text == TOKENIZER.decode(whole)
    assert answer.finished.usage.completion_tokens == 20


async def test_each_completion_goes_on_behind_its_own() -> None:
    plain = generation("r", range(9), max_tokens=12, n=3, seed=5)
    whole = [alone(plain, 12, index=index) for index in range(3)]
    received = (tuple(whole[0]), tuple(whole[1][:5]), ())
    async with engine() as it:
        answer = await read(it.core.submit(generation("r", range(9), max_tokens=12, n=3, seed=5, received=received)))
    assert answer.tokens == {1: whole[1][5:], 2: whole[2]}
    assert [answer.ends[index].reason for index in range(3)] == [inference_pb2.FINISH_REASON_LENGTH] * 3


async def test_what_was_received_whole_is_finished_without_a_step() -> None:
    asked = generation("r", range(9), max_tokens=12, seed=5)
    whole = alone(asked, 12)
    received = (tuple(whole),)
    ends = frozenset([whole[-1]])
    by_token = generation("s", range(9), max_tokens=20, seed=5, received=received, stop_token_ids=ends)
    text = TOKENIZER.decode(whole)
    by_text = generation("t", range(9), max_tokens=20, seed=5, received=received, stop=(text[4:8],))
    assert whole[-1] not in whole[:-1]
    async with engine() as it:
        by_length = generation("r", range(9), max_tokens=12, seed=5, received=received)
        answers = [await read(it.core.submit(each)) for each in (by_length, by_token, by_text)]
        assert it.ranks.steps == 0
        assert it.core.is_idle
    for answer in answers:
        assert (answer.token_ids, answer.text) == ([], "")
        assert answer.finished.usage.completion_tokens == 12
    length, token, stop = (answer.finished for answer in answers)
    assert length.reason == inference_pb2.FINISH_REASON_LENGTH
    assert (token.reason, token.stop_token_id) == (inference_pb2.FINISH_REASON_STOP, whole[-1])
    assert (stop.reason, stop.stop_text) == (inference_pb2.FINISH_REASON_STOP, text[4:8])


async def test_a_stop_string_is_met_across_what_was_received_and_what_comes() -> None:
    asked = generation("r", range(9), max_tokens=30, seed=3)
    whole = alone(asked, 30)
    # A cut between two tokens within a stop string.
    cut = next(i for i in range(4, 30) if TOKENIZER.decode(whole[: i + 1]).startswith(TOKENIZER.decode(whole[:i])))
    at = len(TOKENIZER.decode(whole[:cut]))
    text = TOKENIZER.decode(whole)
    stop = text[at - 2 : at + 2]
    where = text.index(stop)
    detokenizer = TOKENIZER.detokenizer((stop,))
    before = detokenizer.push(whole[:cut])
    assert detokenizer.matched_stop is None
    async with engine() as it:
        resumed = generation("r", range(9), max_tokens=30, seed=3, stop=(stop,), received=(tuple(whole[:cut]),))
        answer = await read(it.core.submit(resumed))
    assert before + answer.text == text[:where]
    assert answer.finished.stop_text == stop


async def test_a_call_that_takes_a_stream_up_takes_it_over() -> None:
    asked = generation("r", range(9), max_tokens=20, seed=3)
    whole = alone(asked, 20)
    async with engine() as it:
        it.ranks.hold()
        old = it.core.submit(asked)
        await until(lambda: it.ranks.num_out == 2)
        with pytest.raises(DuplicateRequest):
            it.core.submit(asked)
        new = it.core.submit(generation("r", range(9), max_tokens=20, seed=3, received=((),)))
        assert (await read(old)).finished.reason == inference_pb2.FINISH_REASON_ABORT
        newer = it.core.submit(generation("r", range(9), max_tokens=20, seed=3, received=(tuple(whole[:4]),)))
        assert (await read(new)).finished.reason == inference_pb2.FINISH_REASON_ABORT
        old.cancel()
        it.ranks.let_go()
        answer = await read(newer)
    assert answer.token_ids == whole[4:]


async def test_received_tokens_that_cannot_be_are_refused() -> None:
    async with engine(engine_config(vocab_size=VOCAB_SIZE, eos_token_ids=frozenset([1]))) as it:
        for received, problem in (
            (((5,), (5,)), "sampling.n"),
            (((VOCAB_SIZE,),), "vocabulary"),
            (((1, 5),), "goes on behind"),
            (((5,) * 21,), "may have 20"),
        ):
            with pytest.raises(InvalidRequest, match=problem):
                it.core.submit(generation("r", range(9), max_tokens=20, received=received))
        assert it.core.is_idle


async def test_a_resumed_stream_survives_a_lost_group() -> None:
    asked = generation("r", range(9), max_tokens=20, seed=3)
    whole = alone(asked, 20)
    async with engine() as it:
        it.ranks.hold()
        stream = it.core.submit(generation("r", range(9), max_tokens=20, seed=3, received=(tuple(whole[:7]),)))
        await until(lambda: it.ranks.num_out == 2)
        it.ranks.do_one()
        await turn_loop(4)
        it.core.lose("rank 1 died")
        it.new_group()
        assert (await asyncio.wait_for(read(stream), 5)).token_ids == whole[7:]
