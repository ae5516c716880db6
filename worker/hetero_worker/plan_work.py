"""PlanWork: a rank's plans, from their arrival to their answers.

Plans are worked off strictly in order, and answered in order. Answers to steps that are short, and that others follow
which are here already, wait for one another a while and travel together (HOLD_S): a message costs its two ends as much
as many answers do. Plans that have come and only go on with the sequences of the one before them are given to the
runner together, if it has a use for that (`runners.step_runs`), as many as take no longer. On a rank that chains its
steps the next plan, if it has come, may begin before the one before is finished (`runners.step_chain`). Else it waits
in the link, and nothing of it is looked at before. Only a step whose draws are masked looks at what comes next, which
are its masks.

The main thread keeps to a core while it works steps off, if the runner has one for it (`runners.home_core`).

One epoch's at a time, all on the main thread. Whatever goes wrong is the caller's to tell.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple, TypeGuard

from hetero_api.host.heartbeat import Heartbeat
from hetero_api.v1 import ranks_pb2
from hetero_worker.errors import ExchangeAborted, ProtocolError
from hetero_worker.process.gateway_link import Arrival, Event, GatewayLink
from hetero_worker.process.messages import step_result
from hetero_worker.runners.base import Runner, StepOutput
from hetero_worker.runners.home_core import HomeCore
from hetero_worker.runners.native_draws import MAX_STEPS
from hetero_worker.runners.step_chain import StepChain
from hetero_worker.runners.step_runs import may_follow, may_lead

HOLD_S: Final = 1 / 30
"""How long the first of the answers that travel together waits at most: text that comes 30 times a second flows."""
_ENDINGS: Final = ("abort", "shutdown")


class _Pace(NamedTuple):
    """How long a step takes that only decodes, of late; unknown of other numbers of rows."""

    rows: int
    step_s: float

    def steps_within(self, seconds: float, rows: int) -> int:
        """Of so many rows; one where nothing is known."""
        return int(seconds / self.step_s) if self.step_s and rows == self.rows else 1


class PlanWork:
    """See the module."""

    def __init__(self, runner: Runner, link: GatewayLink, heartbeat: Heartbeat) -> None:
        self._runner = runner
        self._link = link
        self._heartbeat = heartbeat
        self._home = HomeCore()
        self._chain = StepChain(runner, self._tell)
        self._epoch = 0
        self._rank = -1
        self._next_step = 1
        self._arrivals_s: deque[float] = deque()
        """Of plans that are not answered yet."""
        self._step_ended_s = 0.0
        self._held: list[ranks_pb2.StepResult] = []
        """Answers that wait for more."""
        self._held_since_s = 0.0
        self._pace = _Pace(0, 0.0)
        self.last_step = 0
        """That was finished."""

    def begin_epoch(self, epoch: int, *, rank: int) -> None:
        self._epoch, self._rank = epoch, rank
        self._held.clear()
        self._next_step, self.last_step = 1, 0

    @property
    def is_open(self) -> bool:
        """Whether a step is to be finished."""
        return self._chain.is_open

    def is_next(self, event: Event) -> TypeGuard[Arrival]:
        """Whether it is the plan that comes next, for which a step need not be finished beforehand."""
        if not isinstance(event, Arrival) or not event.message.HasField("step_plan"):
            return False
        return (event.message.epoch, event.message.step_plan.step_id) == (self._epoch, self._next_step)

    def take(self, arrival: Arrival) -> None:
        """Work the plan off, or begin to. Raises ProtocolError, and as the runner does."""
        plan = self._accept(arrival)
        self._home.keep_to(None if plan.HasField("command") else self._runner.home)
        if self._runner.runs_steps and may_lead(plan):
            self._work_off([plan, *self._followers(plan)])
        else:
            self._chain.begin(plan, lambda: self._receive_masks(plan))

    def rest(self) -> None:
        """Until the next event comes, or the step under way is done, and then finished; at once if there is none."""
        self._chain.rest(self._link.wait)

    def finish(self) -> None:
        """The step under way, if there is one."""
        self._chain.finish()

    def drop(self) -> None:
        """The epoch is over: nobody waits for answers."""
        self._home.leave()
        self._chain.drop()
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
        """Plans that are here and go on with the first, as many as answers may wait for."""
        left_s = HOLD_S if not self._held else self._held_since_s + HOLD_S - time.monotonic()
        for _ in range(1, min(MAX_STEPS, self._pace.steps_within(left_s, len(first.decode_slots)))):
            following = self._link.peek()
            if following is None or not self.is_next(following):
                return
            if not may_follow(following.message.step_plan, first):
                return
            self._link.receive()
            yield self._accept(following)

    def _work_off(self, plans: Sequence[ranks_pb2.StepPlan]) -> None:
        """As a run. Plans before one that fails are answered."""
        ended_s: list[float] = []

        def count_step() -> None:
            self._heartbeat.count_step()
            ended_s.append(time.monotonic())

        began_s = max(self._arrivals_s[0], self._step_ended_s)
        step_s, told = 0.0, 0
        try:
            for plan, output in zip(plans, self._runner.run(plans, count_step), strict=True):
                step_s = self._answer(plan, output, ended_s[told])
                told += 1
        finally:
            if told < len(plans) or not self._may_hold(step_s):
                self._send_held()
        self._pace = _Pace(len(plans[0].decode_slots), (ended_s[-1] - began_s) / len(plans))

    def _tell(self, plan: ranks_pb2.StepPlan, output: StepOutput) -> None:
        self._heartbeat.count_step()
        step_s = self._answer(plan, output, time.monotonic())
        if plan.spans or not self._may_hold(step_s):
            self._send_held()

    def _answer(self, plan: ranks_pb2.StepPlan, output: StepOutput, ended_s: float) -> float:
        """Hold the answer, if this rank has one to give. Seconds that the step took."""
        step_s = ended_s - max(self._arrivals_s.popleft(), self._step_ended_s)
        self._step_ended_s = ended_s
        self.last_step = plan.step_id
        if self._rank == 0 or output.report is not None:
            if not self._held:
                self._held_since_s = ended_s
            self._held.append(step_result(plan, output, step_s=step_s))
        return step_s

    def _may_hold(self, step_s: float) -> bool:
        """Whether another answer comes soon enough for those that are held, if the next step takes as long."""
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
        """The masks of the step that is being done. Raises ExchangeAborted when its epoch, or this life, is over."""
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
