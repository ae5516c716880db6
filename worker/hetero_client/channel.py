"""Channel options that the sync and the asyncio client share."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from typing import Final

from hetero_api.contract import MAX_INFERENCE_MESSAGE_BYTES

KEEPALIVE_MS: Final = 30_000
KEEPALIVE_TIMEOUT_MS: Final = 10_000
FIRST_RECONNECT_MS: Final = 100
LONGEST_RECONNECT_MS: Final = 1_000
"""A gateway that is started anew is back within seconds; by default gRPC would look for it ever less often."""

Options = Sequence[tuple[str, int | str]]


def channel_options(address: str) -> Options:
    """Options for a channel to `address`: bounded messages, keepalive through long quiet prefills."""
    options: list[tuple[str, int | str]] = [
        ("grpc.max_send_message_length", MAX_INFERENCE_MESSAGE_BYTES),
        ("grpc.max_receive_message_length", MAX_INFERENCE_MESSAGE_BYTES),
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", FIRST_RECONNECT_MS),
        ("grpc.max_reconnect_backoff_ms", LONGEST_RECONNECT_MS),
    ]
    if is_loopback(address):
        # gRPC obeys http_proxy even for the local machine, which no proxy can reach.
        options.append(("grpc.enable_http_proxy", 0))
    return options


def is_loopback(address: str) -> bool:
    """Whether host:port names this machine."""
    host = address.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
