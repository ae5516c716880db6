"""What the resource fixes, what memory forbids, and what is said about it."""

from __future__ import annotations

from typing import Any

import pytest

from hetero_api.errors import PlanError
from hetero_api.model_config import ModelConfig
from hetero_api.spec import PlacementMode, PlacementShares, PlacementSpec, WorkloadSpec
from hetero_placement.decision import Decision
from hetero_placement.hardware import Hardware
from hetero_placement.solver import ALL_PARTS, GPU_ONLY, LAYER, MLP_ONLY, SHARES, STREAMING, TENSOR, predict, solve
from tests.unit.placement.placement_setup import (
    GB,
    LLAMA_8B,
    MIXTRAL,
    SMOLLM2,
    bounds_of,
    config_of,
    cpu,
    gpu,
    group,
)  # fmt: skip

pytestmark = pytest.mark.unit

TWO_CPUS = group(cpu(2e10, flops=1e11), cpu(2e10, flops=1e11), host_s=1e-5)
MIXED = group(gpu(9e11, flops=1e14, bus=25e9), cpu(3.7e11, flops=3e12), host_s=3e-5)


def solved(
    config: ModelConfig,
    hardware: Hardware,
    *,
    mode: PlacementMode = PlacementMode.AUTO,
    shares: dict[str, list[float]] | None = None,
    **bounds: Any,
) -> Decision:
    return solve(
        config, hardware, dtype="float32", bounds=bounds_of(config, **bounds),
        placement=PlacementSpec(mode=mode, shares=PlacementShares(**(shares or {}))),
    )  # fmt: skip


def sizes(decision: Decision) -> tuple[list[int], list[int], list[int]]:
    """KV heads, MLP columns, vocabulary rows of each rank in the first layer."""
    ranks = decision.plan.ranks
    return (
        [rank.layers[0].kv_heads.size for rank in ranks],
        [rank.layers[0].mlp_columns.size for rank in ranks],
        [rank.head_rows.size for rank in ranks],
    )


def test_equal_ranks_get_equal_parts_of_what_divides() -> None:
    assert sizes(solved(config_of(**SMOLLM2), TWO_CPUS)) == ([2, 1], [768, 768], [24576, 24576])


def test_a_rank_without_heads_gets_columns_and_rows() -> None:
    decision = solved(config_of(**SMOLLM2), group(*[cpu(2e10)] * 4, host_s=1e-6))
    heads, columns, rows = sizes(decision)
    assert decision.chosen.name == TENSOR
    assert heads == [1, 1, 1, 0]
    assert all(columns)
    assert all(rows)


@pytest.mark.parametrize(
    ("mode", "names"),
    [
        (PlacementMode.GPU_ONLY, {GPU_ONLY}),
        (PlacementMode.LAYER, {LAYER}),
        (PlacementMode.TENSOR, {MLP_ONLY, ALL_PARTS}),
    ],
)
def test_the_mode_restricts_what_may_be_chosen_and_the_rest_is_told(mode: PlacementMode, names: set[str]) -> None:
    decision = solved(config_of(**SMOLLM2), MIXED, mode=mode)
    assert decision.chosen.name in names
    for option in decision.options:
        if option.name not in names and option.name != STREAMING:
            assert option.why_not == f"spec.placement.mode asks for {mode}"
            assert option.prediction is not None


@pytest.mark.parametrize("mode", [PlacementMode.TENSOR, PlacementMode.LAYER])
def test_a_mode_that_is_asked_for_leaves_no_rank_without_work(mode: PlacementMode) -> None:
    slow = group(cpu(1e11), cpu(1e9, pool="slow"), host_s=1e-3)
    assert all(share > 0 for share in solved(config_of(**SMOLLM2), slow, mode=mode).chosen.weight_shares)
    assert 0.0 in solved(config_of(**SMOLLM2), slow).chosen.weight_shares


def test_shares_fix_what_they_give_and_the_rest_is_solved() -> None:
    decision = solved(config_of(**SMOLLM2), TWO_CPUS, shares={"attention": [1.0, 0.0]})
    heads, columns, rows = sizes(decision)
    assert decision.chosen.name == SHARES
    assert heads == [3, 0]
    assert sum(columns) == 1536
    assert all(columns)
    assert sum(rows) == 49152


def test_all_shares_given_are_dealt_as_they_are() -> None:
    shares = {"attention": [2.0, 1.0], "mlp": [1.0, 3.0], "vocabulary": [0.0, 1.0]}
    assert sizes(solved(config_of(**SMOLLM2), TWO_CPUS, shares=shares)) == ([2, 1], [384, 1152], [0, 49152])


def test_shares_deal_experts_where_there_are_some() -> None:
    decision = solved(config_of(**MIXTRAL, intermediate_size=64), TWO_CPUS, shares={"mlp": [3.0, 1.0]})
    assert [rank.layers[0].experts.size for rank in decision.plan.ranks] == [6, 2]


def test_shares_of_layers_deal_layers() -> None:
    decision = solved(config_of(**SMOLLM2), TWO_CPUS, mode=PlacementMode.LAYER, shares={"mlp": [1.0, 4.0]})
    assert [sum(not layer.is_empty for layer in rank.layers) for rank in decision.plan.ranks] == [6, 24]


def test_shares_that_leave_a_rank_with_nothing_are_an_error_that_names_them() -> None:
    shares = {kind: [1.0, 0.0] for kind in ("attention", "mlp", "vocabulary")}
    with pytest.raises(PlanError, match=r"spec\.placement\.shares\.attention, .*rank 1 \(cpu\) would own nothing"):
        solved(config_of(**SMOLLM2), TWO_CPUS, shares=shares)


@pytest.mark.parametrize(
    ("mode", "config", "message"),
    [
        (PlacementMode.LAYER, config_of(num_hidden_layers=1), r"2 ranks are more than .*1 layers"),
        (
            PlacementMode.TENSOR,
            config_of(num_key_value_heads=1, num_attention_heads=1, intermediate_size=64, vocab_size=64),
            None,
        ),
        (PlacementMode.GPU_ONLY, config_of(), r"GPU only: spec\.pools has no pool of type GPU"),
    ],
)
def test_ranks_that_a_mode_has_nothing_for_are_an_error(
    mode: PlacementMode, config: ModelConfig, message: str | None
) -> None:
    if message is None:
        assert solved(config, TWO_CPUS, mode=mode).plan.stages()[0].helpers == (1,)
        return
    with pytest.raises(PlanError, match=message):
        solved(config, TWO_CPUS, mode=mode)


def test_more_ranks_than_units_are_an_error_with_the_numbers() -> None:
    config = config_of(num_key_value_heads=2, num_attention_heads=2, intermediate_size=128, vocab_size=128)
    with pytest.raises(PlanError, match=r"5 ranks are more than .*2 KV heads, 128 MLP columns and 128 vocabulary"):
        solved(config, group(*[cpu(1e9)] * 5), mode=PlacementMode.TENSOR)


def test_memory_decides_how_much_goes_to_the_gpu_and_the_rest_says_why() -> None:
    small = group(gpu(3e11, memory=10 * GB), cpu(3.7e11, memory=64 * GB), host_s=6e-5)
    decision = solved(config_of(**LLAMA_8B), small)
    (gpu_only,) = [option for option in decision.options if option.name == GPU_ONLY]
    assert gpu_only.plan is None
    assert "these 1 ranks have 10.00 GB (spec.engine.gpuMemoryUtilization)" in gpu_only.why_not
    assert "spec.model.maxModelLen 1024" in gpu_only.why_not
    assert f"{GPU_ONLY} cannot be had: " in decision.reason
    assert 0.15 < decision.chosen.weight_shares[0] < 10 / 32


def test_the_key_value_cache_that_is_asked_for_takes_its_room() -> None:
    hardware = group(gpu(9e11, memory=10 * GB), cpu(3.7e11, memory=64 * GB), host_s=6e-5)
    config = config_of(**LLAMA_8B)
    free = solved(config, hardware, mode=PlacementMode.LAYER)
    taken = solved(config, hardware, mode=PlacementMode.LAYER, kv_cache_bytes=4 * GB)
    assert taken.chosen.weight_shares[0] < free.chosen.weight_shares[0] - 0.1


def test_nothing_that_fits_is_an_error_with_the_arithmetic_of_every_option() -> None:
    with pytest.raises(PlanError, match=r"Layer split: .* GB.*Tensor, all ranks: weights and KV cache .*memoryPerRank"):
        solved(config_of(**LLAMA_8B), group(cpu(1e10, memory=GB), cpu(1e10, memory=GB)))


def test_the_reason_says_what_it_gives_what_exchanges_take_and_what_else_there_was() -> None:
    decision = solved(config_of(**SMOLLM2), TWO_CPUS)
    assert decision.reason.startswith(f"{TENSOR}: ")
    assert "exchanges of a decode step of" in decision.reason
    assert f"{LAYER} would give" in decision.reason


def test_a_slow_exchange_makes_gpu_only_or_layers_the_choice() -> None:
    slow = group(gpu(9e11, flops=1e14, bus=25e9), cpu(3.7e11, flops=3e12), host_s=1e-3)
    assert solved(config_of(**LLAMA_8B), slow).chosen.name == GPU_ONLY


def test_the_same_input_gives_the_same_plan() -> None:
    assert solved(config_of(**LLAMA_8B), MIXED) == solved(config_of(**LLAMA_8B), MIXED)


def test_a_plan_that_stands_is_predicted_as_the_solver_would() -> None:
    config = config_of(**SMOLLM2)
    decision = solved(config, TWO_CPUS)
    workload, bounds = WorkloadSpec(), bounds_of(config)
    again, _, _ = predict(config, TWO_CPUS, decision.plan, dtype="float32", workload=workload, bounds=bounds)
    assert again == decision.chosen.prediction


def test_plans_cover_the_model() -> None:
    for config in (config_of(**SMOLLM2), config_of(**MIXTRAL), config_of(intermediate_size=1000, vocab_size=200)):
        solved(config, TWO_CPUS).plan.validate_for(config)


def test_memory_that_is_enough_in_sum_only_is_said_to_be_so() -> None:
    with pytest.raises(PlanError) as caught:
        solved(config_of(**LLAMA_8B), group(*[cpu(1e10, memory=int(4.58 * GB))] * 8))
    text = str(caught.value)
    assert text.count("memory is enough in sum, but no deal fits every rank; dealt by memory, rank ") == 2, text
    assert "and has 4.58 GB (memoryPerRank of pool cpu)" in text
    fewer = text.partition("CPU ranks only, fewer than 8: ")[2]
    assert "these 7 ranks have 32.06 GB" in fewer
    assert "enough in sum" not in fewer
