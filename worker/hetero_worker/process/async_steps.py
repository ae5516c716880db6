"""AsyncSteps: drives a runner through plans as they come, so that its device need not wait for the host between steps.

A step that can be followed is not finished at once. If the next plan may follow it, that step begins first; then the
step before is finished and answered. Before anything else the step is finished. Answers go out in the order of the
plans, each at most as late as the next step takes to begin. On a rank without asynchronous steps every step is finished
as soon as it is begun.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from hetero_api.v1 import ranks_pb2
from hetero_worker.runners.base import MaskSource, Runner, StepInFlight, StepOutput, no_masks

LOOK_S: Final = 5e-5
"""Time to wait for the next event before looking whether the step is done: nobody can wait for both. An answer that
nothing follows is late by about as much; a step that is followed is waited for by itself."""


class _Open(NamedTuple):
    """A step that is not answered yet."""

    plan: ranks_pb2.StepPlan
    step: StepInFlight


class AsyncSteps:
    """Steps of one runner, on one thread. `answer` gets each plan and its output, in the plans' order."""

    def __init__(self, runner: Runner, answer: Callable[[ranks_pb2.StepPlan, StepOutput], None]) -> None:
        self._runner = runner
        self._answer = answer
        self._open: _Open | None = None

    @property
    def is_open(self) -> bool:
        """True if a step is to be finished."""
        return self._open is not None

    def begin(self, plan: ranks_pb2.StepPlan, masks: MaskSource = no_masks) -> None:
        """Begin the plan's step, before or after the open one is finished, and leave it open if it can be followed.

        Raises the runner's errors of either step; the open step is answered even if this one fails to begin.
        """
        before, self._open = self._open, None
        if before is not None and not before.step.may_be_followed_by(plan):
            self._finish(before)
            before = None
        try:
            begun = _Open(plan, self._runner.begin(plan, masks))
        finally:
            if before is not None:
                self._finish(before)
        if begun.step.can_be_followed:
            self._open = begun
        else:
            self._finish(begun)

    def rest(self, wait: Callable[[float], bool]) -> None:
        """Wait until an event comes, or until the open step is done, and finish it then. Return at once without a step.

        `wait` waits for so many seconds and returns whether an event has come.
        """
        while self._open is not None and not wait(LOOK_S):
            if self._open.step.is_done:
                self.finish()

    def finish(self) -> None:
        """Finish the open step, if there is one."""
        step, self._open = self._open, None
        if step is not None:
            self._finish(step)

    def drop(self) -> None:
        """Forget the open step: nobody waits for its answer."""
        self._open = None

    def _finish(self, open_step: _Open) -> None:
        self._answer(open_step.plan, open_step.step.finish())
