"""A rank whose steps overlap: when its gateway hears of them, with all that comes in between."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from hetero_api.contract import EXIT_FAILURE, EXIT_OK
from hetero_api.v1 import ranks_pb2
from tests.support.fake_runner import FakeRunner
from tests.support.scripted_gateway import ScriptedGateway
from tests.unit.worker_rank.test_state_machine import (
    expect_beats,
    form_message,
    joined,
    load_message,
    masked_step,
    serve_epoch,
    shut_down,
    step,
)

pytestmark = pytest.mark.unit


def overlapping() -> FakeRunner:
    """Its device is never done before a step is finished."""
    runner = FakeRunner()
    runner.is_async = True
    return runner


def results(gateway: ScriptedGateway, count: int) -> list[int]:
    return [gateway.expect("step_result").step_result.step_id for _ in range(count)]


def test_a_plan_that_is_there_begins_before_the_step_before_is_answered(tmp_path: Path) -> None:
    runner = overlapping()
    with joined(tmp_path, runner=runner) as (gateway, rank):
        serve_epoch(gateway, 1)
        for number in (1, 2, 3):
            gateway.tell(1, step_plan=step(number, 0))
        told = results(gateway, 2)
        runner.computed.set()  # nothing comes behind the third
        told += results(gateway, 1)
        beat = rank.heartbeat.read()
        shut_down(gateway, 1, rank)

    assert told == [1, 2, 3]
    assert runner.said == ["begin 1", "begin 2", "finish 1", "begin 3", "finish 2", "finish 3"]
    assert beat.steps == 3


def test_a_step_that_nothing_follows_is_answered_when_it_is_done_and_is_work_till_then(tmp_path: Path) -> None:
    runner = overlapping()
    with joined(tmp_path, runner=runner) as (gateway, rank):
        gateway.expect("hello")
        gateway.tell(1, form_group=form_message(heartbeat_interval_s=0.05))
        gateway.hear_beside_heartbeats("formed")
        gateway.tell(1, load_model=load_message())
        gateway.hear_beside_heartbeats("loaded")
        gateway.tell(1, allocate_cache=ranks_pb2.AllocateCache(num_blocks=8, block_size=16))
        gateway.hear_beside_heartbeats("allocated")
        gateway.tell(1, step_plan=step(1, 0))
        beats = expect_beats(gateway, 4)
        while (working := rank.heartbeat.read()).due_s == 0:
            assert runner.said == ["begin 1"] or not runner.said
        runner.computed.set()
        gateway.hear_beside_heartbeats("step_result")
        gateway.tell(1, abort=ranks_pb2.Abort(reason="test"))
        gateway.hear_beside_heartbeats("hello")
        waiting = rank.heartbeat.read()
        shut_down(gateway, 1, rank)

    assert beats == [(1, 0)] * 4, "no step was finished"
    assert 0 < working.due_s - time.monotonic() <= 2 * 20
    assert (working.steps, waiting.steps, waiting.due_s) == (0, 1, 0)


SLEEP = ranks_pb2.StepPlan(step_id=2, command=ranks_pb2.GroupCommand(sleep=ranks_pb2.SleepCommand(level=1)))


@pytest.mark.parametrize(
    "messages",
    [
        [{"step_plan": SLEEP}],
        [{"step_plan": step(2)}],
        [{"step_plan": masked_step(2)}, {"token_masks": ranks_pb2.TokenMasks(step_id=2, masks=[b"\xff"])}],
    ],
    ids=["a command", "a release", "masks"],
)
def test_what_cannot_follow_waits_for_the_answer(messages: list[dict[str, Any]], tmp_path: Path) -> None:
    runner = overlapping()
    with joined(tmp_path, runner=runner) as (gateway, rank):
        serve_epoch(gateway, 1)
        gateway.tell(1, step_plan=step(1, 0))
        for message in messages:
            gateway.tell(1, **message)
        first = results(gateway, 1)
        runner.computed.set()
        second = results(gateway, 1)
        shut_down(gateway, 1, rank)

    assert (first, second) == ([1], [2])
    assert runner.said == ["begin 1", "finish 1", "begin 2", "finish 2"]


@pytest.mark.parametrize(
    ("epoch", "body", "complaint"),
    [
        (1, {"step_plan": step(3, 0)}, "sent step 3, expected step 2"),
        (2, {"step_plan": step(2, 0)}, "of epoch 2 in epoch 1"),
        (1, {"token_masks": ranks_pb2.TokenMasks(step_id=1)}, "token_masks"),
    ],
)
def test_what_does_not_fit_is_refused_behind_the_answer(
    epoch: int, body: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    with joined(tmp_path, runner=overlapping()) as (gateway, rank):
        serve_epoch(gateway, 1)
        gateway.tell(1, step_plan=step(1, 0))
        gateway.tell(epoch, **body)
        told = results(gateway, 1)
        failure = gateway.expect("failure").failure
        shut_down(gateway, 1, rank)

    assert told == [1]
    assert complaint in failure.message


def _fail() -> None:
    raise RuntimeError("out of luck")


def test_a_step_that_cannot_begin_is_reported_behind_the_answer_to_the_one_before(tmp_path: Path) -> None:
    runner = overlapping()
    with joined(tmp_path, runner=runner) as (gateway, rank):
        serve_epoch(gateway, 1)
        runner.on_finish = lambda: setattr(runner, "on_execute", _fail)
        for number in (1, 2, 3):
            gateway.tell(1, step_plan=step(number, 0))
        told = results(gateway, 2)
        failure = gateway.expect("failure")
        gateway.tell(1, abort=ranks_pb2.Abort(reason="rank 0 failed"))
        runner.on_finish = runner.on_execute = lambda: None
        runner.computed.set()
        serve_epoch(gateway, 2)
        gateway.tell(2, step_plan=step(1, 0))
        assert results(gateway, 1) == [1]
        shut_down(gateway, 2, rank)

    assert told == [1, 2]
    assert (failure.epoch, failure.failure.message) == (1, "RuntimeError: out of luck")


def test_a_step_that_cannot_be_finished_is_reported_once_and_the_next_epoch_forms(tmp_path: Path) -> None:
    runner = overlapping()
    with joined(tmp_path, runner=runner) as (gateway, rank):
        serve_epoch(gateway, 1)
        runner.on_finish = _fail
        runner.computed.set()
        gateway.tell(1, step_plan=step(1, 0))
        gateway.expect("failure")
        gateway.tell(1, step_plan=step(2, 0))
        gateway.tell(1, abort=ranks_pb2.Abort(reason="rank 0 failed"))
        serve_epoch(gateway, 2)
        shut_down(gateway, 2, rank)

    assert runner.said == ["begin 1", "finish 1"]


def test_a_step_under_way_is_finished_before_an_abort_is_obeyed(tmp_path: Path) -> None:
    runner = overlapping()
    with joined(tmp_path, runner=runner) as (gateway, rank):
        serve_epoch(gateway, 1)
        gateway.tell(1, step_plan=step(1, 0))
        gateway.tell(1, abort=ranks_pb2.Abort(reason="a peer is gone"))
        assert results(gateway, 1) == [1]
        serve_epoch(gateway, 2)
        gateway.tell(2, step_plan=step(1, 0))
        gateway.tell(2, step_plan=step(2, 0))
        assert results(gateway, 1) == [1]
        shut_down(gateway, 2, rank)
        assert results(gateway, 1) == [2]
        gateway.expect_end()

    assert not rank.gave_up.is_set()


@pytest.mark.parametrize("by", ["leave", "hang up"])
def test_the_end_of_life_finds_no_step_under_way(by: str, tmp_path: Path) -> None:
    runner = overlapping()
    with joined(tmp_path, runner=runner) as (gateway, rank):
        serve_epoch(gateway, 1)
        gateway.tell(1, step_plan=step(1, 0))
        if by == "leave":
            gateway.tell(1, step_plan=step(2, 0))
            assert results(gateway, 1) == [1]
            rank.leave_at_once()
        else:
            gateway.hang_up()
        assert rank.exit_code() == (EXIT_OK if by == "leave" else EXIT_FAILURE)

    begun, finished = ([said for said in runner.said if said.startswith(what)] for what in ("begin", "finish"))
    assert len(begun) == len(finished) > 0
