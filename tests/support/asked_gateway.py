"""A gateway as the operator asks it: both ports, with an answer that is always the same."""

from __future__ import annotations

from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2_grpc
from grpc_health.v1.health import aio as health_aio

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

    def __init__(self, tokens: list[Any]) -> None:
        self._tokens = tokens

    async def GetTopology(self, request: Any, context: Any) -> admin_pb2.GetTopologyResponse:  # noqa: N802
        self._tokens += [value for key, value in context.invocation_metadata() if key == "authorization"]
        if ("authorization", "Bearer secret") not in tuple(context.invocation_metadata()):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "who are you?")
        return TOPOLOGY

    async def GetStats(self, request: Any, context: Any) -> admin_pb2.GetStatsResponse:  # noqa: N802
        return admin_pb2.GetStatsResponse()

    async def _refuse(self, request: Any, context: Any) -> Any:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "the operator does not ask for this")

    ResetCache = Sleep = WakeUp = Drain = Profile = PlaceExperts = UpdateWeights = _refuse

    LoadAdapter = UnloadAdapter = ListAdapters = _refuse


class Gateway:
    """Both servers, at ports of their own."""

    def __init__(self, credentials: grpc.ServerCredentials | None = None) -> None:
        """With `credentials`, the administrators' port is encrypted."""
        self._credentials = credentials
        self.tokens: list[Any] = []
        """What callers of the administrators' port showed."""
        self.admin_port, self.inference_port = free_port(), free_port()
        self.health = health_aio.HealthServicer()
        self._servers: list[grpc.aio.Server] = []

    async def start(self) -> None:
        for port in (self.admin_port, self.inference_port):
            server = grpc.aio.server()
            admin_pb2_grpc.add_AdminServicer_to_server(Admin(self.tokens), server)
            health_pb2_grpc.add_HealthServicer_to_server(self.health, server)
            if port == self.admin_port and self._credentials is not None:
                server.add_secure_port(f"127.0.0.1:{port}", self._credentials)
            else:
                server.add_insecure_port(f"127.0.0.1:{port}")
            await server.start()
            self._servers.append(server)

    async def stop(self) -> None:
        for server in self._servers:
            await server.stop(None)
        self._servers.clear()

    def probe(self) -> GatewayProbe:
        return GatewayProbe(admin_port=self.admin_port, inference_port=self.inference_port, timeout_s=2.0)
