"""HomeCore: a thread is on its core while it works steps off, and elsewhere before and after."""

from __future__ import annotations

import os

import pytest

from hetero_worker.runners.recorded.home_core import HomeCore

pytestmark = pytest.mark.unit

NO_CPU = 1023


def test_a_thread_keeps_to_its_core_until_it_leaves() -> None:
    before, home = os.sched_getaffinity(0), HomeCore()
    try:
        for cpu in (max(before), max(before), min(before)):
            home.keep_to(cpu)
            assert os.sched_getaffinity(0) == {cpu}
        home.leave()
        assert os.sched_getaffinity(0) == before
        home.keep_to(max(before))
        home.keep_to(None)
        assert os.sched_getaffinity(0) == before
    finally:
        os.sched_setaffinity(0, before)


def test_a_core_that_cannot_be_had_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    before, home = os.sched_getaffinity(0), HomeCore()
    for _ in range(2):
        home.keep_to(NO_CPU)
        assert os.sched_getaffinity(0) == before
    assert [record.getMessage() for record in caplog.records] == [
        "steps run on any core: CPU 1023, which is left for them, is refused: Invalid argument"
    ]


def test_cores_that_were_taken_away_meanwhile_are_told(caplog: pytest.LogCaptureFixture) -> None:
    before, home = os.sched_getaffinity(0), HomeCore()
    try:
        home.keep_to(max(before))
        home._before = {NO_CPU}
        home.leave()
        assert os.sched_getaffinity(0) == {max(before)}
    finally:
        os.sched_setaffinity(0, before)
    assert [record.getMessage() for record in caplog.records] == [
        "CPUs [1023] were taken away while steps ran: Invalid argument"
    ]
