"""A gateway process within 512 MiB and its doors full: thousands of clients that say nothing, thousands that ask."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from hetero_api.contract import ENV_GROUP_TOKEN_FILE, EXIT_PERMANENT
from hetero_api.v1 import inference_pb2 as pb
from hetero_api.v1 import inference_pb2_grpc
from tests.unit.server.gateway_process import GatewayProcess
from tests.unit.server.server_setup import write_manifest, write_model

pytestmark = [pytest.mark.unit, pytest.mark.slow]

SLOW_CLIENTS = 5_000
REQUESTS = 10_000
AT_ONCE = 64
DIALLED_AT_ONCE = 50
HEALTH_S = 1.0
MAX_PAUSE_S = 0.25
MAX_GROWTH_BYTES = 64 * 1024 * 1024
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: g\r\n"


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    process = GatewayProcess(tmp_path_factory.mktemp("gateway"))
    yield process
    process.close()


@asynccontextmanager
async def _connections(address: str, count: int, words: bytes) -> AsyncIterator[list[asyncio.Transport]]:
    """Connections that have said some words."""
    host, _, port = address.rpartition(":")
    loop = asyncio.get_running_loop()
    transports: list[asyncio.Transport] = []
    try:
        for _ in range(count // DIALLED_AT_ONCE):
            dialled = (loop.create_connection(asyncio.Protocol, host, int(port)) for _ in range(DIALLED_AT_ONCE))
            transports += [transport for transport, _ in await asyncio.gather(*dialled)]
        for transport in transports:
            transport.write(words)
        yield transports
    finally:
        for transport in transports:
            transport.abort()
        await asyncio.sleep(0)


async def _ask_health(gateway: GatewayProcess) -> float:
    """The slower one of both doors, in seconds."""
    began_s = time.monotonic()
    await _ask_http(gateway.addresses["http"])
    http_s, began_s = time.monotonic() - began_s, time.monotonic()
    await _ask_grpc(gateway.addresses["inference"])
    return max(http_s, time.monotonic() - began_s)


async def _ask_http(address: str, path: str = "/health") -> None:
    async with httpx.AsyncClient(base_url=f"http://{address}", trust_env=False) as http:
        assert (await http.get(path, timeout=30)).status_code == 200


async def _ask_grpc(address: str) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=30)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_thousands_of_slow_clients_delay_nobody(gateway: GatewayProcess) -> None:
    before = gateway.report()
    half = SLOW_CLIENTS // 2
    async with (
        _connections(gateway.addresses["inference"], half, PREFACE),
        _connections(gateway.addresses["http"], half, HEAD) as talkers,
    ):
        waited_s = []
        for _ in range(5):
            for writer in talkers[::10]:  # a byte now and then
                writer.write(b"X")
            waited_s.append(await _ask_health(gateway))
        during = gateway.report()
        assert during.num_http_connections >= half
    growth_bytes = during.peak_bytes - before.resident_bytes
    print(f"\nhealth within {max(waited_s):.3f} s, pause {during.pause_s:.3f} s, growth {growth_bytes / 2**20:.0f} MiB")
    assert max(waited_s) < HEALTH_S
    assert during.pause_s < MAX_PAUSE_S
    assert growth_bytes < MAX_GROWTH_BYTES


@pytest.mark.parametrize(("door", "words"), [("inference", PREFACE), ("http", HEAD)])
async def test_a_door_that_is_full_closes_no_other(gateway: GatewayProcess, door: str, words: bytes) -> None:
    """Not even that of probes: the kubelet would end the gateway."""
    async with _connections(gateway.addresses[door], SLOW_CLIENTS, words):
        other = {"inference": "http", "http": "inference"}[door]
        ask = {"http": _ask_http, "inference": _ask_grpc}[other]
        for _ in range(5):
            began_s = time.monotonic()
            await ask(gateway.addresses[other])
            await _ask_http(gateway.addresses["probes"], "/readyz")
            await _ask_http(gateway.addresses["probes"], "/livez")
            assert time.monotonic() - began_s < HEALTH_S
    assert gateway.report().pause_s < MAX_PAUSE_S


@pytest.mark.parametrize("stream", [False, True])
async def test_an_id_that_no_header_can_hold_leaves_nothing_in_flight(gateway: GatewayProcess, stream: bool) -> None:
    before = gateway.report()
    async with httpx.AsyncClient(base_url=f"http://{gateway.addresses['http']}", trust_env=False) as http:
        body = {"model": "g", "prompt": "a", "n": 16, "request_id": "€", "stream": stream}
        assert (await http.post("/v1/completions", json=body, timeout=30)).status_code == 400
    report = gateway.report()
    print(f"\npause {report.pause_s:.3f} s, growth {(report.peak_bytes - before.resident_bytes) / 2**20:.0f} MiB")
    assert report.is_idle
    assert report.pause_s < MAX_PAUSE_S
    assert report.peak_bytes - before.resident_bytes < MAX_GROWTH_BYTES


def test_a_template_that_links_to_a_secret_keeps_a_gateway_from_starting(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("the-secret", encoding="utf-8")
    model = tmp_path / "model"
    model.mkdir()
    write_model(model)
    (model / "chat_template.jinja").unlink()
    (model / "chat_template.jinja").symlink_to(tmp_path / "secret")
    (tmp_path / "token").write_text("token", encoding="utf-8")
    command = [
        sys.executable, "-m", "hetero_gateway", "--manifest", str(write_manifest(tmp_path / "g.yaml")), "--model",
        str(model), "--inference-port", "0", "--admin-port", "0", "--ranks-port", "0",
    ]  # fmt: skip
    environment = {**os.environ, ENV_GROUP_TOKEN_FILE: str(tmp_path / "token")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == EXIT_PERMANENT, done.stderr
    assert "chat_template.jinja" in done.stderr
    assert "the-secret" not in done.stdout + done.stderr


@asynccontextmanager
async def _grpc_door(address: str) -> AsyncIterator[Callable[[int], Awaitable[int]]]:
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = inference_pb2_grpc.InferenceStub(channel)

        async def ask(number: int) -> int:
            sampling = pb.SamplingParams(max_tokens=1, ignore_eos=True, seed=number)
            call = stub.Generate(pb.GenerateRequest(text=f"request {number}", sampling=sampling), timeout=200)
            ends = [event.WhichOneof("event") async for event in call].count("finished")
            return int(ends == 1)

        yield ask


@asynccontextmanager
async def _http_door(address: str) -> AsyncIterator[Callable[[int], Awaitable[int]]]:
    async with httpx.AsyncClient(base_url=f"http://{address}", trust_env=False, timeout=200) as http:

        async def ask(number: int) -> int:
            body = {"model": "g", "prompt": f"request {number}", "max_tokens": 1, "ignore_eos": True}
            answer = (await http.post("/v1/completions", json=body)).json()
            return int([choice["finish_reason"] for choice in answer["choices"]] == ["length"])

        yield ask


@pytest.mark.timeout(600)
async def test_of_thousands_of_short_requests_none_is_lost(gateway: GatewayProcess) -> None:
    before = gateway.report()
    num_ended = 0
    numbers = iter(range(REQUESTS))

    async def work(ask: Callable[[int], Awaitable[int]]) -> None:
        nonlocal num_ended
        for number in numbers:
            ended = await ask(number)
            num_ended += ended

    async with _grpc_door(gateway.addresses["inference"]) as ours, _http_door(gateway.addresses["http"]) as theirs:
        await asyncio.gather(*(work(ask) for ask in (ours, theirs) for _ in range(AT_ONCE // 2)))
    report = gateway.report()
    growth_bytes = report.peak_bytes - before.resident_bytes
    print(f"\n{num_ended} ended; pause {report.pause_s:.3f} s, growth {growth_bytes / 2**20:.0f} MiB")
    assert num_ended == REQUESTS
    assert report.is_idle
    assert report.pause_s < MAX_PAUSE_S
    assert growth_bytes < MAX_GROWTH_BYTES
