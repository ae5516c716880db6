"""Pauses and the budget between epochs."""

from __future__ import annotations

import pytest

from hetero_gateway.group.recovery import LONGEST_PAUSE_S, EpochRestarts
from tests.unit.group.group_setup import group_settings, with_recovery

pytestmark = pytest.mark.unit


class Bench:
    def __init__(self, *, max_restarts: int = 1000, window_s: float = 100.0) -> None:
        self.now = 50.0
        settings = with_recovery(group_settings(), max_restarts=max_restarts, window_seconds=window_s)
        self.restarts = EpochRestarts(settings, clock=lambda: self.now)

    def end(
        self,
        *,
        ran_well: bool = False,
        is_orderly: bool = False,
        permanent: bool = False,
        reason: str = "a rank left",
        present: str = "ab",
    ) -> float:
        """An epoch ends with a process of each letter; the pause."""
        self.restarts.note_end(reason, permanent=permanent, ran_well=ran_well, is_orderly=is_orderly, present=present)
        return self.restarts.pause_left_s


def test_the_first_epoch_waits_for_nothing() -> None:
    assert Bench().restarts.pause_left_s == 0


def test_pauses_begin_with_none_and_double_up_to_the_longest() -> None:
    bench = Bench()
    assert [bench.end() for _ in range(9)] == [0, 0.5, 1, 2, 4, 8, 16, LONGEST_PAUSE_S, LONGEST_PAUSE_S]


def test_an_epoch_that_ran_well_costs_the_next_one_no_time() -> None:
    bench = Bench()
    assert [bench.end(ran_well=well) for well in (False, False, True, True, False, False)] == [0, 0.5, 0, 0, 0.5, 1]


def test_a_pause_passes() -> None:
    bench = Bench()
    bench.end()
    bench.end()
    bench.now += 0.4
    assert bench.restarts.pause_left_s == pytest.approx(0.1)
    bench.now += 1
    assert bench.restarts.pause_left_s == 0


def test_the_outlook_tells_how_long() -> None:
    bench = Bench()
    bench.end()
    assert bench.restarts.outlook == ""
    bench.end()
    assert bench.restarts.outlook == "next try in 0.5 s"


def test_the_budget_is_of_the_window() -> None:
    bench = Bench(max_restarts=2, window_s=100.0)
    for _ in range(2):
        bench.end(ran_well=True)
        assert bench.restarts.failure is None
        bench.now += 51
    bench.end(ran_well=True)
    assert bench.restarts.failure is None
    assert bench.end(ran_well=True) == LONGEST_PAUSE_S
    assert bench.restarts.failure == (
        "a rank left; the group has ended more than spec.recovery.maxRestarts (2) times within 100 s"
    )


def test_an_orderly_end_neither_spends_the_budget_nor_costs_time() -> None:
    bench = Bench(max_restarts=1)
    bench.end()
    assert [bench.end(is_orderly=True) for _ in range(9)] == [0.0] * 9
    assert bench.restarts.failure is None
    bench.end()
    assert bench.restarts.failure is not None


def test_a_used_up_budget_needs_a_new_process_and_the_longest_pause() -> None:
    bench = Bench(max_restarts=0)
    bench.end()
    assert bench.restarts.outlook == "a new process is tried in 30.0 s"
    bench.restarts.reconsider("abc")
    assert bench.restarts.failure is not None
    bench.now += LONGEST_PAUSE_S
    bench.restarts.reconsider("a")
    assert bench.restarts.failure is not None
    bench.restarts.reconsider("ac")
    assert bench.restarts.failure is None


def test_a_permanent_failure_needs_a_new_process_only() -> None:
    bench = Bench()
    bench.end(permanent=True, reason="a damaged file")
    bench.end(reason="its consequence")
    assert (bench.restarts.failure, bench.restarts.ended_reason) == ("a damaged file", "a damaged file")
    bench.now += 1
    bench.restarts.reconsider("ab")
    assert bench.restarts.failure == "a damaged file"
    bench.restarts.reconsider("ac")
    assert bench.restarts.failure is None


def test_a_failure_that_came_second_is_what_is_told() -> None:
    bench = Bench()
    bench.end(reason="a peer left")
    bench.restarts.note_failure("a damaged file", present="ab")
    assert (bench.restarts.failure, bench.restarts.ended_reason) == ("a damaged file", "a damaged file")
