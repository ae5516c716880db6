"""GroupExecutor: sends StepPlans and commands to every rank of one epoch, and takes their answers.

Ranks see one rising sequence of step ids; `StepsInFlight` assigns them and is the only record of the steps that are
out. Ranks work steps off in order, so results come in order too, from rank 0. Every rank answers a command. It goes out
alone, or takes its turn among steps (`command_in_turn`): ranks carry it out behind the steps that are out, and begin
the next step then. Plans that are submitted in one turn of the loop travel together, and so may results; each result
says what it would say alone.

A step's time counts from when it became the oldest one out, i.e. from when the ranks could begin with it, and so does
a command's. A step that exceeds its time ends the epoch, through `on_late`, and so does a command of which
no rank has said for as long that it gets on. One asyncio loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from hetero_api.v1 import ranks_pb2
from hetero_gateway.engine.errors import EngineFault, GroupLost
from hetero_gateway.engine.step import ScheduledStep
from hetero_gateway.engine.steps_in_flight import StepInFlight, StepsInFlight
from hetero_gateway.group.errors import RankMisbehaved
from hetero_gateway.group.roster import RankLink, broadcast


class CommandAnswer(NamedTuple):
    """Every rank's report on a command, in rank order."""

    reports: list[ranks_pb2.CommandReport]
    seconds: float
    """Time from when the ranks could begin with it to the last report."""


@dataclass(slots=True)
class _Command:
    """A command that is out, and the reports that have come.

    `began_s` is when it was sent, or when the step before it was answered if that came later.
    """

    step_id: int
    in_turn: bool
    began_s: float
    future: asyncio.Future[CommandAnswer]
    reports: dict[int, ranks_pb2.CommandReport] = field(default_factory=dict)
    late: asyncio.TimerHandle | None = None


class GroupExecutor:
    """Executor of steps and commands on the ranks of one epoch, over their links.

    `observe_step` gets the seconds of every answered step, as seen from here. `on_late` gets the reason when ranks took
    too long; it has to end the epoch, which calls `lose`.
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
        self.in_flight = StepsInFlight(send=self._send_step, send_masks=self._send_masks)
        self.streams_from: int | None = None
        """Rows from which on a step with prompts streams experts; None: none does."""
        self.num_steps = 0
        """Steps that were answered."""
        self.progressed_s = 0.0
        """Time of the loop at which a rank last said that its long work has got on."""
        self._links = tuple(links)
        self._epoch = epoch
        self._step_timeout_s = step_timeout_s
        self._command_timeout_s = command_timeout_s
        self._observe_step = observe_step
        self._on_late = on_late
        self._command: _Command | None = None
        self._masks_sent = asyncio.Event()
        """Set while no step owes masks."""
        self._masks_sent.set()
        self._timer: asyncio.TimerHandle | None = None
        self._lost: str | None = None
        self._leaving: ranks_pb2.GatewayMessage | None = None
        """Plans that go out when this turn of the loop is over."""

    # --- out --------------------------------------------------------------------------------------------

    def _send_step(self, step: StepInFlight) -> None:
        if self._command is not None and not self._command.in_turn:
            raise EngineFault("a step goes out while a command does")
        plan = step.step.plan
        plan.streams_experts = self._streams(plan)
        self._send(plan)
        if step.owes_masks:
            self._masks_sent.clear()
        if self._timer is None:
            self._arm_timer(self._step_timeout_s)

    def _streams(self, plan: ranks_pb2.StepPlan) -> bool:
        if self.streams_from is None or not plan.spans:
            return False
        proposed = sum(len(proposal.token_ids) for proposal in plan.proposals)
        rows = len(plan.decode_slots) + proposed + sum(span.num_tokens for span in plan.spans)
        return rows >= self.streams_from

    def _send_masks(self, step: StepInFlight) -> None:
        token_masks = ranks_pb2.TokenMasks(step_id=step.step_id, masks=step.masks)
        self._send_leaving()
        broadcast(self._links, ranks_pb2.GatewayMessage(epoch=self._epoch, token_masks=token_masks))
        self._masks_sent.set()

    async def compute(self, plan: ranks_pb2.StepPlan, masks: Sequence[bytes] = ()) -> ranks_pb2.StepResult:
        """Send a plan that belongs to no request, alone, and return its result; `masks` are those of its masked slots.

        Raises GroupLost.
        """
        answered = asyncio.Event()
        self.in_flight.on_progress = answered.set
        step = self.in_flight.submit(ScheduledStep(plan))
        if plan.masked_slots:
            self.in_flight.send_masks(step, masks)
        await answered.wait()
        taken = self.in_flight.take()
        assert taken is not None, "the step was answered"
        assert taken.result is not None, "the step was answered"
        return taken.result

    async def command(self, command: ranks_pb2.GroupCommand) -> list[ranks_pb2.CommandReport]:
        """Have the group do `command`; return every rank's report, in rank order. Raises GroupLost.

        Nothing may be out. A caller that gives up waiting does not stop the command.
        """
        if self.in_flight and self._lost is None:
            raise EngineFault("a command goes out while something else is")
        return (await self._send_command(command, in_turn=False)).reports

    async def command_in_turn(self, command: ranks_pb2.GroupCommand) -> CommandAnswer:
        """As `command`, behind the steps that are out; later steps go out behind it, and need not wait.

        The command must leave slots and cache as they are.
        """
        # A rank that waits for the masks of a step takes nothing else.
        while not self._masks_sent.is_set():
            await self._masks_sent.wait()
        return await self._send_command(command, in_turn=True)

    async def _send_command(self, command: ranks_pb2.GroupCommand, *, in_turn: bool) -> CommandAnswer:
        if self._lost is not None:
            raise GroupLost(self._lost)
        if self._command is not None:
            raise EngineFault("a command goes out while another is")
        plan = ranks_pb2.StepPlan(step_id=self.in_flight.next_step_id(), command=command)
        answered: asyncio.Future[CommandAnswer] = asyncio.get_running_loop().create_future()
        sent = self._command = _Command(plan.step_id, in_turn, time.monotonic(), answered)
        self._send(plan)
        self._arm_command(sent, self._command_timeout_s)
        try:
            return await asyncio.shield(sent.future)
        finally:
            if sent.future.done() and sent.late is not None:
                sent.late.cancel()

    def _arm_command(self, command: _Command, seconds: float) -> None:
        command.late = asyncio.get_running_loop().call_later(seconds, self._on_late_command, command)

    def _send(self, plan: ranks_pb2.StepPlan) -> None:
        if self._leaving is None:
            self._leaving = ranks_pb2.GatewayMessage(epoch=self._epoch, step_plan=plan)
            asyncio.get_running_loop().call_soon(self._send_leaving)
        else:
            self._leaving.further_plans.append(plan)

    def _send_leaving(self) -> None:
        """Send what was submitted: once a turn of the loop, or earlier for what must follow the plans."""
        message, self._leaving = self._leaving, None
        if message is not None and self._lost is None:
            broadcast(self._links, message)

    # --- back -------------------------------------------------------------------------------------------

    def take_results(self, rank: int, results: Sequence[ranks_pb2.StepResult]) -> None:
        """Take a rank's answers, in order. Raises RankMisbehaved if one of them is not awaited of that rank now.

        Steps whose answers travelled together count as having taken equally long.
        """
        oldest, now = self.in_flight.awaited, time.monotonic()
        began_s = oldest.began_s if oldest is not None else 0.0
        for number, result in enumerate(results, 1):
            self._take_result(rank, result, ended_s=began_s + (now - began_s) * number / len(results))

    def _take_result(self, rank: int, result: ranks_pb2.StepResult, *, ended_s: float) -> None:
        if self._lost is not None:
            return
        command, step = self._command, self.in_flight.awaited
        if command is not None and result.step_id == command.step_id and rank not in command.reports:
            self._take_report(command, rank, result)
        elif rank == 0 and step is not None and step.step_id == result.step_id:
            self._take_step(step, result, ended_s=ended_s)
        else:
            raise RankMisbehaved(f"rank {rank} answered step {result.step_id}, which is not awaited of it now")

    def _take_step(self, step: StepInFlight, result: ranks_pb2.StepResult, *, ended_s: float) -> None:
        if step.owes_masks:
            raise RankMisbehaved(f"rank 0 answered step {result.step_id} before its masks were sent")
        self.num_steps += 1
        self._observe_step(self.in_flight.answer(result, at=ended_s).seconds)
        if self._command is not None and step.step_id < self._command.step_id:
            self._command.began_s = ended_s

    def _take_report(self, command: _Command, rank: int, result: ranks_pb2.StepResult) -> None:
        if not result.HasField("command_report"):
            raise RankMisbehaved(f"rank {rank} answered step {result.step_id}, a command, without a report")
        command.reports[rank] = result.command_report
        if len(command.reports) == len(self._links):
            self._command = None
            now, following = time.monotonic(), self.in_flight.awaited
            if following is not None:
                following.began_s = max(following.began_s, now)
            reports = [command.reports[rank] for rank in range(len(self._links))]
            command.future.set_result(CommandAnswer(reports, now - command.began_s))

    def note_progress(self) -> None:
        """Begin the limit of a command anew: a rank's long work has got on."""
        self.progressed_s = asyncio.get_running_loop().time()

    def lose(self, reason: str) -> None:
        """End the epoch: what is out, and what comes later, raises GroupLost. Only the first reason counts."""
        if self._lost is not None:
            return
        self._lost = reason
        if self._timer is not None:
            self._timer.cancel()
        self._masks_sent.set()
        if self._command is not None:
            self._command.future.set_exception(GroupLost(reason))
            self._command.future.exception()  # nobody has to look at it
            self._command = None
        self.in_flight.fail(GroupLost(reason))

    @property
    def stalled_s(self) -> float:
        """Seconds since the ranks could begin with the oldest step out; 0 when there is none, or after a loss."""
        oldest = self.in_flight.awaited
        return time.monotonic() - oldest.began_s if oldest is not None and self._lost is None else 0.0

    # --- late -------------------------------------------------------------------------------------------

    def _arm_timer(self, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self._on_timer)

    def _on_timer(self) -> None:
        """Check the oldest step. One timer serves all steps and is set again when its step is done: cheaper."""
        self._timer = None
        oldest = self.in_flight.awaited
        if oldest is None:
            return
        left_s = self._step_timeout_s - self.stalled_s
        if left_s > 0:
            self._arm_timer(left_s)
        else:
            self._on_late(
                f"step {oldest.step_id} had no result within {self._step_timeout_s:g} s "
                "(spec.recovery.stepTimeoutSeconds)"
            )

    def _on_late_command(self, command: _Command) -> None:
        if self._command is not command:
            return
        left_s = self.progressed_s + self._command_timeout_s - asyncio.get_running_loop().time()
        if left_s > 0:
            self._arm_command(command, left_s)
        else:
            silent = ", ".join(str(rank) for rank in range(len(self._links)) if rank not in command.reports)
            self._on_late(
                f"rank {silent} did not answer a command within {self._command_timeout_s:g} s "
                "(spec.recovery.rendezvousTimeoutSeconds)"
            )
