"""The engine core: the loop that turns requests into steps and steps into streams.

It joins the scheduler (what is computed), a StepExecutor (the ranks), and a detokenizer a request (text). What
always holds:

- Every stream that `submit` returned gets exactly one end: a FinishedEvent, or an EngineError.
- The core outlives groups. `open` gives it one, `lose` takes it away and ends every stream with EngineUnavailable;
  in between, requests are refused with the same. A group whose answer does not fit its plan is lost as well.
- Nothing waits for a reader, and nothing polls: the loop sleeps until there is a request, deadlines wake it by one
  timer.

One asyncio loop, no threads: every method must be called from the loop that runs `run`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from hetero_api.v1 import ranks_pb2
from hetero_gateway.engine.config import EngineConfig
from hetero_gateway.engine.detokenizer import IncrementalDetokenizer
from hetero_gateway.engine.errors import (
    DeadlineExceeded,
    EngineError,
    EngineFault,
    EngineUnavailable,
    GroupLost,
    StepMismatch,
)
from hetero_gateway.engine.request import FinishReason, GenerationRequest, Request
from hetero_gateway.engine.scheduler import Scheduler
from hetero_gateway.engine.step import EngineStats, RequestUpdate, ScheduledStep
from hetero_gateway.engine.stream import FinishedEvent, RequestStream, Timings, Usage
from hetero_gateway.engine.throughput import Throughput

logger = logging.getLogger(__name__)


class StepExecutor(Protocol):
    """A READY group."""

    async def execute(self, plan: ranks_pb2.StepPlan) -> ranks_pb2.StepResult:
        """Have every rank do `plan`; rank 0's answer. Raises GroupLost when they cannot.

        Cancelled when the core is told that the group is lost.
        """
        ...


@dataclass(frozen=True, slots=True)
class _Group:
    executor: StepExecutor
    on_broken: Callable[[str], None]


@dataclass(slots=True, eq=False)
class _Active:
    """A request whose stream has not ended."""

    request: Request
    stream: RequestStream
    detokenizer: IncrementalDetokenizer
    first_token_s: float | None = None


class EngineCore:
    """Serves requests on the group that it was given. `new_detokenizer` makes one for a request's stop strings."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        new_detokenizer: Callable[[Sequence[str]], IncrementalDetokenizer],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._new_detokenizer = new_detokenizer
        self._clock = clock
        self._scheduler = Scheduler(config)
        self._throughput = Throughput()
        self._active: dict[str, _Active] = {}
        self._group: _Group | None = None
        self._unavailable = "no group of ranks has formed yet"
        self._draining = False
        self._executing: asyncio.Future[ranks_pb2.StepResult] | None = None
        self._work = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    # --- the group --------------------------------------------------------------------------------------

    def open(self, executor: StepExecutor, *, num_blocks: int, on_broken: Callable[[str], None]) -> None:
        """Serve on this group, a new epoch. `num_blocks` is AllocateCache's, the null block included.

        `on_broken` is called, with the reason and once at most, when the core itself finds that the group cannot go
        on (it raised GroupLost, or answered what does not fit); its streams have ended then. A group that is still
        open is lost first.
        """
        if self._group is not None:
            self._close("another group of ranks has taken over", EngineUnavailable)
        self._scheduler.reset(num_blocks=num_blocks)
        self._throughput.forget()
        self._group = _Group(executor, on_broken)

    def lose(self, reason: str) -> None:
        """The group is gone: end every stream with EngineUnavailable. Does nothing without a group."""
        if self._group is not None:
            self._close(_lost(reason), EngineUnavailable)

    @property
    def is_serving(self) -> bool:
        """Whether a request would be accepted now, but for its own faults and a full queue."""
        return self._group is not None and not self._draining

    def drain(self) -> None:
        """Accept no more requests; those in flight go on. For good."""
        self._draining = True

    # --- requests ---------------------------------------------------------------------------------------

    def submit(self, asked: GenerationRequest) -> RequestStream:
        """Queue a request.

        Raises EngineUnavailable, InvalidRequest, DuplicateRequest or QueueFull; then there is no stream to end.
        """
        if self._draining:
            raise EngineUnavailable("the gateway is draining: it finishes what it has and accepts nothing new")
        if self._group is None:
            raise EngineUnavailable(self._unavailable)
        detokenizer = self._new_detokenizer(asked.sampling.stop)
        request = self._scheduler.add(asked, now=self._clock())
        stream = RequestStream(asked.request_id, num_prompt_tokens=request.num_prompt_tokens, cancel=self._cancel)
        self._active[asked.request_id] = _Active(request, stream, detokenizer)
        self._work.set()
        if asked.deadline_s is not None:
            self._arm_timer()
        return stream

    def abort(self, request_id: str) -> bool:
        """End a request: its stream ends with ABORT, its blocks are free within one step.

        False if no such request is in flight.
        """
        active = self._active.get(request_id)
        if active is None:
            return False
        self._scheduler.abort(request_id)
        self._finish(active, FinishReason.ABORT)
        return True

    def stats(self) -> EngineStats:
        """Counts, consistent with one another."""
        return self._scheduler.stats()

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second of stepping on the group that was opened last, of late; 0 before any."""
        return self._throughput.tokens_per_second

    # --- the loop ---------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve until cancelled; then every stream has ended."""
        try:
            while True:
                await self._work.wait()
                if not await self._step():
                    self._work.clear()
        finally:
            if self._group is not None:
                self._close("the gateway is shutting down", EngineUnavailable)

    async def _step(self) -> bool:
        """Do one step; False if there is nothing to do."""
        group = self._group
        if group is None:
            return False
        try:
            self._expire()
            step = self._scheduler.schedule(self._clock())
            if step is None:
                return False
            began_s = self._clock()
            result = await self._execute(group, step)
            if result is not None:
                self._throughput.add_step(self._clock() - began_s, tokens=len(result.token_ids))
                self._take(result)
        except (GroupLost, StepMismatch) as error:
            self._break(group, str(error), EngineUnavailable)
        except Exception as error:  # top of the loop
            logger.exception("engine fault in a step; every request ends and the group with them")
            self._break(group, f"internal error: {type(error).__name__}: {error}", EngineFault)
        return True

    async def _execute(self, group: _Group, step: ScheduledStep) -> ranks_pb2.StepResult | None:
        """The step's result; None if the group was lost meanwhile."""
        executing = asyncio.ensure_future(group.executor.execute(step.plan))
        self._executing = executing
        try:
            await asyncio.wait((executing,))
        finally:
            self._executing = None
            # Of one that is done, this keeps asyncio from reporting an error that nobody looks at.
            executing.cancel()
        if self._group is not group:
            return None
        if executing.cancelled():
            raise GroupLost("the step was cancelled by the group")
        return executing.result()

    def _take(self, result: ranks_pb2.StepResult) -> None:
        now = self._clock()
        for update in self._scheduler.apply(result):
            self._deliver(self._active[update.request.request_id], update, now=now)

    def _deliver(self, active: _Active, update: RequestUpdate, *, now: float) -> None:
        if active.first_token_s is None:
            active.first_token_s = now
        detokenizer = active.detokenizer
        # A token that ends the completion is counted and reported, but is not part of the text.
        text = detokenizer.push(update.token_id) if update.stop_token_id is None else ""
        active.stream.push(update.token_id, text)
        if update.reason is not None:
            self._finish(active, update.reason, stop_token_id=update.stop_token_id)
        elif detokenizer.matched_stop is not None:
            self._scheduler.abort(update.request.request_id)
            self._finish(active, FinishReason.STOP)

    # --- ends -------------------------------------------------------------------------------------------

    def _finish(self, active: _Active, reason: FinishReason, *, stop_token_id: int | None = None) -> None:
        """End a stream well. A stop string that is met in the last text, held back until now, is the reason."""
        text = active.detokenizer.finish()
        stop_text = active.detokenizer.matched_stop if reason is not FinishReason.ABORT else None
        if stop_text is not None:
            reason, stop_token_id = FinishReason.STOP, None
        request = active.request
        event = FinishedEvent(
            reason=reason,
            stop_text=stop_text,
            stop_token_id=stop_token_id,
            usage=Usage(request.num_prompt_tokens, request.num_cached_tokens, request.num_output_tokens),
            timings=self._timings(active),
        )
        del self._active[request.request_id]
        active.stream.end(event, text=text)

    def _timings(self, active: _Active) -> Timings:
        arrival_s = active.request.arrival_s
        scheduled_s = active.request.first_scheduled_s
        return Timings(
            queued_s=None if scheduled_s is None else scheduled_s - arrival_s,
            first_token_s=None if active.first_token_s is None else active.first_token_s - arrival_s,
            total_s=self._clock() - arrival_s,
        )

    def _cancel(self, stream: RequestStream) -> None:
        # Another request may have the id by now.
        active = self._active.get(stream.request_id)
        if active is not None and active.stream is stream:
            self.abort(stream.request_id)

    def _break(self, group: _Group, reason: str, kind: type[EngineError]) -> None:
        if self._group is group:
            self._close(_lost(reason), kind)
            group.on_broken(reason)

    def _close(self, reason: str, kind: type[EngineError]) -> None:
        level = logging.WARNING if self._active else logging.INFO
        logger.log(level, "engine closed: %s; requests ended: %d", reason, len(self._active))
        self._group = None
        self._unavailable = reason
        self._scheduler.reset()
        ending, self._active = self._active, {}
        for active in ending.values():
            active.stream.end(kind(self._unavailable))
        if self._executing is not None:
            self._executing.cancel()
        self._stop_timer()

    # --- deadlines --------------------------------------------------------------------------------------

    def _expire(self) -> None:
        for request in self._scheduler.expire(self._clock()):
            active = self._active.pop(request.request_id)
            where = "while it waited" if request.first_scheduled_s is None else "before it was complete"
            active.stream.end(DeadlineExceeded(f"request {request.request_id}: its deadline passed {where}"))

    def _arm_timer(self) -> None:
        self._stop_timer()
        next_s = self._scheduler.next_deadline_s()
        if next_s is not None:
            self._timer = asyncio.get_running_loop().call_later(max(0.0, next_s - self._clock()), self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._expire()
        self._arm_timer()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _lost(reason: str) -> str:
    return f"the group of ranks was lost: {reason}"
