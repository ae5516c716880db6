"""What parts of a model take in memory: linear where it is said to be, and never less than what is really held."""

from __future__ import annotations

import dataclasses

import pytest

from hetero_api.model_config import ModelConfig, RopeConfig
from hetero_api.model_parts import ExpertsConfig, SlidingAttention
from hetero_api.rank_memory import CHOICES_AT_ONCE, WHOLE_LOGITS, KvCost, ModelMemory, StepLimits, with_margin
from hetero_api.sharding import LayerShard, RankShard, UnitRange
from hetero_worker.native.compute_library import BF16, F4, F8, F16, F32, I4, I8, experts_op, ffi, linear_op
from hetero_worker.native.loading import address_of
from tests.support.native_compute import compute_library

pytestmark = pytest.mark.unit

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
    qk_norm=None,
    eos_token_ids=(2,),
    bos_token_id=1,
)
SPARSE = dataclasses.replace(CONFIG, experts=ExpertsConfig(8, 2, 4096, layers=(0, 1)))
WINDOWED = dataclasses.replace(CONFIG, sliding=SlidingAttention(window=16, layers=(0,), rope=RopeConfig(500.0)))
LIMITS = StepLimits(max_num_batched_tokens=64, max_num_seqs=64, max_model_len=512)


def memory(config: ModelConfig = CONFIG, limits: StepLimits = LIMITS) -> ModelMemory:
    return ModelMemory(config, limits, element_bytes=4)


def part(heads: tuple[int, int], columns: int, rows: int, *, experts: int = 0) -> RankShard:
    layers = tuple(LayerShard(UnitRange(0, count), UnitRange(0, columns), UnitRange(0, experts)) for count in heads)
    return RankShard(layers, UnitRange(0, rows), UnitRange(0, rows))


def test_a_kv_position_costs_keys_and_values_of_all_heads_and_layers_and_scratch_of_one() -> None:
    cost = memory().kv_cost(part((3, 1), 128, 256))
    assert cost == KvCost(cache_bytes=2 * (3 + 1) * 8 * 4, scratch_bytes=3 * 2 * 12)
    assert memory(WINDOWED).kv_cost(part((3, 1), 128, 256)).scratch_bytes == 2 * cost.scratch_bytes
    assert memory().kv_cost(part((0, 0), 128, 256)) == KvCost(0, 0)


def test_a_cache_and_its_scratch_are_told_from_one_another_and_from_both() -> None:
    cost = KvCost(cache_bytes=300, scratch_bytes=100)
    assert (cost.cache_of(1000), cost.total_of(750)) == (750, 1000)
    assert cost.cache_of(cost.total_of(751)) >= 751
    assert KvCost(0, 0).cache_of(1000) == KvCost(0, 0).total_of(1000) == 0


@pytest.mark.parametrize("field", ["max_num_batched_tokens", "max_num_seqs", "max_model_len"])
def test_workspace_grows_with_every_limit(field: str) -> None:
    shard = part((4, 4), 128, 256)
    doubled = dataclasses.replace(LIMITS, **{field: 2 * getattr(LIMITS, field)})
    assert memory(limits=doubled).workspace_bytes(shard) > memory().workspace_bytes(shard)


def test_workspace_of_a_rank_that_owns_nothing_is_the_residual_stream_and_whole_rows_of_logits() -> None:
    whole = 5 * 4 * LIMITS.max_num_seqs * CONFIG.vocab_size
    assert memory().workspace_bytes(part((0, 0), 0, 0)) == 4 * 3 * 64 * 64 + whole
    large = dataclasses.replace(CONFIG, vocab_size=1 << 20)
    assert memory(large).workspace_bytes(part((0, 0), 0, 0)) == 4 * 3 * 64 * 64 + 5 * 4 * WHOLE_LOGITS


def test_workspace_bounds_what_experts_and_capped_scores_take() -> None:
    """Of experts: some thousand choices, however many tokens; of capped scores: one KV head's."""
    sparse = memory(SPARSE, dataclasses.replace(LIMITS, max_num_batched_tokens=1000))
    without, with_experts = (sparse.workspace_bytes(part((0, 0), 0, 0, experts=count)) for count in (0, 3))
    together = 2 * 1000 * 4 * (3 * 4096 + 64)
    assert together < with_experts - without < 1.1 * together
    crowd = memory(SPARSE, dataclasses.replace(LIMITS, max_num_batched_tokens=10_000))
    most = CHOICES_AT_ONCE * 4 * (3 * 4096 + 64)
    assert crowd.expert_step < 1.1 * most + 4 * 2 * 10_000 * 64
    heads, capped = part((4, 4), 128, 256), dataclasses.replace(CONFIG, attention_soft_cap=50.0)
    difference = memory(capped).workspace_bytes(heads) - memory().workspace_bytes(heads)
    assert difference == 3 * 4 * CONFIG.group_size * LIMITS.max_num_batched_tokens * LIMITS.max_model_len


@pytest.mark.parametrize("threads", [1, 56])
@pytest.mark.parametrize("rows", [8, 200, 8192])
@pytest.mark.parametrize(("element_bytes", "type_"), [(4, F32), (2, BF16)], ids=["float32", "bfloat16"])
def test_workspace_bounds_the_scratch_of_native_kernels(
    element_bytes: int, type_: int, rows: int, threads: int
) -> None:
    """Of products, whatever a weight is stored as, beside what they return; and of experts."""
    hidden, columns, width = 8192, 28_672, 2048
    config = dataclasses.replace(CONFIG, hidden_size=hidden, head_dim=128, num_heads=64, num_kv_heads=8)
    limits = StepLimits(rows, max_num_seqs=1, max_model_len=rows)
    scratch_bytes = compute_library().functions.hc_scratch_bytes
    for dense in (True, False):
        experts = None if dense else ExpertsConfig(256, 8, width, layers=(0, 1))
        counted = ModelMemory(dataclasses.replace(config, experts=experts), limits, element_bytes, threads=threads)
        shard = part((8, 8), columns if dense else 0, 0, experts=0 if dense else 256)
        bound = counted.workspace_bytes(shard)
        if not dense:
            op = experts_op(rows, type_, 0, 0, 0, hidden, width, 0, 256, 8)
            assert rows * hidden * 3 * element_bytes + scratch_bytes(address_of(op), threads) <= bound
            continue
        attention, mlp = 10_240 + 8192, 3 * columns
        for out, in_, alive in ((10_240, hidden, attention), (hidden, 8192, attention), (2 * columns, hidden, mlp),
                                (hidden, columns, mlp)):  # fmt: skip
            for kind, group in ((F32, 0), (BF16, 0), (F16, 0), (F8, 32), (I8, 0), (I8, 16), (I4, 32), (F4, 32)):
                weight = ffi.new("hc_weight *", (kind, out, in_, group))
                op = linear_op(rows, address_of(weight), type_, type_, 0, in_, 0, 0, out)
                taken = scratch_bytes(address_of(op), threads) + rows * (3 * hidden + alive) * element_bytes
                assert taken <= bound, (out, in_, kind, group)


def test_a_rank_counts_the_wider_half_and_a_sum_of_units_counts_both() -> None:
    wide, narrow = part((1, 1), 4096, 0), part((4, 4), 4, 0)
    for shard in (wide, narrow):
        assert memory().workspace_bytes(shard) < memory().summed_workspace_bytes(shard)
    one, two, three = (memory().summed_workspace_bytes(part((n, n), 64 * n, 64 * n)) for n in (1, 2, 3))
    assert three - two == two - one


def test_a_tied_head_counts_once_where_it_is_the_embedding_itself() -> None:
    shard = part((1, 1), 0, 256)
    row_bytes = 64 * 4
    weights = memory().weight_bytes(shard, packs_head=False)
    assert memory().weight_bytes(shard, packs_head=True) - weights == 256 * row_bytes
    # The first rank of a pipeline has the embedding, its last the head: the same rows, twice.
    last = dataclasses.replace(shard, embedding_rows=NOTHING)
    assert memory().weight_bytes(last, packs_head=False) == weights
    untied = dataclasses.replace(CONFIG, tie_word_embeddings=False)
    assert memory(untied).weight_bytes(shard, packs_head=False) - weights == 256 * row_bytes


def test_routers_count_where_experts_are_owned() -> None:
    with_one, with_two = (memory(SPARSE).weight_bytes(part((1, 1), 0, 0, experts=n), packs_head=False) for n in (1, 2))
    without = memory(SPARSE).weight_bytes(part((1, 1), 0, 0), packs_head=False)
    assert with_one - without == (with_two - with_one) + 2 * 4 * 64 * 8


def test_the_margin_of_a_step_is_a_part_of_it_and_some_more() -> None:
    assert with_margin(800 << 20) == (900 + 16) << 20
    assert with_margin(0) == 16 << 20
