"""From a gRPC status to the client's error tree: the one boundary, for sync and asyncio alike.

Details beside the message come as `google.rpc.Status` in the trailing metadata (BadRequest for wrong
fields, RetryInfo for a full queue).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final, cast

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

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


def error_from(error: grpc.RpcError, *, address: str = "") -> RequestError:
    """The typed error of a call that failed; to be raised `from` the gRPC one."""
    call = cast(grpc.Call, error)  # Every RpcError that grpc raises from a call is one, in both its APIs.
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
