"""hetero.v1.Admin: calls of the operator and of administrators, each with the function that answers it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from hetero_api.v1 import admin_pb2
from hetero_gateway.group.admin_rpcs import AdminRpcs
from hetero_gateway.server.calls import Context, answering

_SERVICE = admin_pb2.DESCRIPTOR.services_by_name["Admin"]


def serve_admin(
    server: grpc.aio.Server,
    *,
    topology: Callable[[], admin_pb2.GetTopologyResponse],
    stats: Callable[[], admin_pb2.GetStatsResponse],
    rpcs: AdminRpcs,
) -> None:
    """Have `server` answer hetero.v1.Admin; `topology` and `stats` each give one moment's answer."""

    async def get_topology(_: admin_pb2.GetTopologyRequest) -> Message:
        return topology()

    async def get_stats(_: admin_pb2.GetStatsRequest) -> Message:
        return stats()

    async def list_adapters(_: admin_pb2.ListAdaptersRequest) -> Message:
        return rpcs.list_adapters()

    calls: dict[str, Callable[[Any], Awaitable[Message]]] = {
        "GetTopology": get_topology,
        "GetStats": get_stats,
        "ResetCache": rpcs.reset_cache,
        "Sleep": rpcs.sleep,
        "WakeUp": rpcs.wake_up,
        "Drain": lambda _: rpcs.drain(),
        "Profile": rpcs.profile,
        "PlaceExperts": lambda _: rpcs.place_experts(),
        "UpdateWeights": lambda _: rpcs.update_weights(),
        "LoadAdapter": rpcs.load_adapter,
        "UnloadAdapter": rpcs.unload_adapter,
        "ListAdapters": list_adapters,
    }
    handlers = {method.name: _handler(method, calls[method.name]) for method in _SERVICE.methods}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE.full_name, handlers),))


def _handler(method: Any, call: Callable[[Any], Awaitable[Message]]) -> Any:
    """Return gRPC's handler of a method whose requests `call` answers."""

    async def answer(request: Message, context: Context) -> Message:
        async with answering(context, method.name):
            return await call(request)

    return grpc.unary_unary_rpc_method_handler(
        answer,
        request_deserializer=GetMessageClass(method.input_type).FromString,
        response_serializer=GetMessageClass(method.output_type).SerializeToString,
    )
