"""The work queue: nothing is lost, nothing is done twice at once, nobody starves, and failures cool down."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_operator.timing import Backoff
from hetero_operator.workers import HURRIED_PAUSE_S, WorkQueue
from tests.support.examples import examples

STEADY = Backoff(first_s=0.5, cap_s=30.0, jitter=0.0)


class FakeTime:
    """A clock that tests set."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


async def test_many_changes_of_a_key_are_one_look() -> None:
    queue: WorkQueue[str] = WorkQueue()
    for _ in range(5):
        queue.add("a")
    assert await queue.take() == "a"
    assert len(queue) == 0


async def test_a_change_during_a_look_brings_another_look_after_it() -> None:
    queue: WorkQueue[str] = WorkQueue()
    queue.add("a")
    key = await queue.take()
    queue.add("a")
    queue.add("a")
    assert len(queue) == 0
    queue.done(key)
    assert await queue.take() == "a"
    queue.done(key)
    assert len(queue) == 0


async def test_who_comes_again_goes_to_the_end() -> None:
    queue: WorkQueue[str] = WorkQueue()
    for key in ("a", "b", "c"):
        queue.add(key)
    first = await queue.take()
    queue.add(first)
    queue.done(first)
    assert [await queue.take() for _ in range(3)] == ["b", "c", "a"]


async def test_a_taker_waits_until_something_comes() -> None:
    queue: WorkQueue[str] = WorkQueue()
    taking = asyncio.create_task(queue.take())
    await asyncio.sleep(0)
    assert not taking.done()
    queue.add("a")
    assert await taking == "a"


async def test_of_several_moments_the_earliest_counts() -> None:
    queue: WorkQueue[str] = WorkQueue()
    queue.add_after("a", 3600.0)
    queue.add_after("a", 0.01)
    queue.add_after("a", 1800.0)
    async with asyncio.timeout(5):
        assert await queue.take() == "a"


async def test_a_look_cancels_the_one_that_was_due_later() -> None:
    queue: WorkQueue[str] = WorkQueue()
    queue.add_after("a", 0.02)
    queue.add("a")
    queue.done(await queue.take())
    taking = asyncio.create_task(queue.take())
    await asyncio.wait([taking], timeout=0.1)
    assert not taking.done()
    taking.cancel()


async def test_pauses_grow_with_failures_in_a_row_and_begin_anew_after_success() -> None:
    queue: WorkQueue[str] = WorkQueue()
    assert [queue.retry("a", STEADY) for _ in range(8)] == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    queue.succeeded("a")
    assert queue.retry("a", STEADY) == 0.5


async def test_the_server_s_own_pause_is_kept_when_it_is_longer() -> None:
    queue: WorkQueue[str] = WorkQueue()
    assert queue.retry("a", STEADY, at_least_s=7.0) == 7.0


async def test_changes_bring_a_failing_key_forward_but_not_at_once() -> None:
    clock = FakeTime()
    queue: WorkQueue[str] = WorkQueue(clock=clock)
    queue.add("a")
    queue.retry(await queue.take(), Backoff(first_s=30.0, jitter=0.0))
    queue.done("a")
    queue.add("a")
    assert len(queue) == 0
    clock.now += HURRIED_PAUSE_S + 0.1
    queue.add("a")
    assert len(queue) == 1


async def test_a_change_does_not_cut_short_the_pause_that_the_server_asked_for() -> None:
    queue: WorkQueue[str] = WorkQueue()
    queue.add("a")
    key = await queue.take()
    queue.retry(key, Backoff(first_s=0.01, jitter=0.0), at_least_s=0.3)
    queue.add(key)  # a change while it is looked at
    queue.add_after(key, 0.01)
    queue.done(key)
    queue.add(key)  # and one afterwards
    begin = asyncio.get_running_loop().time()
    assert await queue.take() == "a"
    assert asyncio.get_running_loop().time() - begin >= 0.25


async def test_what_is_forgotten_does_not_come_back() -> None:
    queue: WorkQueue[str] = WorkQueue()
    queue.retry("a", Backoff(first_s=0.01, jitter=0.0))
    queue.remove("a")
    taking = asyncio.create_task(queue.take())
    await asyncio.wait([taking], timeout=0.1)
    assert not taking.done()
    taking.cancel()


async def test_waits_and_retries_are_told() -> None:
    clock = FakeTime()
    waits: list[float] = []
    retries: list[int] = []
    queue: WorkQueue[str] = WorkQueue(clock=clock, observe_wait=waits.append, count_retry=lambda: retries.append(1))
    queue.add("a")
    clock.now += 3.0
    assert queue.oldest_wait_s() == 3.0
    await queue.take()
    queue.retry("a", STEADY)
    assert (waits, len(retries), queue.oldest_wait_s()) == ([3.0], 1, 0.0)


@pytest.mark.parametrize("workers", [1, 3])
@settings(max_examples=examples(60))
@given(changes=st.lists(st.sampled_from("abcd"), max_size=40))
def test_every_change_is_followed_by_a_look_and_no_key_is_looked_at_twice_at_once(
    workers: int, changes: list[str]
) -> None:
    asyncio.run(_play(workers, changes))


async def _play(workers: int, changes: list[str]) -> None:
    queue: WorkQueue[str] = WorkQueue()
    state: Counter[str] = Counter()
    seen: dict[str, int] = {}
    busy: set[str] = set()

    async def work() -> None:
        while True:
            key = await queue.take()
            assert key not in busy
            busy.add(key)
            seen[key] = state[key]
            await asyncio.sleep(0)
            busy.discard(key)
            queue.done(key)

    tasks = [asyncio.create_task(work()) for _ in range(workers)]
    for key in changes:
        state[key] += 1
        queue.add(key)
        await asyncio.sleep(0)
    for _ in range(10 * len(changes) + 10):  # turns of the loop, more than all looks take
        await asyncio.sleep(0)
    assert not len(queue)
    assert not queue._taken
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert seen == dict(state)
