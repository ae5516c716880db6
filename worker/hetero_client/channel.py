"""gRPC channels: their options, and the errors of calls over them, for the sync and the asyncio client alike.

`error_from` is the one boundary from a gRPC status to the client's error tree. Details beside the message come as
`google.rpc.Status` in the trailing metadata (BadRequest for wrong fields, RetryInfo for a full queue).
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Final, TypeVar, cast

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from hetero_api.contract import ENV_CA_FILE, MAX_INFERENCE_MESSAGE_BYTES
from hetero_client.access import Access
from hetero_client.errors import (
    AccessError,
    CredentialsError,
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
_TOO_LARGE: Final = "larger than max"
"""Words of gRPC's where a message is; sent again, it would be as large."""
_REFUSED_CERTIFICATE: Final = re.compile(r"(?:CERTIFICATE_VERIFY_FAILED: |(?=Peer name |Hostname Verification ))(.+)")
"""Words of gRPC's where a handshake of TLS fails for the server's certificate."""
_PLAIN: Final[dict[grpc.StatusCode, Callable[..., RequestError]]] = {
    grpc.StatusCode.ALREADY_EXISTS: DuplicateRequestError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineError,
    grpc.StatusCode.CANCELLED: RequestCancelledError,
    grpc.StatusCode.UNAUTHENTICATED: AccessError,
    grpc.StatusCode.PERMISSION_DENIED: AccessError,
    grpc.StatusCode.FAILED_PRECONDITION: WrongStateError,
}

_Detail = TypeVar("_Detail", error_details_pb2.BadRequest, error_details_pb2.RetryInfo)
Options = Sequence[tuple[str, int | str]]
"""Options of a channel, as gRPC takes them."""


def channel_options(address: str, *, max_answer_bytes: int = MAX_INFERENCE_MESSAGE_BYTES) -> Options:
    """Return options for a channel to `address`: bounded messages, keepalive through long quiet prefills."""
    options: list[tuple[str, int | str]] = [
        ("grpc.max_send_message_length", MAX_INFERENCE_MESSAGE_BYTES),
        ("grpc.max_receive_message_length", max_answer_bytes),
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


def open_channel(address: str, access: Access, *, max_answer_bytes: int = MAX_INFERENCE_MESSAGE_BYTES) -> grpc.Channel:
    """Return a channel to `address`. Raises CredentialsError where a key would travel unencrypted between machines."""
    credentials, options = _credentials(address, access), channel_options(address, max_answer_bytes=max_answer_bytes)
    if credentials is None:
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, credentials, options=options)


def open_aio_channel(address: str, access: Access) -> grpc.aio.Channel:
    """Return a channel of the asyncio API; see `open_channel`."""
    credentials, options = _credentials(address, access), channel_options(address)
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, credentials, options=options)


def _credentials(address: str, access: Access) -> grpc.ChannelCredentials | None:
    """Return the credentials of TLS, None without it."""
    if access.uses_tls:
        return grpc.ssl_channel_credentials(access.ca, access.private_key, access.certificate)
    check_encrypted(address, access)
    return None


def check_encrypted(address: str, access: Access) -> None:
    """Raise CredentialsError where a key would travel unencrypted to another machine and nobody said that it may."""
    if access.api_key and access.tls is None and not (is_loopback(address) or address.startswith("unix:")):
        raise CredentialsError(
            f"a key would travel unencrypted to {address}; give the gateway's authority (--ca FILE or {ENV_CA_FILE}) "
            "or --tls, or say --no-tls where nobody can listen"
        )


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
    metadata, name = call.trailing_metadata() or (), code.name
    if code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.OUT_OF_RANGE):
        fields = _detail(metadata, error_details_pb2.BadRequest).field_violations
        violations = [FieldViolation(violation.field, violation.description) for violation in fields]
        return InvalidRequestError(message, violations=violations, code=name)
    if code == grpc.StatusCode.RESOURCE_EXHAUSTED:
        retry = _detail(metadata, error_details_pb2.RetryInfo)
        after_s = float(retry.retry_delay.ToTimedelta().total_seconds()) if retry.HasField("retry_delay") else None
        if after_s is None and _TOO_LARGE in message.lower():
            return InvalidRequestError(message, code=name)
        return QueueFullError(message, retry_after_s=after_s, code=name)
    if code == grpc.StatusCode.UNAVAILABLE:
        return _unavailable(message, address)
    return _PLAIN.get(code, ServerError)(message or name, code=name)


def _unavailable(message: str, address: str) -> AccessError | UnavailableError:
    refused = _REFUSED_CERTIFICATE.search(message)
    if refused is not None:
        return AccessError(f"the certificate of {address} is refused: {refused[1]}", code="UNAVAILABLE")
    lowered = message.lower()
    if not any(word in lowered for word in _TRANSPORT_WORDS):
        return UnavailableError(message, code="UNAVAILABLE")
    where = f" at {address}" if address else ""
    return NotConnectedError(f"no gateway answers{where} ({message})", code="UNAVAILABLE")


def _detail(metadata: Iterable[Any], kind: type[_Detail]) -> _Detail:
    """Return the detail of that kind that a call's trailing metadata carries; an empty message if there is none."""
    found, status = kind(), status_pb2.Status()
    for key, value in metadata:
        if key == _DETAILS_KEY:
            with suppress(DecodeError):
                status = status_pb2.Status.FromString(value)
    any(detail.Unpack(found) for detail in status.details)
    return found
