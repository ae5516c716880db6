"""Calls: how they end, and how many are in flight.

This is the one place where both errors and gRPC statuses are known. A wrong field comes with google.rpc.BadRequest, a
full queue, a limit and a missing replica with google.rpc.RetryInfo, all inside the google.rpc.Status that clients find
in the trailing metadata.
INTERNAL is for bugs, and only for them; their nature stays in the log.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from prometheus_client import Counter

from hetero_api.errors import HeteroError
from hetero_gateway.engine.errors import (
    DeadlineExceeded,
    DuplicateRequest,
    EngineUnavailable,
    GroupLost,
    InvalidRequest,
    QueueFull,
)
from hetero_gateway.group.errors import CommandFailed, InvalidCommand, WrongState
from hetero_gateway.server.errors import (
    Forbidden,
    InvalidArguments,
    LimitExceeded,
    NoReplica,
    Unauthenticated,
    Violation,
)

logger = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]

DETAILS_KEY: Final = "grpc-status-details-bin"
RETRY_AFTER_S: Final = 1
MAX_MESSAGE_CHARS: Final = 1500
"""A status travels in headers, which clients bound to 8 KiB all together; it goes there twice."""

_CODES: Final[dict[type[HeteroError], grpc.StatusCode]] = {
    InvalidArguments: grpc.StatusCode.INVALID_ARGUMENT,
    InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    InvalidCommand: grpc.StatusCode.INVALID_ARGUMENT,
    DuplicateRequest: grpc.StatusCode.ALREADY_EXISTS,
    QueueFull: grpc.StatusCode.RESOURCE_EXHAUSTED,
    LimitExceeded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    Forbidden: grpc.StatusCode.PERMISSION_DENIED,
    EngineUnavailable: grpc.StatusCode.UNAVAILABLE,
    GroupLost: grpc.StatusCode.UNAVAILABLE,
    NoReplica: grpc.StatusCode.UNAVAILABLE,
    DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    WrongState: grpc.StatusCode.FAILED_PRECONDITION,
    CommandFailed: grpc.StatusCode.FAILED_PRECONDITION,
}


@dataclass(frozen=True, slots=True)
class RpcStatus:
    """The end of a call: status code, message, and details for programs."""

    code: grpc.StatusCode
    message: str
    details: tuple[Message, ...] = ()

    def metadata(self) -> tuple[tuple[str, bytes], ...]:
        """Return trailing metadata that carries the details; nothing without details."""
        if not self.details:
            return ()
        packed = []
        for detail in self.details:
            wrapper = any_pb2.Any()
            wrapper.Pack(detail)
            packed.append(wrapper)
        number: int = self.code.value[0]
        status = status_pb2.Status(code=number, message=self.message, details=packed)
        return ((DETAILS_KEY, status.SerializeToString()),)


def status_of(error: Exception) -> RpcStatus:
    """Return the status for an error; INTERNAL for one that has no place in the API."""
    code = _CODES.get(type(error)) if isinstance(error, HeteroError) else None
    if code is None:
        return RpcStatus(grpc.StatusCode.INTERNAL, "internal error; the gateway's log tells what happened")
    return RpcStatus(code, clip(str(error)), _details(error))


@asynccontextmanager
async def answering(context: Context, method: str, account: Account | None = None) -> AsyncIterator[None]:
    """End the call with the status that fits an error raised inside, which is also its outcome in `account`."""
    try:
        yield
    except grpc.aio.AbortError:
        raise
    except Exception as error:
        status = status_of(error)
        if status.code is grpc.StatusCode.INTERNAL:
            logger.exception("method=%s peer=%s failed", method, context.peer())
        if account is not None:
            account.outcome = status.code.name
        await abort(context, status)


def host_of(context: Context) -> str:
    """Return the host that a call comes from, as gRPC writes it, without the port."""
    return str(context.peer()).rpartition(":")[0]


def when_over(context: Context, callback: Callable[[], object]) -> None:
    """Call `callback` as soon as the call has ended, by either side."""
    bound: Any = lambda _: callback()  # noqa: E731 - grpc's stubs type callbacks as a class that does not exist
    context.add_done_callback(bound)


async def abort(context: Context, status: RpcStatus) -> NoReturn:
    """End the call."""
    await context.abort(status.code, status.message, trailing_metadata=status.metadata())


def clip(text: str) -> str:
    """Return `text`, or as much of it as a status can carry."""
    return text if len(text) <= MAX_MESSAGE_CHARS else text[: MAX_MESSAGE_CHARS - 1] + "…"


def _details(error: Exception) -> tuple[Message, ...]:
    if isinstance(error, InvalidRequest):
        return (_bad_request(Violation(error.field, error.problem)),)
    if isinstance(error, InvalidArguments):
        return (_bad_request(*error.violations),)
    if isinstance(error, QueueFull):
        return (_retry_info(RETRY_AFTER_S),)
    if isinstance(error, LimitExceeded | NoReplica):
        return (_retry_info(error.retry_after_s),)
    return ()


def _retry_info(after_s: int) -> error_details_pb2.RetryInfo:
    return error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(seconds=after_s))


def _bad_request(*violations: Violation) -> error_details_pb2.BadRequest:
    room = MAX_MESSAGE_CHARS // max(1, len(violations))
    return error_details_pb2.BadRequest(
        field_violations=[
            error_details_pb2.BadRequest.FieldViolation(field=v.field, description=v.problem[:room]) for v in violations
        ]
    )


class InFlight:
    """Count of calls in flight, on one loop, with a way to wait until there is none."""

    def __init__(self) -> None:
        self._count = 0
        self._none = asyncio.Event()
        self._none.set()

    def enter(self) -> None:
        """Count a call that begins."""
        self._count += 1
        self._none.clear()

    def leave(self) -> None:
        """Count a call that is over."""
        self._count -= 1
        if not self._count:
            self._none.set()

    async def wait_idle(self) -> None:
        """Return once there is none."""
        await self._none.wait()


class Account:
    """Account of one call, in flight until it is closed, then counted by its outcome; `outcome` until one is set."""

    def __init__(self, in_flight: InFlight, calls: Counter, *, outcome: str) -> None:
        self.outcome = outcome
        self._in_flight = in_flight
        self._calls = calls
        in_flight.enter()

    def close(self) -> None:
        """Count the call. Once only."""
        self._in_flight.leave()
        self._calls.labels(self.outcome).inc()
