"""The scheduler: one StepPlan a step, from what every request still has to compute.

There are no phases. Every request has `num_computed_tokens` chasing `num_tokens`; a step spends one budget of
tokens, on running requests first, in order of arrival, then on waiting ones. What always holds:

- Requests start in order of arrival, and a running one never waits for a later one: when blocks run out, the
  latest-arrived running request is preempted, i.e. its blocks are freed and it goes to the front of the queue,
  to be computed again (less what is still cached). The earliest therefore always advances, so all end.
- A request is accepted only if it fits the pool alone.
- Blocks that ranks may still write to are not free: a request that is ended while its step is in flight keeps
  them until the step's result is applied.
- One step is in flight at a time: schedule, apply, schedule, apply.

Plain single-threaded Python without a clock of its own: the same calls give the same plans. A step costs
O(tokens and requests in it), however many requests wait.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import count
from typing import Final

from hetero_api.v1 import ranks_pb2
from hetero_gateway.engine.block_pool import BlockDigests, BlockPool
from hetero_gateway.engine.config import EngineConfig
from hetero_gateway.engine.deadlines import DeadlineHeap
from hetero_gateway.engine.errors import DuplicateRequest, EngineFault, QueueFull
from hetero_gateway.engine.limits import resolve_max_tokens
from hetero_gateway.engine.request import FinishReason, GenerationRequest, Request, RequestStatus
from hetero_gateway.engine.slots import SlotTable
from hetero_gateway.engine.step import EngineStats, RequestUpdate, ScheduledEntry, ScheduledStep

NULL_BLOCK_ONLY: Final = 1


class Scheduler:
    """Queue, running requests, slots and blocks of one group. Without a group its pool is empty."""

    def __init__(self, config: EngineConfig, *, num_blocks: int = NULL_BLOCK_ONLY) -> None:
        self._config = config
        self._requests: dict[str, Request] = {}
        self._running: dict[int, Request] = {}
        self._waiting: OrderedDict[int, Request] = OrderedDict()
        self._deadlines = DeadlineHeap()
        self._orders = count()
        self._pool = BlockPool(num_blocks=num_blocks)
        self._slots = SlotTable(config.max_num_seqs)
        self._last_step_id = 0
        self._in_flight: ScheduledStep | None = None
        self._steps = 0
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._generated_tokens = 0
        self._preemptions = 0
        self._finished_requests = 0

    # --- requests come and go ---------------------------------------------------------------------------

    def add(self, asked: GenerationRequest, *, now: float) -> Request:
        """Queue a request. Raises DuplicateRequest, InvalidRequest or QueueFull, and then has changed nothing."""
        if asked.request_id in self._requests:
            raise DuplicateRequest(f"request_id: a request {asked.request_id!r} is in flight; choose another id")
        max_tokens = resolve_max_tokens(asked, config=self._config, pool_blocks=self._pool.capacity)
        self._check_queue()
        request = Request(
            asked=asked,
            max_tokens=max_tokens,
            arrival_s=now,
            order=next(self._orders),
            digests=BlockDigests(cache_salt=asked.cache_salt, block_size=self._config.block_size),
            token_ids=list(asked.prompt_token_ids),
        )
        self._requests[asked.request_id] = request
        self._waiting[request.order] = request
        self._deadlines.push(request, live=len(self._requests))
        return request

    def abort(self, request_id: str) -> bool:
        """End a request. Its blocks are free at once, or, if a step in flight writes to them, with its result.

        False if there is no such request.
        """
        request = self._requests.get(request_id)
        if request is None:
            return False
        self._end(request)
        return True

    def expire(self, now: float) -> list[Request]:
        """End the requests whose deadline has come, waiting or running, and return them."""
        expired = list(self._deadlines.pop_expired(now))
        for request in expired:
            self._end(request)
        return expired

    def next_deadline_s(self) -> float | None:
        """When `expire` has something to do next."""
        return self._deadlines.next_s()

    def has_requests(self) -> bool:
        """Whether a step could do something."""
        return bool(self._requests)

    def reset(self, *, num_blocks: int = NULL_BLOCK_ONLY) -> None:
        """A new epoch: forget every request, the step in flight and what was cached; step ids start at 1 again."""
        for request in list(self._requests.values()):
            request.in_flight = False
            self._end(request)
        self._deadlines.clear()
        self._pool = BlockPool(num_blocks=num_blocks)
        self._slots = SlotTable(self._config.max_num_seqs)
        self._last_step_id = 0
        self._in_flight = None

    def stats(self) -> EngineStats:
        """Counts of one moment, consistent with one another."""
        return EngineStats(
            running_requests=len(self._running),
            waiting_requests=len(self._waiting),
            num_blocks=self._pool.capacity,
            free_blocks=self._pool.free_blocks,
            used_blocks=self._pool.used_blocks,
            cached_blocks=self._pool.cached_blocks,
            steps=self._steps,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            generated_tokens=self._generated_tokens,
            preemptions=self._preemptions,
            finished_requests=self._finished_requests,
        )

    def check_integrity(self) -> None:
        """Compare the pool's counts with its blocks, O(blocks). Raises EngineFault."""
        self._pool.check_integrity()

    # --- a step goes out --------------------------------------------------------------------------------

    def schedule(self, now: float) -> ScheduledStep | None:
        """The next step, or None when there is no request. `now` only dates each request's first step.

        Call `expire` with the same `now` before, so that no expired request is computed.
        """
        if self._in_flight is not None:
            raise EngineFault(f"step {self._last_step_id} is still in flight")
        if not self._requests:
            return None
        plan = ranks_pb2.StepPlan(step_id=self._last_step_id + 1)
        entries: list[ScheduledEntry] = []
        num_preempted = self._preemptions
        budget = self._schedule_running(plan, entries)
        plan.released_slots.extend(self._slots.release())
        if self._preemptions == num_preempted:
            self._admit(plan, entries, budget=budget, now=now)
        if not entries:
            raise EngineFault(f"{len(self._requests)} requests are in flight and none can be scheduled")
        self._last_step_id = plan.step_id
        self._in_flight = ScheduledStep(plan, tuple(entries))
        return self._in_flight

    def _schedule_running(self, plan: ranks_pb2.StepPlan, entries: list[ScheduledEntry]) -> int:
        """Give running requests their tokens, earliest first; what is left of the budget."""
        budget = self._config.max_num_batched_tokens
        for request in list(self._running.values()):
            # Victims of a preemption are the latest, hence not yet in `entries`.
            if budget == 0 or request.status is not RequestStatus.RUNNING:
                break
            num_tokens = min(request.num_tokens - request.num_computed_tokens, budget)
            if not self._make_room(request, num_tokens):
                break
            entries.append(self._schedule_one(request, plan, num_tokens))
            budget -= num_tokens
        return budget

    def _make_room(self, request: Request, num_tokens: int) -> bool:
        """Preempt until `request` can have the blocks it needs; False if that took the request itself."""
        needed = self._new_blocks(request, num_tokens)
        while not self._pool.can_allocate(needed):
            victim = next(reversed(self._running.values()))
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        self._stop_running(request)
        self._release_blocks(request)
        request.status = RequestStatus.WAITING
        request.num_computed_tokens = 0
        self._waiting[request.order] = request
        self._waiting.move_to_end(request.order, last=False)
        self._preemptions += 1

    def _admit(self, plan: ranks_pb2.StepPlan, entries: list[ScheduledEntry], *, budget: int, now: float) -> None:
        """Start waiting requests, in order, while budget, slots and blocks last."""
        while self._waiting and budget > 0 and self._slots.has_free():
            request = next(iter(self._waiting.values()))
            hits = self._find_prefix(request)
            # All blocks that its known tokens take have to be free, though the first chunk may need fewer: what
            # cannot be prefilled to its end would only be preempted again.
            if not self._pool.can_allocate(self._blocks_of(request.num_tokens) - len(hits), keeping=hits):
                return
            self._start(request, plan, hits=hits, now=now)
            num_tokens = min(request.num_tokens - request.num_computed_tokens, budget)
            entries.append(self._schedule_one(request, plan, num_tokens))
            budget -= num_tokens

    def _find_prefix(self, request: Request) -> list[int]:
        """Cached blocks of the leading tokens, less one if they are all.

        The last token is always computed: it is what is sampled from.
        """
        if not self._config.enable_prefix_caching:
            return []
        num_blocks = (request.num_tokens - 1) // self._config.block_size
        return self._pool.lookup(request.digests.upto(num_blocks, request.token_ids))

    def _start(self, request: Request, plan: ranks_pb2.StepPlan, *, hits: list[int], now: float) -> None:
        self._pool.acquire(hits)
        del self._waiting[request.order]
        self._running[request.order] = request
        request.status = RequestStatus.RUNNING
        request.slot = self._slots.take()
        request.block_ids = hits
        request.num_registered_blocks = len(hits)
        request.num_computed_tokens = len(hits) * self._config.block_size
        if request.first_scheduled_s is None:
            request.first_scheduled_s = now
            request.num_cached_tokens = request.num_computed_tokens
            self._cached_tokens += request.num_cached_tokens
        plan.new_sequences.append(_new_sequence(request))

    def _schedule_one(self, request: Request, plan: ranks_pb2.StepPlan, num_tokens: int) -> ScheduledEntry:
        new_block_ids = self._pool.allocate(self._new_blocks(request, num_tokens))
        request.block_ids.extend(new_block_ids)
        request.in_flight = True
        sample = request.num_computed_tokens + num_tokens == request.num_tokens
        plan.scheduled.add(slot=request.slot, num_tokens=num_tokens, new_block_ids=new_block_ids, sample=sample)
        return ScheduledEntry(request, request.slot, num_tokens, sample)

    # --- its result comes back --------------------------------------------------------------------------

    def apply(self, result: ranks_pb2.StepResult) -> list[RequestUpdate]:
        """Take in the result of the step in flight: tokens, computed blocks, requests that end.

        Raises StepMismatch, having changed nothing, if the result does not answer that step.
        """
        step = self._in_flight
        if step is None:
            raise EngineFault(f"no step is in flight, a result of step {result.step_id} came")
        tokens = step.tokens_by_slot(result, vocab_size=self._config.vocab_size)
        self._in_flight = None
        self._steps += 1
        updates = [self._apply_one(entry, tokens) for entry in step.entries]
        return [update for update in updates if update is not None]

    def _apply_one(self, entry: ScheduledEntry, tokens: dict[int, int]) -> RequestUpdate | None:
        request = entry.request
        request.in_flight = False
        prompt_left = max(0, request.num_prompt_tokens - request.num_computed_tokens)
        self._prompt_tokens += min(prompt_left, entry.num_tokens)
        request.num_computed_tokens += entry.num_tokens
        self._register_computed(request)
        if request.status is RequestStatus.ENDED:
            self._release_blocks(request)
            return None
        if not entry.sample:
            return None
        return self._append(request, tokens[entry.slot])

    def _register_computed(self, request: Request) -> None:
        if not self._config.enable_prefix_caching:
            return
        num_full = request.num_computed_tokens // self._config.block_size
        digests = request.digests.upto(num_full, request.token_ids)
        for index in range(request.num_registered_blocks, num_full):
            self._pool.register(request.block_ids[index], digests[index])
        request.num_registered_blocks = num_full

    def _append(self, request: Request, token_id: int) -> RequestUpdate:
        request.token_ids.append(token_id)
        self._generated_tokens += 1
        sampling = request.asked.sampling
        is_eos = token_id in self._config.eos_token_ids and not sampling.ignore_eos
        reason, stop_token_id = None, None
        if is_eos or token_id in sampling.stop_token_ids:
            reason, stop_token_id = FinishReason.STOP, token_id
        elif request.num_output_tokens >= request.max_tokens:
            reason = FinishReason.LENGTH
        if reason is not None:
            self._end(request)
        return RequestUpdate(request, token_id, reason, stop_token_id)

    # --- shared -----------------------------------------------------------------------------------------

    def _check_queue(self) -> None:
        # Those that the next step can start do not wait for anything.
        startable = self._config.max_num_seqs - len(self._running)
        if len(self._waiting) >= self._config.max_queued_requests + startable:
            raise QueueFull(f"{len(self._waiting)} requests wait, maxQueuedRequests allows no more; try later")

    def _end(self, request: Request) -> None:
        del self._requests[request.request_id]
        if request.status is RequestStatus.RUNNING:
            self._stop_running(request)
        else:
            del self._waiting[request.order]
        request.status = RequestStatus.ENDED
        self._finished_requests += 1
        if not request.in_flight:
            self._release_blocks(request)

    def _stop_running(self, request: Request) -> None:
        del self._running[request.order]
        self._slots.give_up(request.slot)
        request.slot = -1

    def _release_blocks(self, request: Request) -> None:
        self._pool.release(request.block_ids)
        request.block_ids = []
        request.num_registered_blocks = 0

    def _blocks_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self._config.block_size)

    def _new_blocks(self, request: Request, num_tokens: int) -> int:
        return self._blocks_of(request.num_computed_tokens + num_tokens) - len(request.block_ids)


def _new_sequence(request: Request) -> ranks_pb2.NewSequence:
    sampling = request.asked.sampling
    return ranks_pb2.NewSequence(
        slot=request.slot,
        token_ids=request.token_ids,
        num_computed_tokens=request.num_computed_tokens,
        block_ids=request.block_ids,
        sampling=ranks_pb2.Sampling(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            seed=sampling.seed,
        ),
    )
