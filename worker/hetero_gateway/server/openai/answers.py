"""What the API answers: objects of chats and completions, whole and in chunks.

A `Voice` knows what differs between the two calls; a `Frame` what all objects of one answer have in common.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol

from hetero_api.v1.logprobs_pb2 import TokenLogprobs
from hetero_gateway.engine.stream import FinishedEvent

Json = dict[str, Any]
TokenBytes = Callable[[int], bytes]
"""The bytes of a token's text."""


class Position(NamedTuple):
    """A token and what is known of its likelihood; nothing of a prompt's first."""

    token_id: int
    logprobs: TokenLogprobs | None


@dataclass(slots=True)
class Choice:
    """One completion as far as it has come. `index` is its number in the answer."""

    index: int
    text: list[str] = field(default_factory=list)
    positions: list[Position] = field(default_factory=list)
    finished: FinishedEvent | None = None


class Voice(Protocol):
    """How one of the two calls speaks. Positions are None where no log-probabilities were asked for."""

    @property
    def whole_kind(self) -> str:
        """`object` of a whole answer."""
        ...

    @property
    def chunk_kind(self) -> str:
        """`object` of a chunk."""
        ...

    def choice(self, text: str, positions: Sequence[Position] | None) -> Json:
        """What a whole choice says."""
        ...

    def opening(self) -> Json | None:
        """What a choice's first chunk says, before any text; None: there is none."""
        ...

    def delta(self, text: str, positions: Sequence[Position] | None) -> Json:
        """What a chunk says."""
        ...

    def end(self) -> Json:
        """What a choice's last chunk says."""
        ...


@dataclass(frozen=True, slots=True)
class Frame:
    """`created` is in Unix seconds."""

    id: str
    created: int
    model: str
    voice: Voice
    with_logprobs: bool

    def whole(self, choices: Iterable[Choice], usage: Json) -> Json:
        """The answer of a call that does not stream."""
        listed = [
            _listed(choice.index, self.voice.choice("".join(choice.text), self._shown(choice.positions)))
            | _ending(choice.finished)
            for choice in choices
        ]
        return self._object(self.voice.whole_kind, listed) | {"usage": usage}

    def opening(self, index: int) -> Json | None:
        body = self.voice.opening()
        return None if body is None else self._chunk(index, body)

    def delta(self, index: int, text: str, positions: Sequence[Position]) -> Json:
        return self._chunk(index, self.voice.delta(text, self._shown(positions)))

    def end(self, index: int, finished: FinishedEvent) -> Json:
        return self._chunk(index, self.voice.end(), finished)

    def usage(self, usage: Json) -> Json:
        """The chunk after the last choice's end."""
        return self._object(self.voice.chunk_kind, []) | {"usage": usage}

    def _chunk(self, index: int, body: Json, finished: FinishedEvent | None = None) -> Json:
        return self._object(self.voice.chunk_kind, [_listed(index, body) | _ending(finished)])

    def _object(self, kind: str, choices: list[Json]) -> Json:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}

    def _shown(self, positions: Sequence[Position]) -> Sequence[Position] | None:
        return positions if self.with_logprobs else None


class ChatVoice:
    """/v1/chat/completions."""

    whole_kind: Final = "chat.completion"
    chunk_kind: Final = "chat.completion.chunk"

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._token_bytes = token_bytes

    def choice(self, text: str, positions: Sequence[Position] | None) -> Json:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"message": message, "logprobs": self._logprobs(positions)}

    def opening(self) -> Json | None:
        return {"delta": {"role": "assistant", "content": ""}, "logprobs": None}

    def delta(self, text: str, positions: Sequence[Position] | None) -> Json:
        return {"delta": {"content": text}, "logprobs": self._logprobs(positions)}

    def end(self) -> Json:
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


class CompletionVoice:
    """/v1/completions."""

    whole_kind: Final = "text_completion"
    chunk_kind: Final = "text_completion"

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._token_bytes = token_bytes

    def choice(self, text: str, positions: Sequence[Position] | None) -> Json:
        return {"text": text, "logprobs": self._logprobs(positions)}

    def opening(self) -> Json | None:
        return None

    def delta(self, text: str, positions: Sequence[Position] | None) -> Json:
        return self.choice(text, positions)

    def end(self) -> Json:
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
        """Text to log-probability, of the likeliest tokens and of the one that was taken."""
        pairs = [*zip(logprobs.top_token_ids, logprobs.top_logprobs, strict=True)]
        return {self._text(token_id): logprob for token_id, logprob in [*pairs, (logprobs.token_id, logprobs.logprob)]}

    def _text(self, token_id: int) -> str:
        return self._token_bytes(token_id).decode(errors="replace")


def usage_object(*, prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> Json:
    """Of all choices together; a prompt counts once, however many completions it has."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def _offsets(tokens: Sequence[str]) -> list[int]:
    """Where each token's text begins, in characters from the first of these."""
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
