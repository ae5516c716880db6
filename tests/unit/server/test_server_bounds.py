"""What a client can cost a gateway: bounds of the servers, proven on a gateway that is a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from hetero_gateway.server import grpc_server
from tests.unit.server.gateway_process import GatewayProcess
from tests.unit.server.server_setup import GatewayBench, served_model

pytestmark = pytest.mark.unit

BOMB_BYTES = 160 * 1024 * 1024
MAX_GROWTH_BYTES = 64 * 1024 * 1024
MAX_PAUSE_S = 0.25
GZIP, DEFLATE = grpc.Compression.Gzip, grpc.Compression.Deflate
BOMBS = [
    ("inference", "/hetero.v1.Inference/Generate", GZIP),
    ("inference", "/hetero.v1.Inference/Generate", DEFLATE),
    ("inference", "/grpc.health.v1.Health/Check", GZIP),
    ("inference", "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", GZIP),
    ("admin", "/hetero.v1.Admin/Profile", GZIP),
    ("admin", "/grpc.health.v1.Health/Check", GZIP),
    ("ranks", "/hetero.v1.Ranks/Join", GZIP),
]


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    process = GatewayProcess(tmp_path_factory.mktemp("gateway"))
    yield process
    process.close()


def _channel(address: str) -> Any:
    options = [("grpc.max_send_message_length", -1), ("grpc.enable_http_proxy", 0)]
    return grpc.insecure_channel(address, options=options)


@pytest.mark.parametrize(("port", "method", "algorithm"), BOMBS)
def test_a_compressed_message_is_refused_before_it_is_inflated(
    gateway: GatewayProcess, port: str, method: str, algorithm: grpc.Compression
) -> None:
    before = gateway.report()
    with _channel(gateway.addresses[port]) as channel, pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary(method)(b"\0" * BOMB_BYTES, compression=algorithm, timeout=60)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    report = gateway.report()
    growth_bytes = report.peak_bytes - before.resident_bytes
    print(f"\n{method}: pause {report.pause_s:.3f} s, growth {growth_bytes / 2**20:.0f} MiB")
    assert report.pause_s < MAX_PAUSE_S
    assert growth_bytes < MAX_GROWTH_BYTES


def test_headers_that_are_too_long_are_refused(gateway: GatewayProcess) -> None:
    metadata = [(f"x-{index}", "y" * 4000) for index in range(8)]
    with _channel(gateway.addresses["inference"]) as channel, pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary("/hetero.v1.Inference/GetServerInfo")(b"", metadata=metadata, timeout=60)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_one_call_more_than_a_server_takes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_server, "MAX_CALLS", 2)
    async with GatewayBench(served_model(tmp_path)) as bench:
        stub = health_pb2_grpc.HealthStub(bench.channel(bench.addresses.inference))
        watching = [stub.Watch(health_pb2.HealthCheckRequest()) for _ in range(2)]
        for call in watching:
            await call.read()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Check(health_pb2.HealthCheckRequest())
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        for call in watching:
            call.cancel()


async def _never() -> AsyncIterator[bytes]:
    await asyncio.Event().wait()
    yield b""


@pytest.mark.parametrize("method", ["/hetero.v1.Inference/Tokenize", "/hetero.v1.Inference/Generate"])
async def test_a_call_whose_message_does_not_come_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """Such calls of one host leave room for those of others, and are gone in time."""
    monkeypatch.setattr(grpc_server, "MAX_SILENT_CALLS", 2)
    monkeypatch.setattr(grpc_server, "MESSAGE_TIMEOUT_S", 0.5)
    async with GatewayBench(served_model(tmp_path)) as bench:
        channel: Any = bench.channel(bench.addresses.inference)
        silent = [asyncio.ensure_future(_end_of(channel.stream_stream(method)(_never()))) for _ in range(5)]
        codes = sorted([await call for call in silent], key=lambda code: code.name)
        late, many = grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.RESOURCE_EXHAUSTED
        assert codes == [late, late, many, many, many]
        assert await _end_of(channel.stream_stream(method)(_nothing())) is grpc.StatusCode.INVALID_ARGUMENT
        stub = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest())
        assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING, "no rank has come"


async def _nothing() -> AsyncIterator[bytes]:
    return
    yield b""


async def _end_of(call: Any) -> grpc.StatusCode:
    with contextlib.suppress(grpc.aio.AioRpcError):
        async for _ in call:
            pass
    code: grpc.StatusCode = await call.code()
    return code


async def test_one_connection_more_than_a_server_takes_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_server, "MAX_CONNECTIONS", 2)
    async with GatewayBench(served_model(tmp_path)) as bench:
        host, _, port = bench.addresses.inference.rpartition(":")
        async with contextlib.AsyncExitStack() as closing:
            greetings = []
            for _ in range(3):
                reader, writer = await asyncio.open_connection(host, int(port))
                closing.push_async_callback(writer.wait_closed)
                closing.callback(writer.close)
                greetings.append(await reader.read(1))
        assert [bool(greeting) for greeting in greetings] == [True, True, False]
