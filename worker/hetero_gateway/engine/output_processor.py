"""OutputProcessor: passes what the scheduler finds out on to the streams of the requests in flight.

Every request that is accepted here ends exactly once: each completion with a Finished, or its open completions
with an EngineError. A completion that ends here ends in the scheduler too. One asyncio loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, cast

from google.protobuf import duration_pb2

from hetero_api.v1 import inference_pb2 as pb
from hetero_gateway.engine.errors import EngineError, InvalidRequest
from hetero_gateway.engine.request import Completion, FinishReason, Request
from hetero_gateway.engine.scheduler import Scheduler
from hetero_gateway.engine.step import CompletionUpdate, StepOutcome
from hetero_gateway.engine.stream import CompletionFeed, RequestStream
from hetero_gateway.engine.telemetry.latencies import Latencies
from hetero_gateway.engine.text.constraints import TokenMatcher
from hetero_gateway.engine.text.detokenizer import IncrementalDetokenizer

_NANOS: Final = 1_000_000_000


class Preparation(NamedTuple):
    """Matcher and detokenizer of each completion of a request, past the tokens that it received."""

    matchers: Sequence[TokenMatcher | None]
    detokenizers: Sequence[IncrementalDetokenizer]


@dataclass(slots=True, eq=False)
class ActiveRequest:
    """Request whose stream has not ended."""

    request: Request
    stream: RequestStream


@dataclass(slots=True, eq=False)
class OpenCompletion:
    """Completion that has not ended, and the feed of its reader."""

    completion: Completion
    active: ActiveRequest
    feed: CompletionFeed
    matcher: TokenMatcher | None
    first_token_s: float | None = None
    last_token_s: float = 0.0
    num_delivered: int = 0
    """Tokens that its feed has, received ones included."""


class OutputProcessor:
    """All requests in flight. `none_left` is set while there are none, `some_left` while there are some."""

    def __init__(self, scheduler: Scheduler, *, clock: Callable[[], float]) -> None:
        self.none_left = asyncio.Event()
        self.none_left.set()
        self.some_left = asyncio.Event()
        self.latencies = Latencies()
        self._scheduler = scheduler
        self._clock = clock
        self._active: dict[str, ActiveRequest] = {}
        self._open: dict[Completion, OpenCompletion] = {}

    def __len__(self) -> int:
        """Return the number of requests in flight."""
        return len(self._active)

    @property
    def active(self) -> list[ActiveRequest]:
        """The requests in flight."""
        return list(self._active.values())

    def get(self, request_id: str) -> ActiveRequest | None:
        """Return the request of an id, if it is in flight."""
        return self._active.get(request_id)

    def is_active(self, active: ActiveRequest) -> bool:
        """Return whether the request has not ended; another request may have its id by now."""
        return self._active.get(active.request.request_id) is active

    def matcher_of(self, completion: Completion) -> TokenMatcher | None:
        """Return the matcher of a completion; None for one that has none or has ended."""
        opened = self._open.get(completion)
        return None if opened is None else opened.matcher

    # --- in ---------------------------------------------------------------------------------------------

    def accept(self, active: ActiveRequest, matchers: Sequence[TokenMatcher | None]) -> None:
        """Add a request that the scheduler took, with a matcher for each completion."""
        request = active.request
        self._active[request.request_id] = active
        self.none_left.clear()
        self.some_left.set()
        for completion, feed, matcher in zip(request.completions, active.stream.feeds, matchers, strict=True):
            opened = self._open[completion] = OpenCompletion(
                completion, active, feed, matcher, num_delivered=completion.num_received
            )
            if completion.num_received:
                self._resume(opened)

    def _resume(self, opened: OpenCompletion) -> None:
        """Go on behind the tokens that the reader has. They may be the whole completion: then end it."""
        completion, feed = opened.completion, opened.feed
        feed.go_on(is_all=completion.ended)
        if completion.ended or feed.matched_stop is not None:
            self._scheduler.finish(completion)
            self._end(opened, completion.reason or FinishReason.STOP, completion.stop_token_id)

    # --- news -------------------------------------------------------------------------------------------

    def process(self, outcome: StepOutcome) -> None:
        """Pass on what a step brought."""
        for request, positions in outcome.prompt_logprobs:
            active = self._active.get(request.request_id)
            if active is not None and active.request is request:
                active.stream.push_prompt_logprobs(positions)
        now = self._clock()
        for update in outcome.updates:
            # It may have ended just now, together with another completion of its request.
            opened = self._open.get(update.completion)
            if opened is not None:
                self._deliver(opened, update, now=now)

    def _deliver(self, opened: OpenCompletion, update: CompletionUpdate, *, now: float) -> None:
        _, token_id, reason, stop_token_id, logprobs = update
        if opened.first_token_s is None:
            opened.first_token_s = now
            self.latencies.first_token(opened.completion, now=now)
            if (trace := opened.active.request.trace) is not None:
                trace.note_token(now)
        else:
            self.latencies.inter_token.observe(now - opened.last_token_s)
        opened.last_token_s = now
        opened.num_delivered += 1
        feed, pooled = opened.feed, opened.active.request.pooled
        if pooled is not None:
            opened.active.stream.embedding = pooled.mean()
        if stop_token_id is not None:
            feed.close()  # the token is reported, but is no part of the text
        feed.push(token_id, logprobs)
        if reason is not None:
            self._finish(opened, reason, stop_token_id)
        elif feed.matched_stop is not None:
            # A step with a proposal may have brought tokens behind the stop string: they never were.
            num_unread = update.completion.num_output_tokens - opened.num_delivered
            self._scheduler.finish(update.completion, num_unread=num_unread)
            self._finish(opened, FinishReason.STOP)
        elif opened.matcher is not None:
            self._advance(opened, opened.matcher, token_id)

    def _advance(self, opened: OpenCompletion, matcher: TokenMatcher, token_id: int) -> None:
        try:
            matcher.advance(token_id)
        except InvalidRequest as error:
            self.fail(opened.active, error)

    # --- ends -------------------------------------------------------------------------------------------

    def abort(self, active: ActiveRequest) -> None:
        """End every open completion of a request with ABORT."""
        self._scheduler.abort(active.request.request_id)
        for opened in self._open_of(active):
            self._finish(opened, FinishReason.ABORT)

    def fail(self, active: ActiveRequest, error: EngineError) -> None:
        """End the open completions of a request with an error."""
        if (trace := active.request.trace) is not None:
            trace.fail(error)
        self._scheduler.abort(active.request.request_id)
        for opened in self._open_of(active):
            del self._open[opened.completion]
        active.stream.fail(error)
        self._remove(active)

    def fail_adapter(self, number: int, problem: str) -> None:
        """End the requests of an adapter with InvalidRequest."""
        for active in self.active:
            if active.request.asked.adapter == number:
                self.fail(active, InvalidRequest("model", problem))

    def fail_completion(self, completion: Completion, error: EngineError) -> None:
        """End the request of a completion with an error, unless the completion has ended."""
        opened = self._open.get(completion)
        if opened is not None:
            self.fail(opened.active, error)

    def fail_all(self, error: EngineError) -> None:
        """End every request with an error."""
        for active in self.active:
            self.fail(active, error)

    def _finish(self, opened: OpenCompletion, reason: FinishReason, stop_token_id: int | None = None) -> None:
        opened.feed.close()
        self._end(opened, reason, stop_token_id)

    def _end(self, opened: OpenCompletion, reason: FinishReason, stop_token_id: int | None) -> None:
        """End a completion. A stop string met in text that was held back until now is the reason."""
        stop_text = opened.feed.matched_stop if reason is not FinishReason.ABORT else None
        if stop_text is not None:
            reason = FinishReason.STOP
        completion, active = opened.completion, opened.active
        request = active.request
        del self._open[completion]
        self.latencies.end(completion, reason, first_token_s=opened.first_token_s, now=self._clock())
        if request.trace is not None:
            request.trace.note_end(reason.name.lower())
        finished = pb.Finished(
            index=completion.index,
            reason=cast("pb.FinishReason.ValueType", reason),
            usage=pb.Usage(
                prompt_tokens=request.num_prompt_tokens,
                cached_tokens=request.num_cached_tokens,
                completion_tokens=completion.num_output_tokens,
            ),
            timings=self._timings(opened),
        )
        if stop_text is not None:
            finished.stop_text = stop_text
        elif stop_token_id is not None:
            finished.stop_token_id = stop_token_id
        opened.feed.end(finished)
        if not active.stream.num_open:
            self._remove(active)

    def _remove(self, active: ActiveRequest) -> None:
        del self._active[active.request.request_id]
        if not self._active:
            self.none_left.set()
            self.some_left.clear()

    def _open_of(self, active: ActiveRequest) -> list[OpenCompletion]:
        found = map(self._open.get, active.request.completions)
        return [opened for opened in found if opened is not None]

    def _timings(self, opened: OpenCompletion) -> pb.Timings:
        request = opened.active.request
        return pb.Timings(
            queued=_duration(request.arrival_s, request.first_scheduled_s),
            first_token=_duration(request.arrival_s, opened.first_token_s),
            total=_duration(request.arrival_s, self._clock()),
        )


def _duration(begin_s: float, end_s: float | None) -> duration_pb2.Duration | None:
    """Return the time in between; None, i.e. an absent field, if the end never came."""
    if end_s is None:
        return None
    duration = duration_pb2.Duration()
    duration.FromNanoseconds(max(0, round((end_s - begin_s) * _NANOS)))
    return duration
