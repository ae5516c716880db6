"""Asking a gateway: what it says in the operator's terms, and what is told when it does not answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from grpc_health.v1 import health_pb2

from hetero_api.group_state import GroupState
from hetero_operator.gateway_probe import GatewayProbe
from tests.support.asked_gateway import TOPOLOGY, Gateway


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    gateway = Gateway()
    await gateway.start()
    await gateway.health.set("hetero.v1.Inference", health_pb2.HealthCheckResponse.SERVING)
    yield gateway
    await gateway.stop()


async def test_what_a_gateway_says_is_told_in_the_operators_terms(gateway: Gateway) -> None:
    probe = gateway.probe()
    report = await probe.ask("x-gateway-0", "127.0.0.1", "secret")
    await probe.close()
    assert (report.pod, report.error, report.state, report.serving) == ("x-gateway-0", "", GroupState.READY, True)
    assert report.group == TOPOLOGY


async def test_not_serving_is_seen(gateway: Gateway) -> None:
    probe = gateway.probe()
    await gateway.health.set("hetero.v1.Inference", health_pb2.HealthCheckResponse.NOT_SERVING)
    assert not (await probe.ask("p", "127.0.0.1", "secret")).serving
    await probe.close()


async def test_a_wrong_token_is_told(gateway: Gateway) -> None:
    probe = gateway.probe()
    report = await probe.ask("p", "127.0.0.1", "wrong")
    await probe.close()
    assert report.error == "UNAUTHENTICATED: who are you?"
    assert not report.group.ranks


async def test_a_gateway_that_is_away_is_told_and_seen_as_soon_as_it_is_back(gateway: Gateway) -> None:
    probe = gateway.probe()
    assert (await probe.ask("p", "127.0.0.1", "secret")).error == ""
    await gateway.stop()
    assert (await probe.ask("p", "127.0.0.1", "secret")).error.startswith("UNAVAILABLE")
    assert not (await probe.ask("p", "127.0.0.1", "secret")).serving
    await gateway.start()
    assert (await probe.ask("p", "127.0.0.1", "secret")).error == ""
    await probe.close()


async def test_a_gateway_that_accepts_and_says_nothing_is_given_up(gateway: Gateway) -> None:
    writers: list[asyncio.StreamWriter] = []

    async def mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)

    server = await asyncio.start_server(mute, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    probe = GatewayProbe(admin_port=port, inference_port=port, timeout_s=0.2)
    report = await probe.ask("p", "127.0.0.1", "")
    await probe.close()
    server.close()
    for writer in writers:
        writer.close()
        await asyncio.wait([asyncio.ensure_future(writer.wait_closed())])
    assert report.error.startswith(("DEADLINE_EXCEEDED", "UNAVAILABLE"))
