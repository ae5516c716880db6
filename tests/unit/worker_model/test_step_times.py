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
