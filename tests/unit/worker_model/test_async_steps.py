"""Answers come in the order of the plans, each as soon as it may, whatever comes next and whatever fails."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hetero_api.v1 import ranks_pb2
from hetero_worker.process.async_steps import LOOK_S, AsyncSteps
from hetero_worker.runners.base import StepOutput
from tests.support.fake_runner import FakeRunner

pytestmark = pytest.mark.unit


class Desk:
    """AsyncSteps of a runner whose steps may follow one another; `runner.said` has the answers, too."""

    def __init__(self, *, is_async: bool = True) -> None:
        self.runner = FakeRunner()
        self.runner.is_async = is_async
        self.steps = AsyncSteps(self.runner, self._answer)

    def _answer(self, plan: ranks_pb2.StepPlan, output: StepOutput) -> None:
        assert [token.slot for token in output.sampled] == list(plan.decode_slots)
        self.runner.said.append(f"answer {plan.step_id}")

    @property
    def said(self) -> str:
        return ", ".join(self.runner.said)


def decode(step_id: int) -> ranks_pb2.StepPlan:
    return ranks_pb2.StepPlan(step_id=step_id, decode_slots=[3])


def never(timeout_s: float) -> bool:
    """Nothing comes."""
    assert timeout_s == LOOK_S
    return False


def test_the_next_step_begins_before_the_open_one_is_finished() -> None:
    desk = Desk()
    desk.steps.begin(decode(1))
    assert (desk.said, desk.steps.is_open) == ("begin 1", True)
    desk.steps.begin(decode(2))
    assert (desk.said, desk.steps.is_open) == ("begin 1, begin 2, finish 1, answer 1", True)


@pytest.mark.parametrize(
    "plan", [ranks_pb2.StepPlan(step_id=2), ranks_pb2.StepPlan(step_id=2, decode_slots=[3], masked_slots=[3])]
)
def test_a_plan_that_cannot_follow_begins_when_the_open_step_is_answered(plan: ranks_pb2.StepPlan) -> None:
    desk = Desk()
    desk.steps.begin(decode(1))
    desk.steps.begin(plan, lambda: [b"\xff"])
    assert desk.said.startswith("begin 1, finish 1, answer 1, begin 2")


def test_steps_that_cannot_be_followed_are_answered_at_once() -> None:
    desk = Desk(is_async=False)
    for number in (1, 2):
        desk.steps.begin(decode(number))
        assert not desk.steps.is_open
    assert desk.said == "begin 1, finish 1, answer 1, begin 2, finish 2, answer 2"


def test_rest_finishes_a_step_that_is_done_while_nothing_comes() -> None:
    desk = Desk()
    desk.steps.rest(never)  # nothing is open
    desk.steps.begin(decode(1))
    looks: list[float] = []

    def wait(timeout_s: float) -> bool:
        looks.append(timeout_s)
        if len(looks) == 3:
            desk.runner.computed.set()
        return False

    desk.steps.rest(wait)
    assert looks == [LOOK_S] * 3
    assert (desk.said, desk.steps.is_open) == ("begin 1, finish 1, answer 1", False)


def test_rest_ends_with_the_step_open_when_something_comes() -> None:
    desk = Desk()
    desk.steps.begin(decode(1))
    desk.runner.computed.set()
    desk.steps.rest(lambda timeout_s: True)
    assert (desk.said, desk.steps.is_open) == ("begin 1", True)
    desk.steps.finish()
    desk.steps.finish()
    assert desk.said == "begin 1, finish 1, answer 1"


def _raising(problem: str) -> Callable[[], None]:
    def fail() -> None:
        raise RuntimeError(problem)

    return fail


def test_the_open_step_is_answered_though_the_next_cannot_begin() -> None:
    desk = Desk()
    desk.steps.begin(decode(1))
    desk.runner.on_execute = _raising("no memory")
    with pytest.raises(RuntimeError, match="no memory"):
        desk.steps.begin(decode(2))
    assert (desk.said, desk.steps.is_open) == ("begin 1, begin 2, finish 1, answer 1", False)


def test_a_step_that_cannot_be_finished_is_not_answered_and_left_behind() -> None:
    desk = Desk()
    desk.steps.begin(decode(1))
    desk.runner.on_finish = _raising("no token")
    with pytest.raises(RuntimeError, match="no token"):
        desk.steps.begin(decode(2))
    assert (desk.said, desk.steps.is_open) == ("begin 1, begin 2, finish 1", False)


def test_a_step_that_was_dropped_is_not_answered() -> None:
    desk = Desk()
    desk.steps.begin(decode(1))
    desk.steps.drop()
    desk.steps.finish()
    assert desk.said == "begin 1"
