"""Answers that travel together: which wait for one another, for how long, and what they never wait behind."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from hetero_api.host.heartbeat import Heartbeat, HeartbeatMemory
from hetero_api.v1 import ranks_pb2
from hetero_worker.gateway_link import Arrival, Event, LeaveRequested, one_by_one
from hetero_worker.plan_work import HOLD_S, PlanWork
from hetero_worker.runners.base import MaskSource, SampledToken, StepOutput, no_masks
from hetero_worker.runners.begun_step import DoneStep

pytestmark = pytest.mark.unit

EPOCH = 3


@dataclass
class PlayedLink:
    """What came, and what was said."""

    coming: deque[Event] = field(default_factory=deque)
    said: list[ranks_pb2.RankMessage] = field(default_factory=list)

    def peek(self) -> Event | None:
        return self.coming[0] if self.coming else None

    def receive(self) -> Event:
        return self.coming.popleft()

    def put_back(self, event: Event) -> None:
        self.coming.appendleft(event)

    def send(self, message: ranks_pb2.RankMessage) -> None:
        self.said.append(message)

    @property
    def told(self) -> list[list[int]]:
        """Steps that each message answers."""
        return [[result.step_id for result in (message.step_result, *message.further_results)] for message in self.said]


class PlayedRunner:
    """Each step takes as long, and draws a token."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self.home: int | None = None

    def begin(self, plan: ranks_pb2.StepPlan, masks: MaskSource = no_masks) -> DoneStep:
        if plan.masked_slots:
            masks()
        time.sleep(self._step_s)
        return DoneStep(StepOutput(sampled=[SampledToken(slot, plan.step_id) for slot in plan.decode_slots]))


def plan(step_id: int, *, span: bool = False, masked: Sequence[int] = ()) -> ranks_pb2.StepPlan:
    spans = [ranks_pb2.ScheduledSpan(slot=1, num_tokens=2, sample=True)] if span else []
    return ranks_pb2.StepPlan(step_id=step_id, decode_slots=[0], spans=spans, masked_slots=masked)


def arrival(**body: object) -> Arrival:
    return Arrival(time.monotonic(), ranks_pb2.GatewayMessage(epoch=EPOCH, **body))  # type: ignore[arg-type]


@dataclass
class Scene:
    link: PlayedLink
    work: PlanWork
    runner: PlayedRunner

    def do(self, *plans: ranks_pb2.StepPlan) -> None:
        """All have come; work them off."""
        self.link.coming.extend(arrival(step_plan=each) for each in plans)
        while self.link.coming:
            event = self.link.coming[0]
            if not isinstance(event, Arrival) or not event.message.HasField("step_plan"):
                break
            self.link.coming.popleft()
            self.work.take(event)


def scene(tmp_path: Path, *, step_s: float = 0.0, rank: int = 0) -> Scene:
    link, memory = PlayedLink(), HeartbeatMemory()
    runner = PlayedRunner(step_s)
    work = PlanWork(runner, link, Heartbeat.open(Path(memory.path)))  # type: ignore[arg-type]
    work.begin_epoch(EPOCH, rank=rank)
    return Scene(link, work, runner)


def test_answers_to_short_steps_travel_together_if_more_are_coming(tmp_path: Path) -> None:
    it = scene(tmp_path)
    it.do(*map(plan, range(1, 5)))
    assert it.link.told == [[1, 2, 3, 4]]
    message = it.link.said[0]
    assert message.epoch == EPOCH
    assert [list(r.token_ids) for r in (message.step_result, *message.further_results)] == [[1], [2], [3], [4]]


def test_one_that_nothing_follows_is_told_at_once(tmp_path: Path) -> None:
    it = scene(tmp_path)
    for step_id in (1, 2, 3):
        it.do(plan(step_id))
    assert it.link.told == [[1], [2], [3]]


def test_none_waits_longer_than_so_long(tmp_path: Path) -> None:
    it = scene(tmp_path, step_s=HOLD_S / 3.5)
    it.do(*map(plan, range(1, 10)))
    assert [step for steps in it.link.told for step in steps] == list(range(1, 10))
    assert max(map(len, it.link.told)) <= 4
    assert len(it.link.told) < 9


def test_answers_to_long_steps_do_not_wait(tmp_path: Path) -> None:
    it = scene(tmp_path, step_s=HOLD_S * 1.1)
    it.do(*map(plan, range(1, 4)))
    assert it.link.told == [[1], [2], [3]]


def test_first_tokens_do_not_wait_nor_does_anything_behind_a_prefill_or_masks(tmp_path: Path) -> None:
    it = scene(tmp_path)
    it.do(plan(1, span=True), plan(2))
    assert it.link.told == [[1], [2]]
    it.do(plan(3), plan(4, span=True), plan(5))
    assert it.link.told[2:] == [[3], [4], [5]]


def test_masks_are_waited_for_with_nothing_held_back(tmp_path: Path) -> None:
    it = scene(tmp_path)
    masks = arrival(token_masks=ranks_pb2.TokenMasks(step_id=2, masks=[b"\xff"]))
    it.link.coming.extend([arrival(step_plan=plan(1)), arrival(step_plan=plan(2, masked=[0])), masks])
    it.do()
    assert it.link.told == [[1], [2]]


@pytest.mark.parametrize("event", [LeaveRequested("by a signal"), arrival(abort=ranks_pb2.Abort())])
def test_what_ends_the_epoch_is_no_step_to_wait_for(event: Event, tmp_path: Path) -> None:
    it = scene(tmp_path)
    it.link.coming.extend([arrival(step_plan=plan(1)), event])
    it.do()
    assert it.link.told == [[1]]


def test_other_ranks_say_nothing(tmp_path: Path) -> None:
    it = scene(tmp_path, rank=1)
    it.do(plan(1), plan(2))
    assert not it.link.told


def test_another_epoch_does_not_answer_for_the_last(tmp_path: Path) -> None:
    it = scene(tmp_path)
    it.link.coming.extend([arrival(step_plan=plan(1)), arrival(step_plan=plan(2))])
    first = it.link.receive()
    assert isinstance(first, Arrival)
    it.work.take(first)
    assert not it.link.told
    it.work.drop()
    it.link.coming.clear()
    it.work.begin_epoch(EPOCH, rank=0)
    it.do(plan(1))
    assert it.link.told == [[1]]


def test_plans_that_travel_together_come_one_by_one() -> None:
    message = ranks_pb2.GatewayMessage(epoch=EPOCH, step_plan=plan(1), further_plans=[plan(2), plan(3)])
    parts = list(one_by_one(message))
    assert [(part.epoch, part.step_plan.step_id) for part in parts] == [(EPOCH, 1), (EPOCH, 2), (EPOCH, 3)]
    assert all(not part.further_plans for part in parts)
    abort = ranks_pb2.GatewayMessage(epoch=EPOCH, abort=ranks_pb2.Abort())
    assert list(one_by_one(abort)) == [abort]


def test_the_thread_keeps_to_the_runners_core_from_step_to_step_only(tmp_path: Path) -> None:
    before, it = os.sched_getaffinity(0), scene(tmp_path)
    it.runner.home = max(before)
    command = ranks_pb2.GroupCommand(reset_cache=ranks_pb2.AllocateCache())
    seen: list[set[int]] = []
    try:
        for each in (plan(1), ranks_pb2.StepPlan(step_id=2, command=command), plan(3)):
            it.do(each)
            seen.append(os.sched_getaffinity(0))
        it.work.drop()
        assert os.sched_getaffinity(0) == before
    finally:
        os.sched_setaffinity(0, before)
    assert seen == [{max(before)}, before, {max(before)}]
