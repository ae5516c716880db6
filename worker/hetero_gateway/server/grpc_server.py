"""gRPC servers: their options, binding with errors that a person can act on, and what callers have to show.

A server refuses before it allocates: messages are never decompressed (a small compressed message can be gigabytes), and
connections, calls and headers are bounded. So is the time for a call's message, and how many calls of one host have not
sent theirs: calls that say nothing keep nobody out.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from typing import Any, Final

import grpc

from hetero_api.contract import AUTHORIZATION_KEY, MAX_DOOR_CONNECTIONS
from hetero_api.errors import HeteroError
from hetero_gateway.server.access.limits import Meters
from hetero_gateway.server.access.principals import Guard
from hetero_gateway.server.access.tracing import note_arrival
from hetero_gateway.server.calls import Context, RpcStatus, abort, host_of, status_of
from hetero_gateway.server.errors import BindError

logger = logging.getLogger(__name__)

KEEPALIVE_MS: Final = 30_000
KEEPALIVE_TIMEOUT_MS: Final = 15_000
MIN_CLIENT_PING_MS: Final = 5_000
MAX_CONNECTIONS: Final = MAX_DOOR_CONNECTIONS
MAX_CALLS: Final = 4096
"""Calls under way on one server; one more ends with RESOURCE_EXHAUSTED before its message is read."""
MAX_METADATA_BYTES: Final = 16 * 1024
HANDSHAKE_TIMEOUT_MS: Final = 10_000
"""A connection that has not said a word of HTTP/2 by then is closed."""
MESSAGE_TIMEOUT_S: Final = 60.0
"""For the whole message of a call, from its headers on: as for a body over HTTP."""
MAX_SILENT_CALLS: Final = 256
"""Calls of one host that wait for their message; one more ends with RESOURCE_EXHAUSTED."""
IDLE_CONNECTION_MS: Final = 600_000
"""A connection without calls is closed after this time; clients open another when they call."""
UNBOUNDED: Final = -1
"""Size of messages that only an administrator gets: the records of all ranks in one."""


def new_server(
    *,
    max_message_bytes: int,
    max_answer_bytes: int | None = None,
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
) -> grpc.aio.Server:
    """Return a server that listens nowhere yet. `max_answer_bytes` defaults to `max_message_bytes`."""
    sizes = (
        ("grpc.max_send_message_length", max_message_bytes if max_answer_bytes is None else max_answer_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
    )
    return grpc.aio.server(
        options=[*_shared_options(), *sizes],
        interceptors=[*interceptors, _MessageInterceptor()],
        maximum_concurrent_rpcs=MAX_CALLS,
    )


def _shared_options() -> tuple[tuple[str, int], ...]:
    return (
        # Two gateways must not share a port without a word.
        ("grpc.so_reuseport", 0),
        # A peer whose machine vanished closes no socket.
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.http2.max_pings_without_data", 0),
        # Clients ping through long quiet prefills; that is no abuse.
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", MIN_CLIENT_PING_MS),
        ("grpc.http2.max_ping_strikes", 0),
        # Identity alone: a call that names another algorithm ends with UNIMPLEMENTED, and nothing is ever inflated.
        ("grpc.compression_enabled_algorithms_bitset", 1),
        ("grpc.per_message_decompression", 0),
        ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_TIMEOUT_MS),
        ("grpc.max_connection_idle_ms", IDLE_CONNECTION_MS),
    )


def bind(
    server: grpc.aio.Server, *, host: str, port: int, option: str, credentials: grpc.ServerCredentials | None = None
) -> str:
    """Listen on `host`:`port`, 0 for any free port, and return the address; without `credentials`, without TLS.

    Raises BindError, which names `option`.
    """
    where = address(host, port)
    try:
        bound = server.add_secure_port(where, credentials) if credentials else server.add_insecure_port(where)
    except RuntimeError as error:
        raise BindError(
            f"{option}: cannot listen on {address(host, port)} ({_why_not(host, port)}); choose another port, or 0 for "
            "any that is free"
        ) from error
    return address(host, bound)


def address(host: str, port: int) -> str:
    """Return host:port, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _why_not(host: str, port: int) -> str:
    """Return why a port cannot be bound: gRPC does not say, a socket does."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((host, port))
    except OSError as error:
        return error.strerror or str(error)
    return "gRPC could not bind it"


_HEALTH_PREFIX: Final = "/grpc.health.v1.Health/"


class GuardInterceptor(grpc.aio.ServerInterceptor):
    """Interceptor that lets a guard decide about all calls but those of health, before anything of them is read.

    Calls are counted in `meters`, if given, but for `uncounted` methods: those that free what others took.
    """

    def __init__(self, guard: Guard, *, meters: Meters | None = None, uncounted: Collection[str] = ()) -> None:
        self._guard = guard
        self._meters = meters
        self._uncounted = frozenset(uncounted)

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Pass on a call that the guard lets in; refuse another."""
        details = handler_call_details
        if not details.method.startswith(_HEALTH_PREFIX):
            try:
                self._admit(details)
            except HeteroError as error:
                # A handler of streams fits any call: it is refused before anything of it is read.
                return grpc.stream_stream_rpc_method_handler(_refusing(details.method, error))
        handler: grpc.RpcMethodHandler[Any, Any] | None = await continuation(details)
        return handler

    def _admit(self, details: Any) -> None:
        """Raise the error that refuses the call, if it is refused."""
        metadata = details.invocation_metadata or ()
        note_arrival(metadata)
        principal = self._guard.admit([value for key, value in metadata if key == AUTHORIZATION_KEY])
        if self._meters is not None and details.method not in self._uncounted:
            self._meters.of(principal).count_call()


class _MessageInterceptor(grpc.aio.ServerInterceptor):
    """Interceptor that bounds how long calls with one message wait for it, and how many of a host do.

    gRPC itself waits without limit, with the call counted as one under way.
    """

    def __init__(self) -> None:
        self._silent: Counter[str] = Counter()
        """Calls that wait for their message, by host."""

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Make a handler of one message one that reads it itself, in time."""
        handler: Any = await continuation(handler_call_details)
        if handler is None or handler.request_streaming:
            return handler  # type: ignore[no-any-return]
        options = {
            "request_deserializer": handler.request_deserializer, "response_serializer": handler.response_serializer,
        }  # fmt: skip
        if not handler.response_streaming:
            return grpc.stream_unary_rpc_method_handler(self._answering(handler.unary_unary), **options)
        method = handler.unary_stream
        # gRPC tells methods that yield answers from those that write them by the same function.
        reading = self._yielding(method) if inspect.isasyncgenfunction(method) else self._answering(method)
        return grpc.stream_stream_rpc_method_handler(reading, **options)

    def _answering(self, method: Any) -> Any:
        async def answer(messages: AsyncIterator[Any], context: Context) -> Any:
            return await method(await self._message(messages, context), context)

        return answer

    def _yielding(self, method: Any) -> Any:
        async def stream(messages: AsyncIterator[Any], context: Context) -> AsyncIterator[Any]:
            async with contextlib.aclosing(method(await self._message(messages, context), context)) as answers:
                async for answer in answers:
                    yield answer

        return stream

    async def _message(self, messages: AsyncIterator[Any], context: Context) -> Any:
        host = host_of(context)
        if self._silent[host] >= MAX_SILENT_CALLS:
            problem = f"{MAX_SILENT_CALLS} calls of this host have sent no message"
            await abort(context, RpcStatus(grpc.StatusCode.RESOURCE_EXHAUSTED, problem))
        self._silent[host] += 1
        try:
            async with asyncio.timeout(MESSAGE_TIMEOUT_S):
                return await anext(messages)
        except TimeoutError:
            problem = f"the call's message did not come within {MESSAGE_TIMEOUT_S:g} s"
            await abort(context, RpcStatus(grpc.StatusCode.DEADLINE_EXCEEDED, problem))
        except StopAsyncIteration:
            await abort(context, RpcStatus(grpc.StatusCode.INVALID_ARGUMENT, "the call has no message"))
        finally:
            self._silent[host] -= 1
            if not self._silent[host]:
                del self._silent[host]


def _refusing(method: str, error: HeteroError) -> Callable[[object, Context], Awaitable[None]]:
    """Return a method that ends every call with an error."""

    async def refuse(_: object, context: Context) -> None:
        logger.warning("method=%s peer=%s refused: %s", method, context.peer(), error)
        await abort(context, status_of(error))

    return refuse
