"""Example models: their shapes are the published ones, and their memory is counted by part."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hetero_api.model_config import ModelConfig
from hetero_api.rank_memory import ModelMemory, StepLimits
from hetero_placement.hardware import Speeds
from hetero_placement.part_costs import Rates
from hetero_placement.shard_plans import plan_within_layers, shard_of_layers

pytestmark = pytest.mark.unit

EXAMPLES = Path(__file__).parents[3] / "examples/models"
PUBLISHED = {
    "deepseek-v3": (671e9, 37e9),
    "gemma-4-26b-a4b": (25.2e9, 3.8e9),
    "gemma-4-31b": (30.7e9, 30.7e9),
    "gemma-4-e4b": (7.5e9, 4.5e9),
    "glm-4-32b": (32.6e9, 32.6e9),
    "glm-4.5": (355e9, 32e9),
    "glm-4.5-air": (106e9, 12e9),
    "glm-4.6": (355e9, 32e9),
    "glm-4.7-flash": (30e9, 3.6e9),
    "gpt-oss-120b": (116.8e9, 5.1e9),
    "gpt-oss-20b": (20.9e9, 3.6e9),
    "kimi-k2": (1.03e12, 32e9),
    "minimax-m2": (230e9, 10e9),
    "mistral-small": (23.6e9, 23.6e9),
    "qwen3-235b-a22b": (235e9, 22e9),
    "qwen3-30b-a3b": (30.5e9, 3.3e9),
    "qwen3-next-80b-a3b": (79.7e9, 3.5e9),
    "qwen3.5-27b": (27e9, 27e9),
    "qwen3.5-35b-a3b": (35e9, 3e9),
    "smollm3-3b": (3.08e9, 3.08e9),
}
"""Parameters, and those that a token uses, as the model cards say: some round, some count a layer of drafts more.

Of gemma-4-e4b's 8e9, 0.5e9 are those of images and sound.
"""


def example(name: str) -> ModelConfig:
    path = EXAMPLES / f"{name}.json"
    return ModelConfig.from_hf(json.loads(path.read_text(encoding="utf-8")), source=str(path))


def test_every_example_has_a_published_number() -> None:
    assert sorted(PUBLISHED) == sorted(path.stem for path in EXAMPLES.glob("*.json"))


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_the_shape_has_as_many_parameters_as_published(name: str) -> None:
    config, (total, active) = example(name), PUBLISHED[name]
    assert config.num_parameters == pytest.approx(total, rel=0.01)
    experts = config.experts
    idle = 0
    if experts is not None:
        idle = len(experts.layers) * (experts.number - experts.per_token) * config.params_per_expert
    embedded = 0 if config.tie_word_embeddings else config.hidden_size
    looked_up = config.vocab_size * (embedded + config.layer_inputs_width)
    assert config.num_parameters - idle - looked_up == pytest.approx(active, rel=0.1)


def test_memory_by_part_is_the_arithmetic_of_deepseek_v3() -> None:
    config = example("deepseek-v3")
    memory = ModelMemory(config, StepLimits(512, 8, 4096), element_bytes=2)
    parts = memory.weight_parts(shard_of_layers(config, 0, config.num_layers), packs_head=True)
    assert parts.attention == 2 * 61 * 187_105_280
    assert parts.dense == 2 * 3 * 3 * 7168 * 18432
    assert parts.shared == 2 * 58 * 3 * 7168 * 2048
    assert parts.experts == 256 * parts.shared
    assert parts.vocabulary == 2 * 2 * 129_280 * 7168
    assert parts.total == pytest.approx(2 * config.num_parameters, rel=0.001)


def test_shared_experts_and_dense_layers_are_counted_where_they_lie() -> None:
    config = example("glm-4.5-air")
    memory = ModelMemory(config, StepLimits(512, 8, 4096), element_bytes=2)
    plan = plan_within_layers(config, heads=[8, 0], columns=[0, 10_944], experts=[0, 128], rows=[151_552, 0])
    holder, helper = (memory.weight_parts(shard, packs_head=True) for shard in plan.ranks)
    assert (holder.dense, holder.shared, holder.experts) == (0, 45 * 2 * 3 * 4096 * 1408, 0)
    assert (helper.dense, helper.shared, helper.attention) == (2 * 3 * 4096 * 10_944, 0, 0)
    assert helper.experts == 128 * holder.shared


def test_experts_take_as_much_longer_as_their_share_of_the_rates_is_smaller() -> None:
    config, rates = example("glm-4.5-air"), {"bfloat16": 1e12}
    half = Rates(config, Speeds(1e11, rates, expert_share=0.5)).experts("bfloat16", 1)
    whole = Rates(config, Speeds(1e11, rates)).experts("bfloat16", 1)
    assert half.unit_s == pytest.approx(2 * whole.unit_s)
    assert half.fixed_s == whole.fixed_s


def test_the_prediction_head_of_deepseek_v3_has_as_many_parameters_as_published() -> None:
    """11.5e9 of its own, and 0.9e9 each of embedding and output head, as its README_WEIGHTS says."""
    head = example("deepseek-v3").prediction_head
    assert head is not None
    assert head.num_parameters == pytest.approx(11.5e9 + 2 * 0.93e9, rel=0.01)
