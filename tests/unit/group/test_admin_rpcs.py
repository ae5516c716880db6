"""What an administrator has a group do, in which state, and what is left when it cannot be done."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from hetero_api.group_state import GroupState
from hetero_api.v1 import admin_pb2, ranks_pb2
from hetero_gateway.engine.errors import EngineUnavailable, GroupLost
from hetero_gateway.group.errors import CommandFailed, InvalidCommand, WrongState
from tests.unit.engine.engine_setup import VOCAB_SIZE, generation
from tests.unit.engine.fake_ranks import tokens_alone
from tests.unit.group.group_setup import PATIENCE_S, WARM_UP_PLANS, GroupBench, ScriptedRank, collect, wait_until

pytestmark = pytest.mark.unit

CONTIGUOUS = admin_pb2.CACHE_LAYOUT_CONTIGUOUS
PAGED = admin_pb2.CACHE_LAYOUT_PAGED
RPCS: dict[str, Callable[[GroupBench], Awaitable[Any]]] = {
    "ResetCache": lambda bench: bench.rpcs.reset_cache(admin_pb2.ResetCacheRequest()),
    "Sleep": lambda bench: bench.rpcs.sleep(admin_pb2.SleepRequest(level=1)),
    "WakeUp": lambda bench: bench.rpcs.wake_up(admin_pb2.WakeUpRequest()),
    "Profile": lambda bench: bench.rpcs.profile(admin_pb2.ProfileRequest(duration_s=0.01)),
    "UpdateWeights": lambda bench: bench.rpcs.update_weights(),
    "Drain": lambda bench: bench.rpcs.drain(),
}


def reset(**fields: Any) -> admin_pb2.ResetCacheRequest:
    return admin_pb2.ResetCacheRequest(**fields)


async def generate(bench: GroupBench, request_id: str = "r") -> None:
    """A request gets the tokens that it gets alone."""
    events = await collect(bench.core.submit(generation(request_id, range(9), max_tokens=6)))
    tokens = [token for event in events[:-1] for token in event.token_ids]
    assert tokens == tokens_alone(range(9), seed=0, count=6, vocab_size=VOCAB_SIZE)


def cache_of(bench: GroupBench) -> tuple[int, int, int]:
    topology = bench.topology
    return topology.cache_layout, topology.block_size, topology.num_blocks


# --- ResetCache -----------------------------------------------------------------------------------------


async def test_reset_goes_to_contiguous_and_back_and_serves_in_both() -> None:
    async with GroupBench() as bench:
        zero, one = await bench.ready()
        assert cache_of(bench) == (PAGED, 4, 64)
        await generate(bench)
        answer = await bench.rpcs.reset_cache(reset(layout=CONTIGUOUS))
        assert (answer.block_size, answer.num_blocks, list(answer.kv_bytes)) == (64, 4, [5 * 64 * 8] * 2)
        assert cache_of(bench) == (CONTIGUOUS, 64, 4)
        assert [rank.kv_bytes for rank in bench.topology.ranks] == [5 * 64 * 8] * 2
        assert bench.core.stats().num_blocks == 4
        await generate(bench)
        await bench.rpcs.reset_cache(reset(layout=PAGED))
        assert cache_of(bench) == (PAGED, 4, 64)
        await generate(bench)
        assert zero.commands == one.commands == ["reset_cache"] * 2
        assert bench.group.state is GroupState.READY


async def test_reset_takes_another_size_and_number_of_blocks_and_forgets_what_was_cached() -> None:
    async with GroupBench() as bench:
        await bench.ready()
        await generate(bench)
        assert bench.core.stats().cached_blocks > 0
        await bench.rpcs.reset_cache(reset(block_size=8, num_blocks=20))
        assert cache_of(bench) == (PAGED, 8, 20)
        stats = bench.core.stats()
        assert (stats.num_blocks, stats.free_blocks, stats.cached_blocks) == (20, 20, 0)
        await generate(bench)


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({"layout": CONTIGUOUS, "block_size": 4}, "block_size", "must be 0 for CONTIGUOUS"),
        ({"block_size": 65}, "block_size", "at most spec.model.maxModelLen 64, not 65"),
        ({"num_blocks": 15}, "num_blocks", "at least 16, not 15: one sequence of spec.model.maxModelLen 64"),
        ({"num_blocks": 40_000}, "num_blocks", "40000 blocks and the null block need 1280032 bytes = 40001 .* 8"),
        ({"num_blocks": 2**32 - 1}, "num_blocks", "must be less than"),
        ({"layout": 9}, "layout", "9 is no CacheLayout"),
    ],
)
async def test_a_reset_to_what_cannot_be_names_the_field(fields: dict[str, int], field: str, words: str) -> None:
    async with GroupBench() as bench:
        zero, _ = await bench.ready()
        with pytest.raises(InvalidCommand, match=words) as caught:
            await bench.rpcs.reset_cache(reset(**fields))
        assert caught.value.field == field
        assert zero.commands == []


async def test_a_reset_that_failed_half_way_forgets_what_was_cached() -> None:
    async with GroupBench() as bench:
        zero, one = await bench.ready()
        await generate(bench)
        assert bench.core.stats().cached_blocks > 0
        before = bench.core.stats().num_blocks
        one.problem, zero.peers_fail = "no memory", True
        with pytest.raises(CommandFailed):
            await bench.rpcs.reset_cache(reset(layout=CONTIGUOUS))
        stats = bench.core.stats()
        assert (stats.num_blocks, stats.cached_blocks) == (before, 0)
        one.problem, zero.peers_fail = "", False
        await generate(bench)


async def test_updated_weights_forget_what_was_cached() -> None:
    async with GroupBench() as bench:
        zero, one = await bench.ready()
        await generate(bench)
        before = bench.core.stats()
        assert before.cached_blocks > 0
        answer = await bench.rpcs.update_weights()
        assert len(answer.weight_bytes) == 2
        stats = bench.core.stats()
        assert (stats.num_blocks, stats.cached_blocks) == (before.num_blocks, 0)
        assert zero.commands == one.commands == ["update_weights"]
        await generate(bench)


# --- Sleep and WakeUp -----------------------------------------------------------------------------------


@pytest.mark.parametrize("level", [1, 2])
async def test_asleep_requests_are_refused_until_everything_is_back(level: int) -> None:
    async with GroupBench() as bench:
        await bench.ready()
        await generate(bench)
        answer = await bench.rpcs.sleep(admin_pb2.SleepRequest(level=level))
        assert list(answer.freed_bytes) == [level * 1000] * 2
        assert (bench.states[-1], bench.group.is_ready) == (GroupState.ASLEEP, False)
        topology = bench.topology
        assert (topology.state, list(topology.asleep)) == (admin_pb2.GROUP_STATE_ASLEEP, ["kv", "weights"])
        assert [(rank.weight_bytes, rank.kv_bytes) for rank in topology.ranks] == [(0, 0)] * 2
        with pytest.raises(EngineUnavailable, match="asleep"):
            bench.core.submit(generation("r", range(3)))
        assert list((await bench.rpcs.wake_up(admin_pb2.WakeUpRequest())).asleep) == []
        assert (bench.states[-1], bench.group.is_ready) == (GroupState.READY, True)
        assert bench.core.stats().cached_blocks == 0
        await generate(bench)


@pytest.mark.parametrize("first", ["weights", "kv"])
async def test_memory_comes_back_by_tags(first: str) -> None:
    async with GroupBench() as bench:
        zero, _ = await bench.ready()
        await bench.rpcs.sleep(admin_pb2.SleepRequest(level=1))
        (other,) = (await bench.rpcs.wake_up(admin_pb2.WakeUpRequest(tags=[first]))).asleep
        assert bench.group.state is GroupState.ASLEEP
        assert list(bench.topology.asleep) == [other] != [first]
        with pytest.raises(WrongState, match=f"{first} is awake already"):
            await bench.rpcs.wake_up(admin_pb2.WakeUpRequest(tags=[first]))
        await bench.rpcs.wake_up(admin_pb2.WakeUpRequest(tags=[other]))
        assert bench.group.is_ready
        await generate(bench)
        assert zero.commands == ["sleep", "wake", "wake"]


async def test_waking_brings_back_the_cache_that_stood_before() -> None:
    async with GroupBench() as bench:
        await bench.ready()
        await bench.rpcs.reset_cache(reset(layout=CONTIGUOUS, num_blocks=3))
        await bench.rpcs.sleep(admin_pb2.SleepRequest(level=2))
        await bench.rpcs.wake_up(admin_pb2.WakeUpRequest())
        assert cache_of(bench) == (CONTIGUOUS, 64, 3)
        await generate(bench)


@pytest.mark.parametrize("level", [0, 3])
async def test_a_level_that_is_none_names_the_field(level: int) -> None:
    async with GroupBench() as bench:
        await bench.ready()
        with pytest.raises(InvalidCommand, match=f"level: must be 1 or 2, not {level}"):
            await bench.rpcs.sleep(admin_pb2.SleepRequest(level=level))


async def test_a_tag_that_is_none_names_the_field() -> None:
    async with GroupBench() as bench:
        await bench.ready()
        await bench.rpcs.sleep(admin_pb2.SleepRequest(level=1))
        with pytest.raises(InvalidCommand, match=r'tags\[1\]: must be "weights" or "kv", not "wights"'):
            await bench.rpcs.wake_up(admin_pb2.WakeUpRequest(tags=["kv", "wights"]))


async def test_a_rank_lost_while_asleep_leads_to_an_epoch_that_is_awake() -> None:
    async with GroupBench() as bench:
        _, one = await bench.ready()
        await bench.rpcs.reset_cache(reset(layout=CONTIGUOUS))
        await bench.rpcs.sleep(admin_pb2.SleepRequest(level=2))
        one.lose()
        await bench.until(GroupState.ABORTED)
        assert list(bench.topology.asleep) == []
        bench.obedient(1, instance="replacement")
        await bench.until(GroupState.READY)
        assert bench.group.is_ready
        assert cache_of(bench) == (PAGED, 4, 64)
        await generate(bench)


# --- Profile --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_trace", [False, True])
async def test_a_profile_has_a_record_of_every_rank(with_trace: bool) -> None:
    async with GroupBench() as bench:
        zero, _ = await bench.ready()
        answer = await bench.rpcs.profile(admin_pb2.ProfileRequest(duration_s=0.01, with_trace=with_trace))
        trace = b"a trace" if with_trace else b""
        assert [(rank.table, rank.trace) for rank in answer.ranks] == [("a table", trace)] * 2
        assert zero.commands == ["start_profile", "stop_profile"]


async def test_requests_are_served_while_a_profile_records() -> None:
    async with GroupBench() as bench:
        zero, _ = await bench.ready()
        profile = asyncio.create_task(bench.rpcs.profile(admin_pb2.ProfileRequest(duration_s=60)))
        await wait_until(lambda: zero.commands == ["start_profile"])
        await generate(bench)
        with pytest.raises(WrongState, match="Sleep: Profile is under way"):
            await bench.rpcs.sleep(admin_pb2.SleepRequest(level=1))
        profile.cancel()  # who asked hangs up: it ends early, and the ranks stop recording
        await wait_until(lambda: zero.commands == ["start_profile", "stop_profile"])
        await generate(bench, "another")


@pytest.mark.parametrize("duration_s", [0.0, -1.0, 60.5, float("nan"), float("inf")])
async def test_a_duration_out_of_bounds_names_the_field(duration_s: float) -> None:
    async with GroupBench() as bench:
        await bench.ready()
        with pytest.raises(InvalidCommand, match="duration_s: must be more than 0 and at most 60"):
            await bench.rpcs.profile(admin_pb2.ProfileRequest(duration_s=duration_s))


async def test_a_profile_whose_epoch_ends_says_so_at_once() -> None:
    async with GroupBench() as bench:
        zero, one = await bench.ready()
        profile = asyncio.create_task(bench.rpcs.profile(admin_pb2.ProfileRequest(duration_s=60)))
        await wait_until(lambda: zero.commands == ["start_profile"])
        one.lose()
        with pytest.raises((GroupLost, EngineUnavailable)):
            await asyncio.wait_for(profile, PATIENCE_S)


# --- Drain ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asleep", [False, True])
async def test_drain_refuses_new_requests_for_good(asleep: bool) -> None:
    async with GroupBench() as bench:
        await bench.ready()
        if asleep:
            await bench.rpcs.sleep(admin_pb2.SleepRequest(level=1))
        await bench.rpcs.drain()
        assert bench.group.state is GroupState.DRAINING
        with pytest.raises(EngineUnavailable, match="draining"):
            bench.core.submit(generation("r", range(3)))
        await bench.rpcs.drain()
        with pytest.raises(WrongState, match="it is DRAINING: it comes back from draining no more"):
            await bench.rpcs.wake_up(admin_pb2.WakeUpRequest())


async def test_drain_answers_once_requests_in_flight_have_ended() -> None:
    async with GroupBench() as bench:
        zero, _ = await bench.ready()
        zero.holds_steps = True
        stream = bench.core.submit(generation("r", range(9), max_tokens=1))
        await wait_until(lambda: len(zero.plans) > WARM_UP_PLANS)
        drain = asyncio.create_task(bench.rpcs.drain())
        await bench.until(GroupState.DRAINING)
        assert not drain.done()
        stream.cancel()
        await asyncio.wait_for(drain, PATIENCE_S)


# --- states ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", RPCS)
async def test_before_there_is_a_group_everything_is_refused(call: str) -> None:
    async with GroupBench() as bench:
        with pytest.raises(WrongState, match=f"{call} needs a group that is .*; it is NEW: wait until it is READY"):
            await RPCS[call](bench)


@pytest.mark.parametrize("call", RPCS)
async def test_between_two_epochs_everything_is_refused(call: str) -> None:
    async with GroupBench() as bench:
        _, one = await bench.ready()
        one.lose()
        await bench.until(GroupState.ABORTED)
        with pytest.raises(WrongState, match="it is ABORTED"):
            await RPCS[call](bench)


async def test_an_epoch_that_has_just_ended_does_nothing_more() -> None:
    async with GroupBench() as bench:
        _, one = await bench.ready()
        one.lose()
        assert bench.group.state is GroupState.READY
        with pytest.raises(WrongState, match="wait until it is READY again"):
            await RPCS["Sleep"](bench)


@pytest.mark.parametrize("call", ["ResetCache", "Sleep", "Profile"])
async def test_asleep_only_waking_and_draining_are_possible(call: str) -> None:
    async with GroupBench() as bench:
        await bench.ready()
        await bench.rpcs.sleep(admin_pb2.SleepRequest(level=1))
        with pytest.raises(WrongState, match=f"{call} needs a group that is READY; it is ASLEEP: call WakeUp first"):
            await RPCS[call](bench)


async def test_a_group_that_is_awake_cannot_be_woken() -> None:
    async with GroupBench() as bench:
        await bench.ready()
        with pytest.raises(WrongState, match="WakeUp needs a group that is ASLEEP; it is READY: there is nothing"):
            await bench.rpcs.wake_up(admin_pb2.WakeUpRequest())


@pytest.mark.parametrize("call", ["ResetCache", "Sleep"])
async def test_a_group_with_requests_neither_sleeps_nor_resets(call: str) -> None:
    async with GroupBench() as bench:
        zero, _ = await bench.ready()
        zero.holds_steps = True
        stream = bench.core.submit(generation("r", range(3)))
        with pytest.raises(WrongState, match=f"{call} needs a group without requests"):
            await RPCS[call](bench)
        stream.cancel()


@pytest.mark.parametrize("call", ["ResetCache", "Sleep"])
async def test_a_request_that_comes_just_before_a_call_begins_makes_it_refuse(call: str) -> None:
    async with GroupBench() as bench:
        await bench.ready()
        task = asyncio.ensure_future(RPCS[call](bench))
        await asyncio.sleep(0)  # the call's own task has not begun
        await generate(bench)
        with pytest.raises(WrongState, match="without requests"):
            await task
        await generate(bench, "another")


# --- failures -------------------------------------------------------------------------------------------


async def asleep(bench: GroupBench) -> None:
    await bench.rpcs.sleep(admin_pb2.SleepRequest(level=1))


@pytest.mark.parametrize("call", ["ResetCache", "Sleep", "WakeUp", "Profile"])
async def test_a_call_that_a_rank_cannot_do_leaves_the_group_as_it_was(call: str) -> None:
    async with GroupBench() as bench:
        zero, one = await bench.ready()
        if call == "WakeUp":
            await asleep(bench)
        one.problem, zero.peers_fail = "no memory", True
        before, epoch = bench.topology, bench.group.epoch
        with pytest.raises(CommandFailed, match=r"the group is as it was; .* rank 1 \(pod-1\): no memory"):
            await RPCS[call](bench)
        assert bench.topology == before
        one.problem, zero.peers_fail = "", False
        if call == "WakeUp":
            await RPCS[call](bench)
        await generate(bench)
        assert bench.group.epoch == epoch


async def test_ranks_that_do_not_agree_whether_they_did_it_end_the_epoch() -> None:
    async with GroupBench() as bench:
        _, one = await bench.ready()
        one.problem = "no memory"
        with pytest.raises(GroupLost):
            await RPCS["ResetCache"](bench)
        await bench.until(GroupState.ABORTED)
        assert "only rank 0 did what all had to do: rank 1 (pod-1): no memory" in bench.topology.reason


@pytest.mark.parametrize("call", ["ResetCache", "Sleep", "WakeUp", "Profile"])
async def test_a_rank_lost_during_a_call_ends_call_and_epoch_and_the_next_one_serves(call: str) -> None:
    async with GroupBench() as bench:
        zero, one = await bench.ready()
        if call == "WakeUp":
            await asleep(bench)
        one.holds_steps = True
        task = asyncio.ensure_future(RPCS[call](bench))
        await wait_until(lambda: len(one.commands) == (2 if call == "WakeUp" else 1))
        one.lose()
        with pytest.raises(GroupLost):
            await task
        await wait_until(lambda: bool(zero.aborts))
        bench.obedient(1, instance="replacement")
        await bench.until(GroupState.READY)
        assert cache_of(bench) == (PAGED, 4, 64)
        await generate(bench)


async def test_a_call_goes_on_when_who_asked_hangs_up() -> None:
    async with GroupBench() as bench:
        _, one = await bench.ready()
        one.holds_steps = True
        task = asyncio.ensure_future(RPCS["Sleep"](bench))
        await wait_until(lambda: one.commands == ["sleep"])
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        with pytest.raises(WrongState, match="ResetCache: Sleep is under way"):
            await RPCS["ResetCache"](bench)
        report = ranks_pb2.CommandReport(done=True)
        one.say(1, step_result=ranks_pb2.StepResult(step_id=one.plans[-1].step_id, command_report=report))
        await bench.until(GroupState.ASLEEP)


async def test_a_rank_that_answers_a_command_without_a_report_misbehaves() -> None:
    async with GroupBench() as bench:
        _, one = await bench.ready()
        one.holds_steps = True
        task = asyncio.ensure_future(RPCS["ResetCache"](bench))
        await wait_until(lambda: len(one.commands) == 1)
        one.say(1, step_result=ranks_pb2.StepResult(step_id=one.plans[-1].step_id))
        with pytest.raises(GroupLost, match="without a report"):
            await task


async def test_a_rank_that_has_not_joined_does_not_matter_to_a_refusal() -> None:
    async with GroupBench() as bench:
        ScriptedRank(bench.group, 0).join()
        with pytest.raises(WrongState, match="it is NEW"):
            await RPCS["Sleep"](bench)
