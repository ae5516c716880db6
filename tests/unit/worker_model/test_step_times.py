"""The gap between steps is the time from the end of one to the beginning of the next."""

from __future__ import annotations

import pytest

from hetero_worker.runners.step_times import IDLE_S, StepTimes

pytestmark = pytest.mark.unit


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def run(times: StepTimes, clock: Clock, *steps: tuple[float, float]) -> None:
    """Steps of (gap before it, work), in seconds."""
    for gap_s, work_s in steps:
        clock.now_s += gap_s
        times.begin()
        clock.now_s += work_s
        times.end()


def test_gaps_and_work_are_told_apart() -> None:
    clock = Clock()
    times = StepTimes(clock)
    run(times, clock, (5.0, 1.0), (0.001, 0.009), (0.002, 0.008), (0.003, 0.007))
    summary = times.summary()
    assert summary is not None
    assert summary.num_steps == 3
    assert summary.median_gap_s == pytest.approx(0.002)
    assert summary.median_work_s == pytest.approx(0.008)
    assert summary.p90_gap_s == pytest.approx(0.0028)
    assert summary.gap_share == pytest.approx(0.2)
    assert "median 2.00 ms" in str(summary)
    assert "20.0%" in str(summary)


def test_waiting_for_requests_is_no_gap() -> None:
    clock = Clock()
    times = StepTimes(clock)
    run(times, clock, (0.0, 0.01), (IDLE_S + 0.01, 0.01), (0.001, 0.01))
    summary = times.summary()
    assert summary is not None
    assert (summary.num_steps, round(summary.median_gap_s, 6)) == (1, 0.001)


def test_one_step_tells_nothing() -> None:
    clock = Clock()
    times = StepTimes(clock)
    run(times, clock, (0.0, 0.01))
    assert times.summary() is None


def test_only_the_latest_steps_count() -> None:
    clock = Clock()
    times = StepTimes(clock)
    run(times, clock, *[(0.1, 0.01)] * 100, *[(0.001, 0.01)] * 4096)
    summary = times.summary()
    assert summary is not None
    assert (summary.num_steps, round(summary.median_gap_s, 6), round(summary.p90_gap_s, 6)) == (4096, 0.001, 0.001)


def overlap(times: StepTimes, clock: Clock, *steps: float) -> None:
    """Each step but the last is followed while it is under way; seconds from one's end to the next one's."""
    for work_s in steps[:-1]:
        clock.now_s += work_s / 2
        times.follow(None)
        clock.now_s += work_s / 2
        times.end()
    clock.now_s += steps[-1]
    times.end()


def test_between_overlapping_steps_there_is_no_gap_and_their_work_is_the_time_between_their_ends() -> None:
    clock = Clock()
    times = StepTimes(clock)
    run(times, clock, (0.0, 1.0))
    clock.now_s += 0.002
    times.begin()
    overlap(times, clock, 0.004, 0.006, 0.008)
    summary = times.summary()
    assert summary is not None
    assert summary.num_steps == 3
    assert summary.median_gap_s == 0.0
    assert summary.median_work_s == pytest.approx(0.006)
    assert summary.gap_share == pytest.approx(2 / 20)
    assert summary.overlapped_share == pytest.approx(2 / 3)
    assert str(summary).endswith("; 66.7% began before the last was finished")


def test_a_device_that_ran_out_of_work_before_the_next_step_came_is_told_from_when_it_was_last_seen_at_work() -> None:
    clock = Clock()
    times = StepTimes(clock)
    run(times, clock, (0.0, 1.0))
    clock.now_s += 0.001
    times.begin()
    clock.now_s += 0.010
    busy_s = times.now()
    clock.now_s += 0.003
    times.follow(busy_s)
    clock.now_s += 0.001
    times.end()  # of the first, which had ended
    clock.now_s += 0.004
    times.end()
    summary = times.summary()
    assert summary is not None
    assert summary.num_steps == 2
    assert summary.gap_share == pytest.approx((0.001 + 0.003) / (0.001 + 0.003 + 0.010 + 0.005))
    assert summary.overlapped_share == 0.5


def test_steps_of_a_run_have_no_gap_but_the_first() -> None:
    clock = Clock()
    times = StepTimes(clock)
    run(times, clock, (0.0, 1.0))
    clock.now_s += 0.003
    times.begin()
    times.end_each([clock.now_s + 0.010, clock.now_s + 0.021, clock.now_s + 0.030])
    clock.now_s += 0.032
    run(times, clock, (0.0, 0.005))
    summary = times.summary()
    assert summary is not None
    assert (summary.num_steps, summary.overlapped_share) == (4, 0.0)
    assert summary.gap_share == pytest.approx((0.003 + 0.002) / (0.003 + 0.002 + 0.030 + 0.005))
    assert summary.median_work_s == pytest.approx(0.0095)


def test_steps_that_do_not_overlap_are_not_reported() -> None:
    clock = Clock()
    times = StepTimes(clock)
    run(times, clock, (0.0, 1.0), (0.001, 0.009))
    assert "before the last" not in str(times.summary())
