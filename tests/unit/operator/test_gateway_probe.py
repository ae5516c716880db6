"""Asking a gateway: what it says in the operator's terms, and what is told when it does not answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio

from hetero_api.group_state import GroupState
from hetero_api.v1 import admin_pb2, admin_pb2_grpc, ranks_pb2
from hetero_operator.gateway_probe import GatewayProbe
from tests.support.kube.ports import free_port

TOPOLOGY = admin_pb2.GetTopologyResponse(
    name="x",
    state=admin_pb2.GROUP_STATE_READY,
    epoch=3,
    exchange=ranks_pb2.EXCHANGE_KIND_GLOO,
    exchange_reason="the ranks are on two hosts",
    model_source="wheel package==1, widened",
    placement_mode="Tensor",
    placement=admin_pb2.PlacementReport(
        options=[
            admin_pb2.PlacementOption(
                name="GPU only", chosen=True, decode_tokens_per_second=50, prefill_tokens_per_second=900
            ),
            admin_pb2.PlacementOption(name="CPU only", why_not="no memory"),
        ],
        reason="GPU only: 50 tokens/s",
        predicted_tokens_per_second=50,
        step_time_ratio=1.25,
        measured_tokens_per_second=40,
    ),
    ranks=[
        admin_pb2.RankStatus(
            joined=True,
            place=ranks_pb2.RankPlace(
                rank=0,
                pool="cpu",
                pod_name="x-cpu-0",
                device=ranks_pb2.DeviceReport(name="CPU", cpus=[0, 1, 2, 8], numa_nodes=[0], pinned=True),
            ),
            shard=ranks_pb2.RankShard(
                layers=[
                    ranks_pb2.LayerShard(
                        kv_heads=ranks_pb2.UnitRange(begin=0, end=2), mlp_columns=ranks_pb2.UnitRange(begin=64, end=192)
                    ),
                    ranks_pb2.LayerShard(
                        kv_heads=ranks_pb2.UnitRange(begin=0, end=1), experts=ranks_pb2.UnitRange(begin=3, end=8)
                    ),
                ],
                embedding_rows=ranks_pb2.UnitRange(begin=0, end=5),
                head_rows=ranks_pb2.UnitRange(begin=10, end=30),
            ),
            weight_bytes=7,
            local_memory_percent=0,
        ),
        admin_pb2.RankStatus(place=ranks_pb2.RankPlace(rank=1, pool="cpu", pod_name="x-cpu-1")),
    ],
)


class Admin(admin_pb2_grpc.AdminServicer):
    """Answers whoever shows the token."""

    async def GetTopology(self, request: Any, context: Any) -> admin_pb2.GetTopologyResponse:  # noqa: N802
        if ("authorization", "Bearer secret") not in tuple(context.invocation_metadata()):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "who are you?")
        return TOPOLOGY

    async def GetStats(self, request: Any, context: Any) -> admin_pb2.GetStatsResponse:  # noqa: N802
        return admin_pb2.GetStatsResponse()

    async def _refuse(self, request: Any, context: Any) -> Any:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "the operator does not ask for this")

    ResetCache = Sleep = WakeUp = Drain = Profile = PlaceExperts = UpdateWeights = _refuse


class Gateway:
    """Both servers, at ports of their own."""

    def __init__(self) -> None:
        self.admin_port, self.inference_port = free_port(), free_port()
        self.health = health_aio.HealthServicer()
        self._servers: list[grpc.aio.Server] = []

    async def start(self) -> None:
        for port in (self.admin_port, self.inference_port):
            server = grpc.aio.server()
            admin_pb2_grpc.add_AdminServicer_to_server(Admin(), server)
            health_pb2_grpc.add_HealthServicer_to_server(self.health, server)
            server.add_insecure_port(f"127.0.0.1:{port}")
            await server.start()
            self._servers.append(server)

    async def stop(self) -> None:
        for server in self._servers:
            await server.stop(None)
        self._servers.clear()

    def probe(self) -> GatewayProbe:
        return GatewayProbe(admin_port=self.admin_port, inference_port=self.inference_port, timeout_s=2.0)


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
