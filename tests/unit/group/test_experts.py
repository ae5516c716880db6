"""Experts are counted and change places in pairs, while requests run or not, and the plan that stands is known."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from hetero_api.group_state import GroupState
from hetero_api.model_config import ModelConfig
from hetero_api.sharding import ShardPlan
from hetero_api.v1 import admin_pb2, ranks_pb2
from hetero_gateway.engine.errors import GroupLost
from hetero_gateway.group.admin_rpcs import AdminRpcs
from hetero_gateway.group.errors import CommandFailed, WrongState
from hetero_gateway.group.experts import ExpertRebalancer, ExpertSwap, RebalancePolicy, merge_counts, wants_rebalancing
from hetero_gateway.group.settings import GroupSettings
from tests.unit.engine.engine_setup import generation
from tests.unit.group.group_setup import (
    EXPERT_BYTES,
    FINGERPRINT,
    PATIENCE_S,
    GroupBench,
    ObedientRank,
    collect,
    group_settings,
    resource,
    wait_until,
)

pytestmark = pytest.mark.unit

MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "num_hidden_layers": 3, "hidden_size": 512, "intermediate_size": 1024,
    "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 128, "max_position_embeddings": 64,
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 2048, "mlp_only_layers": [1],
}  # fmt: skip
SKEWED = {0: [60, 60, 0, 0], 2: [100, 20, 0, 0]}
"""Rank 0 holds experts 0 and 1: it has all the work."""
SETTLED = {0: [60, 0, 60, 0], 2: [100, 0, 0, 20]}


def moe_settings(*, batch_invariant: bool = False, adapted: bool = False, **placement: Any) -> GroupSettings:
    """Two ranks with half of everything each, of whole experts."""
    shares = {"attention": [1, 1], "mlp": [1, 1], "vocabulary": [1, 1]}
    half = resource(
        engine={
            "blockSize": 4,
            "maxNumSeqs": 4,
            "maxNumBatchedTokens": 64,
            "batchInvariant": batch_invariant,
            "adapters": {"experts": adapted},
        },
        placement={"mode": "Tensor", "experts": "Whole", "shares": shares, **placement},
        model={"uri": "hf://org/model", "maxModelLen": 64},
    )
    return GroupSettings.from_resource(half, ModelConfig.from_hf(MOE), model_fingerprint=FINGERPRINT)


@asynccontextmanager
async def serving(**counts: dict[int, list[int]]) -> AsyncIterator[tuple[GroupBench, ObedientRank, ObedientRank]]:
    """A group of a model of experts; each rank reports the counts of its name, rank zero SKEWED by default."""
    async with GroupBench(moe_settings()) as bench:
        zero, one = bench.obedient(0), bench.obedient(1)
        zero.expert_counts = counts.get("zero", SKEWED)
        one.expert_counts = counts.get("one", {})
        await bench.until(GroupState.READY)
        yield bench, zero, one


def placed(rank: ObedientRank) -> list[ShardPlan]:
    """The plans that the rank went over to in this epoch."""
    orders = [plan.command.place_experts for plan in rank.plans if plan.command.HasField("place_experts")]
    return [ShardPlan.from_proto(order.shard_plan) for order in orders if not order.ahead]


def held(plan: ShardPlan | None, layer: int) -> list[set[int]]:
    assert plan is not None
    return [set(plan.experts_of(rank, layer)) for rank in range(plan.world_size)]


def on_place(rank: ObedientRank, act: Callable[[], None], *, ahead: bool = True) -> None:
    """Do something when the first command to place experts, ahead or not, comes to the rank, before it obeys."""
    obey = rank._obey
    done: list[bool] = []

    def acting(plan: ranks_pb2.StepPlan) -> ranks_pb2.CommandReport:
        is_it = plan.command.HasField("place_experts") and plan.command.place_experts.ahead == ahead
        if is_it and not done:
            done.append(True)
            act()
        return obey(plan)

    rank._obey = acting  # type: ignore[method-assign]


async def test_pairs_of_experts_change_places_and_the_plan_is_known() -> None:
    async with serving() as (bench, zero, one):
        before = bench.group.placement.plan
        assert held(before, 0) == held(before, 2) == [{0, 1}, {2, 3}]
        answer = await bench.rpcs.place_experts()
        assert (answer.moved_experts, answer.counted_tokens) == (4, 60)
        assert 0 < answer.step_s_after < 0.9 * answer.step_s_before
        after = bench.group.placement.plan
        for layer in (0, 2):
            assert all(len(experts & {0, 1}) == 1 for experts in held(after, layer))
        assert zero.commands == one.commands == ["count_experts", "count_experts", *["place_experts"] * 4]
        first, second = placed(zero)
        assert [bool(order) for order in first.expert_orders].count(True) == 1
        assert second == after
        assert bench.group.state is GroupState.READY
        await collect(bench.core.submit(generation("r", range(9), max_tokens=6)))


async def test_what_a_warm_up_chose_is_forgotten_before_anything_is_served() -> None:
    async with serving() as (_, zero, one):
        assert zero.commands == one.commands == ["count_experts"]


async def test_ranks_that_settled_are_left_alone() -> None:
    async with serving() as (bench, zero, one):
        await bench.rpcs.place_experts()
        plan = bench.group.placement.plan
        answer = await bench.rpcs.place_experts()
        assert answer.moved_experts == 0
        assert answer.step_s_after == answer.step_s_before
        assert bench.group.placement.plan is plan
        assert len(placed(one)) == len(placed(zero)) == 2


async def test_as_many_pairs_as_were_asked_for_change_places() -> None:
    async with serving() as (bench, zero, _):
        assert (await bench.rpcs.place_experts(1)).moved_experts == 2
        assert bench.group.placement.plan == placed(zero)[0]
        assert (await bench.rpcs.place_experts(1)).moved_experts == 2
        assert (await bench.rpcs.place_experts(1)).moved_experts == 0


async def test_counts_of_all_ranks_are_added_up() -> None:
    async with serving(zero={0: [60, 0, 0, 0]}, one={0: [0, 0, 60, 0]}) as (bench, _, _):
        assert (await bench.rpcs.place_experts()).moved_experts == 0
    reports = [
        ranks_pb2.CommandReport(expert_counts=[ranks_pb2.ExpertCounts(layer=layer, tokens=tokens)])
        for layer, tokens in ((1, [1, 0]), (0, [0, 5]), (1, [0, 2]))
    ]
    assert merge_counts(reports) == {0: [0, 5], 1: [1, 2]}


def test_tokens_of_experts_in_slices_count_once() -> None:
    reports = [
        ranks_pb2.CommandReport(expert_counts=[ranks_pb2.ExpertCounts(layer=0, tokens=tokens)])
        for tokens in ([7, 0, 0], [0, 2, 5], [0, 2, 5])
    ]
    assert merge_counts(reports) == {0: [7, 2, 5]}


async def test_before_any_token_nothing_moves() -> None:
    async with serving(zero={0: [0] * 4, 2: [0] * 4}) as (bench, _, _):
        answer = await bench.rpcs.place_experts()
        assert (answer.moved_experts, answer.counted_tokens) == (0, 0)


async def test_the_next_epoch_goes_on_with_experts_that_moved() -> None:
    async with serving() as (bench, zero, one):
        await bench.rpcs.place_experts()
        plan = bench.group.placement.plan
        orders: list[Any] = []
        note = zero._note

        def noting(kind: str, order: Any) -> None:
            orders.append(order)
            note(kind, order)

        zero._note = noting  # type: ignore[method-assign]
        one.lose()
        await bench.until(GroupState.ABORTED)
        bench.obedient(1, instance="replacement")
        await bench.until(GroupState.READY)
        loads = [order for order in orders if isinstance(order, ranks_pb2.LoadModel)]
        assert [ShardPlan.from_proto(load.shard_plan) for load in loads] == [plan]


async def test_another_gateway_goes_on_with_experts_that_moved() -> None:
    async with serving() as (bench, _, _):
        await bench.rpcs.place_experts()
        plan = bench.group.placement.plan
    assert plan is not None
    settings = moe_settings()
    async with GroupBench(settings) as bench:
        for place in range(2):
            rank = ObedientRank(bench.group, place)
            held_shard = ranks_pb2.HeldShard(shard_plan=plan.to_proto(), plan_key=settings.plan_key, rank=place)
            rank.join(held=held_shard)
            bench._tasks += [asyncio.create_task(rank.live()), asyncio.create_task(rank.beat())]
        await bench.until(GroupState.READY)
        placement = bench.group.placement.current
        assert placement is not None
        assert placement.plan == plan
        assert "anew" not in placement.decision.reason, "it is what the solver chose, but for where experts are"
        rank.expert_counts = SKEWED
        assert (await bench.rpcs.place_experts()).moved_experts == 0


async def test_a_model_without_experts_has_none_to_place() -> None:
    async with GroupBench() as bench:
        zero, _ = await bench.ready()
        with pytest.raises(WrongState, match="PlaceExperts needs a model of experts"):
            await bench.rpcs.place_experts()
        assert zero.commands == []


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ("batch_invariant", r"which engine.batchInvariant rules out; set it to false first"),
        ("adapted", r"set engine.adapters.experts to false first"),
    ],
)
async def test_batch_invariance_and_adapters_keep_experts_where_they_are(setting: str, problem: str) -> None:
    async with GroupBench(moe_settings(**{setting: True})) as bench:
        zero, _ = await bench.ready()
        with pytest.raises(WrongState, match=problem):
            await bench.rpcs.place_experts()
        assert placed(zero) == []


async def test_asleep_and_between_epochs_nothing_is_placed() -> None:
    async with serving() as (bench, _, one):
        await bench.rpcs.sleep(admin_pb2.SleepRequest(level=1))
        with pytest.raises(WrongState, match="PlaceExperts needs a group that is READY; it is ASLEEP"):
            await bench.rpcs.place_experts()
        one.lose()
        await bench.until(GroupState.ABORTED)
        with pytest.raises(WrongState, match="it is ABORTED"):
            await bench.rpcs.place_experts()


async def test_a_rank_that_cannot_leaves_the_group_as_it_was() -> None:
    async with serving() as (bench, zero, one):
        plan = bench.group.placement.plan
        on_place(zero, lambda: setattr(zero, "peers_fail", True))
        on_place(one, lambda: setattr(one, "problem", "no room"))
        with pytest.raises(CommandFailed, match=r"the group is as it was; .* rank 1 \(pod-1\): no room"):
            await bench.rpcs.place_experts()
        assert bench.group.placement.plan is plan
        assert placed(zero) == []
        zero.peers_fail, one.problem = False, ""
        await collect(bench.core.submit(generation("r", range(9), max_tokens=6)))
        assert (await bench.rpcs.place_experts()).moved_experts == 4


@pytest.mark.parametrize("ahead", [True, False], ids=["while it reads", "as all go over"])
async def test_a_rank_lost_meanwhile_ends_it(ahead: bool) -> None:
    """Nobody has gone over: the next epoch has the plan from before."""
    async with serving() as (bench, zero, one):
        before = bench.group.placement.plan
        on_place(zero, lambda: setattr(zero, "peers_fail", True), ahead=ahead)
        on_place(one, one.lose, ahead=ahead)
        with pytest.raises(GroupLost):
            await bench.rpcs.place_experts()
        assert await plan_of_next_epoch(bench, zero) == before == bench.group.placement.plan


async def test_what_the_others_have_gone_over_to_is_kept_when_a_rank_is_lost_before_it_says_so() -> None:
    async with serving() as (bench, zero, one):
        before = bench.group.placement.plan
        on_place(one, one.lose, ahead=False)
        with pytest.raises(GroupLost):
            await bench.rpcs.place_experts()
        assert zero.holds is not None, "it had voted, and gone over"
        gone_over = ShardPlan.from_proto(zero.holds.shard_plan)
        assert await plan_of_next_epoch(bench, zero) == gone_over == bench.group.placement.plan
        assert gone_over != before


async def plan_of_next_epoch(bench: GroupBench, zero: ObedientRank) -> ShardPlan:
    """The plan that all ranks load when the lost one is replaced; rank zero holds weights."""
    await bench.until(GroupState.ABORTED)
    loads: list[ShardPlan] = []
    note = zero._note

    def noting(kind: str, order: Any) -> None:
        if kind == "load_model":
            loads.append(ShardPlan.from_proto(order.shard_plan))
        note(kind, order)

    zero._note, zero.peers_fail = noting, False  # type: ignore[method-assign]
    bench.obedient(1, instance="replacement")
    await bench.until(GroupState.READY)
    (plan,) = loads
    return plan


async def test_what_each_pair_took_is_reported() -> None:
    async with serving() as (bench, _, _):
        swaps: list[ExpertSwap] = []
        rpcs = AdminRpcs(bench.group, core=bench.core, settings=moe_settings(), observe_swap=swaps.append)
        await rpcs.place_experts()
        await rpcs.place_experts()
        assert [swap.read_bytes for swap in swaps] == [2 * EXPERT_BYTES] * 2
        assert all(0 < swap.pause_s < PATIENCE_S for swap in swaps)


# --- while requests run -----------------------------------------------------------------------------------


def orders_to(rank: ObedientRank) -> list[tuple[str, bool]]:
    """Commands in this epoch, and whether they are for later."""
    commands = [plan.command for plan in rank.plans if plan.HasField("command")]
    return [(command.WhichOneof("action") or "", command.place_experts.ahead) for command in commands]


async def test_pairs_are_read_first_and_then_change_places_while_requests_run() -> None:
    async with serving() as (bench, zero, one):
        one.polls_of_reading = 1
        streams = [bench.core.submit(generation("first", range(9), max_tokens=40))]
        on_place(zero, lambda: streams.append(bench.core.submit(generation("second", range(9), max_tokens=6))))
        assert (await bench.rpcs.place_experts()).moved_experts == 4
        reading, exchange = ("place_experts", True), ("place_experts", False)
        assert orders_to(zero)[1:] == [("count_experts", False), *[reading, reading, exchange] * 2]
        assert orders_to(zero) == orders_to(one)
        after = bench.group.placement.plan
        assert placed(zero)[-1] == after
        assert all(len(experts & {0, 1}) == 1 for layer in (0, 2) for experts in held(after, layer))
        for stream, number in zip(streams, (40, 6), strict=True):
            events = await collect(stream)
            assert sum(len(event.token_ids) for event in events[:-1]) == number


# --- without being asked ----------------------------------------------------------------------------------


def test_only_models_of_experts_are_looked_at_and_only_if_the_resource_lets_them() -> None:
    assert wants_rebalancing(moe_settings())
    assert not wants_rebalancing(moe_settings(rebalanceExperts=False))
    assert not wants_rebalancing(moe_settings(batch_invariant=True))
    assert not wants_rebalancing(moe_settings(adapted=True))
    assert not wants_rebalancing(group_settings())


class Rebalancing:
    """A rebalancer at work on a bench."""

    def __init__(self, bench: GroupBench, *, min_tokens: int) -> None:
        policy = RebalancePolicy(interval_s=0.01, min_tokens=min_tokens)
        rebalancer = ExpertRebalancer(bench.rpcs.place_experts, core=bench.core, policy=policy)
        self._task = asyncio.create_task(rebalancer.run())

    async def __aenter__(self) -> Rebalancing:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task


async def compute(bench: GroupBench, request_id: str) -> None:
    """15 tokens."""
    await collect(bench.core.submit(generation(request_id, range(9), max_tokens=6)))


async def look_often(bench: GroupBench) -> None:
    """Give the rebalancer the time to look many times."""
    deadline_s = asyncio.get_running_loop().time() + 0.2
    await wait_until(lambda: asyncio.get_running_loop().time() > deadline_s)
    assert bench.core.is_idle


async def test_a_group_that_computed_enough_moves_experts_by_itself() -> None:
    async with serving() as (bench, zero, _), Rebalancing(bench, min_tokens=20):
        await compute(bench, "one")
        await look_often(bench)
        assert zero.commands == ["count_experts"], "15 tokens say too little"
        await compute(bench, "two")
        await wait_until(lambda: len(placed(zero)) == 2)
        assert held(bench.group.placement.plan, 0) != [{0, 1}, {2, 3}]
        await look_often(bench)
        assert zero.commands.count("count_experts") == 3, "the second time nothing was left to move"


async def test_a_group_that_serves_does_so_too() -> None:
    async with serving() as (bench, zero, _), Rebalancing(bench, min_tokens=20):

        async def ask_on() -> None:
            for number in itertools.count():
                await collect(bench.core.submit(generation(f"r{number}", range(9), max_tokens=50)))

        asking = asyncio.create_task(ask_on())
        await wait_until(lambda: len(placed(zero)) == 2 and bench.group.placement.plan == placed(zero)[-1])
        asking.cancel()
        with suppress(asyncio.CancelledError):
            await asking


async def test_a_rebalancer_lives_on_when_it_is_refused() -> None:
    async with serving() as (bench, zero, one), Rebalancing(bench, min_tokens=1):
        on_place(zero, lambda: setattr(zero, "peers_fail", True))
        on_place(one, lambda: setattr(one, "problem", "no room"))
        await compute(bench, "one")
        await wait_until(lambda: "place_experts" in zero.commands)
        zero.peers_fail, one.problem = False, ""
        await compute(bench, "two")
        await wait_until(lambda: len(placed(zero)) == 2)
