"""gRPC servers: their options, binding with errors that a person can act on, and the tokens that callers show.

A server refuses before it allocates: messages are never decompressed (a small compressed message can be gigabytes), and
connections, calls and headers are bounded.
"""

from __future__ import annotations

import hmac
import logging
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Final

import grpc

from hetero_api.contract import AUTHORIZATION_KEY
from hetero_gateway.server.calls import Context, RpcStatus, abort
from hetero_gateway.server.errors import BindError

logger = logging.getLogger(__name__)

KEEPALIVE_MS: Final = 30_000
KEEPALIVE_TIMEOUT_MS: Final = 15_000
MIN_CLIENT_PING_MS: Final = 5_000
MAX_CONNECTIONS: Final = 4096
MAX_CALLS: Final = 4096
"""Calls under way on one server; one more ends with RESOURCE_EXHAUSTED before its message is read."""
MAX_METADATA_BYTES: Final = 16 * 1024
HANDSHAKE_TIMEOUT_MS: Final = 10_000
"""A connection that has not said a word of HTTP/2 by then is closed."""
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
        options=[*_shared_options(), *sizes], interceptors=list(interceptors), maximum_concurrent_rpcs=MAX_CALLS
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
    )


def bind(server: grpc.aio.Server, *, host: str, port: int, option: str) -> str:
    """Listen on `host`:`port`, 0 for any free port, and return the address. Raises BindError, which names `option`."""
    try:
        bound = server.add_insecure_port(address(host, port))
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


class BearerInterceptor(grpc.aio.ServerInterceptor):
    """Interceptor that asks callers of a server for a token, on all calls but those of health.

    `whose` names the token in refusals, e.g. "this group's".
    """

    def __init__(self, token: str, *, whose: str) -> None:
        self._expected = f"Bearer {token}".encode()
        self._whose = whose

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Pass on a call that shows the token; refuse another before anything of it is read."""
        details = handler_call_details
        if details.method.startswith(_HEALTH_PREFIX) or self._is_shown(details.invocation_metadata):
            handler: grpc.RpcMethodHandler[Any, Any] | None = await continuation(details)
            return handler
        # A handler of streams fits any call: it is refused before anything of it is read.
        return grpc.stream_stream_rpc_method_handler(self._refuse)

    def _is_shown(self, metadata: Iterable[tuple[str, str | bytes]] | None) -> bool:
        """Return whether the metadata hold the token exactly once, in a time that tells nothing about it."""
        shown = [value for key, value in metadata or () if key == AUTHORIZATION_KEY]
        raw = shown[0] if len(shown) == 1 else ""
        return hmac.compare_digest(raw.encode() if isinstance(raw, str) else raw, self._expected)

    async def _refuse(self, _: object, context: Context) -> None:
        """End the call with UNAUTHENTICATED."""
        logger.warning("peer=%s called without %s token", context.peer(), self._whose)
        message = f"metadata {AUTHORIZATION_KEY!r} must be 'Bearer TOKEN' with {self._whose} token"
        await abort(context, RpcStatus(grpc.StatusCode.UNAUTHENTICATED, message))
