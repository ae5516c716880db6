"""POST /v1/embeddings through the public `openai` client."""

from __future__ import annotations

import asyncio
import base64
import math
from array import array
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from hetero_gateway.server.openai import http_server
from tests.unit.engine.fake_ranks import embedding_alone
from tests.unit.server.server_setup import GatewayBench, served_model

pytestmark = pytest.mark.unit

NAME = "g"


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[GatewayBench]:
    """A gateway that serves and lets few requests wait."""
    async with GatewayBench(served_model(tmp_path, gateway={"maxQueuedRequests": 80})) as running:
        await running.join()
        yield running


@pytest.fixture
async def client(bench: GatewayBench) -> AsyncIterator[Any]:
    address = f"http://{bench.addresses.http}/v1"
    async with openai.AsyncOpenAI(base_url=address, api_key="none", max_retries=0) as made:
        yield made


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("encoding", ["float", "base64"])
async def test_texts_have_embeddings_of_unit_length(
    client: Any, bench: GatewayBench, pooling: str, encoding: str
) -> None:
    texts = ["hello", "how are you?"]
    ids = [bench.model.tokenizer.encode(text) for text in texts]
    for each in (texts, ids):
        answer = await client.embeddings.create(
            model=NAME, input=each, encoding_format=encoding, extra_body={"pooling": pooling}
        )
        assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, ids))
        assert [item.index for item in answer.data] == [0, 1]
        for item, tokens in zip(answer.data, ids, strict=True):
            values = embedding_alone(tokens, is_mean=pooling == "mean")
            made = decoded(item.embedding)
            assert made == pytest.approx([value / math.hypot(*values) for value in values], rel=1e-6)


def decoded(embedding: list[float] | str) -> list[float]:
    if not isinstance(embedding, str):
        return embedding
    return list(array("f", base64.b64decode(embedding)))


async def test_one_text_and_one_list_of_tokens_are_one_input(client: Any, bench: GatewayBench) -> None:
    ids = bench.model.tokenizer.encode("hello")
    text = await client.embeddings.create(model=NAME, input="hello", encoding_format="float")
    tokens = await client.embeddings.create(model=NAME, input=ids, encoding_format="float")
    assert text.data == tokens.data


async def test_more_inputs_than_the_queue_holds_are_embedded(client: Any) -> None:
    answer = await client.embeddings.create(model=NAME, input=[f"text {i}" for i in range(200)])
    assert len(answer.data) == 200


REFUSED: dict[str, tuple[Any, str]] = {
    "no input": ({"input": []}, "between 1 and 2048"),
    "an empty text": ({"input": ["a", ""]}, "without a character"),
    "too many": ({"input": ["a"] * 2049}, "between 1 and 2048"),
    "too long": ({"input": "a" * 64}, "model's length"),
    "no such token": ({"input": [258]}, "vocabulary"),
    "a negative token": ({"input": [-1]}, "input"),
    "other dimensions": ({"input": "a", "dimensions": 2}, "dimensions"),
    "another pooling": ({"input": "a", "pooling": "max"}, "pooling"),
    "another model": ({"input": "a", "model": "other"}, "is not served here"),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_bad_input_is_refused_and_leaves_nothing_in_flight(bench: GatewayBench, name: str) -> None:
    body, problem = REFUSED[name]
    async with httpx.AsyncClient(base_url=f"http://{bench.addresses.http}", trust_env=False) as http:
        told = await http.post("/v1/embeddings", json={"model": NAME} | body)
    assert told.status_code in (400, 404)
    assert problem in told.json()["error"]["message"]
    await bench.until(lambda: bench.gateway.core.is_idle)


async def test_a_client_that_goes_away_leaves_nothing_in_flight(tmp_path: Path) -> None:
    async with GatewayBench(served_model(tmp_path)) as bench:
        rank, _ = await bench.join()
        rank.may_step.clear()
        async with httpx.AsyncClient(base_url=f"http://{bench.addresses.http}", trust_env=False) as http:
            asking = asyncio.create_task(http.post("/v1/embeddings", json={"model": NAME, "input": "a"}))
            await bench.until(lambda: not bench.gateway.core.is_idle)
            asking.cancel()
        await bench.until(lambda: bench.gateway.core.is_idle)
        rank.may_step.set()


async def test_a_body_is_not_held_while_its_embeddings_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "SMALL_BODY_BYTES", 0)
    monkeypatch.setattr(http_server, "MAX_BODIES_BYTES", 200)
    async with GatewayBench(served_model(tmp_path)) as bench:
        rank, _ = await bench.join()
        rank.may_step.clear()
        async with httpx.AsyncClient(base_url=f"http://{bench.addresses.http}", trust_env=False) as http:
            body = {"model": NAME, "input": "a", "user": "u" * 100}
            asking = asyncio.create_task(http.post("/v1/embeddings", json=body))
            await bench.until(lambda: not bench.gateway.core.is_idle)
            other = await http.post("/tokenize", json={"model": NAME, "prompt": "b" * 100})
            assert other.status_code == 200
            rank.may_step.set()
            assert (await asking).status_code == 200
