"""Which plan a group works with: decided once, kept, or taken over from ranks that hold weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from hetero_api.errors import PlanError
from hetero_api.group_state import GroupState
from hetero_api.sharding import ShardPlan
from hetero_api.spec import PlacementShares
from hetero_api.v1 import ranks_pb2
from hetero_gateway.group.placement import (
    GroupPlacement,
    PlacedRanks,
    Placement,
    decide_placement,
    hardware_of,
    held_plan,
    machine_of,
)
from hetero_gateway.group.settings import GroupSettings, make_plan_key
from hetero_placement.decision import Streaming
from hetero_placement.shard_plans import deal_within_layers
from hetero_placement.solver import ADOPTED
from tests.unit.group.group_setup import (
    DEVICE,
    HOST_TIMES,
    GroupBench,
    ScriptedRank,
    group_settings,
    hello,
    model_config,
    spec_of,
    wait_until,
)

pytestmark = pytest.mark.unit

OTHER = deal_within_layers(model_config(), cores=[1, 1], shares=PlacementShares(mlp=[1.0, 5.0]))


def holding(plan: ShardPlan, *, rank: int, key: str = "", as_rank: int | None = None) -> ranks_pb2.Hello:
    """A Hello of a rank with weights of a plan."""
    held = ranks_pb2.HeldShard(
        shard_plan=plan.to_proto(), plan_key=key or group_settings().plan_key, rank=rank if as_rank is None else as_rank
    )
    return hello(rank, held=held)


def told(*hellos: ranks_pb2.Hello) -> PlacedRanks:
    return PlacedRanks(hellos, [ranks_pb2.Formed(host_times=HOST_TIMES)] * len(hellos))


FRESH = told(hello(0), hello(1))


class Decisions:
    """Counts how often the solver is asked."""

    def __init__(self) -> None:
        self.held: list[ShardPlan | None] = []

    def __call__(self, settings: GroupSettings, ranks: PlacedRanks, held: ShardPlan | None) -> Placement:
        self.held.append(held)
        return decide_placement(settings, ranks, held)


async def test_the_plan_is_decided_once_and_then_kept() -> None:
    decide = Decisions()
    planner = GroupPlacement(group_settings(), decide=decide)
    assert (planner.plan, planner.needs_times) == (None, True)
    first = await planner.settle(FRESH)
    assert planner.plan == first.plan
    assert not planner.needs_times
    slower = hello(1)
    slower.device.speeds.memory_bandwidth /= 10
    assert await planner.settle(told(hello(0), slower)) is first
    assert decide.held == [None]


@pytest.mark.parametrize("holders", [(0, 1), (0,), (1,)])
async def test_a_gateway_that_comes_back_takes_over_what_ranks_hold(holders: Sequence[int]) -> None:
    hellos = [holding(OTHER, rank=rank) if rank in holders else hello(rank) for rank in (0, 1)]
    placement = await GroupPlacement(group_settings()).settle(told(*hellos))
    assert placement.plan == OTHER
    assert placement.mode == "Tensor"
    assert placement.decision.chosen.name == ADOPTED
    assert placement.decision.chosen.prediction is not None
    assert placement.decision.reason.startswith(ADOPTED)


async def test_a_plan_that_would_be_chosen_anew_is_told_as_that() -> None:
    chosen = await GroupPlacement(group_settings()).settle(FRESH)
    again = await GroupPlacement(group_settings()).settle(told(*(holding(chosen.plan, rank=rank) for rank in (0, 1))))
    assert again.decision == chosen.decision


async def test_what_ranks_agree_on_counts_more_than_what_the_gateway_remembers() -> None:
    planner = GroupPlacement(group_settings())
    await planner.settle(FRESH)
    placement = await planner.settle(told(hello(0), holding(OTHER, rank=1)))
    assert placement.plan == planner.plan == OTHER


@pytest.mark.parametrize(
    "hellos",
    [
        (holding(OTHER, rank=0, key="another"), hello(1)),
        (holding(OTHER, rank=0, as_rank=1), hello(1)),
        (holding(ShardPlan(OTHER.ranks[:1]), rank=0), hello(1)),
        (holding(ShardPlan(OTHER.ranks[::-1]), rank=0), hello(1)),
    ],
    ids=["of another resource", "of another place", "of fewer ranks", "no plan at all"],
)
async def test_a_plan_that_is_none_of_this_group_is_worth_nothing(hellos: Sequence[ranks_pb2.Hello]) -> None:
    assert held_plan(group_settings(), hellos) is None
    placement = await GroupPlacement(group_settings()).settle(told(*hellos))
    assert placement.plan == (await GroupPlacement(group_settings()).settle(FRESH)).plan


async def test_ranks_that_disagree_decide_nothing() -> None:
    even = deal_within_layers(model_config(), cores=[1, 1], shares=PlacementShares())
    assert held_plan(group_settings(), [holding(OTHER, rank=0), holding(even, rank=1)]) is None


async def test_a_replaced_plan_is_the_one_from_then_on() -> None:
    planner = GroupPlacement(group_settings())
    with pytest.raises(PlanError, match="no plan was decided"):
        planner.replace_plan(OTHER)
    await planner.settle(FRESH)
    planner.replace_plan(OTHER)
    assert (await planner.settle(FRESH)).plan == OTHER


async def test_a_rank_that_told_no_speed_is_named() -> None:
    silent = hello(1)
    silent.device.speeds.Clear()
    with pytest.raises(PlanError, match=r"rank 1 \(cpu-1\) reported no memory bandwidth"):
        await GroupPlacement(group_settings()).settle(told(hello(0), silent))


def test_the_key_changes_with_what_plans_are_made_from_and_nothing_else() -> None:
    def key(dtype: str = "float32", fingerprint: str = "f", **spec: object) -> str:
        return make_plan_key(spec_of(**spec), dtype=dtype, model_fingerprint=fingerprint, version="1")

    assert key() == key()
    assert key(engine={"maxNumSeqs": 7}) == key()
    assert key(placement={"rebalanceExperts": False}) == key()
    model = {"uri": "hf://org/model", "quantization": "int8"}
    others = {
        key(model=model),
        key(dtype="bfloat16"), key(fingerprint="g"), key(placement={"mode": "Layer"}),
        key(placement={"workload": {"concurrency": 9}}), key(shares={"mlp": [1.0, 2.0]}),
        make_plan_key(spec_of({"name": "cpu", "ranks": 3}), dtype="float32", model_fingerprint="f", version="1"),
        make_plan_key(spec_of(), dtype="float32", model_fingerprint="f", version="2"),
    }  # fmt: skip
    assert len(others | {key()}) == 9


async def test_only_an_epoch_that_has_to_decide_measures_the_exchange() -> None:
    async with GroupBench() as bench:
        ranks = [ScriptedRank(bench.group, ordinal) for ordinal in (0, 1)]
        for measures in (True, False):
            for rank in ranks:
                rank.join()
            forms = [await rank.obey("form_group") for rank in ranks]
            assert [form.measure_exchange for form in forms] == [measures] * 2
            loads = [await rank.expect("load_model") for rank in ranks]
            assert loads[0] == loads[1]
            ranks[0].say(ranks[0].epoch, failure=ranks_pb2.Failure(message="broken"))
            for rank in ranks:
                await rank.expect("abort")


async def test_ranks_that_hold_another_plan_are_told_to_load_it() -> None:
    async with GroupBench() as bench:
        ranks = [ScriptedRank(bench.group, ordinal) for ordinal in (0, 1)]
        ranks[0].join()
        ranks[1].join(held=holding(OTHER, rank=1).held)
        for rank in ranks:
            await rank.obey("form_group")
            load = await rank.expect("load_model") if rank is ranks[1] else None
        assert load is not None
        assert ShardPlan.from_proto(load.shard_plan) == OTHER
        assert load.plan_key == group_settings().plan_key


async def test_a_model_that_fits_nowhere_ends_the_epoch_for_good_with_the_solvers_words() -> None:
    async with GroupBench() as bench:
        ranks = [ScriptedRank(bench.group, ordinal) for ordinal in (0, 1)]
        small = ranks_pb2.DeviceReport()
        small.CopyFrom(DEVICE)
        small.memory_bytes = 1 << 20
        for rank in ranks:
            rank.join(device=small)
        for rank in ranks:
            await rank.obey("form_group")
        await bench.until(GroupState.ABORTED)
        assert bench.group.failed
        assert "spec.placement: no placement can be had" in bench.topology.reason


def test_what_ranks_need_of_their_memory_in_any_case_is_what_they_told() -> None:
    formed = [ranks_pb2.Formed(host_times=HOST_TIMES, runtime_bytes=70 + rank, gather_bytes=rank) for rank in range(2)]
    hardware = hardware_of(group_settings(), PlacedRanks([hello(0), hello(1)], formed))
    assert [(rank.runtime_bytes, rank.gather_bytes) for rank in hardware.ranks] == [(70, 0), (71, 1)]


def test_pods_of_one_machine_share_its_memory_also_if_they_have_no_folder_in_common() -> None:
    assert machine_of("boot:1a:2") == machine_of("boot:1b:7") != machine_of("other:1a:2")
    assert machine_of("unshared:12") != machine_of("unshared:34")


def streaming_placement(settings: GroupSettings, ranks: PlacedRanks, held: ShardPlan | None) -> Placement:
    """The solver's, as if its plan streamed experts in steps of 8 tokens or more."""
    placement = decide_placement(settings, ranks, held)
    decision = placement.decision
    chosen = replace(decision.chosen, streaming=Streaming(8, 99, 4096, 1.0, 2.0))
    return replace(placement, decision=replace(decision, chosen=chosen))


@pytest.mark.parametrize("problem", ["", "no locked memory"])
async def test_steps_stream_experts_if_all_ranks_can_share_them(monkeypatch: pytest.MonkeyPatch, problem: str) -> None:
    monkeypatch.setattr("hetero_gateway.group.placement.decide_placement", streaming_placement)
    async with GroupBench() as bench:
        ranks = bench.obedient(0), bench.obedient(1)
        ranks[1].streaming_problem = problem
        await bench.until(GroupState.READY)
        long = [plan for plan in ranks[0].plans if sum(span.num_tokens for span in plan.spans) >= 8]
        assert long
        assert {plan.streams_experts for plan in long} == {not problem}
        assert (f"no experts are streamed: rank 1 (pod-1): {problem}" in bench.topology.placement.reason) == bool(
            problem
        )


async def test_a_group_that_must_stream_and_cannot_fails_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetero_gateway.group.placement.decide_placement", streaming_placement)
    monkeypatch.setattr("hetero_gateway.group.placement.check_streaming", lambda *_: None)
    settings = group_settings()
    engine = settings.spec.engine.model_copy(update={"expert_streaming": 8})
    asked = replace(settings, spec=settings.spec.model_copy(update={"engine": engine}))
    async with GroupBench(asked) as bench:
        bench.obedient(0).streaming_problem = "no locked memory"
        bench.obedient(1)
        await wait_until(lambda: bench.group.failed)
        assert "spec.engine.expertStreaming: " in bench.topology.reason
        assert "no locked memory" in bench.topology.reason
