"""Bounds of the HTTP door: connections, heads, bodies and their parts, in size and in time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from hetero_gateway.server.openai import http_server, schema
from tests.unit.group.group_setup import PATIENCE_S, wait_until
from tests.unit.server.server_setup import GatewayBench

pytestmark = pytest.mark.unit

MUCH = 1 << 24
"""Bytes that no socket takes from a server whose client does not read."""
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: g\r\nContent-Length: 1000\r\n"
PARTS = schema.MAX_PARTS


class Connection:
    """A client that speaks as it likes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def say(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def hear_line(self) -> bytes:
        async with asyncio.timeout(PATIENCE_S):
            return await self._reader.readline()

    async def hear(self) -> bytes:
        """All that comes until the server closes the connection."""
        async with asyncio.timeout(PATIENCE_S):
            try:
                return await self._reader.read()
            except ConnectionResetError:
                return b""


@asynccontextmanager
async def connected(bench: GatewayBench) -> AsyncIterator[Connection]:
    host, _, port = bench.addresses.http.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield Connection(reader, writer)
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def _body(**fields: Any) -> bytes:
    return json.dumps({"model": "g", "prompt": "a", "max_tokens": 1} | fields).encode()


async def _post(bench: GatewayBench, content: bytes, path: str = "/v1/completions") -> httpx.Response:
    async with httpx.AsyncClient(base_url=f"http://{bench.addresses.http}", trust_env=False) as http:
        return await http.post(path, content=content, timeout=60)


@pytest.mark.parametrize("said", [b"", b"POST /v1/completions HTT", HEAD])
async def test_a_head_that_does_not_come_in_time_ends_the_connection(
    bench: GatewayBench, said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "HEAD_TIMEOUT_S", 0.05)
    async with connected(bench) as connection:
        await connection.say(said)
        assert await connection.hear() == b""


async def test_a_further_head_is_timed_from_its_first_byte(
    bench: GatewayBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with connected(bench) as connection:
        await connection.say(b"GET /health HTTP/1.1\r\nHost: g\r\n\r\n")
        assert await connection.hear_line() == b"HTTP/1.1 503 Service Unavailable\r\n"
        monkeypatch.setattr(http_server, "HEAD_TIMEOUT_S", 0.05)
        await connection.say(b"GET /hea")
        assert b"HTTP/1.1" not in await connection.hear()


async def test_a_connection_that_is_kept_serves_several_calls(
    ready: GatewayBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "HEAD_TIMEOUT_S", PATIENCE_S / 10)
    async with httpx.AsyncClient(base_url=f"http://{ready.addresses.http}", trust_env=False) as http:
        body = {"model": "g", "prompt": "hello", "max_tokens": 2}
        answers = [await http.post("/v1/completions", json=body) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200] * 3
    assert len(ready.gateway._http._server.server_state.connections) <= 1  # type: ignore[union-attr]


async def test_pieces_of_an_answer_do_not_wait_for_one_another(bench: GatewayBench) -> None:
    async with connected(bench) as connection:
        await connection.say(HEAD)
        connections = bench.gateway._http._server.server_state.connections  # type: ignore[union-attr]
        await wait_until(lambda: bool(connections))
        (served,) = connections
        served_socket = served.transport.get_extra_info("socket")
        assert served_socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


async def test_a_head_that_is_too_long_is_refused(bench: GatewayBench) -> None:
    async with connected(bench) as connection:
        await connection.say(HEAD + b"X-Long: " + b"x" * 40_000 + b"\r\n\r\n")
        assert (await connection.hear()).startswith(b"HTTP/1.1 400 ")


async def test_one_connection_more_than_the_door_takes_is_closed(
    bench: GatewayBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "MAX_CONNECTIONS", 2)
    async with connected(bench) as first, connected(bench) as second:
        for connection in (first, second):
            await connection.say(b"GET /health HTTP/1.1\r\nHost: g\r\nConnection: close\r\n")
        async with connected(bench) as refused:
            assert await refused.hear() == b""
        for connection in (first, second):
            await connection.say(b"\r\n")
            assert (await connection.hear()).startswith(b"HTTP/1.1 503 ")


async def test_a_body_that_does_not_come_in_time_is_answered_408(
    bench: GatewayBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "BODY_TIMEOUT_S", 0.05)
    async with connected(bench) as connection:
        await connection.say(HEAD + b"Connection: close\r\n\r\n{")
        heard = await connection.hear()
    assert heard.startswith(b"HTTP/1.1 408 ")
    assert b"did not come within 0.05 s" in heard


async def test_long_bodies_are_bounded_together(ready: GatewayBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "MAX_BODIES_BYTES", 150_000)
    long = _body(prompt="x" * 100_000)
    bodies = ready.gateway._endpoint._bodies
    async with connected(ready) as connection:
        await connection.say(HEAD.replace(b"1000", b"120000") + b"\r\n" + b"x" * 100_000)
        await wait_until(lambda: bodies._held >= 100_000)
        assert (await _post(ready, long)).status_code == 429
        assert (await _post(ready, _body())).status_code == 200
    await wait_until(lambda: bodies._held == 0)
    assert (await _post(ready, long)).status_code == 400


async def test_a_body_that_is_too_long_is_answered_413(bench: GatewayBench) -> None:
    answer = await _post(bench, b" " * (8 * 1024 * 1024 + 1))
    assert answer.status_code == 413
    assert "longer than 8388608 bytes" in answer.json()["error"]["message"]


WIDE = {
    "wrong stops": (_body(stop=[1] * 300_000), "stop"),
    "wrong prompts": (_body(prompt=[1.5] * 300_000), "prompt"),
    "wrong biases": (_body(logit_bias=dict.fromkeys(map(str, range(1025)), "x")), "at most 1024 entries, not 1025"),
    "biases": (_body(logit_bias=dict.fromkeys(map(str, range(301)), 1)), "at most 300 tokens, not 301"),
    "objects": (_body(prompt=[{}] * 40_000), "too many objects; at most 32768 are allowed"),
    "values": (_body(prompt=[[]] * PARTS), f"too many values; at most {PARTS} are allowed"),
    "texts": (b'{"model":"g","prompt":[' + b'""' * (PARTS + 1) + b"]}", "too many texts"),
    "depth": (b'{"model":"g","prompt":' + b"[" * 300 + b"]" * 300 + b"}", "recursion"),
}


@pytest.mark.parametrize("name", WIDE)
async def test_a_body_of_many_parts_gets_a_short_answer(bench: GatewayBench, name: str) -> None:
    content, words = WIDE[name]
    answer = await _post(bench, content)
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]
    assert len(answer.content) < 2000


async def test_many_unknown_fields_take_a_short_header(ready: GatewayBench) -> None:
    answer = await _post(ready, _body(**{f"k{index}": 1 for index in range(100_000)}))
    assert answer.status_code == 200
    assert len(answer.headers["x-hetero-ignored"]) < 100


async def test_texts_may_hold_what_parts_are_counted_by(ready: GatewayBench) -> None:
    prompt = '{[,"\\' * 10
    many = _body(prompt=prompt, user='\\",{[' * 200_000)
    assert (await _post(ready, many)).status_code == 200


async def test_one_message_more_than_a_chat_may_have(bench: GatewayBench) -> None:
    messages = [{"role": "user", "content": "a"}] * 4097
    answer = await _post(bench, json.dumps({"model": "g", "messages": messages}).encode(), "/v1/chat/completions")
    assert "messages: must hold at most 4096 messages, not 4097" in answer.json()["error"]["message"]


async def much(scope: Any, receive: Any, send: Any) -> None:
    """Answer with MUCH."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for _ in range(0, MUCH, 1 << 16):
        await send({"type": "http.response.body", "body": b"x" * (1 << 16), "more_body": True})
    await send({"type": "http.response.body", "body": b""})


@asynccontextmanager
async def unread_answer() -> AsyncIterator[tuple[http_server.HttpListener, asyncio.StreamReader]]:
    """A listener, and a client of it that has read nothing of a long answer."""
    listener = http_server.HttpListener(much, host="127.0.0.1", port=0, option="--port")
    listener.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", listener.port, limit=1024)
    writer.write(b"GET / HTTP/1.1\r\nHost: g\r\n\r\n")
    connections: Any = listener._server.server_state.connections
    await wait_until(lambda: any(each.flow.write_paused for each in connections))
    try:
        yield listener, reader
    finally:
        writer.close()
        await listener.stop(0)


@pytest.mark.parametrize("as_from_3_12_on", [False, True])
async def test_a_stop_does_not_wait_for_clients_that_do_not_read(
    monkeypatch: pytest.MonkeyPatch, as_from_3_12_on: bool
) -> None:
    async def wait_closed(self: Any) -> None:
        while self._active_count:  # noqa: ASYNC110 — as the library does it
            await asyncio.sleep(0.01)

    if as_from_3_12_on:
        monkeypatch.setattr(asyncio.base_events.Server, "wait_closed", wait_closed)
    async with unread_answer() as (listener, _), asyncio.timeout(PATIENCE_S):
        await listener.stop(0.05)


async def test_a_client_that_does_not_read_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "READ_TIMEOUT_S", 0.05)
    async with unread_answer() as (listener, _):
        await wait_until(lambda: not listener._server.server_state.connections)


async def test_a_client_that_reads_late_gets_its_whole_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "READ_TIMEOUT_S", PATIENCE_S / 4)
    async with unread_answer() as (_, reader), asyncio.timeout(PATIENCE_S):
        await reader.readuntil(b"\r\n\r\n")
        num_bytes = 0
        while num_bytes < MUCH:
            num_bytes += len(await reader.read(1 << 16))
