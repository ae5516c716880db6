"""Experts whole, in slices or mixed: the solver takes the layout that it predicts to be fastest, and says so."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import product
from statistics import mean
from typing import Any

import pytest

from hetero_api.errors import PlanError
from hetero_api.model_config import ModelConfig
from hetero_api.sharding import ShardPlan
from hetero_api.spec import ExpertDeal, PlacementMode, PlacementShares, PlacementSpec, WorkloadSpec
from hetero_placement.cost_model import CostModel
from hetero_placement.decision import Bounds, Decision
from hetero_placement.expert_placement import ExpertCosts, expected_step_s, place_experts
from hetero_placement.hardware import ExchangeSpeeds, Hardware, RankHardware
from hetero_placement.memory_model import MemoryModel
from hetero_placement.part_costs import expected_most
from hetero_placement.roles import RoleChoices
from hetero_placement.solver import solve
from hetero_placement.steps import WorkloadSteps, decode_step
from hetero_placement.tensor_search import NOTHING_FIXED, ExpertLayout, Roles, TensorSearch
from tests.unit.placement.placement_setup import GB, config_of, cpu, gpu

pytestmark = pytest.mark.unit

QWEN3_30B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "num_hidden_layers": 48, "hidden_size": 2048, "intermediate_size": 6144,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151_936,
    "max_position_embeddings": 4096, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
}  # fmt: skip
CONFIG = config_of(**QWEN3_30B).quantized("int4")
BOUNDS = Bounds(max_model_len=1024)
DECODING = WorkloadSpec(prompt_tokens=1, output_tokens=64, concurrency=1)
MANY = WorkloadSpec(prompt_tokens=512, output_tokens=1, concurrency=64)


def nodes(number: int, **rest: Any) -> Hardware:
    """NUMA nodes of one host."""
    ranks = tuple(cpu(2e11, flops=4e12, **rest) for _ in range(number))
    return Hardware(ranks, ExchangeSpeeds.of_rates(2e-6, 1e10))


def with_gpu(*ranks: RankHardware) -> Hardware:
    return Hardware(ranks, ExchangeSpeeds.of_rates(1e-5, 1e10), ExchangeSpeeds.of_rates(5e-6, 1e11))


def solved(
    hardware: Hardware, *, config: ModelConfig = CONFIG, workload: WorkloadSpec = DECODING, **placement: Any
) -> Decision:
    spec = PlacementSpec(**{"mode": PlacementMode.TENSOR, "workload": workload, **placement})
    return solve(config, hardware, dtype="bfloat16", placement=spec, bounds=BOUNDS)


def layout_of(decision: Decision) -> ExpertLayout:
    return ExpertLayout.of(decision.plan)


def best_of(hardware: Hardware, workload: WorkloadSpec) -> dict[ExpertLayout, float]:
    """Seconds of the workload at best, by how experts are dealt, with the roles that are best."""
    model = CostModel(CONFIG, hardware.levelled(), dtype="bfloat16")
    memory = MemoryModel(CONFIG, hardware.levelled(), BOUNDS, dtype="bfloat16")
    roles = RoleChoices(hardware, num_kv_heads=CONFIG.num_kv_heads, every_rank=True)
    options = [roles.mlp_only(), roles.all_parts()] if hardware.num_gpu_ranks else [roles.every_cpu_rank()]
    steps = WorkloadSteps.of(workload, BOUNDS).all

    def seconds(choices: Sequence[Roles], layout: ExpertLayout) -> float:
        plans = [TensorSearch(model, memory, steps, each, NOTHING_FIXED, layout).plan() for each in choices]
        times = [model.predict(plan, workload, BOUNDS).workload_s for plan in plans if plan is not None]
        return min(times, default=float("inf"))

    tables = [{layout: seconds(choices, layout) for layout in ExpertLayout} for choices in map(tuple, options)]
    return min(tables, key=lambda table: min(table.values()))


GROUPS = {
    "two nodes": nodes(2),
    "three nodes": nodes(3),
    "a GPU and two nodes": with_gpu(gpu(3e12, flops=4e14, bus=5e10, memory=24 * GB), cpu(2e11), cpu(2e11)),
}


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("workload", [DECODING, MANY], ids=["decoding", "many prompts"])
def test_the_layout_is_the_predicted_best_of_the_three(group: str, workload: WorkloadSpec) -> None:
    hardware = GROUPS[group]
    decision = solved(hardware, workload=workload)
    times = best_of(hardware, workload)
    assert times[layout_of(decision)] == min(times.values())
    assert decision.chosen.prediction is not None
    assert decision.chosen.prediction.workload_s == pytest.approx(min(times.values()))
    for layout, seconds in times.items():
        told = f"{layout.value} would take {seconds / min(times.values()):.2f} times as long"
        assert (told in decision.reason) is (layout is not layout_of(decision) and seconds != float("inf"))


@pytest.mark.parametrize("number", [2, 3, 4])
def test_slices_level_ranks_of_which_each_token_asks_for_few_experts(number: int) -> None:
    """Every rank has as many bytes of experts as the others, within 5 % of the mean."""
    decision = solved(nodes(number))
    assert layout_of(decision) is ExpertLayout.SLICES
    assert decision.chosen.name == "Tensor, all ranks, experts in slices"
    layers = [shard.layers[0] for shard in decision.plan.ranks]
    assert all(layer.experts == (0, 128) for layer in layers)
    sizes = [layer.expert_columns.size for layer in layers]
    assert sum(sizes) == 768
    assert all(size == pytest.approx(768 / number, rel=0.05) for size in sizes)
    decision.plan.validate_for(CONFIG)


def test_whole_experts_wait_for_the_rank_that_chance_gives_most() -> None:
    """Of 8 experts a token, the busier of two ranks has 5.05: as counted, and as drawn."""
    model = CostModel(CONFIG, nodes(2), dtype="bfloat16")
    whole = model.experts_half_s([0, 1], [64, 64], [0, 0], decode_step(1, 0))
    slices = model.experts_half_s([0, 1], [128, 128], [384, 384], decode_step(1, 0))
    exchange_s = model.exchange.among([0, 1], model.hidden_bytes(1))
    one_s = model.ranks[0].experts(1).unit_s * 128 / 8
    fixed_s = model.ranks[0].experts(1).fixed_s
    draws = random.Random(0)
    busier = mean(max(n := sum(e < 64 for e in draws.sample(range(128), 8)), 8 - n) for _ in range(20_000))
    assert (whole - exchange_s - fixed_s) / one_s == pytest.approx(busier, rel=0.02)
    assert busier == pytest.approx(5.05, abs=0.02)
    assert 4 * one_s < slices - exchange_s - fixed_s < 4.3 * one_s


@pytest.mark.parametrize(("ranks", "rows"), list(product([2, 3, 5], [1, 4])))
def test_the_largest_of_many_shares_is_what_drawing_gives(ranks: int, rows: int) -> None:
    """Ranks of several speeds, with uneven numbers of 60 experts, of which each row chooses 6."""
    draws = random.Random(ranks * 10 + rows)
    numbers, speeds = [60 // ranks] * ranks, [1 + 0.3 * draws.random() for _ in range(ranks)]
    share = 1 - 0.9**rows
    spread = share * (1 - share) * 60 / 59
    covariances = [
        [
            speeds[i] * speeds[j] * spread * (numbers[i] * (i == j) - numbers[i] * numbers[j] / 60)
            for j in range(ranks)
        ]
        for i in range(ranks)
    ]  # fmt: skip
    found = expected_most([speeds[i] * numbers[i] * share for i in range(ranks)], covariances)
    times = []
    for _ in range(4000):
        chosen = {expert for _ in range(rows) for expert in draws.sample(range(60), 6)}
        held = [sum(expert * ranks // 60 == rank for expert in chosen) for rank in range(ranks)]
        times.append(max(speeds[rank] * held[rank] for rank in range(ranks)))
    assert found == pytest.approx(mean(times), rel=0.04)


def test_times_that_do_not_vary_have_a_largest() -> None:
    assert expected_most([1.0, 3.0, 2.0], [[0.0] * 3] * 3) == 3.0
    assert expected_most([2.0], [[5.0]]) == 2.0


def test_the_resource_may_ask_for_a_layout() -> None:
    whole, slices = (solved(nodes(2), experts=deal) for deal in (ExpertDeal.WHOLE, ExpertDeal.SLICES))
    assert [layout_of(whole), layout_of(slices)] == [ExpertLayout.WHOLE, ExpertLayout.SLICES]
    assert whole.chosen.name == "Tensor, all ranks"
    assert "times as long" not in whole.chosen.note
    many = solved(nodes(2), experts=ExpertDeal.SLICES, workload=MANY)
    assert layout_of(many) is ExpertLayout.SLICES


@pytest.mark.parametrize("mlp", [[1, 1], [3, 1], [0, 1]])
def test_shares_count_for_slices(mlp: list[float]) -> None:
    shares = PlacementShares(attention=[1, 1], mlp=mlp, vocabulary=[1, 1])
    plan = solved(nodes(2), shares=shares, experts=ExpertDeal.SLICES).plan
    plan.validate_for(CONFIG)
    assert [shard.layers[0].expert_columns.size for shard in plan.ranks] == [768 * part / sum(mlp) for part in mlp]


def test_experts_that_are_one_unit_stay_whole_and_the_reason_says_so() -> None:
    narrow = config_of(**{**QWEN3_30B, "moe_intermediate_size": 64})
    decision = solved(nodes(2), config=narrow, experts=ExpertDeal.SLICES)
    assert layout_of(decision) is ExpertLayout.WHOLE
    assert "experts stay whole: their 64 columns are one unit of 64" in decision.reason
    assert "experts stay whole" not in solved(nodes(2), config=narrow).reason


@pytest.mark.parametrize(
    ("hardware", "lacking"),
    [(nodes(8), "3 units of an expert's columns (192 in units of 64) for 4 of the 8 ranks"),
     (with_gpu(gpu(3e12), *nodes(4).ranks), "for 4 of the 5 ranks")],
    ids=["CPU ranks", "helpers"],
)  # fmt: skip
def test_more_ranks_than_slices_are_refused_by_the_field_the_ranks_and_the_units(
    hardware: Hardware, lacking: str
) -> None:
    """There is plenty of memory: the reason must not be that."""
    narrow = config_of(**{**QWEN3_30B, "moe_intermediate_size": 192})
    try:
        reason = "; ".join(
            option.why_not for option in solved(hardware, config=narrow, experts=ExpertDeal.SLICES).options
        )
    except PlanError as error:
        reason = str(error)
    assert "spec.placement.experts: Slices has" in reason
    assert lacking in reason
    assert "weights and KV cache" not in reason


def test_cpu_ranks_with_more_experts_than_memory_get_narrower_slices() -> None:
    """And no rank gets more than it has room for."""
    plenty = nodes(2).ranks[0]
    tight = cpu(2e11, flops=4e12, pool="tight", memory=12 * GB)
    hardware = Hardware((plenty, tight), ExchangeSpeeds.of_rates(2e-6, 1e10))
    plan = solved(hardware, experts=ExpertDeal.SLICES).plan
    wide, narrow = (shard.layers[0].expert_columns.size for shard in plan.ranks)
    assert 0 < narrow < wide
    assert not MemoryModel(CONFIG, hardware, BOUNDS, dtype="bfloat16").problem(plan)


def mixed_plan() -> tuple[CostModel, ShardPlan]:
    hardware = GROUPS["a GPU and two nodes"]
    decision = solved(hardware)
    assert layout_of(decision) is ExpertLayout.MIXED
    return CostModel(CONFIG, hardware.levelled(), dtype="bfloat16"), decision.plan


def test_a_gpu_has_whole_experts_and_cpu_ranks_slices_of_the_others() -> None:
    _, plan = mixed_plan()
    first, *others = (shard.layers[0] for shard in plan.ranks)
    assert first.experts.begin == 0
    assert not first.expert_columns.size
    assert [layer.experts for layer in others] == [(first.experts.end, 128)] * 2
    assert sum(layer.expert_columns.size for layer in others) == 768
    plan.validate_for(CONFIG)


def test_hot_experts_go_from_slices_to_the_gpu() -> None:
    model, plan = mixed_plan()
    number = plan.ranks[0].layers[0].experts.size
    costs = ExpertCosts.of(model, plan, rows=1, context=64)
    evenly = dict.fromkeys(CONFIG.expert_layers, [1] * 128)
    assert expected_step_s(plan, evenly, costs) == pytest.approx(
        model.decode_step_s(plan, batch=1, context=64), rel=1e-6
    )
    hot = {0: [0] * (128 - 8) + [10] * 8}
    moves = place_experts(plan, hot, costs, min_gain=0.0)
    (move,) = moves.moves
    after = move.applied_to(plan)
    after.validate_for(CONFIG)
    assert set(after.experts_of(0, 0)) >= set(range(120, 128)) or number < 8
    assert move.num_moved == 2 * min(number, 8)
    assert place_experts(after, hot, costs, min_gain=0.0).moves == ()


def test_slices_have_nothing_to_move() -> None:
    plan = solved(nodes(2)).plan
    model = CostModel(CONFIG, nodes(2), dtype="bfloat16")
    costs = ExpertCosts.of(model, plan, rows=1, context=64)
    assert place_experts(plan, {0: [0] * 120 + [10] * 8}, costs).num_moved == 0


def test_experts_that_come_late_are_computed_beside_the_next_layers_attention() -> None:
    """As long as attention takes at most; a step of many rows, and a group without helpers, gain nothing."""
    hardware = with_gpu(gpu(2e10), cpu(2e11, flops=4e12))
    plan = solved(hardware, shares=PlacementShares(attention=[1, 0], mlp=[0, 1], vocabulary=[1, 0])).plan
    models = [CostModel(CONFIG, hardware.levelled(), dtype="bfloat16", expert_deferral=n) for n in (0, 2, 4)]
    plain, some, more = (model.decode_step_s(plan, batch=1, context=64) for model in models)
    layer_s = models[0].ranks[1].experts(1).unit_s * 128
    assert plain - some == pytest.approx(CONFIG.num_layers * layer_s * 2 / 8, rel=1e-3)
    assert plain - more == pytest.approx(CONFIG.num_layers * layer_s * 4 / 8, rel=1e-3)
    fast = with_gpu(gpu(3e12), cpu(2e10, flops=4e12))
    bound = [CostModel(CONFIG, fast.levelled(), dtype="bfloat16", expert_deferral=n) for n in (0, 7)]
    attention_s = bound[0].attention_half_s([4, 0], decode_step(1, 64), None)
    slow, late = (model.decode_step_s(plan, batch=1, context=64) for model in bound)
    assert slow - late == pytest.approx(CONFIG.num_layers * attention_s, rel=1e-3)
    many = [model.decode_step_s(plan, batch=17, context=64) for model in models]
    assert many[0] == many[1] == many[2]
    alone = solved(nodes(2)).plan
    steps = [CostModel(CONFIG, nodes(2), dtype="bfloat16", expert_deferral=n) for n in (0, 4)]
    assert len({model.decode_step_s(alone, batch=1, context=64) for model in steps}) == 1
