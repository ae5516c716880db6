"""gRPC channels: their options, and the errors of calls over them, for the sync and the asyncio client alike.

`error_from` is the one boundary from a gRPC status to the client's error tree. Details beside the message come as
`google.rpc.Status` in the trailing metadata (BadRequest for wrong fields, RetryInfo for a full queue).
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, cast

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from hetero_api.contract import MAX_INFERENCE_MESSAGE_BYTES
from hetero_client.errors import (
    AccessError,
    DeadlineError,
    DuplicateRequestError,
    FieldViolation,
    InvalidRequestError,
    NotConnectedError,
    QueueFullError,
    RequestCancelledError,
    RequestError,
    ServerError,
    UnavailableError,
    WrongStateError,
)

KEEPALIVE_MS: Final = 30_000
KEEPALIVE_TIMEOUT_MS: Final = 10_000
FIRST_RECONNECT_MS: Final = 100
LONGEST_RECONNECT_MS: Final = 1_000
"""A gateway that restarts is back within seconds; by default gRPC would try to connect ever less often."""
_DETAILS_KEY: Final = "grpc-status-details-bin"
_TRANSPORT_WORDS: Final = (
    "failed to connect",
    "connection re",
    "socket closed",
    "recvmsg",
    "goaway",
    "broken pipe",
    "dns ",
)
_PLAIN: Final[dict[grpc.StatusCode, Callable[..., RequestError]]] = {
    grpc.StatusCode.ALREADY_EXISTS: DuplicateRequestError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineError,
    grpc.StatusCode.CANCELLED: RequestCancelledError,
    grpc.StatusCode.UNAUTHENTICATED: AccessError,
    grpc.StatusCode.PERMISSION_DENIED: AccessError,
    grpc.StatusCode.FAILED_PRECONDITION: WrongStateError,
}

Options = Sequence[tuple[str, int | str]]
"""Options of a channel, as gRPC takes them."""


def channel_options(address: str) -> Options:
    """Return options for a channel to `address`: bounded messages, keepalive through long quiet prefills."""
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
    """Return whether host:port names this machine."""
    host = address.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def error_from(error: grpc.RpcError, *, address: str = "") -> RequestError:
    """Return the typed error of a call that failed; raise it `from` the gRPC error."""
    call = cast(grpc.Call, error)  # every RpcError that a call raises is one, in both APIs
    code, message = call.code(), call.details() or ""
    details = _details(call.trailing_metadata() or ())
    name = code.name
    if code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.OUT_OF_RANGE):
        return InvalidRequestError(message, violations=_violations(details), code=name)
    if code == grpc.StatusCode.RESOURCE_EXHAUSTED:
        return QueueFullError(message, retry_after_s=_retry_after_s(details), code=name)
    if code == grpc.StatusCode.UNAVAILABLE:
        return _unavailable(message, address)
    return _PLAIN.get(code, ServerError)(message or name, code=name)


def _unavailable(message: str, address: str) -> UnavailableError:
    lowered = message.lower()
    if not any(word in lowered for word in _TRANSPORT_WORDS):
        return UnavailableError(message, code="UNAVAILABLE")
    where = f" at {address}" if address else ""
    return NotConnectedError(f"no gateway answers{where} ({message})", code="UNAVAILABLE")


def _details(metadata: Iterable[Any]) -> status_pb2.Status:
    for key, value in metadata:
        if key == _DETAILS_KEY:
            try:
                return status_pb2.Status.FromString(value)
            except DecodeError:
                break
    return status_pb2.Status()


def _violations(status: status_pb2.Status) -> list[FieldViolation]:
    bad_request = error_details_pb2.BadRequest()
    for detail in status.details:
        if detail.Unpack(bad_request):
            return [FieldViolation(v.field, v.description) for v in bad_request.field_violations]
    return []


def _retry_after_s(status: status_pb2.Status) -> float | None:
    retry = error_details_pb2.RetryInfo()
    for detail in status.details:
        if detail.Unpack(retry):
            return float(retry.retry_delay.ToTimedelta().total_seconds())
    return None
