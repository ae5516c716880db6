"""grpc.health.v1 with a real Watch, and reflection, on both ports."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from hetero_gateway.server import health as health_module
from hetero_gateway.server.health import MAX_WATCHERS_A_HOST
from tests.unit.group.group_setup import PATIENCE_S
from tests.unit.server.server_setup import GatewayBench

pytestmark = pytest.mark.unit

Status = health_pb2.HealthCheckResponse
INFERENCE = "hetero.v1.Inference"


def health(bench: GatewayBench, address: str) -> Any:
    return health_pb2_grpc.HealthStub(bench.channel(address))


def asking(service: str) -> health_pb2.HealthCheckRequest:
    return health_pb2.HealthCheckRequest(service=service)


async def next_status(call: Any) -> int:
    response = await asyncio.wait_for(call.read(), PATIENCE_S)
    return int(response.status)


@pytest.mark.parametrize("service", ["", INFERENCE])
async def test_every_watcher_sees_ready_and_lost(bench: GatewayBench, service: str) -> None:
    stub = health(bench, bench.addresses.inference)
    leaving, *staying = [stub.Watch(asking(service)) for _ in range(3)]
    for call in (leaving, *staying):
        assert await next_status(call) == Status.NOT_SERVING
    leaving.cancel()
    _, life = await bench.join()
    for call in staying:
        assert await next_status(call) == Status.SERVING
    assert (await stub.Check(asking(service))).status == Status.SERVING
    life.cancel()
    for call in staying:
        assert await next_status(call) == Status.NOT_SERVING
    assert (await stub.Check(asking(service))).status == Status.NOT_SERVING


async def test_shutting_down_is_told_to_watchers_and_ends_their_streams(ready: GatewayBench) -> None:
    call = health(ready, ready.addresses.inference).Watch(asking(""))
    assert await next_status(call) == Status.SERVING
    await ready.close()
    assert await next_status(call) == Status.NOT_SERVING
    assert await call.read() is grpc.aio.EOF


@pytest.mark.parametrize("bound", ["MAX_WATCHERS", "MAX_WATCHERS_A_HOST"])
async def test_watchers_are_bounded_and_who_leaves_makes_room(
    ready: GatewayBench, monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    monkeypatch.setattr(health_module, bound, MAX_WATCHERS_A_HOST)
    monkeypatch.setattr(health_module, "MAX_WATCHERS_A_HOST" if bound == "MAX_WATCHERS" else "MAX_WATCHERS", 10_000)
    stub = health(ready, ready.addresses.inference)
    leaving, *staying = [stub.Watch(asking("")) for _ in range(MAX_WATCHERS_A_HOST)]
    for call in (leaving, *staying):
        assert await next_status(call) == Status.SERVING
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await next_status(stub.Watch(asking("")))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert (await stub.Check(asking(""))).status == Status.SERVING
    leaving.cancel()
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                assert await next_status(stub.Watch(asking(""))) == Status.SERVING
                break
            except grpc.aio.AioRpcError:
                await asyncio.sleep(0.01)  # the server has not heard of the leave yet


async def test_an_unknown_service_is_not_found_to_check_and_stays_open_to_watch(ready: GatewayBench) -> None:
    stub = health(ready, ready.addresses.inference)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Check(asking("no.such.Service"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    call = stub.Watch(asking("no.such.Service"))
    assert await next_status(call) == Status.SERVICE_UNKNOWN
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(asyncio.ensure_future(call.read())), 0.05)
    assert not call.done()
    call.cancel()


async def test_the_admin_port_is_healthy_before_the_replica_is(bench: GatewayBench) -> None:
    stub = health(bench, bench.addresses.admin)
    assert (await stub.Check(asking(""))).status == Status.SERVING
    assert (await stub.Check(asking("hetero.v1.Admin"))).status == Status.SERVING
    assert (await stub.Check(asking(INFERENCE))).status == Status.NOT_SERVING
    await bench.join()
    assert (await stub.Check(asking(INFERENCE))).status == Status.SERVING


@pytest.mark.parametrize(("port", "service"), [("inference", INFERENCE), ("admin", "hetero.v1.Admin")])
async def test_reflection_lists_the_services_and_knows_their_files(
    bench: GatewayBench, port: str, service: str
) -> None:
    channel = bench.channel(getattr(bench.addresses, port))
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
    call = stub.ServerReflectionInfo()
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    listed = {entry.name for entry in (await call.read()).list_services_response.service}
    assert listed == {service, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
    await call.write(reflection_pb2.ServerReflectionRequest(file_containing_symbol=service))
    assert (await call.read()).file_descriptor_response.file_descriptor_proto
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF
