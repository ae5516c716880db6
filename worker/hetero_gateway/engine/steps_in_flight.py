"""The steps that are out on one group of ranks: the only record of them.

The executor of the ranks owns this record: it sends what is submitted here, notes what the ranks answer and how long
they took, and fails what is left when the group is lost. The scheduler reads how much is out. The engine core submits
steps and takes the answered ones out, oldest first. What always holds:

- Ids rise by one from 1 over all that an epoch's ranks are sent: warm-up, commands and the steps of requests.
- Ranks answer in order, so the answered steps come before those still awaited.
- A step whose draws are bound to masks owes them. They follow from the tokens of all earlier steps, and no later step
  may go out before them, so only the newest step can owe masks.

Plain Python, so that a scheduler can be driven without an event loop.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from hetero_api.v1 import ranks_pb2
from hetero_gateway.engine.errors import EngineFault, StepMismatch
from hetero_gateway.engine.step import ScheduledStep


@dataclass(slots=True, eq=False)
class StepInFlight:
    """A step that is out.

    `began_s` is when it was sent, or when the step before it was answered if that came later. `seconds` counts from
    there to its answer.
    """

    step: ScheduledStep
    began_s: float
    owes_masks: bool
    masks: Sequence[bytes] = ()
    result: ranks_pb2.StepResult | None = None
    seconds: float = 0.0

    @property
    def step_id(self) -> int:
        """Id of the step within its epoch."""
        return self.step.plan.step_id


def _send_nowhere(_: StepInFlight) -> None:
    """Send nothing: for callers that pass plans on by themselves."""


class StepsInFlight:
    """Steps that were submitted and not taken out yet, oldest first.

    `send` passes a step's plan on to the ranks, `send_masks` its masks. `on_progress` is called when `take` may have
    news, `on_broken` with the reason when its taker finds that the group cannot go on. `clock` dates steps.
    """

    def __init__(
        self,
        *,
        send: Callable[[StepInFlight], None] = _send_nowhere,
        send_masks: Callable[[StepInFlight], None] = _send_nowhere,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.on_progress: Callable[[], None] = lambda: None
        self.on_broken: Callable[[str], None] = lambda _: None
        self._send = send
        self._send_masks = send_masks
        self._clock = clock
        self._last_step_id = 0
        self._steps: deque[StepInFlight] = deque()
        self._num_answered = 0
        self._error: Exception | None = None

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[StepInFlight]:
        return iter(self._steps)

    @property
    def oldest(self) -> StepInFlight | None:
        """The step that `take` returns next, answered or not."""
        return self._steps[0] if self._steps else None

    @property
    def awaited(self) -> StepInFlight | None:
        """The oldest step that has no answer yet."""
        return self._steps[self._num_answered] if self._num_answered < len(self._steps) else None

    @property
    def owing(self) -> StepInFlight | None:
        """The step that owes masks; always the newest one."""
        return self._steps[-1] if self._steps and self._steps[-1].owes_masks else None

    def next_step_id(self) -> int:
        """Return the id of what is sent next."""
        self._last_step_id += 1
        return self._last_step_id

    def submit(self, step: ScheduledStep) -> StepInFlight:
        """Write an id into a step's plan and send it to every rank, behind those that are out.

        Raises EngineFault if masks are owed, or the error that `fail` was given.
        """
        if self._error is not None:
            raise self._error
        if self.owing is not None:
            raise EngineFault(f"a step goes out before the masks of step {self.owing.step_id}")
        step.plan.step_id = self.next_step_id()
        sent = StepInFlight(step, self._clock(), owes_masks=bool(step.plan.masked_slots))
        self._steps.append(sent)
        self._send(sent)
        return sent

    def send_masks(self, step: StepInFlight, masks: Sequence[bytes]) -> None:
        """Send the masks that a step owes, one for each masked draw, those behind proposed tokens included.

        Raises EngineFault if it owes none.
        """
        if self._error is not None:
            return
        if step is not self.owing:
            raise EngineFault(f"masks of step {step.step_id} are not due")
        step.masks, step.owes_masks = masks, False
        self._send_masks(step)

    def answer(self, result: ranks_pb2.StepResult, *, at: float | None = None) -> StepInFlight:
        """Record the result of the oldest awaited step, which came now or `at` a time. Raises EngineFault."""
        now = self._clock() if at is None else at
        answered = self.awaited
        if answered is None:
            raise EngineFault(f"no step is in flight, a result of step {result.step_id} came")
        answered.result, answered.seconds = result, now - answered.began_s
        self._num_answered += 1
        if self.awaited is not None:
            self.awaited.began_s = now
        self.on_progress()
        return answered

    def fail(self, error: Exception) -> None:
        """Record that no more answers come. Only the first error counts."""
        if self._error is None:
            self._error = error
            self.on_progress()

    def take(self) -> StepInFlight | None:
        """Take out the oldest step if it was answered; None if it was not.

        Raises what `fail` was given once nothing answered is left, or StepMismatch if a draw ignored its mask.
        """
        if not self._num_answered:
            if self._error is not None:
                raise self._error
            return None
        self._num_answered -= 1
        taken = self._steps.popleft()
        _check_masks(taken)
        return taken

    def may_overlap(self, *, most: int, most_decodes: int | None) -> bool:
        """Return whether one more step may go out beside these.

        `most` steps may be out, or `most_decodes` if all of them only decode and `most` allows overlap at all. Nothing
        goes out beside proposals, whose number of tokens is not known before, nor beside drafts, which wait for them.
        """
        number = len(self._steps)
        if number and (self._steps[-1].step.proposals or self._steps[-1].step.plan.draft_slots):
            return False
        if number < most:
            return True
        if most < 2 or most_decodes is None or number >= most_decodes:
            return False
        return not any(each.step.spans or each.step.masked for each in self._steps)


def _check_masks(taken: StepInFlight) -> None:
    """Raise StepMismatch if a draw ignored its mask: that token must not become known."""
    if not taken.masks or taken.result is None:
        return
    drawn: dict[int, list[int]] = {}
    for slot, token_id in zip(taken.result.slots, taken.result.token_ids, strict=False):
        drawn.setdefault(slot, []).append(token_id)
    masks = iter(taken.masks)
    for slot in taken.step.plan.masked_slots:
        own = list(islice(masks, 1 + len(taken.step.proposals.get(slot, ()))))
        for mask, token_id in zip(own, drawn.get(slot, ()), strict=False):
            if not _allows(mask, token_id):
                raise StepMismatch(f"step {taken.step_id}: slot {slot} drew token {token_id}, against its mask")


def _allows(mask: bytes, token_id: int) -> bool:
    return token_id >> 3 < len(mask) and bool(mask[token_id >> 3] >> (token_id & 7) & 1)
