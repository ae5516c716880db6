"""Answers of the API: objects of chats and completions, whole and in chunks, and errors.

A `ResponseFormatter` knows what differs between the two calls; a `Frame` has what all objects of one answer share.
Errors become HTTP statuses and error objects here, the one place of this door where both are known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol

from pydantic import ValidationError

from hetero_api.errors import HeteroError
from hetero_api.v1.logprobs_pb2 import TokenLogprobs
from hetero_gateway.engine.errors import (
    DeadlineExceeded,
    DuplicateRequest,
    EngineUnavailable,
    GroupLost,
    InvalidRequest,
    QueueFull,
)
from hetero_gateway.engine.stream import FinishedEvent
from hetero_gateway.server.errors import InvalidArguments
from hetero_gateway.server.openai.requests import body_field

Json = dict[str, Any]
TokenBytes = Callable[[int], bytes]
"""The bytes of a token's text."""


class Position(NamedTuple):
    """A token and its log-probabilities; a prompt's first token has none."""

    token_id: int
    logprobs: TokenLogprobs | None


@dataclass(slots=True)
class Choice:
    """One completion so far. `index` is its number in the answer."""

    index: int
    text: list[str] = field(default_factory=list)
    positions: list[Position] = field(default_factory=list)
    finished: FinishedEvent | None = None


class ResponseFormatter(Protocol):
    """Format of one of the two calls. Positions are None where no log-probabilities were asked for."""

    @property
    def whole_kind(self) -> str:
        """`object` of a whole answer."""
        ...

    @property
    def chunk_kind(self) -> str:
        """`object` of a chunk."""
        ...

    def choice(self, text: str, positions: Sequence[Position] | None) -> Json:
        """Return the body of a whole choice."""
        ...

    def opening(self) -> Json | None:
        """Return the body of a choice's first chunk, before any text; None if there is no such chunk."""
        ...

    def delta(self, text: str, positions: Sequence[Position] | None) -> Json:
        """Return the body of a chunk with text."""
        ...

    def end(self) -> Json:
        """Return the body of a choice's last chunk."""
        ...


@dataclass(frozen=True, slots=True)
class Frame:
    """Parts that all objects of one answer share. `created` is in Unix seconds."""

    id: str
    created: int
    model: str
    formatter: ResponseFormatter
    with_logprobs: bool

    def whole(self, choices: Iterable[Choice], usage: Json) -> Json:
        """Return the answer of a call that does not stream."""
        listed = [
            _listed(choice.index, self.formatter.choice("".join(choice.text), self._shown(choice.positions)))
            | _ending(choice.finished)
            for choice in choices
        ]
        return self._object(self.formatter.whole_kind, listed) | {"usage": usage}

    def opening(self, index: int) -> Json | None:
        """Return a choice's first chunk; None if the call has no such chunk."""
        body = self.formatter.opening()
        return None if body is None else self._chunk(index, body)

    def delta(self, index: int, text: str, positions: Sequence[Position]) -> Json:
        """Return a chunk with text."""
        return self._chunk(index, self.formatter.delta(text, self._shown(positions)))

    def end(self, index: int, finished: FinishedEvent) -> Json:
        """Return a choice's last chunk."""
        return self._chunk(index, self.formatter.end(), finished)

    def usage(self, usage: Json) -> Json:
        """Return the chunk after the last choice's end."""
        return self._object(self.formatter.chunk_kind, []) | {"usage": usage}

    def _chunk(self, index: int, body: Json, finished: FinishedEvent | None = None) -> Json:
        return self._object(self.formatter.chunk_kind, [_listed(index, body) | _ending(finished)])

    def _object(self, kind: str, choices: list[Json]) -> Json:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}

    def _shown(self, positions: Sequence[Position]) -> Sequence[Position] | None:
        return positions if self.with_logprobs else None


class ChatFormatter:
    """Format of /v1/chat/completions."""

    whole_kind: Final = "chat.completion"
    chunk_kind: Final = "chat.completion.chunk"

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._token_bytes = token_bytes

    def choice(self, text: str, positions: Sequence[Position] | None) -> Json:
        """See `ResponseFormatter.choice`."""
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"message": message, "logprobs": self._logprobs(positions)}

    def opening(self) -> Json | None:
        """See `ResponseFormatter.opening`."""
        return {"delta": {"role": "assistant", "content": ""}, "logprobs": None}

    def delta(self, text: str, positions: Sequence[Position] | None) -> Json:
        """See `ResponseFormatter.delta`."""
        return {"delta": {"content": text}, "logprobs": self._logprobs(positions)}

    def end(self) -> Json:
        """See `ResponseFormatter.end`."""
        return {"delta": {}, "logprobs": None}

    def _logprobs(self, positions: Sequence[Position] | None) -> Json | None:
        if positions is None:
            return None
        return {"content": [self._position(p.logprobs) for p in positions if p.logprobs is not None], "refusal": None}

    def _position(self, logprobs: TokenLogprobs) -> Json:
        top = zip(logprobs.top_token_ids, logprobs.top_logprobs, strict=True)
        listed = [self._token(token_id, logprob) for token_id, logprob in top]
        return self._token(logprobs.token_id, logprobs.logprob) | {"top_logprobs": listed}

    def _token(self, token_id: int, logprob: float) -> Json:
        data = self._token_bytes(token_id)
        return {"token": data.decode(errors="replace"), "logprob": logprob, "bytes": list(data)}


class CompletionFormatter:
    """Format of /v1/completions."""

    whole_kind: Final = "text_completion"
    chunk_kind: Final = "text_completion"

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._token_bytes = token_bytes

    def choice(self, text: str, positions: Sequence[Position] | None) -> Json:
        """See `ResponseFormatter.choice`."""
        return {"text": text, "logprobs": self._logprobs(positions)}

    def opening(self) -> Json | None:
        """See `ResponseFormatter.opening`."""
        return None

    def delta(self, text: str, positions: Sequence[Position] | None) -> Json:
        """See `ResponseFormatter.delta`."""
        return self.choice(text, positions)

    def end(self) -> Json:
        """See `ResponseFormatter.end`."""
        return {"text": "", "logprobs": None}

    def _logprobs(self, positions: Sequence[Position] | None) -> Json | None:
        if positions is None:
            return None
        tokens = [self._text(position.token_id) for position in positions]
        return {
            "tokens": tokens,
            "token_logprobs": [None if p.logprobs is None else p.logprobs.logprob for p in positions],
            "top_logprobs": [None if p.logprobs is None else self._top(p.logprobs) for p in positions],
            "text_offset": _offsets(tokens),
        }

    def _top(self, logprobs: TokenLogprobs) -> dict[str, float]:
        """Return log-probabilities by text: of the likeliest tokens and of the one that was taken."""
        pairs = [*zip(logprobs.top_token_ids, logprobs.top_logprobs, strict=True)]
        return {self._text(token_id): logprob for token_id, logprob in [*pairs, (logprobs.token_id, logprobs.logprob)]}

    def _text(self, token_id: int) -> str:
        return self._token_bytes(token_id).decode(errors="replace")


def usage_object(*, prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> Json:
    """Return the usage of all choices together; a prompt counts once, however many completions it has."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def _offsets(tokens: Sequence[str]) -> list[int]:
    """Return where each token's text begins, in characters from the first of these."""
    offsets, at = [], 0
    for token in tokens:
        offsets.append(at)
        at += len(token)
    return offsets


def _listed(index: int, body: Json) -> Json:
    return {"index": index, **body}


def _ending(finished: FinishedEvent | None) -> Json:
    if finished is None:
        return {"finish_reason": None}
    stop = finished.stop_text if finished.stop_text is not None else finished.stop_token_id
    return {"finish_reason": finished.reason.value, "stop_reason": stop}


RETRY_AFTER: Final = {"Retry-After": "1"}
_SHOWN: Final = 8


class Failure(Exception):
    """Bad end of a call: an HTTP status, and the parts of the API's error object."""

    def __init__(
        self, status: int, kind: str, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self._error = {"message": message, "type": kind, "param": param, "code": code}

    @property
    def headers(self) -> Mapping[str, str]:
        """Return headers for clients that may try again."""
        return RETRY_AFTER if self.status in (429, 503) else {}

    def body(self) -> dict[str, Any]:
        """Return the API's error object."""
        return {"error": self._error}


_STATUSES: Final[Mapping[type[HeteroError], tuple[int, str, str]]] = {
    DuplicateRequest: (409, "invalid_request_error", "already_exists"),
    QueueFull: (429, "rate_limit_error", "queue_full"),
    EngineUnavailable: (503, "server_error", "unavailable"),
    GroupLost: (503, "server_error", "unavailable"),
    DeadlineExceeded: (504, "server_error", "deadline_exceeded"),
}


def failure_of(error: Exception) -> Failure | None:
    """Return the answer to an error; None for a bug."""
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
    """Return the answer to a bug, whose nature stays in the log."""
    return Failure(500, "server_error", "internal error; the gateway's log tells what happened", code="internal")


def unknown_model(asked: str, served: str) -> Failure:
    """Return the answer to a call for a model that is not served here."""
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
