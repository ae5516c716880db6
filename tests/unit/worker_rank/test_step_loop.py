"""Answers that travel together: which wait for one another, for how long, and what they never wait behind."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from hetero_api.host.heartbeat import Heartbeat, HeartbeatMemory
from hetero_api.v1 import ranks_pb2
from hetero_worker.distributed.exchange import LocalExchange, Traffic
from hetero_worker.errors import ProtocolError
from hetero_worker.process.gateway_link import Arrival, Event, LeaveRequested, one_by_one
from hetero_worker.process.step_loop import HOLD_S, StepLoop
from hetero_worker.runners.base import MaskSource, SampledToken, StepOutput, no_masks
from hetero_worker.runners.recorded.sampling import MAX_STEPS
from hetero_worker.runners.running_step import FinishedStep

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
    """Each step takes as long, and draws a token. In a run the one that `fails` raises."""

    def __init__(self, step_s: float, *, has_multi_step: bool) -> None:
        self._step_s = step_s
        self.home: int | None = None
        self.has_multi_step = has_multi_step
        self.runs: list[list[int]] = []
        """Steps of each."""
        self.fails: int | None = None
        self.on_step: Callable[[], None] = lambda: None

    def begin(self, plan: ranks_pb2.StepPlan, masks: MaskSource = no_masks) -> FinishedStep:
        if plan.masked_slots:
            masks()
        time.sleep(self._step_s)
        return FinishedStep(StepOutput(sampled=[SampledToken(slot, plan.step_id) for slot in plan.decode_slots]))

    def execute_many(self, plans: Sequence[ranks_pb2.StepPlan], on_step: Callable[[], None]) -> Iterator[StepOutput]:
        self.runs.append([plan.step_id for plan in plans])
        for _ in plans:
            time.sleep(self._step_s)
            on_step()
            self.on_step()
        for plan in plans:
            if plan.step_id == self.fails:
                raise ProtocolError(f"step plan {plan.step_id}: does not fit")
            yield StepOutput(sampled=[SampledToken(slot, plan.step_id) for slot in plan.decode_slots])


def plan(
    step_id: int, *, span: bool = False, masked: Sequence[int] = (), slots: Sequence[int] = (0,), **more: Any
) -> ranks_pb2.StepPlan:
    spans = [ranks_pb2.ScheduledSpan(slot=1, num_tokens=2, sample=True)] if span else []
    return ranks_pb2.StepPlan(step_id=step_id, decode_slots=slots, spans=spans, masked_slots=masked, **more)


def arrival(**body: object) -> Arrival:
    return Arrival(time.monotonic(), ranks_pb2.GatewayMessage(epoch=EPOCH, **body))  # type: ignore[arg-type]


@dataclass
class Scene:
    link: PlayedLink
    work: StepLoop
    runner: PlayedRunner
    memory: HeartbeatMemory

    def do(self, *plans: ranks_pb2.StepPlan) -> None:
        """All have come; work them off."""
        self.link.coming.extend(arrival(step_plan=each) for each in plans)
        while self.link.coming:
            event = self.link.coming[0]
            if not isinstance(event, Arrival) or not event.message.HasField("step_plan"):
                break
            self.link.coming.popleft()
            self.work.take(event)


def scene(tmp_path: Path, *, step_s: float = 0.0, rank: int = 0, has_multi_step: bool = False) -> Scene:
    link, memory = PlayedLink(), HeartbeatMemory()
    runner = PlayedRunner(step_s, has_multi_step=has_multi_step)
    work = StepLoop(runner, link, Heartbeat.open(Path(memory.path)))  # type: ignore[arg-type]
    work.begin_epoch(EPOCH, rank=rank)
    return Scene(link, work, runner, memory)


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


class PlayedExchange(LocalExchange):
    """Each look finds a tenth of a second more of exchange."""

    seconds = 0.0

    @property
    def traffic(self) -> Traffic:  # type: ignore[override]
        self.seconds += 0.1
        return Traffic(seconds=self.seconds)


def test_heartbeats_tell_the_epochs_steps_and_their_times_by_phase(tmp_path: Path) -> None:
    it = scene(tmp_path, step_s=0.12, rank=1)
    it.work.meet_over(PlayedExchange())
    it.do(plan(1, slots=(0, 1)), plan(2, span=True), plan(3, slots=()))
    decode, prefill = it.work.heartbeat().decode, it.work.heartbeat().prefill
    assert (it.work.heartbeat().step_id, decode.steps, decode.rows, prefill.steps, prefill.rows) == (3, 1, 2, 1, 3)
    for times in (decode, prefill):
        assert times.seconds >= 0.12
        assert times.exchange_s == pytest.approx(0.1)
    it.work.begin_epoch(EPOCH + 1, rank=1)
    assert it.work.heartbeat() == ranks_pb2.Heartbeat(decode=ranks_pb2.StepTimes(), prefill=ranks_pb2.StepTimes())


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


def test_plans_that_go_on_with_the_same_sequences_are_a_run_once_it_is_known_how_long_steps_take(
    tmp_path: Path,
) -> None:
    it = scene(tmp_path, step_s=0.001, has_multi_step=True)
    it.do(plan(1), *map(plan, range(2, 6)))
    assert it.runner.runs == [[1], [2, 3, 4, 5]]
    assert it.link.told == [[1, 2, 3, 4, 5]]
    results = [it.link.said[0].step_result, *it.link.said[0].further_results]
    assert [list(result.token_ids) for result in results] == [[1], [2], [3], [4], [5]]
    assert all(0.001 <= result.step_s < 0.01 for result in results)
    assert it.memory.read().steps == 5


@pytest.mark.parametrize(
    "other",
    [
        {"span": True}, {"slots": (0, 1)}, {"slots": (1,)}, {"slots": (), "span": True}, {"released_slots": [3]},
        {"new_sequences": [ranks_pb2.NewSequence(slot=4)]},
        {"slots": (), "command": ranks_pb2.GroupCommand(reset_cache=ranks_pb2.AllocateCache())},
    ],
    ids="-".join,
)  # fmt: skip
def test_a_run_ends_before_any_other_plan(other: dict[str, Any], tmp_path: Path) -> None:
    it = scene(tmp_path, step_s=0.001, has_multi_step=True)
    it.do(plan(1), plan(2), plan(3), plan(4, **other), plan(5))
    assert it.runner.runs[:2] == [[1], [2, 3]]
    assert it.runner.runs[-1][-1] == 5
    assert [step for steps in it.link.told for step in steps] == [1, 2, 3, 4, 5]


def test_blocks_do_not_end_a_run_but_masks_do(tmp_path: Path) -> None:
    it = scene(tmp_path, step_s=0.001, has_multi_step=True)
    masks = arrival(token_masks=ranks_pb2.TokenMasks(step_id=4, masks=[b"\xff"]))
    plans = [plan(1), plan(2), plan(3, block_slots=[0], block_ids=[9]), plan(4, masked=[0])]
    it.link.coming.extend([*(arrival(step_plan=each) for each in plans), masks])
    it.do()
    assert it.runner.runs == [[1], [2, 3]]
    assert it.link.told == [[1, 2, 3], [4]]


def test_a_run_takes_no_longer_than_answers_may_wait(tmp_path: Path) -> None:
    it = scene(tmp_path, step_s=HOLD_S / 3.5, has_multi_step=True)
    it.do(*map(plan, range(1, 10)))
    assert [step for run in it.runner.runs for step in run] == list(range(1, 10))
    assert max(map(len, it.runner.runs)) in (2, 3)
    assert max(map(len, it.link.told)) <= 4
    assert [step for steps in it.link.told for step in steps] == list(range(1, 10))


def test_a_run_has_no_more_steps_than_there_is_room_for(tmp_path: Path) -> None:
    it = scene(tmp_path, has_multi_step=True)
    it.do(*map(plan, range(1, 30)))
    assert max(map(len, it.runner.runs)) == MAX_STEPS
    assert [step for run in it.runner.runs for step in run] == list(range(1, 30))


def test_another_number_of_rows_is_another_pace(tmp_path: Path) -> None:
    it = scene(tmp_path, has_multi_step=True)
    it.do(plan(1), plan(2), plan(3), plan(4, slots=(0, 1)), plan(5, slots=(0, 1)), plan(6, slots=(0, 1)))
    assert it.runner.runs == [[1], [2, 3], [4], [5, 6]]


def test_steps_before_one_that_fails_in_a_run_are_answered(tmp_path: Path) -> None:
    it = scene(tmp_path, has_multi_step=True)
    it.runner.fails = 4
    with pytest.raises(ProtocolError, match="step plan 4"):
        it.do(*map(plan, range(1, 7)))
    assert it.link.told == [[1, 2, 3]]
    assert it.work.last_step == 3


def test_each_step_of_a_run_is_seen_from_outside(tmp_path: Path) -> None:
    it = scene(tmp_path, has_multi_step=True)
    seen: list[int] = []
    it.runner.on_step = lambda: seen.append(it.memory.read().steps)
    it.do(*map(plan, range(1, 6)))
    assert seen == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("event", [LeaveRequested("by a signal"), arrival(abort=ranks_pb2.Abort())])
def test_what_ends_the_epoch_stays_in_the_link_behind_a_run(event: Event, tmp_path: Path) -> None:
    it = scene(tmp_path, has_multi_step=True)
    it.link.coming.extend([*(arrival(step_plan=plan(i)) for i in (1, 2, 3)), event, arrival(step_plan=plan(4))])
    it.do()
    assert it.runner.runs == [[1], [2, 3]]
    assert it.link.coming[0] is event


def test_plans_of_another_epoch_or_out_of_order_are_no_part_of_a_run(tmp_path: Path) -> None:
    it = scene(tmp_path, has_multi_step=True)
    it.do(plan(1))
    stale = Arrival(time.monotonic(), ranks_pb2.GatewayMessage(epoch=EPOCH + 1, step_plan=plan(3)))
    it.link.coming.append(stale)
    it.work.take(arrival(step_plan=plan(2)))
    assert it.link.coming == deque([stale])
    it.link.coming[0] = arrival(step_plan=plan(9))
    it.work.take(arrival(step_plan=plan(3)))
    assert it.runner.runs == [[1], [2], [3]]
    assert len(it.link.coming) == 1
