"""One call of the endpoint: the requests it is made of, and its answer, whole or in chunks.

A list of prompts is as many requests side by side; their completions are numbered through. However the call ends, its
requests end with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from starlette.responses import Response

from hetero_api.v1 import inference_pb2 as pb
from hetero_api.v1.logprobs_pb2 import TokenLogprobs
from hetero_gateway.engine.errors import InvalidRequest
from hetero_gateway.engine.request import GenerationRequest
from hetero_gateway.engine.stream import RequestStream
from hetero_gateway.engine.text.answer_parser import AnswerParser, CallStart, Content, Piece, Reasoning
from hetero_gateway.server.openai.answers import (
    MANY_POSITIONS,
    MOST_LOGPROBS,
    Choice,
    Json,
    Position,
    ResponseFormatter,
    answer_of,
)

MAX_ECHOED: Final = 1 << 20
"""Log-probabilities of prompts that a call may have repeated: some 30 MB."""


@dataclass(frozen=True, slots=True)
class Said:
    """New pieces and tokens of one choice."""

    index: int
    pieces: Sequence[Piece]
    positions: list[Position]


class Part:
    """One request of a call. Tokens that end a completion are counted, but no part of its text.

    `new_parser` makes the parser of one answer of a chat, whose positions are without tokens that end it. Without one
    all text is said, and all positions: who scores texts counts on one for each token that was counted.
    """

    def __init__(
        self,
        asked: GenerationRequest,
        stream: RequestStream,
        *,
        first_choice: int,
        eos_token_ids: frozenset[int],
        new_parser: Callable[[], AnswerParser] | None = None,
    ) -> None:
        self.stream = stream
        self.num_prompt_tokens = len(asked.prompt_token_ids)
        self.choices = range(first_choice, first_choice + asked.n)
        self._asked = asked
        self._hidden_tokens: frozenset[int] = frozenset()
        if new_parser is not None:
            self._hidden_tokens = asked.stop_token_ids | (frozenset() if asked.ignore_eos else eos_token_ids)
        self._parsers = [new_parser() for _ in self.choices] if new_parser is not None else []

    def said(self, event: pb.Delta) -> Said:
        """Return new tokens as those of the call's choice."""
        pieces: list[Piece] = [Reasoning(event.reasoning)] if event.reasoning else []
        if self._parsers:
            pieces += self._parsers[event.index].push(event.text)
        elif event.text:
            pieces.append(Content(event.text))
        return Said(self.choices[event.index], pieces, self._positions(event))

    def rest(self, event: pb.Finished) -> Said:
        """Return what was held back of a completion that has ended."""
        pieces = self._parsers[event.index].finish() if self._parsers else []
        return Said(self.choices[event.index], pieces, [])

    def echo(self, decode: Callable[[Sequence[int]], str], logprobs: Sequence[TokenLogprobs]) -> Iterator[Said]:
        """Yield the prompt, to stand at the head of each choice."""
        tokens = self._asked.prompt_token_ids
        positions: list[Position] = []
        if self._asked.sampling.HasField("num_prompt_logprobs"):
            positions = [Position(token, each) for token, each in zip(tokens, [None, *logprobs], strict=True)]
        text = decode(tokens)
        return (Said(index, [Content(text)], positions) for index in self.choices)

    def _positions(self, event: pb.Delta) -> list[Position]:
        if not event.logprobs:
            return []
        pairs = zip(event.token_ids, event.logprobs, strict=True)
        return [Position(token, known) for token, known in pairs if token not in self._hidden_tokens]


def check_echo(asked: Sequence[GenerationRequest]) -> None:
    """Raise InvalidRequest if a call would have more than MAX_ECHOED log-probabilities of its prompts repeated."""
    echoed = [each for each in asked if each.sampling.HasField("num_prompt_logprobs")]
    number = sum(each.n * len(each.prompt_token_ids) * (1 + each.sampling.num_prompt_logprobs) for each in echoed)
    if number > MAX_ECHOED:
        problem = f"with n and logprobs repeats {number} log-probabilities of prompts; at most {MAX_ECHOED} are allowed"
        raise InvalidRequest("echo", problem)


class Call:
    """One call. `echo` decodes prompts that are to be part of the answer."""

    def __init__(
        self, parts: Sequence[Part], *, formatter: ResponseFormatter, echo: Callable[[Sequence[int]], str] | None = None
    ) -> None:
        self._parts = tuple(parts)
        self._formatter = formatter
        self._echo = echo
        self._num_generated = 0
        self._cached = dict.fromkeys(range(len(parts)), 0)

    def cancel(self) -> None:
        """End the requests that have not ended."""
        for part in self._parts:
            part.stream.cancel()

    async def whole(self) -> Response:
        """Return the whole answer. Raises the error that a request ends with."""
        choices = {index: Choice(index) for part in self._parts for index in part.choices}
        async for event in self._events():
            choice = choices[event.index]
            if isinstance(event, pb.Finished):
                choice.finished = event
            else:
                choice.add(event.pieces, event.positions)
        num_numbers = MOST_LOGPROBS * sum(len(each.positions) for each in choices.values())
        return await answer_of(lambda: self._formatter.whole(choices.values(), self._usage()), num_numbers=num_numbers)

    async def chunks(self, *, usage_at_end: bool, usage_in_all: bool) -> AsyncIterator[Json]:
        """Yield the answer as it comes. Raises the error that a request ends with."""
        async for chunk in self._bare_chunks():
            yield chunk | {"usage": self._usage()} if usage_in_all else chunk
        if usage_at_end:
            yield self._formatter.usage(self._usage())

    async def _bare_chunks(self) -> AsyncIterator[Json]:
        calling: set[int] = set()
        for index in (index for part in self._parts for index in part.choices):
            opening = self._formatter.opening(index)
            if opening is not None:
                yield opening
        async for event in self._events():
            if isinstance(event, pb.Finished):
                yield self._formatter.end(event, calls=event.index in calling)
                continue
            if any(isinstance(piece, CallStart) for piece in event.pieces):
                calling.add(event.index)
            for chunk in self._deltas(event):
                yield chunk
                if len(event.positions) > MANY_POSITIONS:
                    await asyncio.sleep(0)  # others take their turns between chunks that take long

    def _deltas(self, said: Said) -> Iterator[Json]:
        """Yield a chunk for each piece; tokens come with the first, or, also those beyond many, in one without text."""
        begins = range(0, max(1, len(said.positions)), MANY_POSITIONS)
        first, *rest = (said.positions[begin : begin + MANY_POSITIONS] for begin in begins)
        for number, piece in enumerate(said.pieces or ([Content("")] if first else [])):
            yield self._formatter.delta(said.index, piece, [] if number else first)
        for positions in rest:
            yield self._formatter.delta(said.index, Content(""), positions)

    async def _events(self) -> AsyncIterator[Said | pb.Finished]:
        """Yield text and ends of the choices; a prompt that is echoed comes first."""
        to_echo = set(range(len(self._parts))) if self._echo is not None else set()
        async for number, event in merged([(number, part.stream) for number, part in enumerate(self._parts)]):
            part = self._parts[number]
            if number in to_echo and self._echo is not None:
                to_echo.discard(number)
                logprobs = event.positions if isinstance(event, pb.PromptLogprobs) else ()
                for said in part.echo(self._echo, logprobs):
                    yield said
            if isinstance(event, pb.Delta):
                self._num_generated += len(event.token_ids)
                yield part.said(event)
            elif isinstance(event, pb.Finished):
                self._cached[number] = max(self._cached[number], event.usage.cached_tokens)
                yield part.rest(event)
                event.index = part.choices[event.index]
                yield event

    def _usage(self) -> Json:
        """Return the usage of all choices together; a prompt counts once, however many completions it has."""
        prompt_tokens = sum(part.num_prompt_tokens for part in self._parts)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": self._num_generated,
            "total_tokens": prompt_tokens + self._num_generated,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached.values())},
        }


K = TypeVar("K")
T = TypeVar("T")


async def merged(streams: Sequence[tuple[K, AsyncIterable[T]]]) -> AsyncIterator[tuple[K, T]]:
    """Yield events of several streams in the order in which they come, each with its stream's key.

    An error of one stream is raised, and ends all.
    """
    if len(streams) == 1:  # of most calls: spare it the task and the queue
        ((only, alone),) = streams
        async for each in alone:
            yield only, each
        return
    # One event of each stream at most waits here: the streams themselves merge what is not read.
    news: asyncio.Queue[tuple[K, T] | Exception | None] = asyncio.Queue(maxsize=len(streams))
    readers = [asyncio.create_task(_read(key, stream, news)) for key, stream in streams]
    try:
        num_open = len(readers)
        while num_open:
            event = await news.get()
            if isinstance(event, Exception):
                raise event
            if event is None:
                num_open -= 1
            else:
                yield event
    finally:
        for reader in readers:
            reader.cancel()


async def _read(key: K, stream: AsyncIterable[T], news: asyncio.Queue[tuple[K, T] | Exception | None]) -> None:
    """Put the stream's events into `news`, then the error that it ends with, or None."""
    try:
        async for event in stream:
            await news.put((key, event))
        await news.put(None)
    except Exception as error:  # noqa: BLE001 — raised to the reader of the merged stream
        await news.put(error)
