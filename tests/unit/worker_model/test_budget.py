"""The KV budget is what the sum says, and a rank without room says the sum."""

from __future__ import annotations

import dataclasses

import pytest

from hetero_api.model_config import ModelConfig, RopeConfig
from hetero_api.model_parts import ExpertNames, ExpertsConfig
from hetero_api.sharding import LayerShard, RankShard, UnitRange
from hetero_worker.errors import MemoryBudgetError
from hetero_worker.memory.budget import EXPERT_ROWS, KvCost, MemoryBudget, StepLimits, workspace_bytes

pytestmark = pytest.mark.unit

MIB = 1024**2
NOTHING = UnitRange(0, 0)
CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    num_layers=2,
    hidden_size=64,
    intermediate_size=128,
    num_heads=8,
    num_kv_heads=4,
    head_dim=8,
    vocab_size=256,
    max_position=1024,
    rms_norm_eps=1e-5,
    rope=RopeConfig(10_000.0),
    tie_word_embeddings=True,
    qkv_bias=False,
    o_bias=False,
    mlp_bias=False,
    qk_norm=False,
    eos_token_ids=(2,),
    bos_token_id=1,
)
LIMITS = StepLimits(max_num_batched_tokens=64, max_num_seqs=64, max_model_len=512)


def _shard(heads: tuple[int, int], columns: int, rows: int) -> RankShard:
    layers = tuple(LayerShard(UnitRange(0, count), UnitRange(0, columns)) for count in heads)
    return RankShard(layers, UnitRange(0, rows), UnitRange(0, rows))


def test_a_kv_position_costs_keys_and_values_of_all_heads_and_layers() -> None:
    cost = KvCost.of(CONFIG, _shard((3, 1), 128, 256), element_bytes=4)
    assert cost.cache_bytes == 2 * (3 + 1) * 8 * 4


def test_budget_is_what_is_left_less_the_scratch_of_decoding() -> None:
    budget = MemoryBudget(1000 * MIB, 300 * MIB, 100 * MIB, runtime_bytes=200 * MIB)
    assert budget.kv_budget_bytes(KvCost(cache_bytes=300, scratch_bytes=100)) == 300 * MIB


def test_a_rank_without_heads_has_no_kv_budget() -> None:
    cost = KvCost.of(CONFIG, _shard((0, 0), 128, 256), element_bytes=4)
    assert cost.cache_bytes == 0
    assert MemoryBudget(1000 * MIB, 0, 0).kv_budget_bytes(cost) == 0


def test_too_little_memory_is_told_with_the_sum() -> None:
    budget = MemoryBudget(500 * MIB, 300 * MIB, 100 * MIB, runtime_bytes=200 * MIB)
    with pytest.raises(MemoryBudgetError) as caught:
        budget.kv_budget_bytes(KvCost(64, 8))
    for word in ("500 MiB given", "200 MiB runtime", "300 MiB weights", "100 MiB workspace", "-100 MiB"):
        assert word in str(caught.value)


@pytest.mark.parametrize("field", ["max_num_batched_tokens", "max_num_seqs", "max_model_len"])
def test_workspace_grows_with_every_limit(field: str) -> None:
    shard = _shard((4, 4), 128, 256)
    doubled = dataclasses.replace(LIMITS, **{field: 2 * getattr(LIMITS, field)})
    assert workspace_bytes(CONFIG, shard, doubled, element_bytes=4) > workspace_bytes(
        CONFIG, shard, LIMITS, element_bytes=4
    )


def test_workspace_of_a_rank_that_owns_nothing_is_the_residual_stream() -> None:
    assert workspace_bytes(CONFIG, _shard((0, 0), 0, 0), LIMITS, element_bytes=4) == 4 * 3 * 64 * 64


def test_workspace_bounds_what_experts_and_capped_scores_take() -> None:
    """Of experts: a crowded one's rows, however many tokens; of capped scores: one KV head's."""
    names = ExpertNames("mlp", gate="gate_proj", up="up_proj", down="down_proj")
    experts = ExpertsConfig(8, 2, 4096, normalised=True, layers=(0, 1), names=names)
    sparse = dataclasses.replace(CONFIG, experts=experts)
    shard = RankShard((LayerShard(UnitRange(0, 0), UnitRange(0, 0), UnitRange(0, 3)),) * 2, NOTHING, NOTHING)
    limits = dataclasses.replace(LIMITS, max_num_batched_tokens=1000)
    without = workspace_bytes(sparse, _shard((0, 0), 0, 0), limits, element_bytes=4)
    with_experts = workspace_bytes(sparse, shard, limits, element_bytes=4)
    one_expert = 4 * EXPERT_ROWS * 4 * 4096
    assert one_expert < with_experts - without < 2 * one_expert
    heads = _shard((4, 4), 128, 256)
    capped = dataclasses.replace(CONFIG, attention_soft_cap=50.0)
    difference = workspace_bytes(capped, heads, LIMITS, element_bytes=4) - workspace_bytes(
        CONFIG, heads, LIMITS, element_bytes=4
    )
    assert difference == 3 * 4 * CONFIG.group_size * LIMITS.max_num_batched_tokens * LIMITS.max_model_len
