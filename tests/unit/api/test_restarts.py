"""How long a process that died waits, and when it is not started any more."""

from __future__ import annotations

import pytest

from hetero_api.host.restarts import RestartBudget, RestartPauses

pytestmark = pytest.mark.unit


def pauses_of(*did_well: bool, first_s: float = 0.5, longest_s: float = 30.0) -> list[float]:
    pauses = RestartPauses(first_s=first_s, longest_s=longest_s)
    return [pauses.next_pause_s(did_well=well) for well in did_well]


def test_the_first_new_start_is_at_once_and_the_next_pauses_double_to_the_longest() -> None:
    assert pauses_of(*[False] * 9) == [0, 0.5, 1, 2, 4, 8, 16, 30, 30]


def test_a_process_that_did_well_begins_without_a_pause_again() -> None:
    assert pauses_of(False, False, False, True, False) == [0, 0.5, 1, 0, 0.5]


def test_pauses_are_exhausted_once_the_longest_was_taken() -> None:
    pauses = RestartPauses(first_s=1, longest_s=2)
    seen = []
    for _ in range(3):
        seen.append(pauses.is_exhausted)
        pauses.next_pause_s(did_well=False)
    assert (seen, pauses.is_exhausted) == ([False, False, False], True)
    pauses.next_pause_s(did_well=True)
    assert not pauses.is_exhausted


def test_a_budget_counts_the_deaths_within_its_window_only() -> None:
    now_s = [0.0]
    budget = RestartBudget(max_restarts=2, window_s=10, clock=lambda: now_s[0])
    answers = []
    for now_s[0] in (0.0, 1.0, 2.0, 9.0, 11.5, 13.0, 30.0):
        answers.append(budget.spend())
    assert answers == [True, True, False, False, False, False, True]


def test_a_budget_of_nothing_allows_nothing() -> None:
    assert not RestartBudget(max_restarts=0, window_s=10).spend()
