"""The scheduler: makes one StepPlan a step from the tokens that every completion still has to compute.

There are no phases. Every completion has `num_scheduled` chasing its tokens; a step spends one budget of tokens: a
token for each running completion that has only its newest to compute, then chunks of running prefills, then of
waiting ones. What always holds:

- **Order.** Waiting completions are served in the order of `Urgency`: the time of arrival, put off by `ageing_s` for
  each step of priority. It never changes, so it is one total order of all completions, waiting or running. Within a
  priority it is first come, first served.
- **No starvation.** A request of priority p that arrived at t goes before every request of priority q that arrives
  after t + (p - q) * ageing_s, hence before all that arrive later than t + 200 * ageing_s. It waits for the finitely
  many before it, and for those that run when it becomes the first: nobody starts past the first in line.
- **Progress.** When blocks run out, the least urgent running completion is preempted: its blocks are freed and it
  queues again, to be computed again (less what is still cached). So the most urgent running one always advances;
  a request is accepted only if it fits the cache alone; hence all end.
- **Decodes do not wait for prefills, nor prefills for decodes.** At most as many completions run as a step may compute
  tokens, so each decode gets its token in every step, and the most urgent prefill at least one.
- **Proposals.** While no step is out, a completion that decodes may get proposed tokens (`speculation`). Ranks compute
  them in the same step, and the completion gets as many tokens as it would have drawn one after another, up to the
  first that was not proposed. Proposals take the places, tokens and blocks of a step that nothing else wants. A draft
  model proposes behind the draws of a step, for the next one.
- **Overlap.** Up to `max_steps_in_flight` steps are out, or more that only decode (`Lookahead`). A completion whose
  result shows that it ended may be in a later step that is out already: its token of that step is dropped. One that is
  preempted while steps that sample for it are out queues again when their tokens are known. Ranks work plans off in
  order, so blocks and slots are free for the next plan at once, no matter what is in flight.

Completions of one request share the full blocks of its prompt: one computes them, the others are *parked* till then.

Where a model keeps states of sequences, a residency begins where a snapshot of them was taken (`StateSnapshots`).

Plain single-threaded Python without a clock of its own: the same calls give the same plans. A step costs
O(tokens and completions in it) in bulk operations and O(1) Python for what is new in it, however many requests wait.
"""

from __future__ import annotations

from itertools import count, takewhile
from typing import Final

from hetero_api.v1 import admin_pb2, logprobs_pb2, ranks_pb2
from hetero_gateway.engine.block_pool import BlockDigests, CacheLog
from hetero_gateway.engine.config import EngineConfig, does_not_fit, end_token_ids, resolve_max_tokens
from hetero_gateway.engine.errors import DuplicateRequest, EngineFault, InvalidRequest, QueueFull, StepMismatch
from hetero_gateway.engine.request import (
    Completion,
    GenerationRequest,
    Request,
    mark_if_received_whole,
    new_request,
    num_queued_tokens,
)
from hetero_gateway.engine.running_batch import RunningBatch
from hetero_gateway.engine.speculation.speculator import NO_SPECULATION, Speculator
from hetero_gateway.engine.step import (
    ScheduledStep,
    SpanEntry,
    StepOutcome,
    add_pooled,
    append_prompt_logprobs,
    append_tokens,
)
from hetero_gateway.engine.step_planner import StepPlanner
from hetero_gateway.engine.steps_in_flight import StepsInFlight
from hetero_gateway.engine.waiting import LiveHeap, WaitingLine

NULL_BLOCK_ONLY: Final = 1


class Scheduler:
    """Queue and running completions of one engine, on the cache of the group that it has at the moment.

    Made with blocks, it has a group from the start. Without a group it queues requests and schedules nothing.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        num_blocks: int = NULL_BLOCK_ONLY,
        num_snapshots: int = 0,
        speculator: Speculator = NO_SPECULATION,
    ) -> None:
        self._config = config
        self._speculator = speculator
        self._requests: dict[str, Request] = {}
        self._waiting = WaitingLine()
        self._deadlines: LiveHeap[Request] = LiveHeap()
        self._orders = count()
        self.cache_log = CacheLog()
        self._num_queued_tokens = 0
        self._counts = admin_pb2.GetStatsResponse()
        """Counts since the start, and the requests that run; `stats` adds the other gauges."""
        self._batch, self._planner = self._new_cache(
            num_blocks=num_blocks, block_size=config.block_size, num_snapshots=num_snapshots
        )
        # What requests have to fit: the group's cache, or the last group's while there is none.
        self._cache = self._batch.cache
        self._is_open = num_blocks > NULL_BLOCK_ONLY

    # --- requests come and go ---------------------------------------------------------------------------

    def add(self, asked: GenerationRequest, *, now: float) -> Request:
        """Queue a request. Raises DuplicateRequest, InvalidRequest or QueueFull, having changed nothing.

        A completion whose received tokens are complete has ended when this returns; if all have, the request is not
        held at all.
        """
        if asked.request_id in self._requests:
            raise DuplicateRequest(f"request_id: a request {asked.request_id!r} is in flight; choose another id")
        max_tokens = resolve_max_tokens(asked, config=self._config, cache=self._cache)
        self._check_queue(asked)
        request = new_request(
            asked,
            max_tokens=max_tokens,
            arrival_s=now,
            order=next(self._orders),
            ageing_s=self._config.ageing_s,
            end_token_ids=end_token_ids(asked, config=self._config),
            block_size=self._cache.block_size,
        )
        self._requests[asked.request_id] = request
        self._num_queued_tokens += request.num_queued_tokens
        if asked.deadline_s is not None:
            self._deadlines.push((request.deadline_s, request.order), request)
        for completion in request.completions:
            if mark_if_received_whole(completion):
                self._end(completion)
        self._enter_line(request)
        return request

    def abort(self, request_id: str) -> bool:
        """End a request; its blocks are free at once. Return False if there is no such request."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        self._end_request(request)
        return True

    def finish(self, completion: Completion, *, num_unread: int = 0) -> None:
        """End one completion, unless it has ended, for a reason that is not seen here, e.g. a stop string.

        Its last `num_unread` tokens came behind that end, and are dropped.
        """
        if num_unread:
            del completion.token_ids[-num_unread:]
            self._counts.generated_tokens -= num_unread
        if not completion.ended:
            self._end(completion)

    def expire(self, now: float) -> list[Request]:
        """End the requests whose deadline has come, waiting or running, and return them."""
        expired: list[Request] = []
        while (request := self._deadlines.first()) is not None and request.deadline_s <= now:
            self._deadlines.pop()
            self._end_request(request)
            expired.append(request)
        return expired

    def next_deadline_s(self) -> float | None:
        """Return when `expire` has something to do next."""
        request = self._deadlines.first()
        return None if request is None else request.deadline_s

    def clear(self) -> list[Request]:
        """End all requests, and return them."""
        requests = list(self._requests.values())
        for request in requests:
            self._end_request(request)
        return requests

    def forget_prefixes(self) -> None:
        """Have no completion start behind what was computed until now; running ones go on."""
        self._batch.forget_prefixes()

    @property
    def block_size(self) -> int:
        """Token positions of a block of the cache, or of the last one while there is none."""
        return self._cache.block_size

    @property
    def is_idle(self) -> bool:
        """Whether `schedule` has nothing to do: no request, and no slot that ranks still have to drop."""
        return not self._requests and not self._batch.slots.has_released

    def stats(self) -> admin_pb2.GetStatsResponse:
        """Return counts of one moment, consistent with one another."""
        pool = self._batch.pool
        stats = admin_pb2.GetStatsResponse(
            waiting_requests=len(self._requests) - self._counts.running_requests,
            num_blocks=pool.capacity,
            free_blocks=pool.free_blocks,
            used_blocks=pool.used_blocks,
            cached_blocks=pool.cached_blocks,
        )
        stats.MergeFrom(self._counts)
        return stats

    def check_integrity(self) -> None:
        """Compare the pool's counts with its blocks, O(blocks). Raises EngineFault."""
        self._batch.pool.check_integrity()

    # --- the group comes and goes -----------------------------------------------------------------------

    def open_group(
        self, *, num_blocks: int, block_size: int, num_snapshots: int = 0
    ) -> list[tuple[Request, InvalidRequest]]:
        """Go on in another epoch or cache; `num_blocks` includes the null block, `num_snapshots` are of states.

        All requests go on from the tokens that they have. Those that do not fit the cache even alone end, and are
        returned with the arithmetic; a request that left max_tokens open gets as many as fit.
        """
        self._replace_cache(num_blocks=num_blocks, block_size=block_size, num_snapshots=num_snapshots)
        self._cache = self._batch.cache
        self._is_open = True
        refused = [(request, problem) for request in self._requests.values() if (problem := self._refit(request))]
        for request, _ in refused:
            self._end_request(request)
        return refused

    def lose_group(self) -> None:
        """Go on without a group: its cache and steps are gone. Every completion queues again, with all its tokens."""
        self._replace_cache(num_blocks=NULL_BLOCK_ONLY, block_size=self._cache.block_size)
        self._is_open = False

    def _replace_cache(self, *, num_blocks: int, block_size: int, num_snapshots: int = 0) -> None:
        for completion in list(self._batch.running):
            self._batch.leave(completion)
        self._batch, self._planner = self._new_cache(
            num_blocks=num_blocks, block_size=block_size, num_snapshots=num_snapshots
        )
        self._waiting.clear()
        for request in self._requests.values():
            if block_size != self._cache.block_size:
                for completion in request.completions:
                    completion.digests = BlockDigests(cache_salt=request.asked.cache_salt, block_size=block_size)
            self._enter_line(request)

    def _new_cache(self, *, num_blocks: int, block_size: int, num_snapshots: int) -> tuple[RunningBatch, StepPlanner]:
        batch = RunningBatch(
            self._config,
            num_blocks=num_blocks,
            block_size=block_size,
            counts=self._counts,
            num_snapshots=num_snapshots,
            log=self.cache_log,
        )
        self.cache_log.cleared()
        return batch, StepPlanner(self._config, batch=batch, waiting=self._waiting, counts=self._counts)

    def _refit(self, request: Request) -> InvalidRequest | None:
        room = self._cache.room(request.num_prompt_tokens)
        if request.max_tokens <= room:
            return None
        longest = max(completion.num_output_tokens for completion in request.completions if not completion.ended)
        if request.asked.max_tokens is None and longest < room:
            request.max_tokens = room
            return None
        return does_not_fit(request.num_prompt_tokens, request.max_tokens, at_once=1, cache=self._cache)

    # --- a step goes out --------------------------------------------------------------------------------

    def schedule(self, now: float, *, in_flight: StepsInFlight, steps_out: int | None = None) -> ScheduledStep | None:
        """Return the next step; None if there is nothing that can go out now. `now` only dates a request's first step.

        Whoever sends the step adds it to `in_flight`. `steps_out`: how many may be out if they only decode, where that
        is more than `max_steps_in_flight`.

        Call `expire` with the same `now` before, so that no expired request is computed. A step may compute nothing:
        it only has ranks drop the slots of what has ended, so that they are idle too. Raises EngineFault if there are
        requests, nothing is out, and none of them can be scheduled.
        """
        most = self._config.max_steps_in_flight
        if not self._is_open or not in_flight.may_overlap(most=most, most_decodes=steps_out):
            return None
        if in_flight and self._speculator.is_worth_a_wait(self._batch.decodes.view().completions):
            return None
        step = self._planner.plan(now, speculator=None if in_flight else self._speculator)
        if step is None and not self._requests:
            step = self._planner.plan_release()
        if step is None and self._requests and not in_flight:
            raise EngineFault(f"{len(self._requests)} requests are in flight and none can be scheduled")
        return step

    def schedule_release(self, *, in_flight: StepsInFlight) -> ScheduledStep | None:
        """Return a step that only has ranks drop the slots of what has ended.

        None if there are none, or steps are out.
        """
        return self._planner.plan_release() if self._is_open and not in_flight else None

    # --- its result comes back --------------------------------------------------------------------------

    def apply(self, step: ScheduledStep, result: ranks_pb2.StepResult) -> StepOutcome:
        """Take in the result of the oldest step in flight: tokens, computed blocks, completions that end.

        Raises StepMismatch if the result does not answer the step; then the group is to be lost.
        """
        for draft in result.drafts:
            if draft.slot not in step.plan.draft_slots:
                raise StepMismatch(f"step {result.step_id}: drafts are for slot {draft.slot}, which wants none")
        with_prompt_logprobs = append_prompt_logprobs(step, result)
        add_pooled(step, result)
        # The last check that may refuse the result: tokens that were appended are final.
        updates = append_tokens(step, result, vocab_size=self._config.vocab_size)
        self._counts.steps += step.computes
        self._counts.generated_tokens += len(updates.all)
        for grown in step.grown:
            if grown.completion.residency == grown.residency:
                self._batch.register(grown.completion, grown.num_full_blocks)
        for span in step.spans:
            self._take_span(span)
        if step.proposals:
            self._catch_up(step)
        if self._waiting.has_returning:
            self._waiting.tokens_came(update.completion for update in updates.all)
        for update in updates.ending:
            update.completion.reason = update.reason
            update.completion.stop_token_id = update.stop_token_id
            self._end(update.completion)
        self._take_drafts(step, result)
        return StepOutcome(updates.all, [(request, _take_prompt_logprobs(request)) for request in with_prompt_logprobs])

    def _catch_up(self, step: ScheduledStep) -> None:
        """Take in how many tokens the step's proposals gave."""
        self._counts.proposals += len(step.proposals)
        self._counts.proposed_tokens += sum(map(len, step.proposals.values()))
        for slot, completion in zip(step.decodes.slots, step.decodes.completions, strict=True):
            # One that has left meanwhile runs no more: nothing starts while a step with proposals is out.
            if slot in step.proposals and completion in self._batch.decodes:
                self._counts.accepted_tokens += self._batch.decodes.catch_up(completion)
                self._batch.register(completion, (completion.num_tokens - 1) // self._cache.block_size)

    def _take_drafts(self, step: ScheduledStep, result: ranks_pb2.StepResult) -> None:
        """Pass on what was drafted behind tokens of completions that go on."""
        if not result.drafts:
            return
        decoding = dict(zip(step.decodes.slots, step.decodes.completions, strict=True))
        for draft in result.drafts:
            if not decoding[draft.slot].ended:
                known = takewhile(lambda token: token < self._config.vocab_size, draft.token_ids)
                self._speculator.take_draft(decoding[draft.slot], list(known))

    def _take_span(self, span: SpanEntry) -> None:
        completion = span.completion
        num_prompt = completion.num_prompt_tokens
        self._counts.prompt_tokens += min(span.end, num_prompt) - min(span.begin, num_prompt)
        if self._batch.snapshots is not None:
            self._batch.snapshots.taken([taken.digest for taken in span.snapshots])
        if completion.residency != span.residency:
            return
        batch = self._batch
        completion.num_filled = span.end
        completion.is_prefilled = span.sample
        batch.register(completion, span.end // self._cache.block_size)
        parked = completion.request.parked
        if parked and span.end >= batch.shareable_blocks(parked[0]) * self._cache.block_size:
            self._waiting.unpark(completion.request)

    # --- shared -----------------------------------------------------------------------------------------

    def _enter_line(self, request: Request) -> None:
        waiting = [completion for completion in request.completions if not completion.ended]
        shares_blocks = len(waiting) > 1 and self._batch.shareable_blocks(waiting[1]) > 0
        self._waiting.enter(request, shares_blocks=shares_blocks)

    def _check_queue(self, asked: GenerationRequest) -> None:
        # Those that the next step can start do not wait for anything.
        num_waiting = len(self._requests) - self._counts.running_requests
        if num_waiting >= self._config.max_queued_requests + self._batch.num_startable:
            raise QueueFull(f"{num_waiting} requests wait, maxQueuedRequests allows no more; try later")
        num_tokens = self._num_queued_tokens + num_queued_tokens(asked)
        cached_tokens = self._cache.num_blocks * self._cache.block_size
        # A request that is alone is never refused.
        if self._requests and num_tokens > self._config.max_queued_tokens + cached_tokens:
            raise QueueFull(
                f"the prompts of {len(self._requests)} requests, each times its completions, hold "
                f"{self._num_queued_tokens} tokens; there is no room for another {num_queued_tokens(asked)}; try later"
            )

    def _end_request(self, request: Request) -> None:
        for completion in request.completions:
            self.finish(completion)

    def _end(self, completion: Completion) -> None:
        request = completion.request
        if completion.slot >= 0:
            self._batch.leave(completion)
        completion.ended = True
        self._speculator.ended(completion)
        self._waiting.remove_ended(completion)
        request.num_open -= 1
        if request.ended:
            del self._requests[request.request_id]
            self._num_queued_tokens -= request.num_queued_tokens
            self._counts.finished_requests += 1
        else:
            self._waiting.replace_first(request)


def _take_prompt_logprobs(request: Request) -> list[logprobs_pb2.TokenLogprobs]:
    """Return the prompt's log-probabilities, which are sent once and not computed again."""
    prompt_logprobs, request.prompt_logprobs = request.prompt_logprobs, None
    assert prompt_logprobs is not None, "the request waited for them"
    return prompt_logprobs
