"""How a gateway stops, with real signals and real streams."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from hetero_api.contract import EXIT_OK
from hetero_api.v1 import admin_pb2
from hetero_gateway.server.serving import SHUTTING_DOWN, StopSignals, serve_until
from tests.unit.group.group_setup import PATIENCE_S
from tests.unit.server.server_setup import GatewayBench, GrpcRank, read_all, request, sampling, served_model

pytestmark = pytest.mark.unit


class StoppableBench(GatewayBench):
    """A gateway that ends as its process does: by signals to this one."""

    drain_timeout_s = 60.0
    notice_s = 0.0

    async def __aenter__(self) -> StoppableBench:
        await super().__aenter__()
        return self

    async def __aexit__(self, *ending: object) -> None:
        await super().__aexit__(*ending)
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().remove_signal_handler(number)

    def serve(self) -> asyncio.Task[Any]:
        self.stop = StopSignals(asyncio.get_running_loop())
        living = serve_until(self.stop, self.gateway, drain_timeout_s=self.drain_timeout_s, notice_s=self.notice_s)
        return asyncio.create_task(living)

    async def signal(self, number: signal.Signals = signal.SIGTERM) -> None:
        was_asked = self.stop.asked.is_set()
        os.kill(os.getpid(), number)
        await self.until(self.stop.urged.is_set if was_asked else self.stop.asked.is_set)

    async def ended(self) -> int:
        """The exit status, after the gateway was closed as the process does."""
        status = int(await asyncio.wait_for(asyncio.shield(self.serving), PATIENCE_S))
        await self.close()
        return status


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[StoppableBench]:
    async with StoppableBench(served_model(tmp_path)) as bench:
        yield bench


async def one_stream(bench: StoppableBench) -> tuple[GrpcRank, Any]:
    """A rank that holds its steps, and a Generate call that waits for one."""
    rank, _ = await bench.join()
    rank.may_step.clear()
    call = bench.inference().Generate(request([1], sampling=sampling(max_tokens=20, ignore_eos=True)))
    await call.read()
    return rank, call


async def test_streams_in_flight_finish_and_new_requests_are_refused(running: StoppableBench) -> None:
    rank, call = await one_stream(running)
    health: Any = health_pb2_grpc.HealthStub(running.channel(running.addresses.inference))
    await running.signal()
    await running.until(lambda: not running.gateway.group.is_ready)
    answer = await health.Check(health_pb2.HealthCheckRequest(service=""))
    assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
    topology = await running.admin().GetTopology(admin_pb2.GetTopologyRequest())
    assert topology.state == admin_pb2.GROUP_STATE_DRAINING
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read_all(running.inference().Generate(request([2])))
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "draining" in str(caught.value.details())
    assert not running.serving.done()
    rank.may_step.set()
    events = await read_all(call)
    assert sum(len(event.delta.token_ids) for event in events) == 20
    assert events[-1].HasField("finished")
    assert await running.ended() == EXIT_OK
    assert rank.kinds[-1] == "shutdown"


async def test_clients_that_have_not_heard_of_the_end_are_served_for_a_while(tmp_path: Path) -> None:
    leaving = StoppableBench(served_model(tmp_path))
    leaving.notice_s = 3.0
    async with leaving, httpx.AsyncClient(base_url=f"http://{leaving.addresses.http}") as client:
        await leaving.join()
        probe = await client.get("/health")
        assert (probe.status_code, probe.headers.get("connection")) == (200, None)
        await leaving.signal()
        await leaving.until(lambda: not leaving.gateway.group.is_ready)
        assert (await client.get("/health")).status_code == 503
        served = [await completion(client)]
        while served[-1].status_code == 200:
            served.append(await completion(client))
        *answers, refusal = served
        assert {answer.status_code for answer in answers} == {200}
        assert answers[-1].headers["connection"] == "close"
        assert (refusal.status_code, refusal.headers["connection"]) == (503, "close")
        assert await leaving.ended() == EXIT_OK


async def completion(client: httpx.AsyncClient) -> httpx.Response:
    asked = {"model": "g", "prompt": [1], "max_tokens": 2}
    return await client.post("/v1/completions", json=asked)


async def test_a_gateway_without_ranks_has_nobody_to_wait_for(tmp_path: Path) -> None:
    leaving = StoppableBench(served_model(tmp_path))
    leaving.notice_s = 600.0
    async with leaving:
        await leaving.signal()
        assert await leaving.ended() == EXIT_OK


async def test_without_requests_it_ends_at_once(running: StoppableBench) -> None:
    await running.join()
    await running.signal(signal.SIGINT)
    assert await running.ended() == EXIT_OK


async def test_what_takes_longer_than_the_drain_timeout_ends_with_unavailable(tmp_path: Path) -> None:
    hasty = StoppableBench(served_model(tmp_path))
    hasty.drain_timeout_s = 0.05
    async with hasty:
        _, call = await one_stream(hasty)
        await hasty.signal()
        status = asyncio.create_task(hasty.ended())
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_all(call)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert SHUTTING_DOWN in str(caught.value.details())
        assert await status == EXIT_OK


async def test_a_second_signal_does_not_wait(running: StoppableBench) -> None:
    _, call = await one_stream(running)
    await running.signal()
    await running.signal()
    status = asyncio.create_task(running.ended())
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read_all(call)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert await status == EXIT_OK


async def test_a_client_that_leaves_is_not_waited_for(running: StoppableBench) -> None:
    rank, call = await one_stream(running)
    await running.signal()
    call.cancel()
    rank.may_step.set()
    assert await running.ended() == EXIT_OK


async def test_a_rank_that_is_lost_while_draining_ends_the_streams_and_the_gateway(running: StoppableBench) -> None:
    rank, life = await running.join()
    rank.may_step.clear()
    call = running.inference().Generate(request([1], sampling=sampling(max_tokens=5, ignore_eos=True)))
    await call.read()
    await running.signal()
    life.cancel()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read_all(call)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert await running.ended() == EXIT_OK
    assert running.gateway.group.epoch == 1
