"""Errors as HTTP statuses and error objects: the one place of this door where both are known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pydantic import ValidationError

from hetero_api.errors import HeteroError
from hetero_gateway.engine.errors import (
    DeadlineExceeded,
    DuplicateRequest,
    EngineUnavailable,
    GroupLost,
    InvalidRequest,
    QueueFull,
)
from hetero_gateway.server.errors import InvalidArguments
from hetero_gateway.server.openai.requests import body_field

RETRY_AFTER: Final = {"Retry-After": "1"}
_SHOWN: Final = 8


class Failure(Exception):
    """How a call ends badly: an HTTP status, and the parts of the API's error object."""

    def __init__(
        self, status: int, kind: str, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self._error = {"message": message, "type": kind, "param": param, "code": code}

    @property
    def headers(self) -> Mapping[str, str]:
        return RETRY_AFTER if self.status in (429, 503) else {}

    def body(self) -> dict[str, Any]:
        return {"error": self._error}


_STATUSES: Final[Mapping[type[HeteroError], tuple[int, str, str]]] = {
    DuplicateRequest: (409, "invalid_request_error", "already_exists"),
    QueueFull: (429, "rate_limit_error", "queue_full"),
    EngineUnavailable: (503, "server_error", "unavailable"),
    GroupLost: (503, "server_error", "unavailable"),
    DeadlineExceeded: (504, "server_error", "deadline_exceeded"),
}


def failure_of(error: Exception) -> Failure | None:
    """What to answer; None for a bug."""
    if isinstance(error, Failure):
        return error
    if isinstance(error, ValidationError):
        return _malformed(error)
    if isinstance(error, InvalidArguments):
        text = "; ".join(f"{body_field(v.field)}: {v.problem}" for v in error.violations)
        return _invalid(text, body_field(error.violations[0].field))
    if isinstance(error, InvalidRequest):
        field = body_field(error.field)
        return _invalid(f"{field}: {error.problem}", field)
    known = _STATUSES.get(type(error)) if isinstance(error, HeteroError) else None
    if known is None:
        return None
    status, kind, code = known
    return Failure(status, kind, str(error), code=code)


def internal_failure() -> Failure:
    """A bug; what it was stays in the log."""
    return Failure(500, "server_error", "internal error; the gateway's log tells what happened", code="internal")


def unknown_model(asked: str, served: str) -> Failure:
    return Failure(
        404,
        "invalid_request_error",
        f"model: {asked!r} is not served here; this replica serves {served!r}",
        param="model",
        code="model_not_found",
    )


def _invalid(message: str, param: str) -> Failure:
    return Failure(400, "invalid_request_error", message, param=param)


def _malformed(error: ValidationError) -> Failure:
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    texts = [f"{path}: {_words(problem)}" if (path := _path(problem)) else _words(problem) for problem in problems]
    return _invalid("; ".join(texts[:_SHOWN]), _path(problems[0]) or "body")


def _path(problem: Mapping[str, Any]) -> str:
    return ".".join(str(part) for part in problem["loc"])


def _words(problem: Mapping[str, Any]) -> str:
    if problem["type"] == "extra_forbidden":
        return "is not a field that this endpoint knows"
    return str(problem["msg"]).removeprefix("Value error, ")
