"""How long a rank that died waits, and when it is given up."""

from __future__ import annotations

import pytest

from hetero_worker.pod.restarts import RestartPauses

pytestmark = pytest.mark.unit


def test_pauses_double_to_a_minute_and_then_it_is_given_up() -> None:
    pauses = RestartPauses()
    assert [pauses.next_pause_s(5.0) for _ in range(8)] == [1, 2, 4, 8, 16, 32, 60, None]


def test_a_rank_that_ran_well_begins_with_a_second_again() -> None:
    pauses = RestartPauses()
    assert [pauses.next_pause_s(ran_s) for ran_s in (1, 1, 299, 300, 1, 1000)] == [1, 2, 4, 1, 2, 1]


def test_one_that_was_given_up_after_running_well_is_not() -> None:
    pauses = RestartPauses(longest_s=2)
    assert [pauses.next_pause_s(ran_s) for ran_s in (1, 1, 1, 400)] == [1, 2, None, 1]
