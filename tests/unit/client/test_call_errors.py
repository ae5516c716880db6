"""gRPC statuses become the client's errors, whatever their details hold."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from hetero_client.channel import error_from
from hetero_client.errors import (
    AccessError,
    InvalidRequestError,
    NotConnectedError,
    QueueFullError,
    RequestCancelledError,
    ServerError,
    UnavailableError,
    WrongStateError,
)

pytestmark = pytest.mark.unit


class FailedCall(grpc.RpcError):
    """What grpc raises, without a call behind it."""

    def __init__(self, code: grpc.StatusCode, details: str = "", metadata: Any = ()) -> None:
        self._answer = (code, details, metadata)

    def code(self) -> grpc.StatusCode:
        return self._answer[0]

    def details(self) -> str:
        return self._answer[1]

    def trailing_metadata(self) -> Any:
        return self._answer[2]


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.CANCELLED, RequestCancelledError),
        (grpc.StatusCode.UNAUTHENTICATED, AccessError),
        (grpc.StatusCode.PERMISSION_DENIED, AccessError),
        (grpc.StatusCode.FAILED_PRECONDITION, WrongStateError),
        (grpc.StatusCode.UNIMPLEMENTED, ServerError),
        (grpc.StatusCode.UNKNOWN, ServerError),
    ],
)
def test_code_decides_the_kind(code: grpc.StatusCode, kind: type[Exception]) -> None:
    error = error_from(FailedCall(code, "why"))
    assert type(error) is kind
    assert (str(error), error.code) == ("why", code.name)


@pytest.mark.parametrize(
    "words", ["Sent message larger than max (9 vs. 8)", "CLIENT: Received message larger than max"]
)
def test_a_message_that_is_too_large_is_so_again(words: str) -> None:
    error = error_from(FailedCall(grpc.StatusCode.RESOURCE_EXHAUSTED, words))
    assert type(error) is InvalidRequestError
    assert (str(error), error.code) == (words, "RESOURCE_EXHAUSTED")


def test_servers_unavailable_is_told_from_a_broken_connection() -> None:
    told = error_from(FailedCall(grpc.StatusCode.UNAVAILABLE, "rank 1 was lost"), address="h:1")
    assert type(told) is UnavailableError
    broken = error_from(FailedCall(grpc.StatusCode.UNAVAILABLE, "failed to connect to all addresses"), address="h:1")
    assert type(broken) is NotConnectedError
    assert "h:1" in str(broken)


def test_message_stands_in_where_details_lack_or_are_damaged() -> None:
    bare = error_from(FailedCall(grpc.StatusCode.INVALID_ARGUMENT, "empty prompt"))
    assert isinstance(bare, InvalidRequestError)
    assert (str(bare), bare.violations) == ("empty prompt", ())
    damaged = error_from(FailedCall(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", [("grpc-status-details-bin", b"\xff")]))
    assert isinstance(damaged, QueueFullError)
    assert damaged.retry_after_s is None
