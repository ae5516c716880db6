"""gRPC servers: options that all three share, and binding with errors that a person can act on.

A server refuses before it allocates: messages are never decompressed (a small compressed message can be gigabytes), and
connections, calls and headers are bounded.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Final

import grpc

from hetero_gateway.server.errors import BindError

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
