"""Hidden states for embeddings: collected over chunks, cached prefixes and lost groups."""

from __future__ import annotations

import pytest

from hetero_api.v1 import ranks_pb2
from hetero_gateway.engine.stream import RequestStream
from tests.unit.engine.core_setup import engine, read, turn_loop, until
from tests.unit.engine.engine_setup import engine_config, generation
from tests.unit.engine.fake_ranks import embedding_alone

pytestmark = pytest.mark.unit

PROMPT = range(30)
MEAN, LAST = ranks_pb2.POOLING_MEAN, ranks_pb2.POOLING_LAST
CHUNKED = engine_config(max_num_batched_tokens=8)


async def embedding(stream: RequestStream) -> list[float] | None:
    await read(stream)
    return stream.embedding


@pytest.mark.parametrize("pooling", [MEAN, LAST])
async def test_an_embedding_is_of_the_whole_prompt_however_it_was_computed(
    pooling: ranks_pb2.Pooling.ValueType,
) -> None:
    expected = embedding_alone(PROMPT, is_mean=pooling == MEAN)
    async with engine(CHUNKED) as it:
        first = it.core.submit(generation("first", PROMPT, max_tokens=1, pooling=pooling))
        assert await embedding(first) == expected
        again = it.core.submit(generation("again", PROMPT, max_tokens=1, pooling=pooling))
        answer = await read(again)
        assert again.embedding == expected
        # A mean is of all tokens, so all are computed; the last token alone needs no others.
        assert bool(answer.finished.usage.cached_tokens) == (pooling == LAST)
        plain = it.core.submit(generation("plain", PROMPT, max_tokens=1))
        assert await embedding(plain) is None


async def test_an_embedding_begins_again_with_the_next_group() -> None:
    async with engine(CHUNKED) as it:
        it.ranks.hold()
        stream = it.core.submit(generation("r", PROMPT, max_tokens=1, pooling=MEAN))
        for _ in range(2):
            await until(lambda: it.ranks.num_out > 0)
            it.ranks.do_one()
            await turn_loop(4)
        it.core.lose("rank 1 died")
        it.new_group()
        assert await embedding(stream) == embedding_alone(PROMPT, is_mean=True)


def drop_all(result: ranks_pb2.StepResult) -> None:
    del result.pooled[:]


def narrow(result: ranks_pb2.StepResult) -> None:
    if result.step_id > 1 and result.pooled:
        del result.pooled[0].sums[1:]


@pytest.mark.parametrize("spoil", [drop_all, narrow])
async def test_hidden_states_that_do_not_fit_lose_the_group(spoil: object) -> None:
    async with engine(CHUNKED) as it:
        it.ranks.spoil = spoil  # type: ignore[assignment]
        it.core.submit(generation("r", PROMPT, max_tokens=1, pooling=MEAN))
        await until(lambda: bool(it.broken))
        assert "hidden states" in it.broken[0]
