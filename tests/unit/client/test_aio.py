"""The asyncio client: the same behaviour as the synchronous one, with await."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from hetero_client import AsyncHeteroClient, ChatMessage, Finished, Started
from hetero_client.errors import (
    DeadlineError,
    IncompleteStreamError,
    InvalidRequestError,
    NotConnectedError,
    RequestCancelledError,
)
from tests.support.fake_gateway import NOT_SERVING, SERVING, FakeGateway

pytestmark = pytest.mark.unit


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[FakeGateway]:
    fake = FakeGateway(f"unix:{tmp_path / 'gateway.sock'}")
    fake.start()
    yield fake
    fake.stop()


async def test_stream_begins_with_started_and_ends_with_finished(gateway: FakeGateway) -> None:
    async with AsyncHeteroClient(gateway.address) as client:
        events = [event async for event in client.generate("echo one two")]
    assert isinstance(events[0], Started)
    assert isinstance(events[-1], Finished)
    assert len(events) == 4


async def test_many_streams_at_once(gateway: FakeGateway) -> None:
    async with AsyncHeteroClient(gateway.address) as client:
        texts = await asyncio.gather(*(client.generate_text(f"echo {i}", request_id=f"q{i}") for i in range(8)))
    assert [completion.text for completion in texts] == [f"{i} " for i in range(8)]
    assert [completion.request_id for completion in texts] == [f"q{i}" for i in range(8)]


async def test_closing_the_stream_cancels_the_call(gateway: FakeGateway) -> None:
    async with AsyncHeteroClient(gateway.address) as client:
        async with client.generate("hang") as stream:
            assert isinstance(await anext(stream), Started)
        assert await asyncio.to_thread(gateway.inference.cancelled.wait, 5)
        assert [event async for event in stream] == []


@pytest.mark.parametrize("broken", [False, True])
async def test_whoever_reads_on_behind_a_timeout_is_told_that_the_request_is_cancelled(
    gateway: FakeGateway, broken: bool
) -> None:
    async with AsyncHeteroClient(gateway.address) as client:
        gateway.set_health(NOT_SERVING)  # a stream that breaks waits for it
        stream = client.generate("break-1 a b" if broken else "hang")
        for _ in range(2 if broken else 1):
            await anext(stream)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(stream), 0.5)
        for _ in range(2):
            with pytest.raises(RequestCancelledError, match="was cancelled"):
                await anext(stream)


async def test_cancelling_the_task_cancels_the_call(gateway: FakeGateway) -> None:
    async with AsyncHeteroClient(gateway.address) as client:
        stream = client.generate("hang")
        await anext(stream)
        task = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(gateway.inference.cancelled.wait, 5)


async def test_errors_are_those_of_the_sync_client(gateway: FakeGateway, tmp_path: Path) -> None:
    async with AsyncHeteroClient(gateway.address) as client:
        with pytest.raises(InvalidRequestError, match=r"sampling\.temperature"):
            await client.generate_text("invalid")
        with pytest.raises(DeadlineError):
            await client.generate_text("hang", timeout_s=0.2)
        with pytest.raises(IncompleteStreamError):
            await client.generate_text("unfinished")
    async with AsyncHeteroClient(f"unix:{tmp_path / 'nobody.sock'}") as client:
        with pytest.raises(NotConnectedError):
            await client.model_info()


async def test_unary_calls(gateway: FakeGateway) -> None:
    async with AsyncHeteroClient(gateway.address) as client:
        assert await client.tokenize([ChatMessage("user", "c")]) == (99,)
        assert await client.detokenize([104, 105]) == "hi"
        assert await client.abort("r1")
        assert (await client.model_info()).vocab_size == 256
        assert (await client.server_info()).name == "fake"


async def test_wait_ready_follows_health(gateway: FakeGateway) -> None:
    gateway.set_health(NOT_SERVING)
    async with AsyncHeteroClient(gateway.address) as client:
        with pytest.raises(DeadlineError):
            await client.wait_ready(0.2)
        waiting = asyncio.ensure_future(client.wait_ready(10))
        await asyncio.sleep(0)
        gateway.set_health(SERVING)
        await waiting
