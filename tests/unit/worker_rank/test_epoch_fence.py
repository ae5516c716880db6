from __future__ import annotations

import threading

import pytest

from hetero_worker.distributed.exchange import LocalExchange
from hetero_worker.errors import ExchangeAborted
from hetero_worker.process.epoch_fence import EpochFence

pytestmark = pytest.mark.unit

LONG_S = 60.0


class WatchedExchange(LocalExchange):
    def __init__(self) -> None:
        self.aborts = 0

    def abort(self) -> None:
        self.aborts += 1


def fence(patience_s: float = LONG_S) -> tuple[EpochFence, threading.Event]:
    gave_up = threading.Event()
    return EpochFence(patience_s=patience_s, give_up=gave_up.set), gave_up


def test_abort_wakes_the_exchange_of_its_epoch() -> None:
    guard, _ = fence()
    exchange = WatchedExchange()
    guard.enter(3)
    guard.adopt(exchange.abort)

    guard.abort(3)

    assert exchange.aborts == 1
    assert guard.aborted
    with pytest.raises(ExchangeAborted):
        guard.check()
    guard.leave()


def test_abort_of_an_older_epoch_does_nothing() -> None:
    guard, _ = fence()
    exchange = WatchedExchange()
    guard.enter(3)
    guard.adopt(exchange.abort)

    guard.abort(2)

    assert exchange.aborts == 0
    assert not guard.aborted


def test_abort_that_overtakes_its_form_group_is_found_at_the_entrance() -> None:
    guard, _ = fence()
    guard.abort(3)

    with pytest.raises(ExchangeAborted):
        guard.enter(3)
    guard.leave()
    guard.enter(4)

    assert not guard.aborted


def test_abort_between_entering_and_the_exchange_is_found_at_adoption() -> None:
    guard, _ = fence()
    guard.enter(1)
    guard.abort(1)

    with pytest.raises(ExchangeAborted):
        guard.adopt(WatchedExchange().abort)
    guard.leave()


def test_gives_up_when_the_epoch_is_not_left_in_time() -> None:
    guard, gave_up = fence(patience_s=0.01)
    guard.enter(1)
    guard.abort(1)

    assert gave_up.wait(10)


def test_leaving_calls_the_watchdog_off() -> None:
    guard, gave_up = fence(patience_s=0.2)
    guard.enter(1)
    guard.abort(1)
    guard.leave()

    assert not gave_up.wait(0.4)


def test_work_worth_finishing_is_let_finish_and_watched_afterwards() -> None:
    guard, gave_up = fence(patience_s=0.05)
    guard.enter(1)
    with guard.patient():
        guard.abort(1)
        assert not gave_up.wait(0.3)
    assert gave_up.wait(10)


def test_no_work_is_worth_finishing_when_life_is_over() -> None:
    guard, gave_up = fence(patience_s=0.01)
    guard.enter(1)
    with guard.patient():
        guard.close()
        assert gave_up.wait(10)


def test_close_ends_every_epoch_to_come() -> None:
    guard, _ = fence()
    guard.close()

    with pytest.raises(ExchangeAborted):
        guard.enter(1)
