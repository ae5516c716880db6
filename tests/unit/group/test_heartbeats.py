"""Who is accused of silence, and who is not."""

from __future__ import annotations

import asyncio

import pytest

from hetero_gateway.group import recovery
from hetero_gateway.group.recovery import CHECK_S, FORMING_SILENCE_S, SERVING_SILENCE_S, HeartbeatWatch
from tests.unit.group.group_setup import wait_until

pytestmark = pytest.mark.unit


class Bench:
    """A watch over two ranks on a clock of the test's own."""

    def __init__(self) -> None:
        self.now = 100.0
        self.silent: list[tuple[int, str]] = []
        self.watch = HeartbeatWatch(
            range(2), on_silent=lambda rank, reason: self.silent.append((rank, reason)), clock=lambda: self.now
        )
        self.watch.tolerate(SERVING_SILENCE_S)

    def pass_time(self, seconds: float, *, beating: tuple[int, ...] = ()) -> None:
        """Time with a loop that turns."""
        end = self.now + seconds
        while self.now < end - 1e-9:
            self.now = min(end, self.now + CHECK_S)
            for rank in beating:
                self.watch.hear(rank)
            self.watch.look()

    def stall(self, seconds: float) -> None:
        """Time in which the loop did not turn, and the look that comes after it."""
        self.now += seconds
        self.watch.look()


def test_a_rank_that_says_nothing_is_told_once_with_the_time() -> None:
    bench = Bench()
    bench.pass_time(1.9, beating=(0,))
    assert bench.silent == []
    bench.pass_time(5.0, beating=(0,))
    assert [rank for rank, _ in bench.silent] == [1]
    assert bench.silent[0][1].startswith("said nothing for 2.")


def test_every_silent_rank_is_told() -> None:
    bench = Bench()
    bench.pass_time(2.5)
    assert [rank for rank, _ in bench.silent] == [0, 1]


def test_before_ranks_serve_more_silence_is_borne() -> None:
    bench = Bench()
    bench.watch.tolerate(FORMING_SILENCE_S)
    bench.pass_time(FORMING_SILENCE_S)
    assert bench.silent == []
    bench.watch.tolerate(SERVING_SILENCE_S)
    bench.pass_time(SERVING_SILENCE_S)
    assert bench.silent == []
    bench.pass_time(CHECK_S)
    assert len(bench.silent) == 2


@pytest.mark.parametrize("stall_s", [0.5, 3.0, 100.0])
def test_a_gateway_that_was_stopped_accuses_nobody(stall_s: float) -> None:
    bench = Bench()
    bench.pass_time(1.0, beating=(0, 1))
    bench.stall(stall_s)
    assert bench.silent == []
    bench.pass_time(3.0, beating=(0, 1))
    assert bench.silent == []


def test_after_a_stall_there_is_time_to_hear_what_was_said_meanwhile() -> None:
    bench = Bench()
    bench.pass_time(1.9)
    bench.stall(4.0)
    bench.pass_time(CHECK_S)
    assert bench.silent == []
    bench.pass_time(2 * CHECK_S)
    assert len(bench.silent) == 2


def test_a_gateway_that_is_late_again_and_again_still_finds_a_frozen_rank() -> None:
    bench = Bench()
    for _ in range(20):
        bench.stall(CHECK_S + 0.3)
        bench.watch.hear(0)
    assert [rank for rank, _ in bench.silent] == [1]


async def test_it_looks_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "CHECK_S", 0.01)
    silent: list[int] = []
    watch = HeartbeatWatch([3], on_silent=lambda rank, _: silent.append(rank))
    watch.tolerate(0.05)
    task = asyncio.create_task(watch.run())
    await wait_until(lambda: bool(silent))
    task.cancel()
    assert silent == [3]
