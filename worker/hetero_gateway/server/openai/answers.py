"""Answers of the API: objects of chats and completions, whole and in chunks, and errors.

A `ResponseFormatter` makes all objects of one answer, with a subclass for each of the two calls.
Errors become HTTP statuses and error objects here, the one place of this door where both are known.
"""

from __future__ import annotations

import asyncio
import json
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, ClassVar, Final, NamedTuple

from pydantic import ValidationError
from starlette.responses import JSONResponse, Response

from hetero_api.errors import HeteroError
from hetero_api.v1 import inference_pb2 as pb
from hetero_api.v1.logprobs_pb2 import TokenLogprobs
from hetero_gateway.engine.errors import (
    DeadlineExceeded,
    DuplicateRequest,
    EngineUnavailable,
    GroupLost,
    InvalidRequest,
    QueueFull,
)
from hetero_gateway.engine.request import FinishReason
from hetero_gateway.engine.text.answer_parser import CallArguments, CallStart, Content, Piece, Reasoning
from hetero_gateway.group.errors import CommandFailed, WrongState
from hetero_gateway.server.errors import Forbidden, InvalidArguments, LimitExceeded, NoReplica, Unauthenticated
from hetero_gateway.server.openai.requests import body_field

Json = dict[str, Any]
TokenBytes = Callable[[int], bytes]
"""The bytes of a token's text."""
MANY_POSITIONS: Final = 64
"""With all their likeliest tokens they take a few milliseconds."""
MOST_LOGPROBS: Final = 21
"""Of a position."""
_encode: Final = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


async def answer_of(make: Callable[[], Json], *, num_numbers: int) -> Response:
    """Return the answer that `make` makes, of about so many numbers; if many, it is made in a thread."""
    if num_numbers <= MANY_POSITIONS * MOST_LOGPROBS:
        text = _encode(make()).encode()
    else:
        text = await asyncio.to_thread(lambda: b"".join(piece.encode() for piece in _pieces(make())))
    return Response(text, media_type="application/json")


def _pieces(value: Any, depth: int = 4) -> Iterator[str]:
    """Yield JSON text. The encoder in C lets no other thread run, so it gets a part of a long list at a time."""
    if isinstance(value, dict) and value and depth:
        for number, (key, each) in enumerate(value.items()):
            yield f"{',' if number else '{'}{_encode(key)}:"
            yield from _pieces(each, depth - 1)
        yield "}"
    elif isinstance(value, list) and value:
        has_parts = depth > 0 and isinstance(value[0], dict)
        for begin in range(0, len(value), 1 if has_parts else MANY_POSITIONS):
            yield "," if begin else "["
            listed = value[begin : begin + MANY_POSITIONS]
            yield from _pieces(value[begin], depth - 1) if has_parts else (_encode(listed)[1:-1],)
        yield "]"
    else:
        yield _encode(value)


class Position(NamedTuple):
    """A token and its log-probabilities; a prompt's first token has none."""

    token_id: int
    logprobs: TokenLogprobs | None


@dataclass(slots=True)
class MadeCall:
    """A call of a tool, and its arguments so far."""

    id: str
    name: str
    arguments: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Choice:
    """One completion so far. `index` is its number in the answer."""

    index: int
    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[MadeCall] = field(default_factory=list)
    positions: list[Position] = field(default_factory=list)
    finished: pb.Finished | None = None

    def add(self, pieces: Iterable[Piece], positions: Iterable[Position]) -> None:
        """Add what came."""
        self.positions.extend(positions)
        for piece in pieces:
            match piece:
                case Content(text):
                    self.text.append(text)
                case Reasoning(text):
                    self.reasoning.append(text)
                case CallStart(_, call_id, name):
                    self.calls.append(MadeCall(call_id, name))
                case CallArguments(index, text):
                    self.calls[index].arguments.append(text)


class ResponseFormatter(ABC):
    """Form of one answer: what all of its objects share; subclasses have what differs between the two calls.

    Parts are what a choice says, thinks and calls, as the API's call has it. Log-probabilities are null where none
    were asked for.
    """

    id_prefix: ClassVar[str]
    whole_kind: ClassVar[str]
    """`object` of a whole answer."""
    chunk_kind: ClassVar[str]
    """`object` of a chunk."""
    opening_part: ClassVar[Json | None]
    """Part of a choice's first chunk, before any text; None if there is no such chunk."""
    end_part: ClassVar[Json]
    """Part of a choice's last chunk."""

    def __init__(
        self, call_id: str, model: str, token_bytes: TokenBytes, with_logprobs: bool, silent_ids: Collection[int] = ()
    ) -> None:
        """`silent_ids` are tokens that have bytes, but no part in the text: special ones."""
        self._id = f"{self.id_prefix}-{call_id}"
        self._created = int(time.time())
        self._model = model
        self._token_bytes = token_bytes
        self._with_logprobs = with_logprobs
        self._silent_ids = silent_ids
        self._num_chars: Counter[int] = Counter()
        """Characters of the tokens of each choice so far."""

    def whole(self, choices: Iterable[Choice], usage: Json) -> Json:
        """Return the answer of a call that does not stream."""
        listed = [
            self._choice(each.index, self.whole_part(each), each.positions, each.finished, calls=bool(each.calls))
            for each in choices
        ]
        return self._object(self.whole_kind, listed) | {"usage": usage}

    def opening(self, index: int) -> Json | None:
        """Return a choice's first chunk; None if the call has no such chunk."""
        return None if self.opening_part is None else self._chunk(index, self.opening_part)

    def delta(self, index: int, piece: Piece, positions: Sequence[Position]) -> Json:
        """Return a chunk with a piece of an answer."""
        return self._chunk(index, self.delta_part(piece), positions)

    def end(self, finished: pb.Finished, *, calls: bool = False) -> Json:
        """Return a choice's last chunk; `finished` has the choice's index, `calls`: the choice calls tools."""
        return self._chunk(finished.index, self.end_part, finished=finished, calls=calls)

    def usage(self, usage: Json) -> Json:
        """Return the chunk after the last choice's end."""
        return self._object(self.chunk_kind, []) | {"usage": usage}

    @abstractmethod
    def whole_part(self, choice: Choice) -> Json:
        """Return the part of a whole choice."""

    @abstractmethod
    def delta_part(self, piece: Piece) -> Json:
        """Return the part of a chunk with a piece."""

    @abstractmethod
    def logprobs(self, index: int, positions: Sequence[Position]) -> Json:
        """Return the log-probabilities of a choice's next tokens."""

    def _chunk(
        self,
        index: int,
        part: Json,
        positions: Sequence[Position] | None = None,
        finished: pb.Finished | None = None,
        *,
        calls: bool = False,
    ) -> Json:
        return self._object(self.chunk_kind, [self._choice(index, part, positions, finished, calls=calls)])

    def _choice(
        self, index: int, part: Json, positions: Sequence[Position] | None, finished: pb.Finished | None, *, calls: bool
    ) -> Json:
        shown = None if positions is None or not self._with_logprobs else self.logprobs(index, positions)
        choice = {"index": index, **part, "logprobs": shown}
        if finished is None:
            return choice | {"finish_reason": None}
        matched = finished.WhichOneof("matched_stop")
        stop = None if matched is None else getattr(finished, matched)
        reason = FinishReason(finished.reason)
        told = "tool_calls" if calls and reason is FinishReason.STOP else reason.name.lower()
        return choice | {"finish_reason": told, "stop_reason": stop}

    def _object(self, kind: str, choices: list[Json]) -> Json:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model, "choices": choices}


class ChatFormatter(ResponseFormatter):
    """Form of /v1/chat/completions."""

    id_prefix = "chatcmpl"
    whole_kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    opening_part: ClassVar = {"delta": {"role": "assistant", "content": ""}}
    end_part: ClassVar = {"delta": {}}

    def whole_part(self, choice: Choice) -> Json:
        """See `ResponseFormatter.whole_part`; a choice that calls tools may say nothing, which is null."""
        text, reasoning = "".join(choice.text), "".join(choice.reasoning)
        thought = {"reasoning_content": reasoning} if reasoning else {}
        calls = {"tool_calls": [_whole_call(call) for call in choice.calls]} if choice.calls else {}
        content = None if calls and not text else text
        return {"message": {"role": "assistant", "content": content, **thought, **calls, "refusal": None}}

    def delta_part(self, piece: Piece) -> Json:
        """See `ResponseFormatter.delta_part`."""
        match piece:
            case Content(text):
                delta: Json = {"content": text}
            case Reasoning(text):
                delta = {"reasoning_content": text}
            case CallStart(index, call_id, name):
                function = {"name": name, "arguments": ""}
                delta = {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]}
            case CallArguments(index, text):
                delta = {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
        return {"delta": delta}

    def logprobs(self, index: int, positions: Sequence[Position]) -> Json:  # noqa: ARG002
        """See `ResponseFormatter.logprobs`."""
        return {"content": [self._position(p.logprobs) for p in positions if p.logprobs is not None], "refusal": None}

    def _position(self, logprobs: TokenLogprobs) -> Json:
        top = zip(logprobs.top_token_ids, logprobs.top_logprobs, strict=True)
        listed = [self._token(token_id, logprob) for token_id, logprob in top]
        return self._token(logprobs.token_id, logprobs.logprob) | {"top_logprobs": listed}

    def _token(self, token_id: int, logprob: float) -> Json:
        data = self._token_bytes(token_id)
        return {"token": data.decode(errors="replace"), "logprob": logprob, "bytes": list(data)}


class CompletionFormatter(ResponseFormatter):
    """Form of /v1/completions."""

    id_prefix = "cmpl"
    whole_kind = chunk_kind = "text_completion"
    opening_part = None
    end_part: ClassVar = {"text": ""}

    def whole_part(self, choice: Choice) -> Json:
        """See `ResponseFormatter.whole_part`; reasoning is text here, since this call has no other place for it."""
        return {"text": "".join((*choice.reasoning, *choice.text))}

    def delta_part(self, piece: Piece) -> Json:
        """See `ResponseFormatter.delta_part`. The answer is text alone: no calls are read from it."""
        return {"text": piece.text if isinstance(piece, Content | Reasoning) else ""}

    def logprobs(self, index: int, positions: Sequence[Position]) -> Json:
        """See `ResponseFormatter.logprobs`."""
        tokens = [self._text(position.token_id) for position in positions]
        # Where each token's text begins, in characters from the first of the choice.
        lengths = (self._length(position.token_id) for position in positions)
        *offsets, self._num_chars[index] = accumulate(lengths, initial=self._num_chars[index])
        return {
            "tokens": tokens,
            "token_logprobs": [None if p.logprobs is None else p.logprobs.logprob for p in positions],
            "top_logprobs": [None if p.logprobs is None else self._top(p.logprobs) for p in positions],
            "text_offset": offsets,
        }

    def _top(self, logprobs: TokenLogprobs) -> dict[str, float]:
        """Return log-probabilities by text: of the likeliest tokens and of the one that was taken."""
        pairs = [*zip(logprobs.top_token_ids, logprobs.top_logprobs, strict=True)]
        return {self._text(token_id): logprob for token_id, logprob in [*pairs, (logprobs.token_id, logprobs.logprob)]}

    def _text(self, token_id: int) -> str:
        """Return a token's text; bytes that are no UTF-8 as the API writes them, so that no two tokens are alike."""
        data = self._token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _length(self, token_id: int) -> int:
        """Return the characters that begin with a token: one may be spread over several."""
        data = b"" if token_id in self._silent_ids else self._token_bytes(token_id)
        return len(data) if data.isascii() else sum(byte & 0xC0 != 0x80 for byte in data)


def _whole_call(call: MadeCall) -> Json:
    function = {"name": call.name, "arguments": "".join(call.arguments)}
    return {"id": call.id, "type": "function", "function": function}


RETRY_AFTER_S: Final = 1
_SHOWN: Final = 8


class Failure(Exception):
    """Bad end of a call: an HTTP status, and the parts of the API's error object."""

    def __init__(
        self,
        status: int,
        kind: str,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int = RETRY_AFTER_S,
    ) -> None:
        super().__init__(message)
        self.status = status
        self._retry_after_s = retry_after_s
        self._error = {"message": message, "type": kind, "param": param, "code": code}

    @property
    def _headers(self) -> Mapping[str, str]:
        """Return headers for clients that may try again, or have to show a key."""
        if self.status == 401:
            return {"WWW-Authenticate": "Bearer"}
        return {"Retry-After": str(self._retry_after_s)} if self.status in (429, 503) else {}

    def body(self) -> dict[str, Any]:
        """Return the API's error object."""
        return {"error": self._error}

    def response(self) -> Response:
        """Return the answer."""
        return JSONResponse(self.body(), status_code=self.status, headers=self._headers)


_STATUSES: Final[Mapping[type[HeteroError], tuple[int, str, str]]] = {
    WrongState: (409, "invalid_request_error", "failed_precondition"),
    CommandFailed: (409, "invalid_request_error", "failed_precondition"),
    DuplicateRequest: (409, "invalid_request_error", "already_exists"),
    QueueFull: (429, "rate_limit_error", "queue_full"),
    Unauthenticated: (401, "invalid_request_error", "invalid_api_key"),
    Forbidden: (403, "invalid_request_error", "permission_denied"),
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
        code = "context_length_exceeded" if error.is_too_long else None
        return _invalid(f"{field}: {error.problem}", field, code)
    if isinstance(error, LimitExceeded):
        after_s = error.retry_after_s
        return Failure(429, "rate_limit_error", str(error), code="rate_limit_exceeded", retry_after_s=after_s)
    if isinstance(error, NoReplica):
        return Failure(503, "server_error", str(error), code="unavailable", retry_after_s=error.retry_after_s)
    known = _STATUSES.get(type(error)) if isinstance(error, HeteroError) else None
    if known is None:
        return None
    status, kind, code = known
    return Failure(status, kind, str(error), code=code)


def _invalid(message: str, param: str, code: str | None = None) -> Failure:
    return Failure(400, "invalid_request_error", message, param=param, code=code)


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
