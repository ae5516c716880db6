"""Who may call Admin, and when a gateway refuses to start for want of a token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2_grpc

from hetero_api.contract import AUTHORIZATION_KEY, ENV_ADMIN_TOKEN_FILE, ENV_GROUP_TOKEN_FILE, EXIT_USAGE
from hetero_api.v1 import admin_pb2
from hetero_gateway.server.config import GatewayConfig
from tests.unit.group.group_setup import PATIENCE_S
from tests.unit.server.server_setup import GatewayBench, served_model

pytestmark = pytest.mark.unit

ADMIN_TOKEN = "the-administrators-token"
METHODS = [method.name for method in admin_pb2.DESCRIPTOR.services_by_name["Admin"].methods]


@pytest.fixture
async def guarded(tmp_path: Path) -> AsyncIterator[GatewayBench]:
    async with GatewayBench(served_model(tmp_path), admin_token=ADMIN_TOKEN) as running:
        yield running


@pytest.mark.parametrize("method", METHODS)
async def test_every_call_of_admin_needs_the_token(guarded: GatewayBench, method: str) -> None:
    call, request = getattr(guarded.admin(), method), getattr(admin_pb2, f"{method}Request")()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(request)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert "the administrator's token" in str(caught.value.details())
    # With it a call gets to where it is answered, or refused for what it asks of a group that has not formed.
    refused = (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INVALID_ARGUMENT)
    try:
        await call(request, metadata=((AUTHORIZATION_KEY, f"Bearer {ADMIN_TOKEN}"),))
    except grpc.aio.AioRpcError as error:
        assert error.code() in refused  # noqa: PT017


@pytest.mark.parametrize(
    "metadata",
    [
        ((AUTHORIZATION_KEY, "Bearer another"),),
        ((AUTHORIZATION_KEY, ADMIN_TOKEN),),
        ((AUTHORIZATION_KEY, "Bearer the-token"),),  # the group's
        ((AUTHORIZATION_KEY, f"Bearer {ADMIN_TOKEN}"), (AUTHORIZATION_KEY, f"Bearer {ADMIN_TOKEN}")),
    ],
)
async def test_no_other_token_will_do(guarded: GatewayBench, metadata: Any) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await guarded.admin().GetTopology(admin_pb2.GetTopologyRequest(), metadata=metadata)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert ADMIN_TOKEN not in str(caught.value.details())


async def test_health_of_the_admin_port_is_open(guarded: GatewayBench) -> None:
    stub: Any = health_pb2_grpc.HealthStub(guarded.channel(guarded.addresses.admin))
    answer = await stub.Check(health_pb2.HealthCheckRequest(service=""))
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_what_else_the_admin_port_offers_needs_the_token_too(guarded: GatewayBench) -> None:
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(guarded.channel(guarded.addresses.admin))
    call = stub.ServerReflectionInfo()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await asyncio.wait_for(call.read(), PATIENCE_S)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


def config(folder: Path, *, host: str, admin_token: str | None) -> GatewayConfig:
    environment = {ENV_GROUP_TOKEN_FILE: write(folder / "group", "g")}
    if admin_token is not None:
        environment[ENV_ADMIN_TOKEN_FILE] = write(folder / "admin", admin_token)
    return GatewayConfig.from_command_line(["--manifest", "g.yaml", "--model", "m", "--host", host], environment)


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "gateway.example"])
def test_without_a_token_only_loopback_is_listened_on(
    host: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        config(tmp_path, host=host, admin_token=None)
    assert caught.value.code == EXIT_USAGE
    told = capsys.readouterr().err
    assert f"--host {host} can be reached from other machines" in told
    assert ENV_ADMIN_TOKEN_FILE in told
    assert config(tmp_path, host=host, admin_token=ADMIN_TOKEN).admin_token == ADMIN_TOKEN


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_loopback_needs_no_token(host: str, tmp_path: Path) -> None:
    assert config(tmp_path, host=host, admin_token=None).admin_token is None


def test_an_empty_token_file_is_no_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        config(tmp_path, host="127.0.0.1", admin_token="\n")
    assert f"{ENV_ADMIN_TOKEN_FILE}: " in capsys.readouterr().err
    assert ADMIN_TOKEN not in repr(config(tmp_path, host="127.0.0.1", admin_token=ADMIN_TOKEN))
