"""How a rank goes from one gateway to the next."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from hetero_api.contract import EXIT_FAILURE, EXIT_OK, EXIT_PERMANENT
from hetero_worker.process.reconnect import ReconnectingRank

pytestmark = pytest.mark.unit


@dataclass
class ScriptedSession:
    """A session that ends as the test says, after doing what it says."""

    exit_code: int = EXIT_FAILURE
    gateway_lost: bool = True
    was_in_group: bool = True
    during: Callable[[], object] = lambda: None
    left: list[str] = field(default_factory=list)
    was_closed: bool = False

    def run(self) -> int:
        self.during()
        return self.exit_code

    def request_leave(self, reason: str) -> None:
        self.left.append(reason)
        self.exit_code, self.gateway_lost = EXIT_OK, False

    def hang_up(self, timeout_s: float) -> None:
        self.was_closed = True


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Career:
    """A rank that has these sessions, one after another."""

    def __init__(self, *sessions: ScriptedSession, reconnect_timeout_s: float = 100.0) -> None:
        self.clock = Clock()
        self.patience: list[float] = []
        self.sessions = sessions
        self._next = list(sessions)
        self.rank = ReconnectingRank(
            self._begin, connect_timeout_s=7.0, reconnect_timeout_s=reconnect_timeout_s, first_pause_s=0.001,
            clock=self.clock,
        )  # fmt: skip

    def _begin(self, patience_s: float) -> Any:
        self.patience.append(patience_s)
        return self._next.pop(0)


def test_a_lost_gateway_is_followed_by_the_next() -> None:
    career = Career(ScriptedSession(), ScriptedSession(), ScriptedSession(EXIT_OK, gateway_lost=False))
    assert career.rank.run() == EXIT_OK
    assert career.patience == [7.0, 100.0, 100.0]
    assert all(session.was_closed for session in career.sessions)


def test_without_a_reconnect_timeout_there_is_one_session() -> None:
    career = Career(ScriptedSession(), reconnect_timeout_s=0)
    assert career.rank.run() == EXIT_FAILURE
    assert [session.was_closed for session in career.sessions] == [True]


def test_what_is_permanent_is_not_tried_again() -> None:
    career = Career(ScriptedSession(), ScriptedSession(EXIT_PERMANENT, gateway_lost=False))
    assert career.rank.run() == EXIT_PERMANENT


def test_patience_runs_from_the_last_group_and_ends() -> None:
    career = Career(*(ScriptedSession(was_in_group=index == 0) for index in range(4)))
    for index, session in enumerate(career.sessions):
        session.during = lambda index=index: setattr(career.clock, "now_s", 40.0 * (index + 1))  # type: ignore[misc]
    assert career.rank.run() == EXIT_FAILURE
    assert career.patience == [7.0, 100.0, 60.0, 20.0]


def test_a_request_to_leave_reaches_the_session_that_runs() -> None:
    session = ScriptedSession()
    career = Career(session)
    career.rank._first_pause_s = 600.0
    session.during = lambda: career.rank.request_leave("SIGTERM")
    assert career.rank.run() == EXIT_OK
    assert session.left == ["SIGTERM"]


def test_a_request_to_leave_ends_the_pause_between_two_gateways() -> None:
    session = ScriptedSession()
    career = Career(session)
    career.rank._first_pause_s = 600.0
    ended: list[int] = []
    living = threading.Thread(target=lambda: ended.append(career.rank.run()))
    living.start()
    while not session.was_closed:  # then it is between two gateways
        pass
    career.rank.request_leave("SIGTERM")
    living.join(20)
    assert ended == [EXIT_OK]
    assert career.patience == [7.0]


def test_a_request_before_the_first_session_is_heard() -> None:
    career = Career()
    career.rank.request_leave("SIGTERM")
    assert career.rank.run() == EXIT_OK
