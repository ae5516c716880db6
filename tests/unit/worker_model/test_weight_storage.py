"""Weights in memory: as narrow as the kernel can multiply with, the same numbers, and as large as was said before."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest
import torch
from safetensors.torch import save_file

from hetero_api.kept_weights import KeptWeights
from hetero_api.model_config import ModelConfig, RopeConfig
from hetero_api.model_parts import ExpertsConfig
from hetero_api.rank_memory import ModelMemory, StepLimits
from hetero_api.sharding import NO_UNITS, LayerShard, RankShard, UnitRange
from hetero_api.weight_format import INT8, StoredWeights, WeightFormat, int4
from hetero_worker.checkpoints.checkpoint import Checkpoint
from hetero_worker.checkpoints.quantized_matrix import quantize
from hetero_worker.checkpoints.store import TensorSlice
from hetero_worker.layers.blocks import GatedMlp, SelfAttention
from hetero_worker.layers.embedding import EMBEDDING, OutputHead, ShardedEmbedding
from hetero_worker.layers.linear import JoinedWeights, ShardedLinear, output_linear
from hetero_worker.layers.linear_kernels import PlainKernel
from hetero_worker.layers.moe import Expert
from hetero_worker.probe.synthetic import SyntheticWeights
from tests.support.narrow_kernel import NarrowKernel, NarrowRowsKernel

pytestmark = pytest.mark.unit

CONFIG: Final = ModelConfig(
    architecture="LlamaForCausalLM",
    num_layers=1,
    hidden_size=96,
    intermediate_size=320,
    num_heads=9,
    num_kv_heads=3,
    head_dim=16,
    vocab_size=256,
    max_position=64,
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
EXPERTS: Final = ExpertsConfig(4, 2, 160, layers=(0,))
QUANTIZATIONS: Final = ("int8", "int4", "none")
BITS: Final = frozenset({16, 8, 4})
ROWS: Final = UnitRange(64, 192)


def _config(quantization: str, **changes: object) -> ModelConfig:
    config = replace(CONFIG, weights=StoredWeights(floats="bfloat16"), **changes)  # type: ignore[arg-type]
    return config.quantized(quantization, 64 if quantization == "int4" else None)


def _memory(config: ModelConfig) -> ModelMemory:
    return ModelMemory(config, StepLimits(16, 4, 64), element_bytes=4, weight_bits=BITS)


class Bfloat16Weights(SyntheticWeights):
    """Synthetic weights that say they are stored in bfloat16."""

    def dtype_of(self, part: TensorSlice) -> torch.dtype | None:
        return None if self.format_of(part) is not None else torch.bfloat16


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize("heads", [UnitRange(0, 3), UnitRange(1, 2)])
def test_attention_takes_what_layers_and_the_ranks_arithmetic_say(quantization: str, heads: UnitRange) -> None:
    config, kernel = _config(quantization), NarrowKernel()
    part = SelfAttention(config, 0, heads, adds_bias=True)
    part.load(Bfloat16Weights(), dtype=torch.float32, kernel=kernel)
    norm = 4 * config.hidden_size
    assert part.weight_bytes(torch.float32, kernel) == kernel.num_bytes + norm
    assert part.weight_bytes(torch.float32) > 1.9 * part.weight_bytes(torch.float32, kernel)
    memory = _memory(config)
    shared = memory.layer_weights - 2 * norm
    assert kernel.num_bytes <= heads.size * memory.head_weights + shared
    assert kernel.num_bytes >= heads.size * memory.head_weights


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize("columns", [UnitRange(0, 320), UnitRange(64, 128), UnitRange(192, 320)])
def test_an_mlp_takes_what_layers_and_the_ranks_arithmetic_say(quantization: str, columns: UnitRange) -> None:
    config, kernel = _config(quantization), NarrowKernel()
    part = GatedMlp(config, 0, columns, adds_bias=True)
    part.load(Bfloat16Weights(), dtype=torch.float32, kernel=kernel)
    norm = 4 * config.hidden_size
    assert part.weight_bytes(torch.float32, kernel) == kernel.num_bytes + norm
    memory = _memory(config)
    counted = columns.size * memory.column_weights
    assert counted <= kernel.num_bytes <= counted + memory.layer_weights - 2 * norm


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_an_expert_takes_what_layers_and_the_ranks_arithmetic_say(quantization: str) -> None:
    config, kernel = _config(quantization, experts=EXPERTS), NarrowKernel()
    part = Expert(config, EXPERTS, "model.layers.0.mlp", 0)
    part.load(Bfloat16Weights(), dtype=torch.float32, kernel=kernel)
    assert part.weight_bytes(torch.float32, kernel) == kernel.num_bytes == _memory(config).expert_weights


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize("columns", [UnitRange(0, 64), UnitRange(64, 128), UnitRange(128, 160)], ids=str)
def test_a_slice_of_an_expert_takes_no_more_than_the_ranks_arithmetic_says(
    quantization: str, columns: UnitRange
) -> None:
    """The last slice ends within a group."""
    config, kernel = _config(quantization, experts=EXPERTS), NarrowKernel()
    part = Expert(config, EXPERTS, "model.layers.0.mlp", 0, columns=columns)
    part.load(Bfloat16Weights(), dtype=torch.float32, kernel=kernel)
    counted = _memory(config).experts_weights(1, columns.size)
    assert part.weight_bytes(torch.float32, kernel) == kernel.num_bytes <= counted
    assert counted <= _memory(config).expert_weights


def test_slices_keep_groups_that_are_made_at_load_whole() -> None:
    config = replace(_config("none", experts=EXPERTS))
    assert [config.quantized("int4", group).expert_unit for group in (32, 64, 128)] == [64, 64, 128]
    assert [config.expert_unit, config.quantized("int8").expert_unit] == [64, 64]


def test_columns_that_end_within_a_group_are_counted_whole() -> None:
    config = replace(_config("int4"), intermediate_size=330)
    kernel, memory = NarrowKernel(), _memory(config)
    part = GatedMlp(config, 0, UnitRange(256, 330), adds_bias=True)
    part.load(Bfloat16Weights(), dtype=torch.float32, kernel=kernel)
    norm = 4 * config.hidden_size
    assert kernel.num_bytes <= 74 * memory.column_weights + memory.layer_weights - 2 * norm


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize("kernel", [NarrowKernel(), NarrowRowsKernel(), PlainKernel()], ids=lambda each: each.name)
def test_a_tied_head_and_its_embedding_are_the_same_numbers(
    quantization: str, kernel: NarrowKernel | PlainKernel
) -> None:
    config, weights = _config(quantization), Bfloat16Weights()
    embedding = ShardedEmbedding(config, ROWS)
    head = OutputHead(config, ROWS, embedding_rows=ROWS)
    embedding.load(weights, dtype=torch.float32, kernel=kernel)
    if isinstance(kernel, NarrowRowsKernel):
        assert embedding.tensors == ()
    else:
        assert 0 < sum(part.nbytes for part in embedding.tensors) <= embedding.weight_bytes(torch.float32, kernel)
    head.load(weights, embedding, dtype=torch.float32, kernel=kernel)
    found = embedding(torch.tensor([70, 191, 3, 64]))
    logits = head(torch.eye(config.hidden_size)).T
    assert found.dtype == torch.float32
    assert torch.equal(found[[0, 1, 3]], logits[[6, 127, 0]])
    assert not found[2].any()
    if isinstance(kernel, NarrowRowsKernel):
        assert head.weight_bytes(torch.float32, kernel) == 0


@pytest.mark.parametrize("kernel", [NarrowKernel(), NarrowRowsKernel()], ids=["narrow", "narrow rows"])
def test_rows_of_the_vocabulary_take_what_the_ranks_arithmetic_says(kernel: NarrowKernel) -> None:
    config = _config("int4")
    embedding, head = ShardedEmbedding(config, ROWS), OutputHead(config, ROWS, embedding_rows=ROWS)
    layer = LayerShard(NO_UNITS, NO_UNITS)
    shard = RankShard((layer,), embedding_rows=ROWS, head_rows=ROWS)
    memory = _memory(config)
    common = memory.weight_bytes(RankShard((layer,), NO_UNITS, NO_UNITS), packs_head=True)
    packs_head = not kernel.embeds
    counted = memory.weight_bytes(shard, packs_head=packs_head) - common
    assert counted == embedding.weight_bytes(torch.float32, kernel) + head.weight_bytes(torch.float32, kernel)
    assert memory.row_weights == INT8.row_bytes(config.hidden_size)


def test_a_rank_that_has_no_kernel_for_a_width_counts_the_arithmetic_type() -> None:
    for quantization, bits in (("int8", {16, 4}), ("int4", {16}), ("none", {8, 4})):
        kept = KeptWeights(_config(quantization).weights, 4, frozenset(bits))
        assert kept.layers.row_bytes(96) == 4 * 96
        floats = KeptWeights(StoredWeights(), 4)
        assert kept.head_bytes(CONFIG) == floats.head_bytes(CONFIG) == 4 * CONFIG.attention_params_per_kv_head
        assert kept.column_bytes(hidden=96) == 4 * CONFIG.mlp_params_per_column


def test_a_kernel_that_takes_no_quantised_weights_gets_their_numbers() -> None:
    config = _config("int4")
    heads = UnitRange(1, 3)
    narrow, wide = (output_linear(config, "model.layers.0.self_attn", heads, bias=False) for _ in range(2))
    kernel = NarrowKernel()
    narrow.load(Bfloat16Weights(), dtype=torch.float32, kernel=kernel)
    wide.load(Bfloat16Weights(), dtype=torch.float32, kernel=PlainKernel())
    x = torch.randn(5, narrow.shape[1], generator=torch.Generator().manual_seed(1))
    assert torch.equal(narrow(x), wide(x))
    [matrix] = kernel.matrices
    assert matrix.format == int4(48 // 3), "48 inputs a KV head: groups of 64 would reach over the seam"


def test_parts_in_different_formats_are_packed_in_one_that_holds_them_or_apart(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(rows, 32, generator=generator).to(torch.bfloat16) for rows in (6, 4, 5))
    bias = torch.randn(15, generator=generator)
    save_file({"q": q, "k": k, "v": v, "bias": bias}, tmp_path / "model.safetensors")
    formats: list[WeightFormat | None] = [int4(32), INT8, None]
    parts = [
        TensorSlice(name, (rows, 32), quantize_to=weights)
        for (name, rows), weights in zip((("q", 6), ("k", 4), ("v", 5)), formats, strict=True)
    ]
    linear, kernel = ShardedLinear(parts, [TensorSlice("bias", (15,))]), NarrowKernel()
    quantized, together, apart = ShardedLinear(parts[:2]), NarrowKernel(), NarrowKernel(widest=8.5)
    with Checkpoint(tmp_path) as checkpoint:
        linear.load(checkpoint, dtype=torch.float32, kernel=kernel)
        quantized.load(checkpoint, dtype=torch.float32, kernel=together)
        x = torch.randn(3, 32, generator=generator)
        expected = quantized(x)
        quantized.load(checkpoint, dtype=torch.float32, kernel=apart)
    assert [matrix.format for matrix in together.matrices] == [WeightFormat(8, 32, has_minimum=True)]
    assert [matrix.format for matrix in apart.matrices] == [int4(32), INT8]
    assert torch.allclose(quantized(x), expected, atol=1e-6)
    assert isinstance(linear.packed, JoinedWeights)
    assert [matrix.format for matrix in kernel.matrices] == [int4(32), INT8]
    assert [weight.dtype for weight in kernel.floats] == [torch.bfloat16]
    numbers = [quantize(q.float(), int4(32)).dequantized(), quantize(k.float(), INT8).dequantized(), v.float()]
    assert torch.allclose(linear(x), x @ torch.cat(numbers).T + bias, atol=1e-5)


def test_sixteen_bits_are_kept_where_that_loses_nothing(tmp_path: Path) -> None:
    half = torch.randn(4, 32).to(torch.bfloat16)
    save_file({EMBEDDING: half, "wide": half.float()}, tmp_path / "model.safetensors")
    config = replace(_config("none"), vocab_size=4, hidden_size=32)
    kernel, embedding = NarrowKernel(), ShardedEmbedding(config, UnitRange(0, 4))
    wide = ShardedLinear([TensorSlice(EMBEDDING, (4, 32)), TensorSlice("wide", (4, 32))])
    with Checkpoint(tmp_path) as checkpoint:
        embedding.load(checkpoint, dtype=torch.float32, kernel=kernel)
        wide.load(checkpoint, dtype=torch.float32, kernel=kernel)
    assert [tensor.dtype for tensor in embedding.tensors] == [torch.bfloat16]
    assert torch.equal(embedding(torch.arange(4)), half.float())
    assert [weight.dtype for weight in kernel.floats] == [torch.float32], "of slices of two types, the wider"
