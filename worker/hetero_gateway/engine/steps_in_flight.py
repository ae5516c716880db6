"""The steps that are out on one group: sent in order, their results taken in order.

A step whose draws are bound to masks owes them: they can be computed only when every earlier step's tokens are known,
and no later plan may go out before them. One asyncio loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from hetero_api.v1 import ranks_pb2
from hetero_gateway.engine.errors import GroupLost, StepMismatch
from hetero_gateway.engine.step import ScheduledStep


class StepExecutor(Protocol):
    """A READY group."""

    def submit(self, plan: ranks_pb2.StepPlan) -> asyncio.Future[ranks_pb2.StepResult]:
        """Send `plan` to every rank, at once; rank 0's answer, with the plan's own id. It raises GroupLost.

        Several may be out; results come in order.
        """
        ...

    def send_masks(self, step_id: int, masks: Sequence[bytes]) -> None:
        """What the masked draws of the plan sent last, whose own id this is, may choose from."""
        ...

    async def command(self, command: ranks_pb2.GroupCommand) -> list[ranks_pb2.CommandReport]:
        """Have the whole group do something between two steps; every rank's report, in rank order. Raises GroupLost."""
        ...


@dataclass(slots=True, eq=False)
class Flight:
    """A step that is out. `began_s` is when it was sent, or when the step before it landed if that came later."""

    step: ScheduledStep
    result: asyncio.Future[ranks_pb2.StepResult]
    began_s: float
    owes_masks: bool
    masks: Sequence[bytes] = ()

    def check_masks(self) -> None:
        """Raises StepMismatch if a draw was not bound to its mask: what was drawn must not become known."""
        if not self.masks:
            return
        result = self.result.result()
        drawn = dict(zip(result.slots, result.token_ids, strict=False))
        for slot, mask in zip(self.step.plan.masked_slots, self.masks, strict=True):
            token_id = drawn.get(slot)
            if token_id is not None and not _allows(mask, token_id):
                raise StepMismatch(f"step {result.step_id}: slot {slot} drew token {token_id}, against its mask")


class Landed(NamedTuple):
    """A step whose result has come, and how long it took."""

    flight: Flight
    seconds: float


class StepsInFlight:
    """See the module. `on_landed` is called when a result has come, or the group says that none will."""

    def __init__(self, executor: StepExecutor, *, on_landed: Callable[[], None]) -> None:
        self._executor = executor
        self._on_landed = on_landed
        self._flights: deque[Flight] = deque()

    def __len__(self) -> int:
        return len(self._flights)

    def send(self, step: ScheduledStep, *, now: float) -> None:
        """Send a step. None may owe masks."""
        result = self._executor.submit(step.plan)
        self._flights.append(Flight(step, result, now, owes_masks=bool(step.masked)))
        result.add_done_callback(self._landed)

    @property
    def owing(self) -> Flight | None:
        """The step that owes masks; it is the one sent last."""
        return self._flights[-1] if self._flights and self._flights[-1].owes_masks else None

    @property
    def oldest(self) -> Flight | None:
        return self._flights[0] if self._flights else None

    def send_masks(self, flight: Flight, masks: Sequence[bytes]) -> None:
        self._executor.send_masks(flight.step.plan.step_id, masks)
        flight.owes_masks = False
        flight.masks = masks

    def land(self, *, now: float) -> Landed | None:
        """Take out the oldest step if its result has come. Raises GroupLost if none will come, or StepMismatch.

        Steps whose results came together took as long as one another.
        """
        if not self._flights or not self._flights[0].result.done():
            return None
        number = next((i for i, each in enumerate(self._flights) if not each.result.done()), len(self._flights))
        flight = self._flights.popleft()
        seconds = (now - flight.began_s) / number
        if self._flights:
            self._flights[0].began_s = flight.began_s + seconds
        if flight.result.cancelled():
            raise GroupLost("the step was cancelled by the group")
        flight.result.result()
        flight.check_masks()
        return Landed(flight, seconds)

    def forget(self) -> None:
        """The group is over: no result is taken any more."""
        self._flights.clear()

    def _landed(self, result: asyncio.Future[ranks_pb2.StepResult]) -> None:
        # Of one that nobody takes, this keeps asyncio from reporting an error that nobody looks at.
        if not result.cancelled():
            result.exception()
        self._on_landed()


def _allows(mask: bytes, token_id: int) -> bool:
    return token_id >> 3 < len(mask) and bool(mask[token_id >> 3] >> (token_id & 7) & 1)
