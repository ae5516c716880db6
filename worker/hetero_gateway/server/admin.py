"""hetero.v1.Admin: what the operator and an administrator ask."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

from hetero_api.v1 import admin_pb2, admin_pb2_grpc
from hetero_gateway.engine.step import EngineStats
from hetero_gateway.server.statuses import Context, answering


class AdminServicer(admin_pb2_grpc.AdminServicer):
    """`topology` and `stats` each give one moment's answer."""

    def __init__(
        self, *, topology: Callable[[], admin_pb2.GetTopologyResponse], stats: Callable[[], EngineStats]
    ) -> None:
        self._topology = topology
        self._stats = stats

    async def GetTopology(  # noqa: N802
        self,
        request: admin_pb2.GetTopologyRequest,  # noqa: ARG002
        context: Context,
    ) -> admin_pb2.GetTopologyResponse:
        async with answering(context, "GetTopology"):
            return self._topology()

    async def GetStats(self, request: admin_pb2.GetStatsRequest, context: Context) -> admin_pb2.GetStatsResponse:  # noqa: N802, ARG002
        async with answering(context, "GetStats"):
            return admin_pb2.GetStatsResponse(**asdict(self._stats()))
