"""StepLoop: a rank's plans, from their arrival to their answers.

Plans are executed strictly in order, and answered in order. Answers to short steps wait for one another if the next
plans are here already, and travel together (HOLD_S): one message costs its two ends as much as many answers do. Plans
that have come and only continue the sequences of the one before are given to the runner together, if it has multi-step
decode (`runners.multi_step`), as many as take no longer. On a rank with asynchronous steps the next plan, if it has
come, may begin before the one before is finished (`async_steps.py`). Otherwise it waits in the link unread. Only a
step whose draws are masked reads what comes next, which are its masks.

The main thread keeps to a core while it executes steps, if the runner has one for it (`runners.recorded.home_core`).

A loop serves one epoch at a time, all on the main thread. The caller reports errors.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple, TypeGuard

from hetero_api.host.heartbeat import Heartbeat
from hetero_api.v1 import ranks_pb2
from hetero_worker.distributed.exchange import Exchange
from hetero_worker.distributed.hierarchical import exchange_seconds
from hetero_worker.errors import ExchangeAborted, ProtocolError
from hetero_worker.process.async_steps import AsyncSteps
from hetero_worker.process.gateway_link import Arrival, Event, GatewayLink
from hetero_worker.process.messages import step_result, step_trace
from hetero_worker.process.step_counts import StepCounts
from hetero_worker.runners.base import Runner, StepOutput
from hetero_worker.runners.recorded.home_core import HomeCore
from hetero_worker.runners.recorded.multi_step import may_follow, may_lead
from hetero_worker.runners.recorded.sampling import MAX_STEPS

HOLD_S: Final = 1 / 30
"""Longest wait of the first of the answers that travel together: text that comes 30 times a second flows."""
_ENDINGS: Final = ("abort", "shutdown")


class _Pace(NamedTuple):
    """Duration of the latest decode step, known for its number of rows only."""

    rows: int
    step_s: float

    def steps_within(self, seconds: float, rows: int) -> int:
        """Return how many steps of so many rows fit; 1 where nothing is known."""
        return int(seconds / self.step_s) if self.step_s and rows == self.rows else 1


class StepLoop:
    """Loop over one rank's plans."""

    def __init__(self, runner: Runner, link: GatewayLink, heartbeat: Heartbeat) -> None:
        self._runner = runner
        self._link = link
        self._heartbeat = heartbeat
        self._home = HomeCore()
        self._steps = AsyncSteps(runner, self._take_output)
        self._epoch = 0
        self._rank = -1
        self._next_step = 1
        self._arrivals_s: deque[float] = deque()
        """Arrival times of plans that are not answered yet."""
        self._step_ended_s = 0.0
        self._held: list[ranks_pb2.StepResult] = []
        """Answers that wait for others."""
        self._held_since_s = 0.0
        self._pace = _Pace(0, 0.0)
        self._counts = StepCounts()
        self.last_step = 0
        """Id of the last finished step."""

    def begin_epoch(self, epoch: int, *, rank: int) -> None:
        """Expect step 1 of a new epoch, in which this process is `rank`."""
        self._epoch, self._rank = epoch, rank
        self._held.clear()
        self._counts = StepCounts()
        self._next_step, self.last_step = 1, 0

    def meet_over(self, exchange: Exchange) -> None:
        """Count the time that the epoch's steps spend in `exchange`."""
        self._counts = StepCounts(lambda: exchange_seconds(exchange))

    def heartbeat(self) -> ranks_pb2.Heartbeat:
        """Return what the epoch's steps took so far. From any thread."""
        decode, prefill = self._counts.messages()
        return ranks_pb2.Heartbeat(step_id=self.last_step, decode=decode, prefill=prefill)

    @property
    def is_open(self) -> bool:
        """True if a step is to be finished."""
        return self._steps.is_open

    def is_next(self, event: Event) -> TypeGuard[Arrival]:
        """Return whether it is the next plan, for which a running step need not be finished beforehand."""
        if not isinstance(event, Arrival) or not event.message.HasField("step_plan"):
            return False
        return (event.message.epoch, event.message.step_plan.step_id) == (self._epoch, self._next_step)

    def take(self, arrival: Arrival) -> None:
        """Execute the plan, or begin to. Raises ProtocolError, and as the runner does."""
        plan = self._accept(arrival)
        self._home.keep_to(None if plan.HasField("command") else self._runner.home)
        if self._runner.has_multi_step and may_lead(plan):
            self._execute_many([plan, *self._followers(plan)])
        else:
            self._steps.begin(plan, lambda: self._receive_masks(plan))

    def rest(self) -> None:
        """Wait for the next event, or until the running step is done and finish it. Return at once without a step."""
        self._steps.rest(self._link.wait)

    def finish(self) -> None:
        """Finish the running step, if there is one."""
        self._steps.finish()

    def drop(self) -> None:
        """Forget the epoch: nobody waits for its answers."""
        self._home.leave()
        self._steps.drop()
        self._arrivals_s.clear()
        self._held.clear()

    def _accept(self, arrival: Arrival) -> ranks_pb2.StepPlan:
        plan = arrival.message.step_plan
        if plan.step_id != self._next_step:
            raise ProtocolError(f"the gateway sent step {plan.step_id}, expected step {self._next_step}")
        self._next_step += 1
        self._arrivals_s.append(arrival.arrived_s)
        return plan

    def _followers(self, first: ranks_pb2.StepPlan) -> Iterator[ranks_pb2.StepPlan]:
        """Take the plans that are here and continue the first, as many as answers may wait for."""
        left_s = HOLD_S if not self._held else self._held_since_s + HOLD_S - time.monotonic()
        for _ in range(1, min(MAX_STEPS, self._pace.steps_within(left_s, len(first.decode_slots)))):
            following = self._link.peek()
            if following is None or not self.is_next(following):
                return
            if not may_follow(following.message.step_plan, first):
                return
            self._link.receive()
            yield self._accept(following)

    def _execute_many(self, plans: Sequence[ranks_pb2.StepPlan]) -> None:
        """Execute plans as a multi-step, and answer those before one that fails."""
        ended_s: list[float] = []

        def count_step() -> None:
            self._heartbeat.count_step()
            ended_s.append(time.monotonic())

        began_s = max(self._arrivals_s[0], self._step_ended_s)
        step_s, answered = 0.0, 0
        try:
            for plan, output in zip(plans, self._runner.execute_many(plans, count_step), strict=True):
                step_s = self._answer(plan, output, ended_s[answered])
                answered += 1
        finally:
            if answered < len(plans) or not self._may_hold(step_s):
                self._send_held()
        self._pace = _Pace(len(plans[0].decode_slots), (ended_s[-1] - began_s) / len(plans))

    def _take_output(self, plan: ranks_pb2.StepPlan, output: StepOutput) -> None:
        self._heartbeat.count_step()
        step_s = self._answer(plan, output, time.monotonic())
        if plan.spans or not self._may_hold(step_s):
            self._send_held()

    def _answer(self, plan: ranks_pb2.StepPlan, output: StepOutput, ended_s: float) -> float:
        """Hold the answer, if this rank has one, and return the seconds that the step took."""
        step_s = ended_s - max(self._arrivals_s.popleft(), self._step_ended_s)
        self._step_ended_s = ended_s
        exchange_s = self._counts.add(plan, step_s)
        if plan.traced:
            trace = step_trace(plan, step_s=step_s, ended_s=ended_s, exchange_s=exchange_s)
            self._link.send(ranks_pb2.RankMessage(epoch=self._epoch, step_trace=trace))
        self.last_step = plan.step_id
        if self._rank == 0 or output.report is not None:
            if not self._held:
                self._held_since_s = ended_s
            self._held.append(step_result(plan, output, step_s=step_s))
        return step_s

    def _may_hold(self, step_s: float) -> bool:
        """Return whether the next answer comes soon enough for the held ones, if its step takes as long."""
        if time.monotonic() + step_s > self._held_since_s + HOLD_S:
            return False
        following = self._link.peek()
        if following is None or not self.is_next(following):
            return False
        plan = following.message.step_plan
        return not plan.spans and not plan.masked_slots and not plan.HasField("command")

    def _send_held(self) -> None:
        if self._held:
            first, *others = self._held
            self._link.send(ranks_pb2.RankMessage(epoch=self._epoch, step_result=first, further_results=others))
            self._held.clear()

    def _receive_masks(self, plan: ranks_pb2.StepPlan) -> Sequence[bytes]:
        """Wait for the masks of the current step. Raises ExchangeAborted when its epoch, or this process, ends."""
        self._send_held()
        event = self._link.receive()
        if not isinstance(event, Arrival) or event.message.WhichOneof("body") in _ENDINGS:
            self._link.put_back(event)
            raise ExchangeAborted(f"the epoch ended while step {plan.step_id} waited for its masks")
        masks, epoch = event.message.token_masks, event.message.epoch
        if not event.message.HasField("token_masks") or (epoch, masks.step_id) != (self._epoch, plan.step_id):
            body = event.message.WhichOneof("body")
            raise ProtocolError(f"the gateway sent {body} while step {plan.step_id} waited for its token_masks")
        return masks.masks
