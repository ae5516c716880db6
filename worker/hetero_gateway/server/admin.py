"""hetero.v1.Admin: what the operator and an administrator ask."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict

from hetero_api.v1 import admin_pb2, admin_pb2_grpc
from hetero_gateway.engine.step import EngineStats
from hetero_gateway.group.admin_rpcs import AdminRpcs
from hetero_gateway.group.errors import InvalidCommand
from hetero_gateway.server.errors import InvalidArguments, Violation
from hetero_gateway.server.statuses import Context, answering


class AdminServicer(admin_pb2_grpc.AdminServicer):
    """`topology` and `stats` each give one moment's answer; `rpcs` change the group or have it do something."""

    def __init__(
        self,
        *,
        topology: Callable[[], admin_pb2.GetTopologyResponse],
        stats: Callable[[], EngineStats],
        rpcs: AdminRpcs,
    ) -> None:
        self._topology = topology
        self._stats = stats
        self._rpcs = rpcs

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

    async def ResetCache(  # noqa: N802
        self, request: admin_pb2.ResetCacheRequest, context: Context
    ) -> admin_pb2.ResetCacheResponse:
        async with _obeying(context, "ResetCache"):
            return await self._rpcs.reset_cache(request)

    async def Sleep(self, request: admin_pb2.SleepRequest, context: Context) -> admin_pb2.SleepResponse:  # noqa: N802
        async with _obeying(context, "Sleep"):
            return await self._rpcs.sleep(request)

    async def WakeUp(self, request: admin_pb2.WakeUpRequest, context: Context) -> admin_pb2.WakeUpResponse:  # noqa: N802
        async with _obeying(context, "WakeUp"):
            return await self._rpcs.wake_up(request)

    async def Drain(self, request: admin_pb2.DrainRequest, context: Context) -> admin_pb2.DrainResponse:  # noqa: N802, ARG002
        async with _obeying(context, "Drain"):
            await self._rpcs.drain()
            return admin_pb2.DrainResponse()

    async def Profile(self, request: admin_pb2.ProfileRequest, context: Context) -> admin_pb2.ProfileResponse:  # noqa: N802
        async with _obeying(context, "Profile"):
            return await self._rpcs.profile(request)

    async def PlaceExperts(  # noqa: N802
        self,
        request: admin_pb2.PlaceExpertsRequest,  # noqa: ARG002
        context: Context,
    ) -> admin_pb2.PlaceExpertsResponse:
        async with _obeying(context, "PlaceExperts"):
            return await self._rpcs.place_experts()


@asynccontextmanager
async def _obeying(context: Context, method: str) -> AsyncIterator[None]:
    """Around a verb: the status that its error asks for, wrong fields with their paths."""
    async with answering(context, method):
        try:
            yield
        except InvalidCommand as error:
            raise InvalidArguments([Violation(error.field, error.problem)]) from error
