"""gRPC servers: options that all three share, and binding with errors that a person can act on."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any, Final

import grpc

from hetero_gateway.server.errors import BindError

KEEPALIVE_MS: Final = 30_000
KEEPALIVE_TIMEOUT_MS: Final = 15_000
MIN_CLIENT_PING_MS: Final = 5_000
UNBOUNDED: Final = -1
"""A message size for answers that only an administrator gets: the records of all ranks in one."""

_OPTIONS: Final[tuple[tuple[str, Any], ...]] = (
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
)


def new_server(
    *,
    max_message_bytes: int,
    max_answer_bytes: int | None = None,
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
) -> grpc.aio.Server:
    """A server that listens nowhere yet. What it sends may be as large as what it takes, unless told otherwise."""
    sizes = (
        ("grpc.max_send_message_length", max_message_bytes if max_answer_bytes is None else max_answer_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
    )
    return grpc.aio.server(options=[*_OPTIONS, *sizes], interceptors=list(interceptors))


def bind(server: grpc.aio.Server, *, host: str, port: int, option: str) -> str:
    """Listen on `host`:`port`, 0 for a port of the system's choice; the address. Raises BindError naming `option`."""
    try:
        bound = server.add_insecure_port(address(host, port))
    except RuntimeError as error:
        raise BindError(
            f"{option}: cannot listen on {address(host, port)} ({_why_not(host, port)}); choose another port, or 0 for "
            "any that is free"
        ) from error
    return address(host, bound)


def address(host: str, port: int) -> str:
    """host:port, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _why_not(host: str, port: int) -> str:
    """gRPC does not tell why; a socket does."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((host, port))
    except OSError as error:
        return error.strerror or str(error)
    return "gRPC could not bind it"
