"""Readers take turns: no turn of the loop hands on more than so many events, and nobody is passed over."""

from __future__ import annotations

import asyncio

import pytest

from hetero_gateway.engine.stream import ReaderTurns
from tests.unit.engine.core_setup import turn_loop, until

pytestmark = pytest.mark.unit


async def _take(turns: ReaderTurns, name: int, taken: list[int]) -> None:
    await turns.wait()
    taken.append(name)


async def test_a_turn_has_room_for_so_many_and_the_rest_follow_in_order() -> None:
    turns, taken = ReaderTurns(events_a_turn=3), list[int]()
    tasks = [asyncio.create_task(_take(turns, name, taken)) for name in range(10)]
    sizes = []
    while len(taken) < 10:
        before = len(taken)
        await asyncio.sleep(0)
        sizes.append(len(taken) - before)
    assert max(sizes) <= 3
    assert taken == list(range(10))
    await asyncio.gather(*tasks)


async def test_one_reader_alone_never_waits() -> None:
    turns = ReaderTurns(events_a_turn=1)
    for _ in range(5):
        waiting = turns.wait()
        with pytest.raises(StopIteration):
            waiting.send(None)
        await turn_loop(3)


async def test_a_reader_that_went_away_takes_nobodys_turn() -> None:
    turns, taken = ReaderTurns(events_a_turn=1), list[int]()
    tasks = [asyncio.create_task(_take(turns, name, taken)) for name in range(4)]
    await asyncio.sleep(0)
    for task in tasks[1:3]:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert taken == [0, 3]


async def test_who_comes_later_does_not_overtake() -> None:
    turns, taken = ReaderTurns(events_a_turn=2), list[int]()
    tasks = [asyncio.create_task(_take(turns, name, taken)) for name in range(5)]
    await until(lambda: len(taken) >= 3)
    tasks.append(asyncio.create_task(_take(turns, 9, taken)))
    await asyncio.gather(*tasks)
    assert taken == [0, 1, 2, 3, 4, 9]
