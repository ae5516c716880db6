"""StepChain: drives a runner through plans as they come, so that its device need not wait for the host between steps.

A step that can be followed is not finished at once: whoever has the plans waits, until the next thing comes or the
step is done. A plan that may follow begins first, and then the step before it is finished and answered; before anything
else the step is finished. So answers go out in the order of the plans, each as soon as it is known, but for the time
that it takes to begin one step. On a rank that does not chain, every step is finished as it is begun.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from hetero_api.v1 import ranks_pb2
from hetero_worker.runners.base import MaskSource, Runner, StepOutput, StepUnderWay, no_masks

LOOK_S: Final = 5e-5
"""How long to wait for the next thing before looking whether the step is done: nobody can wait for both. It delays an
answer that nothing follows by about as much; a step that is followed is waited for by itself."""


class _Open(NamedTuple):
    """A step that is not answered yet."""

    plan: ranks_pb2.StepPlan
    step: StepUnderWay


class StepChain:
    """On one thread. `answer` is told what became of each plan, in their order."""

    def __init__(self, runner: Runner, answer: Callable[[ranks_pb2.StepPlan, StepOutput], None]) -> None:
        self._runner = runner
        self._answer = answer
        self._open: _Open | None = None

    @property
    def is_open(self) -> bool:
        """Whether a step is to be finished."""
        return self._open is not None

    def begin(self, plan: ranks_pb2.StepPlan, masks: MaskSource = no_masks) -> None:
        """Begin the plan's step, now or when the open one is finished, and leave it open if it can be followed.

        Raises what the runner does, of either; an open step is answered whatever becomes of this one.
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
        """Until the next thing comes, or the open step is done, and then finished; at once if there is none.

        `wait` waits for so many seconds and says whether something has come.
        """
        while self._open is not None and not wait(LOOK_S):
            if self._open.step.is_done:
                self.finish()

    def finish(self) -> None:
        """The open step, if there is one."""
        step, self._open = self._open, None
        if step is not None:
            self._finish(step)

    def drop(self) -> None:
        """Whoever waits for answers is gone."""
        self._open = None

    def _finish(self, open_step: _Open) -> None:
        self._answer(open_step.plan, open_step.step.finish())
