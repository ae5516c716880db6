"""Everything that ends an epoch, what survivors are told, and how the next one comes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from hetero_api.v1 import admin_pb2, ranks_pb2
from hetero_gateway.engine.errors import EngineUnavailable
from hetero_gateway.group.rank_link import LinkEnd
from hetero_gateway.group.settings import GroupSettings
from hetero_gateway.group.topology import GroupState
from tests.unit.engine.engine_setup import generation
from tests.unit.group.group_setup import GroupBench, ScriptedRank, collect, group_settings, wait_until

pytestmark = pytest.mark.unit

PHASES = ("form_group", "load_model", "allocate_cache")
ENDINGS: dict[str, tuple[Callable[[ScriptedRank], None], str]] = {
    "stream": (lambda rank: rank.lose(), "its stream ended: connection reset"),
    "failure": (
        lambda rank: rank.say(1, failure=ranks_pb2.Failure(message="out of luck")),
        "rank 1 (pod-1) failed: out of luck",
    ),
    "future epoch": (lambda rank: rank.say(2, formed=ranks_pb2.Formed()), "spoke in epoch 2, the current one is 1"),
    "wrong kind": (
        lambda rank: rank.say(1, step_result=ranks_pb2.StepResult(step_id=1)),
        "rank 1 (pod-1) said step_result in epoch 1",
    ),
    "hello": (lambda rank: rank.join(), "said Hello and is engaged already"),
    "nothing": (lambda rank: rank.say(1), "said nothing in epoch 1"),
}


def timed(**recovery: float) -> GroupSettings:
    settings = group_settings()
    values: dict[str, Any] = {name: getattr(settings, name) for name in settings.__slots__}
    return GroupSettings(**(values | recovery))


async def engaged(bench: GroupBench, *, through: int = 0) -> tuple[ScriptedRank, ScriptedRank]:
    """Two ranks that answered the orders of the first `through` phases and have got the next one."""
    zero, one = ScriptedRank(bench.group, 0), ScriptedRank(bench.group, 1)
    zero.join()
    one.join()
    for phase in PHASES[:through]:
        await zero.obey(phase)
        await one.obey(phase)
    for rank in (zero, one):
        await rank.expect((*PHASES, "step_plan")[through])
    return zero, one


@pytest.mark.parametrize("through", range(4))
@pytest.mark.parametrize("ending", ENDINGS)
async def test_any_end_in_any_phase_aborts_the_survivor_with_the_reason(ending: str, through: int) -> None:
    end, reason = ENDINGS[ending]
    async with GroupBench() as bench:
        zero, one = await engaged(bench, through=through)
        end(one)
        assert reason in (await zero.expect("abort")).reason
        assert zero.epoch == 1
        assert bench.group.state is GroupState.ABORTED
        assert reason in bench.topology.reason
        assert not bench.topology.failed
        assert not bench.core.is_serving


@pytest.mark.parametrize("ending", ["future epoch", "wrong kind", "hello", "nothing"])
async def test_a_rank_that_misbehaves_loses_its_stream(ending: str) -> None:
    async with GroupBench() as bench:
        _, one = await engaged(bench)
        ENDINGS[ending][0](one)
        assert (await one.expect_end()).end is LinkEnd.MISBEHAVED


@pytest.mark.parametrize("through", range(3))
async def test_a_rank_that_does_not_answer_in_time_is_named(through: int) -> None:
    async with GroupBench(timed(rendezvous_timeout_s=0.05)) as bench:
        zero, one = await engaged(bench, through=through)
        orders = (ranks_pb2.FormGroup(), ranks_pb2.LoadModel(), ranks_pb2.AllocateCache())
        zero.answer(PHASES[through], orders[through])
        for rank in (zero, one):
            reason = (await rank.expect("abort")).reason
            assert reason.startswith("rank 1 (pod-1) did not answer")
            assert "spec.recovery.rendezvousTimeoutSeconds" in reason


async def test_a_warm_up_step_without_a_result_ends_the_epoch() -> None:
    async with GroupBench(timed(step_timeout_s=0.02)) as bench:
        zero, one = await engaged(bench, through=3)
        assert "step 1 had no result within 0.02 s" in (await zero.expect("abort")).reason
        assert "step 1 had no result" in (await one.expect("abort")).reason


async def test_a_warm_up_result_for_wrong_slots_ends_the_epoch() -> None:
    async with GroupBench() as bench:
        zero, one = await engaged(bench, through=3)
        zero.say(1, step_result=ranks_pb2.StepResult(step_id=1, slots=[3], token_ids=[1]))
        assert "slots [0] had to sample, slots [3] did" in (await one.expect("abort")).reason


async def test_ranks_that_built_different_exchanges_do_not_go_on() -> None:
    async with GroupBench() as bench:
        zero, one = await engaged(bench)
        zero.say(1, formed=ranks_pb2.Formed(exchange=ranks_pb2.EXCHANGE_KIND_SHM))
        one.say(1, formed=ranks_pb2.Formed(exchange=ranks_pb2.EXCHANGE_KIND_GLOO))
        assert "different exchanges" in (await zero.expect("abort")).reason


async def test_the_same_answer_twice_is_misbehaviour() -> None:
    async with GroupBench() as bench:
        zero, one = await engaged(bench)
        for _ in range(2):
            one.say(1, formed=ranks_pb2.Formed(exchange=ranks_pb2.EXCHANGE_KIND_SHM))
        assert "said formed in epoch 1" in (await zero.expect("abort")).reason


@pytest.mark.parametrize("victim", [0, 1])
async def test_a_lost_rank_ends_every_request_unavailable(victim: int) -> None:
    async with GroupBench() as bench:
        ranks = await bench.ready()
        ranks[0].holds_steps = True
        streams = [bench.core.submit(generation(f"r{i}", range(3))) for i in range(3)]
        ranks[victim].lose()
        for stream in streams:
            with pytest.raises(EngineUnavailable, match=rf"rank {victim} \(pod-{victim}\): its stream ended"):
                await collect(stream)
        await bench.until(GroupState.ABORTED)
        assert bench.core.stats().used_blocks == 0


async def test_a_group_that_is_lost_while_idle_serves_no_more() -> None:
    async with GroupBench() as bench:
        _, one = await bench.ready()
        one.lose()
        await bench.until(GroupState.ABORTED)
        assert not bench.core.is_serving
        with pytest.raises(EngineUnavailable, match=r"rank 1 \(pod-1\): its stream ended"):
            bench.core.submit(generation("r", range(3)))


async def test_a_step_without_a_result_ends_requests_and_epoch() -> None:
    async with GroupBench(timed(step_timeout_s=0.05)) as bench:
        zero, _ = await bench.ready()
        zero.holds_steps = True
        with pytest.raises(EngineUnavailable, match=r"had no result within 0\.05 s"):
            await collect(bench.core.submit(generation("r", range(3))))
        await bench.until(GroupState.ABORTED)


async def test_a_result_that_does_not_fit_its_plan_ends_the_epoch() -> None:
    async with GroupBench() as bench:
        zero, one = await bench.ready()
        zero.holds_steps = True
        stream = bench.core.submit(generation("r", range(3)))
        await wait_until(lambda: len(zero.plans) == 6)
        result = ranks_pb2.StepResult(step_id=zero.plans[-1].step_id, slots=[2], token_ids=[1])
        zero.say(1, step_result=result)
        with pytest.raises(EngineUnavailable, match=r"slots \[0\] had to sample, slots \[2\] did"):
            await collect(stream)
        await bench.until(GroupState.ABORTED)
        assert "had to sample" in one.group.topology().reason


async def test_survivors_and_a_replacement_form_the_next_epoch_and_serve() -> None:
    async with GroupBench() as bench:
        zero, one = await bench.ready()
        one.lose()
        await wait_until(lambda: bool(zero.aborts))
        assert bench.group.state is GroupState.ABORTED
        assert bench.topology.reason.endswith("waiting for rank 1 (cpu-1)")
        bench.obedient(1, instance="replacement")
        await bench.until(GroupState.READY)
        assert (bench.group.epoch, zero.epoch) == (2, 2)
        assert [plan.step_id for plan in zero.plans][:2] == [1, 2]
        events = await collect(bench.core.submit(generation("r", range(3), max_tokens=2)))
        assert sum(len(event.token_ids) for event in events[:-1]) == 2


async def test_the_next_epoch_waits_until_every_survivor_said_hello_again() -> None:
    async with GroupBench() as bench:
        zero, one = await engaged(bench)
        one.lose()
        await zero.expect("abort")
        replacement = ScriptedRank(bench.group, 1, instance="replacement")
        replacement.join()
        await asyncio.sleep(0)
        assert bench.group.state is GroupState.ABORTED
        zero.join(store_address="127.0.0.1:9")
        form = await replacement.expect("form_group")
        assert (replacement.epoch, form.store_address) == (2, "127.0.0.1:9")
        assert form.segment_name.endswith("-2")


async def test_messages_of_an_ended_epoch_are_dropped_and_counted() -> None:
    async with GroupBench() as bench:
        zero, one = await engaged(bench)
        one.lose()
        await zero.expect("abort")
        zero.say(1, formed=ranks_pb2.Formed())
        assert bench.group.dropped_messages == 1
        zero.join()
        ScriptedRank(bench.group, 1, instance="replacement").join()
        await zero.expect("form_group")
        zero.say(1, formed=ranks_pb2.Formed())
        assert bench.group.dropped_messages == 2
        assert bench.group.state is GroupState.FORMING
        assert zero.link.closing is None


async def test_a_survivor_that_does_not_come_back_loses_its_place_to_a_new_process() -> None:
    async with GroupBench() as bench:
        zero, one = await engaged(bench)
        one.lose()
        await zero.expect("abort")
        newcomer = ScriptedRank(bench.group, 0, instance="newcomer")
        newcomer.join()
        assert (await zero.expect_end()).end is LinkEnd.REPLACED
        ScriptedRank(bench.group, 1, instance="replacement").join()
        assert (await newcomer.expect("form_group")).rank == 0


async def test_a_survivor_that_does_not_come_back_in_time_loses_its_stream() -> None:
    async with GroupBench(timed(rendezvous_timeout_s=0.05)) as bench:
        zero, one = await engaged(bench)
        one.lose()
        await zero.expect("abort")
        closing = await zero.expect_end()
        assert (closing.end, closing.reason) == (LinkEnd.REPLACED, "did not say Hello within 0.05 s")
        assert not bench.topology.ranks[0].joined


async def test_a_permanent_failure_stays_until_a_new_process_joins() -> None:
    async with GroupBench() as bench:
        zero, one = await engaged(bench, through=1)
        one.say(1, failure=ranks_pb2.Failure(message="model.safetensors: damaged", permanent=True))
        await zero.expect("abort")
        await one.expect("abort")
        topology = bench.topology
        assert (topology.failed, topology.state) == (True, admin_pb2.GROUP_STATE_ABORTED)
        assert topology.reason == "rank 1 (pod-1) failed: model.safetensors: damaged"
        zero.join()
        one.join()
        await asyncio.sleep(0)
        assert (bench.group.state, bench.topology.failed) == (GroupState.ABORTED, True)
        one.lose()
        ScriptedRank(bench.group, 1, instance="mended").join()
        assert (await zero.expect("form_group")).rank == 0
        assert not bench.topology.failed


async def test_a_permanent_failure_is_told_even_if_it_came_second() -> None:
    async with GroupBench() as bench:
        zero, one = await engaged(bench, through=1)
        zero.say(1, failure=ranks_pb2.Failure(message="a peer left"))
        one.say(1, failure=ranks_pb2.Failure(message="damaged", permanent=True))
        await zero.expect("abort")
        assert (bench.topology.failed, bench.topology.reason) == (True, "rank 1 (pod-1) failed: damaged")


async def test_a_cache_that_holds_no_full_sequence_is_a_permanent_failure() -> None:
    async with GroupBench() as bench:
        zero, one = await engaged(bench, through=1)
        zero.answer("load_model", None, kv_budget_bytes=100)
        one.answer("load_model", None)
        assert "spec.pools[0].cpu.memoryPerRank: rank 0" in (await zero.expect("abort")).reason
        assert bench.topology.failed


async def test_more_ends_than_the_restart_budget_allows_is_a_failure() -> None:
    now = [0.0]
    settings = timed(max_restarts=1, restart_window_s=100.0)
    async with GroupBench(settings, clock=lambda: now[0]) as bench:
        zero, one = await engaged(bench)
        for epoch, failed in ((1, False), (2, True)):
            one.say(epoch, failure=ranks_pb2.Failure(message="no luck"))
            for rank in (zero, one):
                await rank.expect("abort")
            assert bench.topology.failed is failed
            for rank in (zero, one):
                rank.join()
            if not failed:
                for rank in (zero, one):
                    await rank.expect("form_group")
        assert "no luck; the group has ended more than spec.recovery.maxRestarts (1) times" in bench.topology.reason
        now[0] = 1000.0
        one.lose()
        ScriptedRank(bench.group, 1, instance="new").join()
        await zero.expect("form_group")
        zero.say(3, failure=ranks_pb2.Failure(message="again"))
        await zero.expect("abort")
        assert not bench.topology.failed
