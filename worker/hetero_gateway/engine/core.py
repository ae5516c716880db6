"""The engine core: the loop that turns requests into steps and steps into streams.

It joins the scheduler (what is computed), the steps in flight (the ranks) and the output processor (streams). What
always holds:

- Every stream that `submit` returned ends: each completion with a Finished, or all with an EngineError.
- The core outlives groups. `open` gives it one; `lose` takes it away for now: streams pause, requests still queue, and
  the next group goes on from the tokens that are known here, so that none is lost or doubled. A request that waits
  longer than `pause_limit_s` for it ends with EngineUnavailable. `fail` gives up: nothing waits any longer.
- The next plan goes out before the last result has come, if the scheduler has one; results are taken in the order of
  the plans.
- Nothing waits for a reader, and nothing polls: the loop sleeps until there is a request or a result, and one timer
  wakes it for deadlines.

One asyncio loop: every method must be called from the loop that runs `run`. Only masks are computed elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from itertools import chain
from typing import Final

from hetero_api.v1 import admin_pb2, ranks_pb2
from hetero_gateway.engine.admission import Admission, Alarm, StepHolds
from hetero_gateway.engine.block_pool import CacheLog
from hetero_gateway.engine.config import EngineConfig, end_token_ids
from hetero_gateway.engine.errors import (
    DeadlineExceeded,
    EngineFault,
    EngineUnavailable,
    GroupLost,
    InvalidRequest,
    StepMismatch,
)
from hetero_gateway.engine.output_processor import ActiveRequest, OutputProcessor, Preparation
from hetero_gateway.engine.request import GenerationRequest, Request, note_loss, num_generated_tokens
from hetero_gateway.engine.scheduler import Scheduler
from hetero_gateway.engine.speculation.ngram import NGramProposer
from hetero_gateway.engine.speculation.speculator import Speculator
from hetero_gateway.engine.step_pace import DecodePace, StepPace
from hetero_gateway.engine.steps_in_flight import StepInFlight, StepsInFlight
from hetero_gateway.engine.stream import ReaderTurns, RequestStream
from hetero_gateway.engine.telemetry.latencies import Latencies
from hetero_gateway.engine.telemetry.request_trace import RequestTrace
from hetero_gateway.engine.telemetry.traced_steps import TracedSteps
from hetero_gateway.engine.text.constraints import MaskedDraws, MaskWriter, matchers_of
from hetero_gateway.engine.text.detokenizer import IncrementalDetokenizer

logger = logging.getLogger(__name__)

MOST_LOSSES: Final = 3
"""Groups lost in a row with a request that got no token meanwhile; the usual limit of restarts is 5."""
_FEW: Final = 4
"""Readers that are few enough to be served before the next step is made, if ranks have another to do."""


class EngineCore:
    """Engine that serves requests on the group it was given. `new_detokenizer` makes one for given stop strings, the
    prompt of an answer that may have channels, and special tokens that are part of the text. `proposer`: of tokens, in
    place of the config's."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        new_detokenizer: Callable[[Sequence[str], Sequence[int], Collection[int]], IncrementalDetokenizer],
        clock: Callable[[], float] = time.monotonic,
        proposer: NGramProposer | None = None,
    ) -> None:
        self._new_detokenizer = new_detokenizer
        self._config = config
        self._clock = clock
        self._speculator = Speculator(config.speculation, proposer)
        self._scheduler = Scheduler(config, speculator=self._speculator)
        self._outputs = OutputProcessor(self._scheduler, clock=clock)
        self._paused: deque[tuple[float, ActiveRequest]] = deque()
        """Requests that wait for a group to come back, each until a time; soonest first."""
        self._pace = StepPace(lookahead_s=config.lookahead_s)
        self._masks = MaskWriter(vocab_size=config.vocab_size)
        self._admission = Admission()
        self._drains = asyncio.Event()
        self._turns = ReaderTurns()
        self._group: StepsInFlight | None = None
        self._lost_reason = ""
        self.recoveries = 0
        """Groups that were lost and followed by another on which requests went on."""
        self._holds = StepHolds()
        self._work = asyncio.Event()
        self._masking: asyncio.Task[None] | None = None
        self._alarm = Alarm(self._on_alarm, clock=clock)
        self._traced = TracedSteps(clock=clock)

    # --- the group --------------------------------------------------------------------------------------

    def open(
        self,
        in_flight: StepsInFlight,
        *,
        num_blocks: int,
        block_size: int,
        num_snapshots: int = 0,
        on_broken: Callable[[str], None],
    ) -> None:
        """Serve on this group, a new epoch; requests in flight go on from where they were.

        Steps are submitted to `in_flight`. Numbers are AllocateCache's, the null block included. `on_broken` is
        called once at most, with the reason, when the core itself finds that the group cannot go on: it raised
        GroupLost, or an answer does not fit. A group that is still open is lost first.
        """
        self._admission.failed = None
        self.lose("another group of ranks has taken over")
        self.rouse()
        self._group = in_flight
        in_flight.on_progress, in_flight.on_broken = self._work.set, on_broken
        self.recoveries += self._admission.has_opened and bool(self._outputs)
        self._admission.has_opened = True
        self._pace = StepPace(lookahead_s=self._config.lookahead_s)
        self._speculator.begin_epoch()
        self._paused.clear()
        for traced in self._traced.requests:
            traced.event("group formed")
        self._use_cache(num_blocks=num_blocks, block_size=block_size, num_snapshots=num_snapshots)
        self._work.set()

    def lose(self, reason: str) -> None:
        """Take note that the group is gone and another may come: streams pause. Without a group, do nothing.

        A request that several groups in a row were lost with ends: it may be what breaks them.
        """
        if self._group is None:
            return
        computed = [active for active in self._outputs.active if active.request.num_running]
        logger.warning("group lost, requests paused: %d: %s", len(self._outputs), reason)
        self._lost_reason = reason
        self._drop_group()
        self._scheduler.lose_group()
        for traced in self._traced.requests:
            traced.event("group lost", reason=reason)
        for active in computed:
            note_loss(active.request)
            if active.request.num_losses >= MOST_LOSSES:
                problem = f"ranks were lost {MOST_LOSSES} times in a row while they computed this: {reason}"
                self._outputs.fail(active, InvalidRequest("input", problem))
        self._pause(self._outputs.active)
        self._arm_timer()

    def fail(self, reason: str) -> None:
        """Give up: every stream ends with EngineUnavailable, and requests are refused with it.

        Should a group come all the same, by a process that was repaired, `open` takes it.
        """
        self._admission.failed = reason
        self._drop_group()
        self._scheduler.lose_group()
        self._outputs.fail_all(EngineUnavailable(reason))
        self._paused.clear()
        self._alarm.stop()

    @asynccontextmanager
    async def hold(self) -> AsyncIterator[None]:
        """Keep steps from going out. Inside, none is out, and only requests in flight have slots on the ranks.

        Requests still queue. Raises GroupLost if there is no group, or none any more when the last step was answered.
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

    def rest(self) -> None:
        """Keep steps from going out until `rouse`, or until the group is gone; requests still queue.

        Only within `hold`; raises EngineFault elsewhere.
        """
        if not self._holds.num_inside:
            raise EngineFault("ranks can rest only while steps are held")
        self._holds.roused.clear()

    def rouse(self) -> None:
        """Let steps go out again after `rest`."""
        self._holds.roused.set()
        self._work.set()

    @property
    def is_resting(self) -> bool:
        """Whether steps stay because of `rest`."""
        return self._holds.is_resting

    async def wait_roused(self) -> None:
        """Return once steps no longer stay because of `rest`."""
        await self._holds.roused.wait()

    def reset_cache(self, *, num_blocks: int, block_size: int, num_snapshots: int = 0) -> None:
        """Go on with another, empty cache of the same group. Only within `hold`; raises EngineFault elsewhere."""
        if not self._holds.num_inside:
            raise EngineFault("the cache can be reset only while steps are held")
        self._use_cache(num_blocks=num_blocks, block_size=block_size, num_snapshots=num_snapshots)

    def _use_cache(self, *, num_blocks: int, block_size: int, num_snapshots: int) -> None:
        """Go on with an empty cache; requests that no longer fit end."""
        refused = self._scheduler.open_group(num_blocks=num_blocks, block_size=block_size, num_snapshots=num_snapshots)
        for request, problem in refused:
            active = self._outputs.get(request.request_id)
            if active is not None:
                self._outputs.fail(active, problem)

    # --- admission --------------------------------------------------------------------------------------

    @property
    def is_serving(self) -> bool:
        """Whether a correct request would be accepted and worked on now, unless the queue is full."""
        return self._group is not None and self._admission.refusal is None and not self._admission.is_leaving

    def close_intake(self, reason: str) -> None:
        """Refuse requests with EngineUnavailable until `open_intake`; those in flight go on."""
        self._admission.closed = reason

    def open_intake(self) -> None:
        """Accept requests again."""
        self._admission.closed = None

    def drain(self, *, notice_s: float = 0.0) -> None:
        """Accept no more requests after `notice_s`, for good; those in flight go on. It stops being ready at once."""
        self._admission.is_leaving = True
        if notice_s:
            asyncio.get_running_loop().call_later(notice_s, self.drain)
        else:
            self._admission.is_draining = True
            self._drains.set()

    @property
    def is_idle(self) -> bool:
        """Whether no request is in flight."""
        return not self._outputs

    async def wait_idle(self) -> None:
        """Return once no request is in flight."""
        await self._outputs.none_left.wait()

    async def wait_drained(self) -> None:
        """Return once no request is in flight, and none is accepted because it drains."""
        await self._drains.wait()
        await self.wait_idle()

    async def wait_busy(self) -> None:
        """Return once a request is in flight."""
        await self._outputs.some_left.wait()

    # --- requests ---------------------------------------------------------------------------------------

    def prepare(self, asked: GenerationRequest) -> Preparation:
        """Return what `submit` needs of a request; from any thread, for much text that was received takes seconds.

        Raises InvalidRequest if that does not fit the constraint.
        """
        end_ids = end_token_ids(asked, config=self._config)
        # A token that ends the completion is no part of its form and text.
        received = [ids[:-1] if ids and ids[-1] in end_ids else ids for ids in asked.received]
        matchers = matchers_of(asked, received)
        detokenizers = [self._detokenizer(asked) for _ in range(asked.n)]
        for detokenizer, token_ids in zip(detokenizers, received, strict=False):
            detokenizer.push(token_ids)
        return Preparation(matchers, detokenizers)

    def submit(
        self,
        asked: GenerationRequest,
        prepared: Preparation | None = None,
        *,
        on_end: Callable[[int], None] = lambda _: None,
        trace: RequestTrace | None = None,
    ) -> RequestStream:
        """Queue a request and return its stream; a constraint must be compiled, `prepared` None: it is prepared here.

        With `received` it goes on behind these tokens, and takes the place of a request of the same id that is in
        flight: the old stream ends with ABORT. `on_end` is called once, as soon as the stream ends, with the number of
        tokens that were generated. Raises EngineUnavailable, InvalidRequest, DuplicateRequest or QueueFull; then there
        is no stream to end.
        """
        refusal = self._admission.refusal
        if refusal is not None:
            raise EngineUnavailable(refusal)
        prepared = prepared or self.prepare(asked)
        if asked.received:
            self.abort(asked.request_id)
        request = self._scheduler.add(asked, now=self._clock())
        request.trace = trace
        if trace is not None:
            self._traced.add(trace)
        stream = RequestStream(
            asked.request_id,
            num_prompt_tokens=request.num_prompt_tokens,
            detokenizers=prepared.detokenizers,
            cancel=self._cancel,
            turns=self._turns,
            on_end=lambda: self._end_stream(request, on_end),
        )
        active = ActiveRequest(request, stream)
        self._outputs.accept(active, prepared.matchers)
        if self._group is None:
            self._pause([active])
        if self._group is None or asked.deadline_s is not None:
            self._arm_timer()
        self._work.set()
        return stream

    def _end_stream(self, request: Request, on_end: Callable[[int], None]) -> None:
        if request.trace is not None:
            self._traced.remove(request.trace)
            request.trace.end(
                arrival_s=request.arrival_s,
                first_step_s=request.first_scheduled_s,
                now_s=self._clock(),
                usage=_usage_of(request),
            )
        on_end(num_generated_tokens(request))

    def take_step_trace(self, rank: int, report: ranks_pb2.StepTrace) -> None:
        """Take what a traced step took on a rank."""
        self._traced.take(rank, report)

    def _detokenizer(self, asked: GenerationRequest) -> IncrementalDetokenizer:
        # An answer that is bound to a form has no channels, unless the form writes them.
        has_channels = asked.constraint is None or asked.constraint.has_frame
        prompt = asked.prompt_token_ids if has_channels else ()
        detokenizer = self._new_detokenizer(asked.stop, prompt, asked.shown_token_ids)
        detokenizer.min_tokens = asked.sampling.min_tokens
        return detokenizer

    def abort(self, request_id: str) -> bool:
        """End a request: its stream ends with ABORT, its blocks are free at once.

        Return False if no such request is in flight.
        """
        active = self._outputs.get(request_id)
        if active is None:
            return False
        self._outputs.abort(active)
        self._work.set()
        return True

    def fail_adapter(self, number: int, problem: str) -> None:
        """End the requests of an adapter with InvalidRequest."""
        self._outputs.fail_adapter(number, problem)

    def stats(self) -> admin_pb2.GetStatsResponse:
        """Return counts of one moment, consistent with one another."""
        return self._scheduler.stats()

    def latencies(self) -> Latencies:
        """Return the latencies of all requests so far, as a copy."""
        return self._outputs.latencies.copy()

    def forget_prefixes(self) -> None:
        """Empty the prefix cache; requests in flight go on."""
        self._scheduler.forget_prefixes()

    @property
    def cache_log(self) -> CacheLog:
        """Record of what the prefix cache holds, of this group and the next."""
        return self._scheduler.cache_log

    @property
    def block_size(self) -> int:
        """Token positions of a block of the KV cache."""
        return self._scheduler.block_size

    @property
    def paused_requests(self) -> int:
        """Number of requests that wait for a group to come back."""
        return 0 if self._group is not None else len(self._outputs)

    @property
    def tokens_per_second(self) -> float:
        """Tokens generated per second of recent stepping on the group that was opened last; 0 before any."""
        return self._pace.throughput.tokens_per_second

    @property
    def speculation(self) -> str:
        """How tokens are proposed and what has come of it on the group that was opened last; "" if none are."""
        return self._speculator.describe()

    @property
    def speculation_gain(self) -> float:
        """Tokens per second of late steps with proposals, times those of steps without; 0: not measured."""
        return self._speculator.gain

    @property
    def decode_pace(self) -> DecodePace:
        """Seconds of steps that only decode, on the group that was opened last."""
        return self._pace.decodes

    def _cancel(self, stream: RequestStream) -> None:
        # Another request may have the id by now.
        active = self._outputs.get(stream.request_id)
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
            if self._admission.failed is None:
                self.fail("the gateway is shutting down")

    def _turn(self) -> None:
        """Take the results that have come, send what can go out."""
        group = self._group
        if group is None:
            return
        with self._guarding(group):
            self._expire()
            num_updates = self._take_results(group)
            if len(group) and 0 < num_updates <= _FEW:
                # Ranks have work already: these readers need not wait until the next step is made.
                asyncio.get_running_loop().call_soon(self._send, group)
            else:
                self._send(group)

    def _take_results(self, group: StepsInFlight) -> int:
        """Apply the results that have come; return how many tokens they brought."""
        num_updates = 0
        while (taken := group.take()) is not None:
            result = taken.result
            assert result is not None, "only answered steps are taken out"
            num_tokens = len(result.token_ids)
            self._pace.add_step(taken.step, seconds=taken.seconds, on_ranks_s=result.step_s, num_tokens=num_tokens)
            self._speculator.add_step(
                taken.step,
                began_s=taken.began_s,
                seconds=taken.seconds,
                on_ranks_s=result.step_s,
                num_tokens=num_tokens,
            )
            outcome = self._scheduler.apply(taken.step, result)
            self._outputs.process(outcome)
            num_updates += len(outcome.updates)
        return num_updates

    def _send(self, group: StepsInFlight) -> None:
        """Send steps as long as there is one that can go out."""
        if self._group is not group:
            return
        with self._guarding(group):
            while self._send_next(group):
                pass
            if not len(group):
                self._holds.settled.set()

    def _send_next(self, group: StepsInFlight) -> bool:
        """Send the next step; return False if none can go out now."""
        if group.owing is not None:
            self._begin_masks(group, group.owing)
            return False
        if self._is_held:
            return False
        if self._holds.num_waiting:
            step = self._scheduler.schedule_release(in_flight=group)
        else:
            steps_out = self._pace.lookahead.steps_out()
            step = self._scheduler.schedule(self._clock(), in_flight=group, steps_out=steps_out)
        if step is None:
            return False
        trace = self._traced.mark(step) if self._traced.requests else None
        sent = group.submit(step)
        if trace is not None:
            self._traced.sent(sent.step_id, trace)
        return True

    @property
    def _is_held(self) -> bool:
        return self._holds.num_inside > 0 or self._holds.is_resting

    def _begin_masks(self, group: StepsInFlight, owing: StepInFlight) -> None:
        """Start to compute masks, once all steps before theirs are answered: masks follow from their tokens."""
        if owing is group.oldest and self._masking is None:
            self._masking = asyncio.create_task(self._send_masks(group, owing))

    async def _send_masks(self, group: StepsInFlight, owing: StepInFlight) -> None:
        completions, proposals = owing.step.masked, owing.step.proposals
        matchers = map(self._outputs.matcher_of, completions)
        proposed = [proposals.get(slot, ()) for slot in owing.step.plan.masked_slots]
        try:
            masks = await self._masks.masks([*map(MaskedDraws, matchers, proposed)])
        finally:
            self._masking = None
        if self._group is not group:
            self._work.set()
            return
        with self._guarding(group):
            for completion, (first, *_) in zip(completions, masks, strict=True):
                if first.problem is not None:
                    self._outputs.fail_completion(completion, first.problem)
            group.send_masks(owing, [mask.allowed for mask in chain.from_iterable(masks)])
        self._send(group)

    @contextmanager
    def _guarding(self, group: StepsInFlight) -> Iterator[None]:
        """End the group when something inside goes wrong."""
        try:
            yield
        except (GroupLost, StepMismatch) as error:
            self._break(group, str(error))
        except Exception as error:  # top of the loop
            logger.exception("engine fault in a step; every request ends and the group with them")
            reason = f"internal error: {type(error).__name__}: {error}"
            self._outputs.fail_all(EngineFault(reason))
            self._break(group, reason)

    # --- the group's end --------------------------------------------------------------------------------

    def _break(self, group: StepsInFlight, reason: str) -> None:
        if self._group is group:
            self.lose(reason)
            group.on_broken(reason)

    def _drop_group(self) -> None:
        self._group = None
        self._traced.forget_steps()
        self._holds.settled.set()
        self._holds.roused.set()

    def _pause(self, requests: Iterable[ActiveRequest]) -> None:
        until_s = self._clock() + self._config.pause_limit_s
        self._paused.extend((until_s, active) for active in requests)

    # --- deadlines --------------------------------------------------------------------------------------

    def _expire(self) -> None:
        now = self._clock()
        for request in self._scheduler.expire(now):
            active = self._outputs.get(request.request_id)
            if active is not None:
                where = "while it waited" if request.first_scheduled_s is None else "before it was complete"
                problem = f"request {request.request_id}: its deadline passed {where}"
                self._outputs.fail(active, DeadlineExceeded(problem))
        while self._paused and self._paused[0][0] <= now:
            _, active = self._paused.popleft()
            if self._outputs.is_active(active):
                problem = f"the group of ranks was lost and did not come back in time: {self._lost_reason}"
                self._outputs.fail(active, EngineUnavailable(problem))

    def _arm_timer(self) -> None:
        self._alarm.set(self._scheduler.next_deadline_s(), self._paused[0][0] if self._paused else None)

    def _on_alarm(self) -> None:
        self._expire()
        self._work.set()
        self._arm_timer()


def _usage_of(request: Request) -> dict[str, int]:
    """Return a request's counts of tokens, by the names of OpenTelemetry's conventions."""
    return {
        "gen_ai.usage.input_tokens": request.num_prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": request.num_cached_tokens,
        "gen_ai.usage.output_tokens": sum(completion.num_output_tokens for completion in request.completions),
    }
