"""GroupExecutor: StepPlans out to every rank, rank 0's answer back. One epoch's.

Plans get the ids of the epoch here: warm-up and the scheduler each count from 1, ranks see one rising sequence.
One step is in flight at a time. One asyncio loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from hetero_api.v1 import ranks_pb2
from hetero_gateway.engine.errors import EngineFault, GroupLost
from hetero_gateway.group.errors import RankMisbehaved
from hetero_gateway.group.rank_link import RankLink


class GroupExecutor:
    """Implements the engine's StepExecutor. `observe_step` is told the seconds of every step, as seen from here."""

    def __init__(
        self,
        links: Sequence[RankLink],
        *,
        epoch: int,
        step_timeout_s: float,
        observe_step: Callable[[float], None],
    ) -> None:
        self._links = tuple(links)
        self._epoch = epoch
        self._step_timeout_s = step_timeout_s
        self._observe_step = observe_step
        self._last_step_id = 0
        self._sent_s: float | None = None
        self._awaited: asyncio.Future[ranks_pb2.StepResult] | None = None
        self._lost: str | None = None

    async def execute(self, plan: ranks_pb2.StepPlan) -> ranks_pb2.StepResult:
        """Have every rank do `plan`; its result with the plan's own id. Raises GroupLost."""
        if self._lost is not None:
            raise GroupLost(self._lost)
        if self._awaited is not None:
            raise EngineFault(f"step {self._last_step_id} is still in flight")
        started_s = self._sent_s = time.monotonic()
        self._awaited = asyncio.get_running_loop().create_future()
        try:
            self._send(plan)
            async with asyncio.timeout(self._step_timeout_s):
                result = await self._awaited
        except TimeoutError as error:
            raise GroupLost(
                f"step {self._last_step_id} had no result within {self._step_timeout_s:g} s "
                "(spec.recovery.stepTimeoutSeconds)"
            ) from error
        finally:
            self._awaited = self._sent_s = None
        self._observe_step(time.monotonic() - started_s)
        result.step_id = plan.step_id
        return result

    @property
    def stalled_s(self) -> float:
        """Seconds that the step in flight has been out; 0 when there is none."""
        return 0.0 if self._sent_s is None else time.monotonic() - self._sent_s

    def take_result(self, result: ranks_pb2.StepResult) -> None:
        """Rank 0's answer. Raises RankMisbehaved unless it answers the step in flight."""
        if self._awaited is None or self._awaited.done() or result.step_id != self._last_step_id:
            raise RankMisbehaved(f"rank 0 answered step {result.step_id}, which is not in flight")
        self._awaited.set_result(result)

    def lose(self, reason: str) -> None:
        """The epoch is over: the step in flight, and any later one, raises GroupLost."""
        self._lost = reason
        if self._awaited is not None and not self._awaited.done():
            self._awaited.set_exception(GroupLost(reason))

    def _send(self, plan: ranks_pb2.StepPlan) -> None:
        self._last_step_id += 1
        message = ranks_pb2.GatewayMessage(epoch=self._epoch, step_plan=plan)
        message.step_plan.step_id = self._last_step_id
        for link in self._links:
            link.send(message)
