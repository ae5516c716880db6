"""Models whose last layers read earlier layers' keys and values, and whose layers have inputs of their own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import pytest
import torch

from hetero_api.errors import PlanError
from hetero_api.model_config import ModelConfig
from hetero_api.rank_memory import ModelMemory, StepLimits
from hetero_api.sharding import ShardPlan
from hetero_api.spec import PlacementMode, PlacementShares, PlacementSpec
from hetero_placement.shard_plans import deal_layers, plan_of_layers, plan_within_layers, shard_of_layers
from hetero_placement.solver import solve
from hetero_placement.sweep import sweep
from hetero_worker.attention.torch_paged import TorchPagedAttention
from hetero_worker.layers.linear_kernels import PlainKernel
from hetero_worker.models.decoder import Decoder
from tests.unit.placement.placement_setup import GB, bounds_of, cpu, group
from tests.unit.placement.test_example_models import example

pytestmark = pytest.mark.unit

SMALL: Final[dict[str, Any]] = {
    "architectures": ["Gemma4ForCausalLM"], "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 16, "global_head_dim": 32, "vocab_size": 640, "num_hidden_layers": 7,
    "vocab_size_per_layer_input": 640, "hidden_size_per_layer_input": 32, "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True, "max_position_embeddings": 256, "sliding_window": 64,
    "layer_types": ["full_attention", "sliding_attention"] * 3 + ["full_attention"],
}  # fmt: skip
CONFIG: Final = ModelConfig.from_hf(SMALL)
ROWS: Final = CONFIG.vocab_size
PLANS: Final = {
    "one rank": plan_within_layers(CONFIG, heads=[4], columns=[128], experts=[0], rows=[ROWS]),
    "uneven": plan_within_layers(
        CONFIG, heads=[3, 0, 1], columns=[0, 64, 64], experts=[0] * 3, rows=[64, ROWS - 64, 0]
    ),
    "whole layers": plan_of_layers(CONFIG, [1, 1, 5]),
}


def test_a_readers_cache_is_counted_once() -> None:
    config = example("gemma-4-e4b")
    memory = ModelMemory(config, StepLimits(512, 8, 4096), element_bytes=2)
    cost = memory.kv_cost(shard_of_layers(config, 0, config.num_layers))
    assert cost.cache_bytes == 2 * 2 * 2 * (20 * 256 + 4 * 512)
    assert config.kv_layers[24:] == (22, 22, 22, 22, 22, 23) * 3
    assert memory.attention_weights(22, 2) - memory.attention_weights(24, 2) == 2 * 256 * (2 * 2 * 2560 + 2)


def test_embeddings_of_layers_are_counted_with_the_rows_that_a_rank_has() -> None:
    config = example("gemma-4-e4b")
    memory = ModelMemory(config, StepLimits(512, 8, 4096), element_bytes=2)
    whole = memory.weight_parts(shard_of_layers(config, 0, config.num_layers), packs_head=False)
    assert whole.vocabulary == 2 * 262_144 * (2560 + 42 * 256)
    assert whole.total == pytest.approx(2 * config.num_parameters, rel=0.001)
    first, last = (
        memory.weight_parts(shard_of_layers(config, *layers), packs_head=False) for layers in ((0, 9), (9, 42))
    )
    assert (first.vocabulary, last.vocabulary) == (whole.vocabulary, 2 * 262_144 * 2560)


@pytest.mark.parametrize("packs_head", [True, False])
@pytest.mark.parametrize("plan", PLANS.values(), ids=list(PLANS))
def test_ranks_take_what_the_arithmetic_says(plan: ShardPlan, packs_head: bool) -> None:
    memory = ModelMemory(CONFIG, StepLimits(64, 4, 128), element_bytes=4)
    kernel = PlainKernel()
    kernel.copies_weight = packs_head
    for rank, shard in enumerate(plan.ranks):
        decoder = Decoder(
            CONFIG, plan, rank=rank, dtype=torch.float32, max_length=128, attention=TorchPagedAttention()
        )  # fmt: skip
        taken, counted = decoder.weight_bytes(kernel), memory.weight_bytes(shard, packs_head=packs_head)
        assert taken <= counted
        if shard.kv_heads_total:
            assert counted <= 1.05 * taken


def test_whole_layers_that_read_one_another_stay_together() -> None:
    config = example("gemma-4-e4b")
    assert config.first_inseparable == 22
    bounds = bounds_of(config)
    for number in (2, 3):
        ranks = [cpu(1e11, memory=64 * GB)] * number
        placement = PlacementSpec(mode=PlacementMode.LAYER)
        plan = solve(config, group(*ranks), dtype="bfloat16", placement=placement, bounds=bounds).plan
        plan.validate_for(config)
        assert [len(stage.ranks) for stage in plan.stages()] == [1] * number


def test_more_ranks_than_can_have_whole_layers_are_refused() -> None:
    too_many, placement = group(*[cpu(1e11, memory=64 * GB)] * 4), PlacementSpec(mode=PlacementMode.LAYER)
    with pytest.raises(PlanError, match=r"4 ranks are more .* the last 5 together, since they read one another's"):
        solve(CONFIG, too_many, dtype="float32", placement=placement, bounds=bounds_of(CONFIG))


def test_shares_that_part_them_are_refused_with_the_fix() -> None:
    config = example("gemma-4-e4b")
    deal_layers(config, cores=[1, 1], shares=PlacementShares()).validate_for(config)
    with pytest.raises(PlanError, match=r"layers 22 to 41 read .* a share of 20 of 42 at least"):
        deal_layers(config, cores=[1, 1, 1], shares=PlacementShares())
    deal_layers(config, cores=[1, 1, 2], shares=PlacementShares()).validate_for(config)


def test_a_curve_has_the_points_that_the_model_allows() -> None:
    hardware = group(*[cpu(1e11, memory=64 * GB)] * 3)
    config = example("gemma-4-e4b")
    curves = {
        curve.name: curve.points
        for curve in sweep(
            config, hardware, dtype="bfloat16", workload=PlacementSpec().workload, bounds=bounds_of(config), points=9
        ).curves
    }
    assert len(curves["Tensor"]) > len(curves["Layer split"]) > 0


def test_wider_layers_are_dealt_in_the_same_ratio() -> None:
    plan = PLANS["uneven"]
    plan.validate_for(CONFIG)
    sizes = [[shard.mlp_columns.size for shard in rank.layers] for rank in plan.ranks]
    assert sizes == [[0] * 7, [64] * 4 + [128] * 3, [64] * 4 + [128] * 3]
    with pytest.raises(PlanError, match="layer 4 MLP columns: 256 of 128 are owned"):
        plan.validate_for(replace(CONFIG, wide_readers=False))
