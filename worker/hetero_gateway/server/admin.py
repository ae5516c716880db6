"""hetero.v1.Admin: calls of the operator and of administrators."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict

from hetero_api.v1 import admin_pb2, admin_pb2_grpc
from hetero_gateway.engine.step import EngineStats
from hetero_gateway.group.admin_rpcs import AdminRpcs
from hetero_gateway.group.errors import InvalidCommand
from hetero_gateway.server.calls import Context, answering
from hetero_gateway.server.errors import InvalidArguments, Violation


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
        """Return the group's ranks, placement and state."""
        async with answering(context, "GetTopology"):
            return self._topology()

    async def GetStats(self, request: admin_pb2.GetStatsRequest, context: Context) -> admin_pb2.GetStatsResponse:  # noqa: N802, ARG002
        """Return the engine's counts."""
        async with answering(context, "GetStats"):
            return admin_pb2.GetStatsResponse(**asdict(self._stats()))

    async def ResetCache(  # noqa: N802
        self, request: admin_pb2.ResetCacheRequest, context: Context
    ) -> admin_pb2.ResetCacheResponse:
        """Replace the KV cache by an empty one."""
        async with _obeying(context, "ResetCache"):
            return await self._rpcs.reset_cache(request)

    async def Sleep(self, request: admin_pb2.SleepRequest, context: Context) -> admin_pb2.SleepResponse:  # noqa: N802
        """Give up memory of weights and cache until WakeUp."""
        async with _obeying(context, "Sleep"):
            return await self._rpcs.sleep(request)

    async def WakeUp(self, request: admin_pb2.WakeUpRequest, context: Context) -> admin_pb2.WakeUpResponse:  # noqa: N802
        """Take memory back, and serve again."""
        async with _obeying(context, "WakeUp"):
            return await self._rpcs.wake_up(request)

    async def Drain(self, request: admin_pb2.DrainRequest, context: Context) -> admin_pb2.DrainResponse:  # noqa: N802, ARG002
        """Refuse new requests for good, and return when those in flight have ended."""
        async with _obeying(context, "Drain"):
            await self._rpcs.drain()
            return admin_pb2.DrainResponse()

    async def Profile(self, request: admin_pb2.ProfileRequest, context: Context) -> admin_pb2.ProfileResponse:  # noqa: N802
        """Record what the ranks do for some steps, and return their reports."""
        async with _obeying(context, "Profile"):
            return await self._rpcs.profile(request)

    async def PlaceExperts(  # noqa: N802
        self,
        request: admin_pb2.PlaceExpertsRequest,  # noqa: ARG002
        context: Context,
    ) -> admin_pb2.PlaceExpertsResponse:
        """Move experts to the ranks where they are chosen most."""
        async with _obeying(context, "PlaceExperts"):
            return await self._rpcs.place_experts()

    async def UpdateWeights(  # noqa: N802
        self,
        request: admin_pb2.UpdateWeightsRequest,  # noqa: ARG002
        context: Context,
    ) -> admin_pb2.UpdateWeightsResponse:
        """Read the model's files again in place of the weights that serve."""
        async with _obeying(context, "UpdateWeights"):
            return await self._rpcs.update_weights()


@asynccontextmanager
async def _obeying(context: Context, method: str) -> AsyncIterator[None]:
    """End the call with the status of an error raised inside; wrong fields are named by their paths."""
    async with answering(context, method):
        try:
            yield
        except InvalidCommand as error:
            raise InvalidArguments([Violation(error.field, error.problem)]) from error
