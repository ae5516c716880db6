"""The stream that a request's reader sees: token events of its completions, then exactly one end of each.

The engine never waits for a reader. Events that a slow one has not read yet are merged, up to TOKENS_AN_EVENT, so a
stream holds at most its completions' tokens and a reader that catches up gets them in few pieces. Text is made of
tokens when the reader takes them, many at once for one that is behind; only where stop strings are looked for it is
made token by token. One loop, one reader.

A step of many streams has news for all of them at once. Handing an event on costs far more than making it, so without
a bound one turn of the event loop would last as long as all those writes, and the next plan, the results of ranks and
new requests would wait for it. So readers take turns (`ReaderTurns`): with the bound, other work comes in between, and
the more there is to do the cheaper a token gets.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from hetero_api.v1 import inference_pb2 as pb
from hetero_api.v1.logprobs_pb2 import TokenLogprobs
from hetero_gateway.engine.errors import EngineError
from hetero_gateway.engine.text.detokenizer import IncrementalDetokenizer

EVENTS_A_TURN: Final = 16
"""Events that readers take in one turn of the event loop."""
TOKENS_AN_EVENT: Final = 4096
"""With all their likeliest tokens and the longest text they take far less than a message may."""


StreamEvent = pb.Delta | pb.PromptLogprobs | pb.Finished
"""Event as inference.proto has it, without log-probabilities that nobody asked for."""


class CompletionFeed:
    """Way of one completion from tokens to events. Made by its stream; the engine puts in, the stream takes out."""

    __slots__ = (
        "_detokenizer", "_finished", "_full", "_index", "_is_closed", "_is_eager", "_logprobs", "_stream", "_text",
        "_token_ids", "is_queued",
    )  # fmt: skip

    def __init__(self, stream: RequestStream, index: int, detokenizer: IncrementalDetokenizer) -> None:
        self._stream = stream
        self._index = index
        self._detokenizer = detokenizer
        self._is_eager = detokenizer.looks_for_stops
        self._is_closed = False
        self._token_ids: list[int] = []
        self._text: list[str] = []
        self._logprobs: list[TokenLogprobs] = []
        self._full: deque[pb.Delta] = deque()
        """Events of as many tokens as one may have. Text goes with its tokens: a reader may go on behind any event."""
        self._finished: pb.Finished | None = None
        self.is_queued = False
        """Whether the stream knows that there is something to take. Only the stream writes to it."""

    @property
    def matched_stop(self) -> str | None:
        """The stop string that was met, if any."""
        return self._detokenizer.matched_stop

    def go_on(self, *, is_all: bool) -> None:
        """Go on behind tokens that the reader has from an earlier stream; with `is_all` no text follows.

        The detokenizer is past these tokens.
        """
        if is_all:
            self._detokenizer.finish()
            self._is_closed = True
        self._detokenizer.take_reasoning()

    def push(self, token_id: int, logprobs: TokenLogprobs | None) -> None:
        """Add one token, and its text."""
        self._token_ids.append(token_id)
        if logprobs is not None:
            self._logprobs.append(logprobs)
        if self._is_eager:
            self._text.append(self._detokenizer.push((token_id,)))
        if len(self._token_ids) == TOKENS_AN_EVENT and (full := self._take_tokens()) is not None:
            self._full.append(full)
        if not self.is_queued:
            self._stream.has_news(self)

    def close(self) -> None:
        """End the text: release what is held back, which may complete a stop string."""
        if not self._is_closed:
            self._text += (self._pending_text(), self._detokenizer.finish())
            self._is_closed, self._is_eager = True, False

    def end(self, event: pb.Finished) -> None:
        """Add the end, after `close`. Once only."""
        self._finished = event
        self._stream.has_news(self, ended=True)

    def take(self) -> pb.Delta | pb.Finished | None:
        """Return the next event for the reader; None if there is none now."""
        if self._full:
            return self._full.popleft()
        if self._token_ids or self._text:
            event = self._take_tokens()
            if event is not None:
                return event
        finished, self._finished = self._finished, None
        return finished

    @property
    def has_more(self) -> bool:
        """Whether `take` would give something after what it gave."""
        return self._finished is not None or bool(self._full or self._token_ids or self._text)

    def _take_tokens(self) -> pb.Delta | None:
        text = "".join(self._text) + self._pending_text()
        self._text.clear()
        reasoning = self._detokenizer.take_reasoning()
        token_ids, self._token_ids = self._token_ids, []
        if not token_ids and not text and not reasoning:
            return None
        logprobs, self._logprobs = self._logprobs, []
        return pb.Delta(index=self._index, token_ids=token_ids, text=text, reasoning=reasoning, logprobs=logprobs)

    def _pending_text(self) -> str:
        return "" if self._is_eager or self._is_closed else self._detokenizer.push(self._token_ids)


class RequestStream:
    """Events of one request: iterate over it. It ends after a Finished for each completion, or by an EngineError.

    `turns` bounds how much all readers of the loop take at once. `on_end` is called once, when the last completion has
    ended, whether or not the reader has taken it.
    """

    def __init__(
        self,
        request_id: str,
        *,
        num_prompt_tokens: int,
        detokenizers: Sequence[IncrementalDetokenizer],
        cancel: Callable[[RequestStream], None],
        turns: ReaderTurns,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self.request_id = request_id
        self.num_prompt_tokens = num_prompt_tokens
        self.embedding: list[float] | None = None
        """Pooled hidden states of the prompt, there with the first token if they were asked for."""
        self.feeds = tuple(CompletionFeed(self, index, each) for index, each in enumerate(detokenizers))
        self._cancel = cancel
        self._turns = turns
        self._on_end = on_end
        self._num_open = len(self.feeds)
        self._with_news: deque[CompletionFeed] = deque()
        self._prompt_logprobs: pb.PromptLogprobs | None = None
        self._error: EngineError | None = None
        self._reader: asyncio.Future[None] | None = None

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> StreamEvent:
        while True:
            if self._prompt_logprobs is not None or self._with_news:
                await self._turns.wait()
            event = self.take()
            if event is not None:
                return event
            if self._error is not None:
                error, self._error = self._error, None
                raise error
            if not self._num_open:
                raise StopAsyncIteration
            await self._wait()

    def take(self) -> StreamEvent | None:
        """Return the next event, if there is one now. Never raises: the iteration does."""
        if self._prompt_logprobs is not None:
            event, self._prompt_logprobs = self._prompt_logprobs, None
            return event
        while self._with_news:
            feed = self._with_news.popleft()
            feed.is_queued = False
            taken = feed.take()
            if feed.has_more:
                self._queue(feed)
            if taken is not None:
                return taken
        return None

    def cancel(self) -> None:
        """End the request, unless it has ended: its reader goes away. Its blocks are free within one step."""
        self._cancel(self)

    # --- for the engine ---------------------------------------------------------------------------------

    @property
    def num_open(self) -> int:
        """Completions that have not ended."""
        return self._num_open

    def push_prompt_logprobs(self, positions: Sequence[TokenLogprobs]) -> None:
        """Add the log-probabilities of the whole prompt. Once only."""
        self._prompt_logprobs = pb.PromptLogprobs(positions=positions)
        self._wake()

    def fail(self, error: EngineError) -> None:
        """End every completion that has not ended. Pending events still come before the error."""
        self._error = error
        self._close(self._num_open)
        self._wake()

    def has_news(self, feed: CompletionFeed, *, ended: bool = False) -> None:
        """Note that a feed had nothing to take and now has, or has ended."""
        if not feed.is_queued:
            self._queue(feed)
        if ended:
            self._close(1)
        self._wake()

    def _close(self, num_ended: int) -> None:
        """Count completions that have ended."""
        self._num_open -= num_ended
        if num_ended and not self._num_open:
            self._on_end()

    def _queue(self, feed: CompletionFeed) -> None:
        feed.is_queued = True
        self._with_news.append(feed)

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def _wait(self) -> None:
        self._reader = asyncio.get_running_loop().create_future()
        try:
            await self._reader
        finally:
            self._reader = None


class ReaderTurns:
    """Turns of all readers of one loop, in the order in which they asked."""

    def __init__(self, *, events_a_turn: int = EVENTS_A_TURN) -> None:
        self._events_a_turn = events_a_turn
        self._left = events_a_turn
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_turning = False

    async def wait(self) -> None:
        """Wait until this turn of the loop, or a later one, has room for an event."""
        loop = asyncio.get_running_loop()
        if not self._is_turning:
            self._is_turning = True
            loop.call_soon(self._turn, loop)
        if self._left and not self._waiting:
            self._left -= 1
            return
        waiter: asyncio.Future[None] = loop.create_future()
        self._waiting.append(waiter)
        await waiter

    def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        self._left = self._events_a_turn
        while self._left and self._waiting:
            waiter = self._waiting.popleft()
            # One whose reader went away takes no turn.
            if not waiter.done():
                waiter.set_result(None)
                self._left -= 1
        self._is_turning = self._left < self._events_a_turn
        if self._is_turning:
            loop.call_soon(self._turn, loop)
