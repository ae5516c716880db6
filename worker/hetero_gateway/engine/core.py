"""The engine core: the loop that turns requests into steps and steps into streams.

It joins the scheduler (what is computed), a StepExecutor (the ranks) and the deliveries (streams). What always holds:

- Every stream that `submit` returned ends: each completion with a FinishedEvent, or all with an EngineError.
- The core outlives groups. `open` gives it one; `lose` takes it away for now: streams pause, requests still queue, and
  the next group goes on from the tokens that are known here, so that none is lost or doubled. Who waits longer than
  `pause_limit_s` for it ends with EngineUnavailable. `fail` gives up: nobody waits any longer.
- The next plan goes out before the last result came, as far as the scheduler has one to give; results are taken in the
  order of the plans.
- Nothing waits for a reader, and nothing polls: the loop sleeps until there is a request or a result, deadlines wake it
  by one timer.

One asyncio loop: every method must be called from the loop that runs `run`. Only masks are computed elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Final

from hetero_gateway.engine.alarm import Alarm
from hetero_gateway.engine.config import EngineConfig
from hetero_gateway.engine.constraints import MaskWriter, matchers_of
from hetero_gateway.engine.decode_pace import DecodePace
from hetero_gateway.engine.deliveries import Active, Deliveries
from hetero_gateway.engine.detokenizer import IncrementalDetokenizer
from hetero_gateway.engine.errors import (
    DeadlineExceeded,
    EngineFault,
    EngineUnavailable,
    GroupLost,
    StepMismatch,
)
from hetero_gateway.engine.holds import Holds
from hetero_gateway.engine.intake import Intake
from hetero_gateway.engine.limits import end_token_ids
from hetero_gateway.engine.lookahead import Lookahead
from hetero_gateway.engine.pace import Pace
from hetero_gateway.engine.pauses import Pauses
from hetero_gateway.engine.request import GenerationRequest
from hetero_gateway.engine.scheduler import Scheduler
from hetero_gateway.engine.step import EngineStats, ScheduledStep
from hetero_gateway.engine.steps_in_flight import StepExecutor, StepInFlight
from hetero_gateway.engine.stream import RequestStream
from hetero_gateway.engine.throughput import Throughput

logger = logging.getLogger(__name__)

_FEW: Final = 4
"""So few readers are served before the next step is made, if ranks have another to do."""


@dataclass(frozen=True, slots=True)
class _Group:
    executor: StepExecutor
    on_broken: Callable[[str], None]


class EngineCore:
    """Serves requests on the group that it was given. `new_detokenizer` makes one for a completion's stop strings."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        new_detokenizer: Callable[[Sequence[str]], IncrementalDetokenizer],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._new_detokenizer = new_detokenizer
        self._config = config
        self._clock = clock
        self._scheduler = Scheduler(config)
        self._deliveries = Deliveries(self._scheduler, clock=clock)
        self._pauses: Pauses[Active] = Pauses(config.pause_limit_s)
        self._throughput = Throughput()
        self._lookahead = Lookahead(config.lookahead_s)
        self.decode_pace = DecodePace()
        """Of steps that only decode, on the group that was opened last."""
        self._masks = MaskWriter(vocab_size=config.vocab_size)
        self._intake = Intake()
        self._pace = Pace()
        self._group: _Group | None = None
        self._lost_reason = ""
        self.recoveries = 0
        """Groups that were lost and followed by another on which requests went on."""
        self._holds = Holds()
        self._work = asyncio.Event()
        self._masking: asyncio.Task[None] | None = None
        self._alarm = Alarm(self._on_alarm, clock=clock)

    # --- the group --------------------------------------------------------------------------------------

    def open(
        self, executor: StepExecutor, *, num_blocks: int, block_size: int, on_broken: Callable[[str], None]
    ) -> None:
        """Serve on this group, a new epoch; requests in flight go on from where they were.

        `num_blocks` is AllocateCache's, the null block included. `on_broken` is called, with the reason and once at
        most, when the core itself finds that the group cannot go on: it raised GroupLost, or answered what does not
        fit. A group that is still open is lost first.
        """
        self._intake.failed = None
        self.lose("another group of ranks has taken over")
        self._group = _Group(executor, on_broken)
        executor.in_flight.on_progress = self._work.set
        self.recoveries += self._intake.has_opened and bool(self._deliveries)
        self._intake.has_opened = True
        self._throughput.forget()
        self._lookahead.forget()
        self.decode_pace.forget()
        self._pauses.over()
        self._use_cache(num_blocks=num_blocks, block_size=block_size)
        self._work.set()

    def lose(self, reason: str) -> None:
        """The group is gone, another may come: streams pause. Does nothing without a group."""
        if self._group is None:
            return
        logger.warning("group lost, requests paused: %d: %s", len(self._deliveries), reason)
        self._lost_reason = reason
        self._drop_group()
        self._scheduler.lose_group()
        self._pauses.begin(self._deliveries.active, now=self._clock())
        self._arm_timer()

    def fail(self, reason: str) -> None:
        """No group will come: every stream ends with EngineUnavailable, and requests are refused with it.

        Should one come all the same, by a process that somebody mended, `open` takes it.
        """
        self._intake.failed = reason
        self._drop_group()
        self._scheduler.lose_group()
        self._deliveries.fail_all(EngineUnavailable(reason))
        self._pauses.over()
        self._alarm.stop()

    @asynccontextmanager
    async def hold(self) -> AsyncIterator[None]:
        """Inside, no step is out and none goes out, and no slot is bound but those of requests in flight.

        Requests still queue. Raises GroupLost if there is no group, or none any more when the last step landed.
        """
        try:
            async with self._holds.waiting():
                self._work.set()
                if self._group is not None:
                    await self._holds.settled.wait()
                if self._group is None:
                    raise GroupLost(f"no group of ranks: {self._lost_reason or 'none has formed yet'}")
                self._holds.num_inside += 1
            try:
                yield
            finally:
                self._holds.num_inside -= 1
        finally:
            self._work.set()

    def reset_cache(self, *, num_blocks: int, block_size: int) -> None:
        """The group has another cache now; what was cached is forgotten. Only within `hold`."""
        if not self._holds.num_inside:
            raise EngineFault("the cache can be reset only while steps are held")
        self._use_cache(num_blocks=num_blocks, block_size=block_size)

    def _use_cache(self, *, num_blocks: int, block_size: int) -> None:
        """Go on with an empty cache; requests that cannot fit it any more end."""
        for request, problem in self._scheduler.open_group(num_blocks=num_blocks, block_size=block_size):
            active = self._deliveries.get(request.request_id)
            if active is not None:
                self._deliveries.fail(active, problem)

    # --- whether requests are accepted ------------------------------------------------------------------

    @property
    def is_serving(self) -> bool:
        """Whether a request would be accepted and worked on now, but for its own faults and a full queue."""
        return self._group is not None and self._intake.refusal is None

    def close_intake(self, reason: str) -> None:
        """Refuse requests with EngineUnavailable until `open_intake`; those in flight go on."""
        self._intake.closed = reason

    def open_intake(self) -> None:
        """Accept requests again."""
        self._intake.closed = None

    def drain(self) -> None:
        """Accept no more requests; those in flight go on. For good."""
        self._intake.is_draining = True

    @property
    def is_idle(self) -> bool:
        """Whether no request is in flight."""
        return not self._deliveries

    async def wait_idle(self) -> None:
        """Return once no request is in flight."""
        await self._deliveries.none_left.wait()

    # --- requests ---------------------------------------------------------------------------------------

    def submit(self, asked: GenerationRequest) -> RequestStream:
        """Queue a request; a constraint must be compiled.

        With `received` it goes on behind that, and if a request of the same id is in flight it takes that one's place:
        the old stream ends with ABORT. Raises EngineUnavailable, InvalidRequest, DuplicateRequest or QueueFull; then
        there is no stream to end.
        """
        refusal = self._intake.refusal
        if refusal is not None:
            raise EngineUnavailable(refusal)
        matchers = matchers_of(asked, end_token_ids=end_token_ids(asked, config=self._config))
        if asked.received:
            self.abort(asked.request_id)
        request = self._scheduler.add(asked, now=self._clock())
        stream = RequestStream(
            asked.request_id,
            num_prompt_tokens=request.num_prompt_tokens,
            detokenizers=[self._new_detokenizer(asked.sampling.stop) for _ in request.completions],
            cancel=self._cancel,
            pace=self._pace,
        )
        active = Active(request, stream)
        self._deliveries.accept(active, matchers)
        if self._group is None:
            self._pauses.begin([active], now=self._clock())
        if self._group is None or asked.deadline_s is not None:
            self._arm_timer()
        self._work.set()
        return stream

    def abort(self, request_id: str) -> bool:
        """End a request: its stream ends with ABORT, its blocks are free at once.

        False if no such request is in flight.
        """
        active = self._deliveries.get(request_id)
        if active is None:
            return False
        self._deliveries.abort(active)
        self._work.set()
        return True

    def stats(self) -> EngineStats:
        """Counts, consistent with one another."""
        return self._scheduler.stats()

    @property
    def paused_requests(self) -> int:
        """Requests that wait for a group to come back."""
        return 0 if self._group is not None else len(self._deliveries)

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second of stepping on the group that was opened last, of late; 0 before any."""
        return self._throughput.tokens_per_second

    def _cancel(self, stream: RequestStream) -> None:
        # Another request may have the id by now.
        active = self._deliveries.get(stream.request_id)
        if active is not None and active.stream is stream:
            self.abort(stream.request_id)

    # --- the loop ---------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve until cancelled; then every stream has ended."""
        try:
            while True:
                await self._work.wait()
                self._work.clear()
                self._turn()
        finally:
            if self._intake.failed is None:
                self.fail("the gateway is shutting down")

    def _turn(self) -> None:
        """Take the results that have come, send what can go out."""
        group = self._group
        if group is None:
            return
        with self._guarding(group):
            self._expire()
            num_updates = self._take_results(group)
            if group.executor.in_flight and 0 < num_updates <= _FEW:
                # Ranks have work already: these readers need not wait until the next step is made.
                asyncio.get_running_loop().call_soon(self._send, group)
            else:
                self._send(group)

    def _take_results(self, group: _Group) -> int:
        """Apply the results that have come; return how many tokens they brought."""
        num_updates = 0
        while (taken := group.executor.in_flight.take()) is not None:
            result = taken.result
            assert result is not None, "only answered steps are taken out"
            self._throughput.add_step(taken.seconds, tokens=len(result.token_ids))
            self._note_pace(taken.step, taken.seconds, result.step_s)
            outcome = self._scheduler.apply(taken.step, result)
            self._deliveries.take(outcome)
            num_updates += len(outcome.updates)
        return num_updates

    def _note_pace(self, step: ScheduledStep, seconds: float, on_ranks_s: float) -> None:
        rows = len(step.decodes.slots)
        if rows and not step.spans and not step.masked:
            self._lookahead.add_step(on_ranks_s)
            self.decode_pace.add_step(seconds, rows=rows, tokens=sum(map(len, step.decodes.token_ids)))

    def _send(self, group: _Group) -> None:
        """Send steps as long as there is one that can go out."""
        if self._group is not group:
            return
        with self._guarding(group):
            while self._send_next(group):
                pass
            if not group.executor.in_flight:
                self._holds.settled.set()

    def _send_next(self, group: _Group) -> bool:
        """Send the next step; return False if none can go out now."""
        in_flight = group.executor.in_flight
        if in_flight.owing is not None:
            self._begin_masks(group, in_flight.owing)
            return False
        if self._is_held:
            return False
        step = self._scheduler.schedule(self._clock(), in_flight=in_flight, steps_out=self._lookahead.steps_out())
        if step is None:
            return False
        group.executor.submit(step)
        return True

    @property
    def _is_held(self) -> bool:
        # Whoever waits to hold lets a step go out that only tells ranks which slots are free.
        return self._holds.num_inside > 0 or (self._holds.num_waiting > 0 and self._scheduler.has_requests())

    def _begin_masks(self, group: _Group, owing: StepInFlight) -> None:
        """Masks follow from the tokens of all steps before theirs."""
        if owing is group.executor.in_flight.oldest and self._masking is None:
            self._masking = asyncio.create_task(self._send_masks(group, owing))

    async def _send_masks(self, group: _Group, owing: StepInFlight) -> None:
        completions = owing.step.masked
        try:
            masks = await self._masks.masks([self._deliveries.matcher_of(completion) for completion in completions])
        finally:
            self._masking = None
        if self._group is not group:
            self._work.set()
            return
        with self._guarding(group):
            for completion, mask in zip(completions, masks, strict=True):
                if mask.problem is not None:
                    self._deliveries.fail_completion(completion, mask.problem)
            group.executor.send_masks(owing, [mask.allowed for mask in masks])
        self._send(group)

    @contextmanager
    def _guarding(self, group: _Group) -> Iterator[None]:
        """What goes wrong inside ends the group."""
        try:
            yield
        except (GroupLost, StepMismatch) as error:
            self._break(group, str(error))
        except Exception as error:  # top of the loop
            logger.exception("engine fault in a step; every request ends and the group with them")
            reason = f"internal error: {type(error).__name__}: {error}"
            self._deliveries.fail_all(EngineFault(reason))
            self._break(group, reason)

    # --- the group's end --------------------------------------------------------------------------------

    def _break(self, group: _Group, reason: str) -> None:
        if self._group is group:
            self.lose(reason)
            group.on_broken(reason)

    def _drop_group(self) -> None:
        self._group = None
        self._holds.settled.set()

    # --- deadlines --------------------------------------------------------------------------------------

    def _expire(self) -> None:
        now = self._clock()
        for request in self._scheduler.expire(now):
            active = self._deliveries.get(request.request_id)
            if active is not None:
                where = "while it waited" if request.first_scheduled_s is None else "before it was complete"
                problem = f"request {request.request_id}: its deadline passed {where}"
                self._deliveries.fail(active, DeadlineExceeded(problem))
        for active in self._pauses.pop_expired(now):
            if self._deliveries.is_active(active):
                problem = f"the group of ranks was lost and did not come back in time: {self._lost_reason}"
                self._deliveries.fail(active, EngineUnavailable(problem))

    def _arm_timer(self) -> None:
        self._alarm.set(self._scheduler.next_deadline_s(), self._pauses.next_s())

    def _on_alarm(self) -> None:
        self._expire()
        self._work.set()
        self._arm_timer()
