"""The responder: both doors tell any caller that no replica runs and when to try again."""

from __future__ import annotations

import asyncio
import re
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from hetero_client.aio import AsyncHeteroClient
from hetero_client.errors import RequestError
from hetero_gateway.responder import Responder, ResponderConfig
from hetero_gateway.server.errors import TlsError
from tests.unit.server.test_tls import Authority

pytestmark = pytest.mark.unit

MOST_BYTES = 128 * 2**20
"""What the operator gives its pod."""


@asynccontextmanager
async def responding(**changes: Any) -> AsyncIterator[Responder]:
    arguments = ["--inference-port", "0", "--http-port", "0", "--retry-after-s", "7"]
    arguments += [text for name, value in changes.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    responder = Responder(ResponderConfig.from_command_line(arguments))
    serving = asyncio.create_task(responder.serve())
    try:
        yield responder
    finally:
        serving.cancel()
        await responder.close()


def retry_after_s(error: grpc.aio.AioRpcError) -> int:
    (details,) = [value for key, value in error.trailing_metadata() or () if key == "grpc-status-details-bin"]
    (detail,) = status_pb2.Status.FromString(details).details
    info = error_details_pb2.RetryInfo()
    assert detail.Unpack(info)
    return int(info.retry_delay.seconds)


async def test_any_http_call_is_answered_503_with_retry_after() -> None:
    async with responding() as responder, httpx.AsyncClient(base_url=f"http://{responder.http_address}") as http:
        for method, path in (("POST", "/v1/chat/completions"), ("GET", "/v1/models"), ("GET", "/health")):
            answer = await http.request(method, path, content=b"x" * 100_000 if method == "POST" else None)
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "7")
            assert answer.json()["error"]["code"] == "unavailable"
            assert "no replica runs now" in answer.json()["error"]["message"]


async def test_any_grpc_call_ends_with_unavailable_and_retry_info() -> None:
    async with responding() as responder, grpc.aio.insecure_channel(responder.inference_address) as channel:
        calls: list[Any] = [
            channel.unary_unary("/hetero.v1.Inference/GetModelInfo", bytes)(b""),
            channel.unary_stream("/hetero.v1.Inference/Generate", bytes)(b"\x0a\x00").read(),
        ]
        for call in calls:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            assert retry_after_s(caught.value) == 7


async def test_health_tells_that_nothing_serves() -> None:
    async with responding() as responder, grpc.aio.insecure_channel(responder.inference_address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service="hetero.v1.Inference")
        assert (await stub.Check(request)).status == health_pb2.HealthCheckResponse.NOT_SERVING
        statuses = [answer.status async for answer in stub.Watch(request)]
        assert statuses == [health_pb2.HealthCheckResponse.NOT_SERVING]


async def test_our_client_hears_of_it() -> None:
    async with responding() as responder, AsyncHeteroClient(responder.inference_address) as client:
        with pytest.raises(RequestError, match="no replica runs now"):
            await client.model_info()


async def test_the_certificate_of_the_front_door_is_shown(tmp_path: Path) -> None:
    authority = Authority()
    folder = authority.write(tmp_path / "tls")
    async with responding(tls_dir=folder) as responder:
        port = responder.http_address.rpartition(":")[2]
        async with httpx.AsyncClient(
            verify=ssl.create_default_context(cafile=folder / "ca.crt"), trust_env=False
        ) as http:
            assert (await http.get(f"https://localhost:{port}/")).status_code == 503
        target = f"localhost:{responder.inference_address.rpartition(':')[2]}"
        credentials = grpc.ssl_channel_credentials(authority.pem)
        async with grpc.aio.secure_channel(target, credentials) as channel:
            with pytest.raises(grpc.aio.AioRpcError, match="no replica runs now"):
                await channel.unary_unary("/hetero.v1.Inference/GetModelInfo", bytes)(b"")
    with pytest.raises(TlsError):
        Responder(ResponderConfig.from_command_line(["--tls-dir", str(tmp_path)]))


def test_as_a_process_it_fits_its_pod_and_ends_at_once() -> None:
    command = [sys.executable, "-m", "hetero_gateway", "respond", "--inference-port", "0", "--http-port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        found = re.search(r"listening inference=\S+ http=(\S+)", line)
        assert found, line + process.stderr.read()
        assert httpx.get(f"http://{found[1]}/", trust_env=False).headers["retry-after"] == "30"
        held = psutil.Process(process.pid).memory_info().rss
        process.terminate()
        assert process.wait(10) == 0
    assert held < MOST_BYTES


def test_a_wrong_command_line_is_a_line_on_stderr() -> None:
    command = [sys.executable, "-m", "hetero_gateway", "respond", "--retry-after-s", "soon"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1)
    assert "--retry-after-s: 'soon' is no number" in ended.stderr
