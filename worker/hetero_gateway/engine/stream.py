"""What a request's reader sees: token events, then exactly one end.

The engine never waits for a reader. What a slow one has not read yet is merged into one pending event, so a stream
holds at most one completion's tokens and a reader that catches up gets them in one piece. One loop, one reader.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from hetero_gateway.engine.errors import EngineError
from hetero_gateway.engine.request import FinishReason


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts. `completion_tokens` includes an ending token."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds since the request's arrival; None for what never came."""

    queued_s: float | None
    first_token_s: float | None
    total_s: float


@dataclass(frozen=True, slots=True)
class TokensEvent:
    """Tokens and text since the last event; `text` may be empty while a character or a stop string is unclear."""

    token_ids: tuple[int, ...]
    text: str


@dataclass(frozen=True, slots=True)
class FinishedEvent:
    """The completion's end. With STOP, one of `stop_text` and `stop_token_id` says what ended it."""

    reason: FinishReason
    stop_text: str | None
    stop_token_id: int | None
    usage: Usage
    timings: Timings


class RequestStream:
    """Iterate: TokensEvents, then a FinishedEvent or an EngineError raised, then the iteration is over."""

    def __init__(self, request_id: str, *, num_prompt_tokens: int, cancel: Callable[[RequestStream], None]) -> None:
        self.request_id = request_id
        self.num_prompt_tokens = num_prompt_tokens
        self._cancel = cancel
        self._token_ids: list[int] = []
        self._text: list[str] = []
        self._end: FinishedEvent | EngineError | None = None
        self._news = asyncio.Event()

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> TokensEvent | FinishedEvent:
        await self._news.wait()
        if self._token_ids or self._text:
            return self._take_tokens()
        end, self._end = self._end, None
        if end is None:
            raise StopAsyncIteration
        if isinstance(end, EngineError):
            raise end
        return end

    def cancel(self) -> None:
        """The reader goes away: end the request, unless it has ended. Its blocks are free within one step."""
        self._cancel(self)

    def push(self, token_id: int, text: str) -> None:
        """Engine only: one more token."""
        self._token_ids.append(token_id)
        self._add_text(text)
        self._news.set()

    def end(self, event: FinishedEvent | EngineError, *, text: str = "") -> None:
        """Engine only: the end, after the last piece of text. Comes once; nothing comes after it."""
        self._add_text(text)
        self._end = event
        self._news.set()

    def _add_text(self, text: str) -> None:
        if text:
            self._text.append(text)

    def _take_tokens(self) -> TokensEvent:
        event = TokensEvent(tuple(self._token_ids), "".join(self._text))
        self._token_ids.clear()
        self._text.clear()
        if self._end is None:
            self._news.clear()
        return event
