"""How a rank goes from one gateway to the next."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from hetero_api.contract import EXIT_FAILURE, EXIT_OK, EXIT_PERMANENT
from hetero_worker.process.reconnect import ReconnectingRank, Session

pytestmark = pytest.mark.unit


@dataclass
class ScriptedLife:
    """A life that ends as the test says, after doing what it says."""

    exit_code: int = EXIT_FAILURE
    gateway_lost: bool = True
    was_in_group: bool = True
    during: Callable[[], object] = lambda: None
    left: list[str] = field(default_factory=list)

    def run(self) -> int:
        self.during()
        return self.exit_code

    def request_leave(self, reason: str) -> None:
        self.left.append(reason)
        self.exit_code, self.gateway_lost = EXIT_OK, False


class FinishedLinks:
    """Counts the links that were closed."""

    def __init__(self) -> None:
        self.count = 0

    def finish(self, timeout_s: float) -> None:
        self.count += 1


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Career:
    """A rank that has these lives, one after another."""

    def __init__(self, *lives: ScriptedLife, reconnect_timeout_s: float = 100.0) -> None:
        self.links, self.clock = FinishedLinks(), Clock()
        self.patience: list[float] = []
        self._lives = list(lives)
        self.rank = ReconnectingRank(
            self._begin, connect_timeout_s=7.0, reconnect_timeout_s=reconnect_timeout_s, first_pause_s=0.001,
            clock=self.clock,
        )  # fmt: skip

    def _begin(self, patience_s: float) -> Session:
        self.patience.append(patience_s)
        return Session(self._lives.pop(0), self.links)


def test_a_lost_gateway_is_followed_by_the_next() -> None:
    career = Career(ScriptedLife(), ScriptedLife(), ScriptedLife(EXIT_OK, gateway_lost=False))
    assert career.rank.run() == EXIT_OK
    assert career.patience == [7.0, 100.0, 100.0]
    assert career.links.count == 3


def test_without_a_reconnect_timeout_there_is_one_life() -> None:
    career = Career(ScriptedLife(), reconnect_timeout_s=0)
    assert career.rank.run() == EXIT_FAILURE
    assert career.links.count == 1


def test_what_is_permanent_is_not_tried_again() -> None:
    career = Career(ScriptedLife(), ScriptedLife(EXIT_PERMANENT, gateway_lost=False))
    assert career.rank.run() == EXIT_PERMANENT


def test_patience_runs_from_the_last_group_and_ends() -> None:
    career = Career(*(ScriptedLife(was_in_group=index == 0) for index in range(4)))
    for index, life in enumerate(career._lives):
        life.during = lambda index=index: setattr(career.clock, "now_s", 40.0 * (index + 1))  # type: ignore[misc]
    assert career.rank.run() == EXIT_FAILURE
    assert career.patience == [7.0, 100.0, 60.0, 20.0]


def test_a_request_to_leave_reaches_the_life_that_is_lived() -> None:
    life = ScriptedLife()
    career = Career(life)
    life.during = lambda: career.rank.request_leave("SIGTERM")
    assert career.rank.run() == EXIT_OK
    assert life.left == ["SIGTERM"]


def test_a_request_to_leave_ends_the_pause_between_two_gateways() -> None:
    life = ScriptedLife()
    career = Career(life)
    career.rank._first_pause_s = 600.0
    ended: list[int] = []
    living = threading.Thread(target=lambda: ended.append(career.rank.run()))
    living.start()
    while not career.links.count:  # then it is between two gateways
        pass
    career.rank.request_leave("SIGTERM")
    living.join(20)
    assert ended == [EXIT_OK]
    assert career.patience == [7.0]


def test_a_request_before_the_first_life_is_heard() -> None:
    career = Career()
    career.rank.request_leave("SIGTERM")
    assert career.rank.run() == EXIT_OK
