"""GroupExecutor: StepPlans out to every rank, answers back. One epoch's.

Plans get the ids of the epoch here: warm-up, commands and the scheduler count for themselves, ranks see one rising
sequence. Several steps may be out; ranks work them off in order, so their results come in order too, from rank 0. A
command goes out alone, and every rank answers it. Plans that are submitted in one turn of the loop travel together, and
so may results: what they say of a step is what they would say alone.

A step has its time from when it became the oldest one out, i.e. from when the ranks could begin with it. One that
exceeds it ends the epoch, through `on_late`. One asyncio loop.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from hetero_api.v1 import ranks_pb2
from hetero_gateway.engine.errors import EngineFault, GroupLost
from hetero_gateway.group.errors import RankMisbehaved
from hetero_gateway.group.rank_link import RankLink, broadcast

T = TypeVar("T")


@dataclass(slots=True)
class _Flight:
    """A step that is out. `own_id` is the plan's own, `step_id` the epoch's; `began_s` is when it became the oldest."""

    step_id: int
    own_id: int
    future: asyncio.Future[ranks_pb2.StepResult]
    began_s: float


@dataclass(slots=True)
class _Command:
    """A command that is out, and the reports that came."""

    step_id: int
    future: asyncio.Future[list[ranks_pb2.CommandReport]]
    reports: dict[int, ranks_pb2.CommandReport] = field(default_factory=dict)


class GroupExecutor:
    """Implements the engine's StepExecutor. `observe_step` is told the seconds of every step, as seen from here.

    `on_late` is called with the reason when ranks took too long; whoever gets it ends the epoch, and so calls `lose`.
    """

    def __init__(
        self,
        links: Sequence[RankLink],
        *,
        epoch: int,
        step_timeout_s: float,
        command_timeout_s: float,
        observe_step: Callable[[float], None],
        on_late: Callable[[str], None],
    ) -> None:
        self.num_steps = 0
        """Steps whose results came."""
        self._links = tuple(links)
        self._epoch = epoch
        self._step_timeout_s = step_timeout_s
        self._command_timeout_s = command_timeout_s
        self._observe_step = observe_step
        self._on_late = on_late
        self._last_step_id = 0
        self._flights: deque[_Flight] = deque()
        self._command: _Command | None = None
        self._masks_due: _Flight | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._lost: str | None = None
        self._leaving: ranks_pb2.GatewayMessage | None = None
        """Plans that go out when this turn of the loop is over."""

    # --- out --------------------------------------------------------------------------------------------

    def submit(self, plan: ranks_pb2.StepPlan) -> asyncio.Future[ranks_pb2.StepResult]:
        """Send `plan` to every rank at once. Its result has the plan's own id; or the future raises GroupLost."""
        future: asyncio.Future[ranks_pb2.StepResult] = asyncio.get_running_loop().create_future()
        if self._lost is not None:
            return _fail(future, self._lost)
        if self._command is not None:
            raise EngineFault(f"step {plan.step_id} goes out while a command does")
        if self._masks_due is not None:
            raise EngineFault(f"step {plan.step_id} goes out before the masks of step {self._masks_due.own_id}")
        flight = _Flight(self._send(plan), plan.step_id, future, time.monotonic())
        self._flights.append(flight)
        if plan.masked_slots:
            self._masks_due = flight
        if self._timer is None:
            self._arm_timer(self._step_timeout_s)
        return future

    def send_masks(self, step_id: int, masks: Sequence[bytes]) -> None:
        """What the masked draws of a plan may choose from; `step_id` is the plan's own. Before any later plan."""
        if self._lost is not None:
            return
        due, self._masks_due = self._masks_due, None
        if due is None or due.own_id != step_id:
            raise EngineFault(f"masks of step {step_id} are not due")
        token_masks = ranks_pb2.TokenMasks(step_id=due.step_id, masks=masks)
        self._send_leaving()
        broadcast(self._links, ranks_pb2.GatewayMessage(epoch=self._epoch, token_masks=token_masks))

    async def command(self, command: ranks_pb2.GroupCommand) -> list[ranks_pb2.CommandReport]:
        """Have the group do `command`; every rank's report, in rank order. Raises GroupLost.

        Nothing may be out. A caller that gives up waiting does not stop the command.
        """
        if self._lost is not None:
            raise GroupLost(self._lost)
        if self._flights or self._command is not None:
            raise EngineFault("a command goes out while something else is")
        sent = self._command = _Command(
            self._send(ranks_pb2.StepPlan(command=command)), asyncio.get_running_loop().create_future()
        )
        late = asyncio.get_running_loop().call_later(self._command_timeout_s, self._on_late_command, sent)
        try:
            return await asyncio.shield(sent.future)
        finally:
            if sent.future.done():
                late.cancel()

    def _send(self, plan: ranks_pb2.StepPlan) -> int:
        self._last_step_id += 1
        if self._leaving is None:
            self._leaving = ranks_pb2.GatewayMessage(epoch=self._epoch, step_plan=plan)
            self._leaving.step_plan.step_id = self._last_step_id
            asyncio.get_running_loop().call_soon(self._send_leaving)
        else:
            self._leaving.further_plans.append(plan)
            self._leaving.further_plans[-1].step_id = self._last_step_id
        return self._last_step_id

    def _send_leaving(self) -> None:
        """Once a turn of the loop; earlier for what has to come behind the plans."""
        message, self._leaving = self._leaving, None
        if message is not None and self._lost is None:
            broadcast(self._links, message)

    # --- back -------------------------------------------------------------------------------------------

    def take_results(self, rank: int, results: Sequence[ranks_pb2.StepResult]) -> None:
        """A rank's answers, in order. Raises RankMisbehaved unless they are awaited of it, and are to the oldest steps.

        Steps whose answers travelled together took, as seen from here, as long as one another.
        """
        began_s = self._flights[0].began_s if self._flights else 0.0
        now = time.monotonic()
        for number, result in enumerate(results, 1):
            self._take_result(rank, result, ended_s=began_s + (now - began_s) * number / len(results))

    def _take_result(self, rank: int, result: ranks_pb2.StepResult, *, ended_s: float) -> None:
        if self._lost is not None:
            return
        command = self._command
        if command is not None and result.step_id == command.step_id and rank not in command.reports:
            self._take_report(command, rank, result)
        elif rank == 0 and self._flights and self._flights[0].step_id == result.step_id:
            self._take_step(self._flights.popleft(), result, ended_s=ended_s)
        else:
            raise RankMisbehaved(f"rank {rank} answered step {result.step_id}, which it had not to answer now")

    def _take_step(self, flight: _Flight, result: ranks_pb2.StepResult, *, ended_s: float) -> None:
        if self._masks_due is flight:
            raise RankMisbehaved(f"rank 0 answered step {result.step_id} before its masks were sent")
        if self._flights:
            self._flights[0].began_s = ended_s
        self.num_steps += 1
        self._observe_step(ended_s - flight.began_s)
        result.step_id = flight.own_id
        if not flight.future.done():
            flight.future.set_result(result)

    def _take_report(self, command: _Command, rank: int, result: ranks_pb2.StepResult) -> None:
        if not result.HasField("command_report"):
            raise RankMisbehaved(f"rank {rank} answered step {result.step_id}, a command, without a report")
        command.reports[rank] = result.command_report
        if len(command.reports) == len(self._links):
            self._command = None
            command.future.set_result([command.reports[rank] for rank in range(len(self._links))])

    def lose(self, reason: str) -> None:
        """The epoch is over: what is out, and what comes later, raises GroupLost. Only the first reason counts."""
        if self._lost is not None:
            return
        self._lost = reason
        for flight in self._flights:
            _fail(flight.future, reason)
        if self._command is not None:
            _fail(self._command.future, reason)
        self._flights.clear()
        self._command = self._masks_due = None
        if self._timer is not None:
            self._timer.cancel()

    @property
    def stalled_s(self) -> float:
        """Seconds that the oldest step out has had; 0 when there is none. Commands do not count."""
        return time.monotonic() - self._flights[0].began_s if self._flights else 0.0

    # --- late -------------------------------------------------------------------------------------------

    def _arm_timer(self, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self._on_timer)

    def _on_timer(self) -> None:
        """One timer for all steps, armed anew when it finds that its step is done: cheaper than one a step."""
        self._timer = None
        if not self._flights:
            return
        left_s = self._step_timeout_s - self.stalled_s
        if left_s > 0:
            self._arm_timer(left_s)
        else:
            self._on_late(
                f"step {self._flights[0].step_id} had no result within {self._step_timeout_s:g} s "
                "(spec.recovery.stepTimeoutSeconds)"
            )

    def _on_late_command(self, command: _Command) -> None:
        if self._command is command:
            silent = ", ".join(str(rank) for rank in range(len(self._links)) if rank not in command.reports)
            self._on_late(
                f"rank {silent} did not answer a command within {self._command_timeout_s:g} s "
                "(spec.recovery.rendezvousTimeoutSeconds)"
            )


def _fail(future: asyncio.Future[T], reason: str) -> asyncio.Future[T]:
    """End it with GroupLost, unless it has ended. Nobody has to look at the error."""
    if not future.done():
        future.set_exception(GroupLost(reason))
        future.exception()
    return future
