"""Everything that ends an epoch, what survivors are told, and how the next one comes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from hetero_api.group_state import GroupState
from hetero_api.v1 import admin_pb2, ranks_pb2
from hetero_gateway.engine.errors import EngineUnavailable
from hetero_gateway.engine.stream import RequestStream
from hetero_gateway.group import recovery, rendezvous
from hetero_gateway.group.roster import Closing, LinkEnd
from hetero_gateway.group.settings import GroupSettings
from tests.unit.engine.engine_setup import VOCAB_SIZE, engine_config, generation
from tests.unit.engine.fake_ranks import tokens_alone
from tests.unit.group.group_setup import (
    WARM_UP_PLANS,
    GroupBench,
    ObedientRank,
    ScriptedRank,
    collect,
    group_settings,
    wait_until,
    with_recovery,
)

pytestmark = pytest.mark.unit


async def held_up(bench: GroupBench, rank: ObedientRank) -> RequestStream:
    """A request whose first step the rank has, and does not answer."""
    rank.holds_steps = True
    stream = bench.core.submit(generation("r", range(3)))
    await wait_until(lambda: len(rank.plans) > WARM_UP_PLANS)
    return stream


PHASES = ("form_group", "load_model", "allocate_cache")
ENDINGS: dict[str, tuple[Callable[[ScriptedRank], None], str]] = {
    "stream": (lambda rank: rank.lose(), "its stream ended: connection reset"),
    "failure": (
        lambda rank: rank.say(1, failure=ranks_pb2.Failure(message="out of luck")),
        "rank 1 (pod-1) failed: out of luck",
    ),
    "future epoch": (lambda rank: rank.say(2, formed=ranks_pb2.Formed()), "spoke in epoch 2, the current one is 1"),
    "hello": (lambda rank: rank.join(), "said Hello and is engaged already"),
    "nothing": (lambda rank: rank.say(1), "said nothing in epoch 1"),
    "wrong kind": (
        lambda rank: rank.say(1, step_result=ranks_pb2.StepResult(step_id=1)),
        "rank 1 answered step 1, which is not awaited of it now",
    ),
}


def timed(**changes: float) -> GroupSettings:
    return with_recovery(group_settings(), **changes)


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


@pytest.mark.parametrize("state", [GroupState.READY, GroupState.ASLEEP])
@pytest.mark.parametrize("ending", ENDINGS)
async def test_who_asks_before_the_loop_comes_to_an_end_is_not_told_that_the_group_serves(
    ending: str, state: GroupState
) -> None:
    end, _ = ENDINGS[ending]
    async with GroupBench() as bench:
        _, one = await bench.ready()
        bench.group.enter(state)
        assert bench.topology.state == state.to_proto()
        end(one)
        assert bench.topology.state == GroupState.ABORTED.to_proto()
        bench.group.enter(state)  # as a command does that ended a moment before
        assert bench.topology.state == GroupState.ABORTED.to_proto()


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
    async with GroupBench(timed(rendezvous_timeout_seconds=0.05)) as bench:
        zero, one = await engaged(bench, through=through)
        orders = (ranks_pb2.FormGroup(), ranks_pb2.LoadModel(), ranks_pb2.AllocateCache())
        zero.answer(PHASES[through], orders[through])
        for rank in (zero, one):
            reason = (await rank.expect("abort")).reason
            assert reason.startswith("rank 1 (pod-1) did not answer")
            assert "spec.recovery.rendezvousTimeoutSeconds" in reason


async def test_ranks_that_get_on_with_a_load_have_time() -> None:
    async with GroupBench(timed(rendezvous_timeout_seconds=0.2)) as bench:
        zero, one = await engaged(bench, through=1)
        zero.answer("load_model", ranks_pb2.LoadModel())
        reading = ranks_pb2.Progress(work="reading weights", total=100, unit="B")
        for reading.done in range(1, 9):
            one.say(1, heartbeat=ranks_pb2.Heartbeat(progress=reading))
            await asyncio.sleep(0.05)
        assert bench.group.state is GroupState.LOADING
        began_s = time.monotonic()
        for _ in range(8):
            one.say(1, heartbeat=ranks_pb2.Heartbeat(progress=reading))  # it says the same again: it hangs
            await asyncio.sleep(0.05)
        assert "rank 1 (pod-1) did not answer 'loaded' within 0.2 s" in (await zero.expect("abort")).reason
        assert time.monotonic() - began_s < 5


async def test_a_warm_up_step_without_a_result_ends_the_epoch() -> None:
    async with GroupBench(timed(step_timeout_seconds=0.02)) as bench:
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


# --- streams go on --------------------------------------------------------------------------------------


def tokens_of(events: list[Any]) -> list[int]:
    return [token for event in events[:-1] for token in event.token_ids]


async def heal(bench: GroupBench, survivors: tuple[ObedientRank, ...], ordinal: int) -> None:
    """Once the survivors know that the epoch is over, a new process takes the place."""
    await wait_until(lambda: all(rank.aborts for rank in survivors))
    bench.obedient(ordinal, instance="replacement")
    await bench.until(GroupState.READY)


@pytest.mark.parametrize("victim", [0, 1])
async def test_a_lost_rank_pauses_requests_and_its_replacement_lets_them_go_on(victim: int) -> None:
    async with GroupBench() as bench:
        ranks = await bench.ready()
        streams = [bench.core.submit(generation(f"r{i}", range(5 + i), max_tokens=20, seed=i)) for i in range(3)]
        await wait_until(lambda: len(ranks[0].plans) > WARM_UP_PLANS + 4)
        ranks[victim].lose()
        await bench.until(GroupState.ABORTED)
        assert bench.topology.paused_requests == 3
        queued = bench.core.submit(generation("late", range(4), max_tokens=3))
        assert bench.topology.paused_requests == 4
        await heal(bench, (ranks[1 - victim],), victim)
        for index, stream in enumerate(streams):
            alone = tokens_alone(range(5 + index), seed=index, count=20, vocab_size=VOCAB_SIZE)
            assert tokens_of(await collect(stream)) == alone
        assert len(tokens_of(await collect(queued))) == 3
        assert (bench.group.epoch, bench.topology.paused_requests) == (2, 0)


async def test_while_requests_wait_the_warm_up_is_brief() -> None:
    async with GroupBench() as bench:
        zero, one = await bench.ready()
        assert max(span.num_tokens for plan in zero.plans for span in plan.spans) > 16
        stream = bench.core.submit(generation("r", range(5), max_tokens=20))
        await wait_until(lambda: len(zero.plans) > WARM_UP_PLANS + 4)
        one.lose()
        await heal(bench, (zero,), 1)
        assert max(span.num_tokens for plan in zero.plans[:4] for span in plan.spans) == 16
        await collect(stream)


async def test_a_step_without_a_result_ends_the_epoch_and_the_request_goes_on_in_the_next() -> None:
    async with GroupBench(timed(step_timeout_seconds=0.2)) as bench:
        zero, one = await bench.ready()
        zero.holds_steps = True
        stream = bench.core.submit(generation("r", range(3), max_tokens=4))
        await wait_until(lambda: bool(one.aborts))
        assert "had no result within 0.2 s" in one.aborts[0]
        zero.holds_steps = False
        assert tokens_of(await collect(stream)) == tokens_alone(range(3), seed=0, count=4, vocab_size=VOCAB_SIZE)


async def test_a_result_that_does_not_fit_its_plan_ends_the_epoch_and_the_request_goes_on() -> None:
    async with GroupBench() as bench:
        zero, one = await bench.ready()
        zero.holds_steps = True
        stream = bench.core.submit(generation("r", range(3), max_tokens=4))
        await wait_until(lambda: len(zero.plans) > WARM_UP_PLANS)
        zero.holds_steps = False
        zero.say(1, step_result=ranks_pb2.StepResult(step_id=WARM_UP_PLANS + 1, slots=[2], token_ids=[1]))
        assert tokens_of(await collect(stream)) == tokens_alone(range(3), seed=0, count=4, vocab_size=VOCAB_SIZE)
        assert "slots [0] had to sample, slots [2] did" in one.aborts[0]


async def test_a_request_that_waits_too_long_for_a_group_ends_unavailable() -> None:
    bench = GroupBench(engine=engine_config(pause_limit_s=0.05))
    async with bench:
        zero, one = await bench.ready()
        stream = await held_up(bench, zero)
        one.lose()
        with pytest.raises(EngineUnavailable, match=r"rank 1 \(pod-1\): its stream ended"):
            await collect(stream)


async def test_a_permanent_failure_ends_every_request_and_refuses_new_ones() -> None:
    async with GroupBench() as bench:
        zero, one = await bench.ready()
        zero.holds_steps = True
        streams = [bench.core.submit(generation(f"r{i}", range(3))) for i in range(2)]
        await wait_until(lambda: len(zero.plans) > WARM_UP_PLANS)
        one.say(1, failure=ranks_pb2.Failure(message="model.safetensors: damaged", permanent=True))
        for stream in streams:
            with pytest.raises(EngineUnavailable, match=r"model\.safetensors: damaged"):
                await collect(stream)
        with pytest.raises(EngineUnavailable, match="damaged"):
            bench.core.submit(generation("r", range(3)))
        one.lose()
        zero.holds_steps = False
        bench.obedient(1, instance="mended")
        await bench.until(GroupState.READY)
        assert len(tokens_of(await collect(bench.core.submit(generation("r", range(3)))))) == 4


async def test_a_rank_lost_while_draining_ends_requests_for_there_is_no_other_epoch() -> None:
    async with GroupBench() as bench:
        zero, one = await bench.ready()
        stream = await held_up(bench, zero)
        bench.group.drain()
        one.lose()
        with pytest.raises(EngineUnavailable, match="its stream ended"):
            await collect(stream)


async def test_draining_between_two_epochs_ends_the_requests_that_wait_for_the_next() -> None:
    async with GroupBench() as bench:
        zero, one = await bench.ready()
        stream = await held_up(bench, zero)
        one.lose()
        await bench.until(GroupState.ABORTED)
        bench.group.drain()
        with pytest.raises(EngineUnavailable, match=r"draining and its group was lost: rank 1 \(pod-1\)"):
            await collect(stream)


# --- leaving --------------------------------------------------------------------------------------------


def leaves(rank: ScriptedRank) -> None:
    rank.say(rank.epoch, leaving=ranks_pb2.Leaving(reason="SIGTERM"))


async def test_a_rank_that_leaves_an_idle_group_goes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "DRAIN_NOTICE_S", 600.0)
    async with GroupBench() as bench:
        _, one = await bench.ready()
        leaves(one)
        await bench.until(GroupState.ABORTED)
        assert one.link.closing == Closing(LinkEnd.DONE, "it was asked to leave: SIGTERM")
        assert bench.group.topology().reason.startswith("rank 1 (pod-1): it was asked to leave: SIGTERM; waiting for")


async def test_a_rank_that_leaves_a_busy_group_goes_soon_and_requests_go_on_with_its_successor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rendezvous, "DRAIN_NOTICE_S", 0.05)
    async with GroupBench() as bench:
        zero, one = await bench.ready()
        stream = await held_up(bench, zero)
        leaves(one)
        await bench.until(GroupState.ABORTED)
        zero.holds_steps = False
        bench.obedient(1, instance="successor")
        assert len(tokens_of(await collect(stream))) == 4


@pytest.mark.parametrize("drains", ["before", "after"])
async def test_a_rank_that_leaves_with_its_gateway_stays_until_the_last_stream_has_ended(
    drains: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "DRAIN_NOTICE_S", 0.05)
    async with GroupBench() as bench:
        zero, one = await bench.ready()
        stream = await held_up(bench, zero)
        if drains == "before":
            bench.group.drain()
        leaves(one)
        bench.group.drain()
        await asyncio.sleep(3 * rendezvous.DRAIN_NOTICE_S)
        assert one.link.closing is None
        zero.go_on()
        assert len(tokens_of(await collect(stream))) == 4
        await wait_until(lambda: one.link.closing is not None)
        assert zero.link.closing is None


async def test_a_rank_that_leaves_with_its_gateway_stays_while_that_accepts_requests() -> None:
    async with GroupBench() as bench:
        _, one = await bench.ready()
        bench.group.drain(notice_s=1.0)
        assert not bench.group.is_ready
        leaves(one)
        for _ in range(3):
            await asyncio.sleep(0.05)
            assert len(tokens_of(await collect(bench.core.submit(generation("r", range(3)))))) == 4
            assert one.link.closing is None
        await wait_until(lambda: one.link.closing is not None)
        with pytest.raises(EngineUnavailable, match="draining"):
            bench.core.submit(generation("s", range(3)))


@pytest.mark.parametrize("keeps_its_stream", [True, False])
async def test_ranks_that_were_told_to_end_never_use_the_budget_up(keeps_its_stream: bool) -> None:
    async with GroupBench(timed(max_restarts=0)) as bench:
        _, one = await bench.ready()
        for life in range(4):
            leaves(one)
            if not keeps_its_stream:  # its pod's grace is over before the gateway lets it go
                one.lose()
            await bench.until(GroupState.ABORTED)
            assert not bench.topology.failed
            one = bench.obedient(1, instance=f"successor {life}")
            await bench.until(GroupState.READY)
        one.lose()
        await bench.until(GroupState.ABORTED)
        assert bench.topology.failed


async def test_a_rank_that_leaves_between_two_epochs_is_let_go() -> None:
    async with GroupBench() as bench:
        zero, one = await bench.ready()
        zero.lose()
        await bench.until(GroupState.ABORTED)
        leaves(one)
        await wait_until(lambda: one.link.closing is not None)


# --- silence --------------------------------------------------------------------------------------------


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence is noticed ten times as fast."""
    monkeypatch.setattr("hetero_gateway.group.epoch.SERVING_SILENCE_S", 0.2)
    monkeypatch.setattr("tests.unit.group.group_setup.HEARTBEAT_INTERVAL_S", 0.02)
    monkeypatch.setattr(recovery, "FORMING_SILENCE_S", 0.2)
    monkeypatch.setattr(recovery, "CHECK_S", 0.03)


@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.usefixtures("impatient")
async def test_a_frozen_rank_loses_its_place_and_requests_go_on_with_its_replacement(busy: bool) -> None:
    async with GroupBench() as bench:
        zero, one = await bench.ready()
        stream = None
        if busy:
            zero.holds_steps = True
            stream = bench.core.submit(generation("r", range(3), max_tokens=4))
        one.beats = False
        await bench.until(GroupState.ABORTED)
        assert "rank 1 (pod-1): said nothing for 0." in bench.topology.reason
        assert one.link.closing is not None
        assert one.link.closing.end is LinkEnd.REPLACED
        assert not bench.topology.ranks[1].joined
        zero.holds_steps = False
        await heal(bench, (zero,), 1)
        if stream is not None:
            assert len(tokens_of(await collect(stream))) == 4


@pytest.mark.usefixtures("impatient")
async def test_a_rank_that_beats_while_it_computes_is_not_accused() -> None:
    async with GroupBench() as bench:
        zero, _ = await bench.ready()
        zero.holds_steps = True
        stream = bench.core.submit(generation("r", range(3), max_tokens=4))
        await asyncio.sleep(0.6)
        assert bench.group.state is GroupState.READY
        stream.cancel()


@pytest.mark.usefixtures("impatient")
async def test_a_gateway_that_stood_still_accuses_nobody(caplog: pytest.LogCaptureFixture) -> None:
    async with GroupBench() as bench:
        await bench.ready()
        await asyncio.sleep(0.05)
        time.sleep(1.2)  # noqa: ASYNC251 - the loop does not turn
        await asyncio.sleep(0.3)
        assert bench.group.state is GroupState.READY
        assert "the event loop did not turn for 1." in caplog.text


@pytest.mark.usefixtures("impatient")
async def test_a_rank_that_is_frozen_from_the_start_of_an_epoch_is_noticed() -> None:
    async with GroupBench() as bench:
        zero, one = ScriptedRank(bench.group, 0), ScriptedRank(bench.group, 1)
        zero.join()
        one.join()
        for rank in (zero, one):
            await rank.expect("form_group")
            closing = await rank.expect_end()
            assert closing.end is LinkEnd.REPLACED
            assert "said nothing for 0." in closing.reason


# --- the next epoch -------------------------------------------------------------------------------------


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
    async with GroupBench(timed(rendezvous_timeout_seconds=0.05)) as bench:
        zero, one = await engaged(bench)
        one.lose()
        await zero.expect("abort")
        closing = await zero.expect_end()
        assert (closing.end, closing.reason) == (
            LinkEnd.REPLACED, "did not say Hello within 0.05 s of the end of epoch 1",
        )  # fmt: skip
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


class Clock:
    """A time that the test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


async def fail_once(bench: GroupBench, *ranks: ScriptedRank) -> None:
    """All ranks get into an epoch, the last one fails, and all say Hello again."""
    for rank in ranks:
        await rank.expect("form_group")
    ranks[-1].say(bench.group.epoch, failure=ranks_pb2.Failure(message="no luck"))
    for rank in ranks:
        await rank.expect("abort")
        rank.join()


async def test_more_ends_than_the_restart_budget_allows_is_a_failure_that_a_new_process_may_mend() -> None:
    clock = Clock()
    async with GroupBench(timed(max_restarts=1, window_seconds=100.0), clock=clock) as bench:
        zero, one = ScriptedRank(bench.group, 0), ScriptedRank(bench.group, 1)
        zero.join()
        one.join()
        await fail_once(bench, zero, one)
        assert not bench.topology.failed
        await fail_once(bench, zero, one)
        assert bench.topology.failed
        assert "no luck; the group has ended more than spec.recovery.maxRestarts (1) times" in bench.topology.reason
        assert "a new process is tried in 30.0 s" in bench.topology.reason
        one.lose()
        ScriptedRank(bench.group, 1, instance="at once").join()
        await settle()
        assert (bench.topology.failed, bench.group.state) == (True, GroupState.ABORTED)
        clock.now = 30.0
        zero.lose()
        again = ScriptedRank(bench.group, 0, instance="later")
        again.join()
        await fail_once(bench, again)
        assert bench.topology.failed
        clock.now = 1000.0
        ScriptedRank(bench.group, 1, instance="new").join()


async def test_an_epoch_that_fails_at_once_again_and_again_waits_longer_and_tells() -> None:
    clock = Clock()
    async with GroupBench(timed(max_restarts=100), clock=clock) as bench:
        zero, one = ScriptedRank(bench.group, 0), ScriptedRank(bench.group, 1)
        zero.join()
        one.join()
        for pause_s in (0.0, 0.5, 1.0, 2.0):
            await fail_once(bench, zero, one)
            if not pause_s:
                continue
            await settle()
            assert bench.group.state is GroupState.ABORTED
            assert bench.topology.reason.endswith(f"no luck; next try in {pause_s:.1f} s")
            clock.now += pause_s
            bench.group._changed.set()  # the clock is not the loop's
        await zero.expect("form_group")
        assert bench.topology.reason == "rank 1 (pod-1) failed: no luck"


async def test_a_pause_ends_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetero_gateway.group.recovery.FIRST_PAUSE_S", 0.05)
    async with GroupBench(timed(max_restarts=100)) as bench:
        zero, one = ScriptedRank(bench.group, 0), ScriptedRank(bench.group, 1)
        zero.join()
        one.join()
        for _ in range(2):
            await fail_once(bench, zero, one)
        began_s = time.monotonic()
        await zero.expect("form_group")
        assert 0.03 < time.monotonic() - began_s < 2


async def test_an_epoch_that_served_well_is_followed_by_the_next_at_once() -> None:
    async with GroupBench(timed(max_restarts=100)) as bench:
        zero, one = await bench.ready()
        for epoch in range(2, 6):
            await collect(bench.core.submit(generation("r", range(3), max_tokens=12)))
            one.say(one.epoch, failure=ranks_pb2.Failure(message="no luck"))
            await wait_until(lambda epoch=epoch: bench.group.epoch == epoch)  # type: ignore[misc]
            await bench.until(GroupState.READY)
        assert len(zero.aborts) == 4


async def test_a_survivor_that_was_loading_has_longer_to_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "LEAVING_S", 0.05)
    for through, comes_back in ((0, False), (1, True)):
        async with GroupBench() as bench:
            zero, one = await engaged(bench, through=through)
            one.lose()
            await zero.expect("abort")
            await asyncio.sleep(0.15)
            assert (zero.link.closing is None) is comes_back


async def settle() -> None:
    """Let everything happen that can happen now."""
    for _ in range(20):
        await asyncio.sleep(0)
