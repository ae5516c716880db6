"""A group without requests rests and wakes with the next one; nothing is lost, whatever comes in between."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from hetero_api.group_state import GroupState
from hetero_api.v1 import admin_pb2
from hetero_gateway.engine.errors import EngineFault, EngineUnavailable
from hetero_gateway.group.errors import WrongState
from hetero_gateway.group.idle import IdleSleeper
from tests.unit.engine.engine_setup import VOCAB_SIZE, generation
from tests.unit.engine.fake_ranks import tokens_alone
from tests.unit.group.group_setup import GroupBench, ObedientRank, collect, wait_until

pytestmark = pytest.mark.unit

AFTER_S = 0.02


@asynccontextmanager
async def idling(*, level: int = 1) -> AsyncIterator[tuple[GroupBench, ObedientRank, ObedientRank]]:
    """A group that serves, and rests after AFTER_S."""
    async with GroupBench() as bench:
        ranks = await bench.ready()
        sleeper = IdleSleeper(bench.rpcs, core=bench.core, after_s=AFTER_S, level=level)
        running = asyncio.create_task(sleeper.run())
        try:
            yield bench, *ranks
        finally:
            running.cancel()


async def check(asked: AsyncIterator[Any]) -> None:
    """The stream of `generation(...)` below has the tokens that it has alone."""
    events = await collect(asked)
    tokens = [token for event in events[:-1] for token in event.token_ids]
    assert tokens == tokens_alone(range(9), seed=0, count=6, vocab_size=VOCAB_SIZE)


def ask(bench: GroupBench, request_id: str = "r") -> AsyncIterator[Any]:
    return bench.core.submit(generation(request_id, range(9), max_tokens=6))


async def until_resting(bench: GroupBench, *, sleeps: int = 1) -> None:
    idle = bench.group.idle
    await wait_until(lambda: idle.rests and idle.sleeps == sleeps and not bench.rpcs._under_way)


async def until_commanded(rank: ObedientRank, command: str) -> None:
    await wait_until(lambda: rank.commands[-1:] == [command])


def keep_answer(rank: ObedientRank) -> None:
    rank.holds_steps = True


def give_answer(rank: ObedientRank) -> None:
    rank.holds_steps = False
    rank._step(rank.plans.pop())


@pytest.mark.parametrize("level", [1, 2])
async def test_a_group_rests_stays_ready_and_wakes_with_the_next_request(level: int) -> None:
    async with idling(level=level) as (bench, zero, one):
        await until_resting(bench)
        assert (bench.group.state, bench.group.is_ready) == (GroupState.ASLEEP, True)
        topology = bench.topology
        assert (topology.state, list(topology.asleep)) == (admin_pb2.GROUP_STATE_ASLEEP, ["kv", "weights"])
        assert list(topology.idle.freed_bytes) == [level * 1000] * 2
        assert topology.idle.sleep_s > 0
        await check(ask(bench))
        assert not bench.topology.idle.rests
        assert bench.topology.idle.wake_s > 0
        await until_resting(bench, sleeps=2)
        assert zero.commands == one.commands == ["sleep", "wake", "sleep"]
        assert bench.states[-3:] == [GroupState.ASLEEP, GroupState.READY, GroupState.ASLEEP]


async def test_a_group_that_took_long_to_load_does_not_rest_before_its_time() -> None:
    after_s = 0.5
    async with GroupBench() as bench:
        running = asyncio.create_task(IdleSleeper(bench.rpcs, core=bench.core, after_s=after_s, level=1).run())
        await asyncio.sleep(1.5 * after_s)
        zero, _ = await bench.ready()
        began_s = time.monotonic()
        await wait_until(lambda: bench.group.idle.rests)
        assert time.monotonic() - began_s > 0.8 * after_s
        assert zero.commands == ["sleep"]
        running.cancel()


async def test_requests_keep_a_group_awake() -> None:
    async with idling() as (bench, zero, _):
        before = len(zero.plans)
        keep_answer(zero)
        stream = bench.core.submit(generation("r", range(9), max_tokens=1))
        await wait_until(lambda: len(zero.plans) > before)
        await asyncio.sleep(2 * AFTER_S)
        assert (bench.group.state, zero.commands) == (GroupState.READY, [])
        give_answer(zero)
        await collect(stream)
        await until_resting(bench)


async def test_a_request_that_comes_while_ranks_fall_asleep_or_wake_is_served() -> None:
    async with idling() as (bench, zero, _):
        for number, command in enumerate(("sleep", "wake")):
            keep_answer(zero)
            waiting = [ask(bench, f"first{number}")] if command == "wake" else []
            await until_commanded(zero, command)
            waiting.append(ask(bench, f"second{number}"))
            give_answer(zero)
            await asyncio.gather(*map(check, waiting))
            assert zero.commands[-1] == "wake"
            await until_resting(bench, sleeps=number + 2)


async def test_a_rank_lost_at_rest_costs_no_request_and_the_next_epoch_rests_again() -> None:
    async with idling() as (bench, _, one):
        await until_resting(bench)
        one.lose()
        await bench.until(GroupState.ABORTED)
        assert not bench.topology.idle.rests
        stream = ask(bench)
        bench.obedient(1, instance="replacement")
        await check(stream)
        await until_resting(bench, sleeps=2)
        assert bench.group.epoch == 2


async def test_a_group_that_cannot_wake_begins_an_epoch_that_is_awake() -> None:
    async with idling() as (bench, zero, one):
        await until_resting(bench)
        zero.problem, one.peers_fail = "too little memory", True
        await check(ask(bench))
        assert bench.group.epoch == 2
        (reason,) = zero.aborts
        assert reason.startswith("the group rested and could not wake: ")
        assert "rank 0 (pod-0): too little memory" in reason


async def test_a_group_that_cannot_fall_asleep_serves_on() -> None:
    async with idling() as (bench, zero, one):
        zero.problem, one.peers_fail = "no memory on the host", True
        await wait_until(lambda: zero.commands[-2:] == ["sleep", "sleep"])
        assert (bench.group.state, bench.group.idle.sleeps) == (GroupState.READY, 0)
        await check(ask(bench))
        assert bench.group.epoch == 1


async def test_an_administrator_wakes_a_group_at_rest_which_then_rests_again() -> None:
    async with idling() as (bench, zero, _):
        await until_resting(bench)
        with pytest.raises(WrongState, match="Sleep needs a group that is READY; it is ASLEEP"):
            await bench.rpcs.sleep(admin_pb2.SleepRequest(level=1))
        assert list((await bench.rpcs.wake_up(admin_pb2.WakeUpRequest(tags=["weights"]))).asleep) == ["kv"]
        assert bench.group.idle.rests
        await check(ask(bench))
        await until_resting(bench, sleeps=2)
        await bench.rpcs.wake_up(admin_pb2.WakeUpRequest())
        await until_resting(bench, sleeps=3)
        assert zero.commands == ["sleep", "wake", "wake", "sleep", "wake", "sleep"]


async def test_a_group_that_an_administrator_put_to_sleep_is_left_alone() -> None:
    async with idling() as (bench, zero, _):
        await bench.rpcs.sleep(admin_pb2.SleepRequest(level=2))
        await asyncio.sleep(3 * AFTER_S)
        assert (bench.group.is_ready, bench.group.idle.rests) == (False, False)
        with pytest.raises(EngineUnavailable, match="asleep"):
            ask(bench)
        assert zero.commands == ["sleep"]


async def test_a_request_that_waits_for_a_waking_group_is_finished_by_a_drain() -> None:
    async with idling() as (bench, _, _):
        await until_resting(bench)
        stream = ask(bench)
        bench.group.drain()
        await check(stream)
        await bench.core.wait_idle()
        assert bench.group.state is GroupState.DRAINING


async def test_a_request_given_up_while_it_waits_leaves_nothing() -> None:
    async with idling() as (bench, zero, _):
        await until_resting(bench)
        keep_answer(zero)
        ask(bench, "given-up")
        await wait_until(lambda: zero.commands == ["sleep", "wake"])
        assert bench.core.abort("given-up")
        give_answer(zero)
        await until_resting(bench, sleeps=2)
        await check(ask(bench))


async def test_ranks_rest_only_while_steps_are_held() -> None:
    async with GroupBench() as bench:
        await bench.ready()
        with pytest.raises(EngineFault, match="only while steps are held"):
            bench.core.rest()


async def test_two_that_wait_for_the_same_call_wake_a_group_once() -> None:
    async with idling() as (bench, zero, _):
        await until_resting(bench)
        keep_answer(zero)
        partial = asyncio.create_task(bench.rpcs.wake_up(admin_pb2.WakeUpRequest(tags=["weights"])))
        await until_commanded(zero, "wake")
        both = [asyncio.create_task(bench.rpcs.rouse()) for _ in range(2)]
        await asyncio.sleep(0)
        give_answer(zero)
        await asyncio.gather(partial, *both)
        assert zero.commands == ["sleep", "wake", "wake"]
        assert bench.group.state is GroupState.READY
