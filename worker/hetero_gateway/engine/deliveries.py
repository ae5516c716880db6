"""Requests in flight and their streams: what the scheduler found out, on its way to readers.

Every request that is accepted here ends exactly once: each completion with a FinishedEvent, or what is open of it with
an EngineError. Whoever is ended here is ended in the scheduler too. One asyncio loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hetero_gateway.engine.constraints import TokenMatcher
from hetero_gateway.engine.errors import EngineError, InvalidRequest
from hetero_gateway.engine.request import Completion, FinishReason, Request
from hetero_gateway.engine.scheduler import Scheduler
from hetero_gateway.engine.step import CompletionUpdate, StepOutcome
from hetero_gateway.engine.stream import CompletionFeed, FinishedEvent, RequestStream, Timings, Usage


@dataclass(slots=True, eq=False)
class Active:
    """A request whose stream has not ended."""

    request: Request
    stream: RequestStream


@dataclass(slots=True, eq=False)
class Delivery:
    """A completion that has not ended, on its way to its reader."""

    completion: Completion
    active: Active
    feed: CompletionFeed
    matcher: TokenMatcher | None
    first_token_s: float | None = None


class Deliveries:
    """See the module. `none_left` is set while no request is in flight."""

    def __init__(self, scheduler: Scheduler, *, clock: Callable[[], float]) -> None:
        self.none_left = asyncio.Event()
        self.none_left.set()
        self._scheduler = scheduler
        self._clock = clock
        self._active: dict[str, Active] = {}
        self._open: dict[Completion, Delivery] = {}

    def __len__(self) -> int:
        """Requests in flight."""
        return len(self._active)

    @property
    def active(self) -> list[Active]:
        return list(self._active.values())

    def get(self, request_id: str) -> Active | None:
        return self._active.get(request_id)

    def is_active(self, active: Active) -> bool:
        """Whether it has not ended; another request may have its id by now."""
        return self._active.get(active.request.request_id) is active

    def matcher_of(self, completion: Completion) -> TokenMatcher | None:
        """None for one that has ended."""
        delivery = self._open.get(completion)
        return None if delivery is None else delivery.matcher

    # --- in ---------------------------------------------------------------------------------------------

    def accept(self, active: Active, matchers: Sequence[TokenMatcher | None]) -> None:
        """A request that the scheduler took; a matcher a completion."""
        request = active.request
        self._active[request.request_id] = active
        self.none_left.clear()
        for completion, feed, matcher in zip(request.completions, active.stream.feeds, matchers, strict=True):
            delivery = self._open[completion] = Delivery(completion, active, feed, matcher)
            if completion.num_received:
                self._resume(delivery)

    def _resume(self, delivery: Delivery) -> None:
        """Go on behind what the reader has. What it has may be all there is: then this is the end."""
        completion, feed = delivery.completion, delivery.feed
        token_ids = completion.output_token_ids
        if completion.stop_token_id is not None:
            token_ids.pop()
        feed.prime(token_ids, is_all=completion.ended)
        if completion.ended or feed.matched_stop is not None:
            self._scheduler.finish(completion)
            self._end(delivery, completion.reason or FinishReason.STOP, completion.stop_token_id)

    # --- news -------------------------------------------------------------------------------------------

    def take(self, outcome: StepOutcome) -> None:
        """Pass on what a step brought."""
        for request, positions in outcome.prompt_logprobs:
            active = self._active.get(request.request_id)
            if active is not None and active.request is request:
                active.stream.push_prompt_logprobs(positions)
        now = self._clock()
        for update in outcome.updates:
            # Another completion of its request may have ended it just now.
            delivery = self._open.get(update.completion)
            if delivery is not None:
                self._deliver(delivery, update, now=now)

    def _deliver(self, delivery: Delivery, update: CompletionUpdate, *, now: float) -> None:
        _, token_id, reason, stop_token_id, logprobs = update
        if delivery.first_token_s is None:
            delivery.first_token_s = now
        feed = delivery.feed
        if stop_token_id is None:
            feed.push(token_id, logprobs)
        else:
            feed.push_last(token_id, logprobs)
        if reason is not None:
            self._finish(delivery, reason, stop_token_id)
        elif feed.matched_stop is not None:
            self._scheduler.finish(update.completion)
            self._finish(delivery, FinishReason.STOP)
        elif delivery.matcher is not None:
            self._advance(delivery, delivery.matcher, token_id)

    def _advance(self, delivery: Delivery, matcher: TokenMatcher, token_id: int) -> None:
        try:
            matcher.advance(token_id)
        except InvalidRequest as error:
            self.fail(delivery.active, error)

    # --- ends -------------------------------------------------------------------------------------------

    def abort(self, active: Active) -> None:
        """End every completion that is open with ABORT."""
        self._scheduler.abort(active.request.request_id)
        for delivery in self._open_of(active):
            self._finish(delivery, FinishReason.ABORT)

    def fail(self, active: Active, error: EngineError) -> None:
        """End what is open of a request with an error."""
        self._scheduler.abort(active.request.request_id)
        for delivery in self._open_of(active):
            del self._open[delivery.completion]
        active.stream.fail(error)
        self._forget(active)

    def fail_completion(self, completion: Completion, error: EngineError) -> None:
        """End the request of a completion that may have ended itself."""
        delivery = self._open.get(completion)
        if delivery is not None:
            self.fail(delivery.active, error)

    def fail_all(self, error: EngineError) -> None:
        """End every request with an error."""
        for active in self.active:
            self.fail(active, error)

    def _finish(self, delivery: Delivery, reason: FinishReason, stop_token_id: int | None = None) -> None:
        delivery.feed.close()
        self._end(delivery, reason, stop_token_id)

    def _end(self, delivery: Delivery, reason: FinishReason, stop_token_id: int | None) -> None:
        """A stop string that is met in the last text, held back until now, is the reason."""
        stop_text = delivery.feed.matched_stop if reason is not FinishReason.ABORT else None
        if stop_text is not None:
            reason, stop_token_id = FinishReason.STOP, None
        completion, active = delivery.completion, delivery.active
        request = active.request
        del self._open[completion]
        delivery.feed.end(
            FinishedEvent(
                index=completion.index,
                reason=reason,
                stop_text=stop_text,
                stop_token_id=stop_token_id,
                usage=Usage(request.num_prompt_tokens, request.num_cached_tokens, completion.num_output_tokens),
                timings=self._timings(delivery),
            )
        )
        if not active.stream.num_open:
            self._forget(active)

    def _forget(self, active: Active) -> None:
        del self._active[active.request.request_id]
        if not self._active:
            self.none_left.set()

    def _open_of(self, active: Active) -> list[Delivery]:
        found = map(self._open.get, active.request.completions)
        return [delivery for delivery in found if delivery is not None]

    def _timings(self, delivery: Delivery) -> Timings:
        request = delivery.active.request
        arrival_s, scheduled_s, first_s = request.arrival_s, request.first_scheduled_s, delivery.first_token_s
        return Timings(
            queued_s=None if scheduled_s is None else scheduled_s - arrival_s,
            first_token_s=None if first_s is None else first_s - arrival_s,
            total_s=self._clock() - arrival_s,
        )
