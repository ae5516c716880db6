"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434) of one rank's heads.

A token's cache is one vector for all heads, `LatentShape.cached_dim` elements, so every rank that holds heads caches
the same vectors, and computes them itself. A matrix of each head brings its query to the cache's space, attention is
that of many query heads with one KV head, and another matrix brings the result back. Both are halves of the
checkpoint's `kv_b_proj`, and stay floats.

Devices make long spans cheaper (`LatentExpansion`): the same matrices make each head's keys and values of the cached
vectors, some heads at a time, and attention is the usual one. Host cores do not, since the bits of a row must not
depend on the rows beside it.
"""

from __future__ import annotations

from typing import Final

import torch
from torch.nn import functional as F

from hetero_api.model_config import ModelConfig
from hetero_api.model_parts import LatentShape, RowOrder
from hetero_api.sharding import UnitRange
from hetero_worker.attention.base import AttentionBatch, AttentionRule, PrefillSpan, StepAttention
from hetero_worker.attention.kv_cache import LayerCache
from hetero_worker.attention.torch_paged import SeenTokens, SequenceRows
from hetero_worker.checkpoints.checkpoint import Checkpoint
from hetero_worker.checkpoints.store import TensorSlice
from hetero_worker.layers.blocks import Attention, SumOverRanks
from hetero_worker.layers.fused_ops import PLAIN_OPS, FusedOps, LatentNorm, LatentWrite
from hetero_worker.layers.linear import ShardedLinear, compressing_linear, latent_query_linear, output_linear
from hetero_worker.layers.linear_kernels import LinearKernel, PackedHeads
from hetero_worker.layers.norm import ResidualStream, RmsNorm
from hetero_worker.layers.packing import floats_dtype
from hetero_worker.layers.rotary import Rotation
from hetero_worker.memory.streams import HOST

_EPS: Final = 1e-6
"""Of norms of compressed vectors, whatever the model's other norms have."""


class LatentAttention(Attention):
    """norm → queries, and what is cached → each head to the cache's space → attention → back → output projection."""

    keys_only = True

    def __init__(
        self, config: ModelConfig, layer: int, heads: UnitRange, *, adds_bias: bool, ops: FusedOps = PLAIN_OPS
    ) -> None:
        """`heads`: of this rank. Raises ValueError for a model with the usual attention."""
        if config.latent is None:
            raise ValueError(f"{config.architecture} has no latent attention")
        prefix, shape = f"model.layers.{layer}.self_attn", config.latent
        rule = AttentionRule(config.attention_scale)
        super().__init__(config, layer, rule, cached_heads=1, cached_dim=shape.cached_dim, ops=ops)
        self._shape = shape
        self._num_heads = heads.size
        self._query = latent_query_linear(config, shape, prefix, heads)
        self._compressed_query, self._query_norm = None, None
        if shape.query_rank is not None:
            self._compressed_query = compressing_linear(config, f"{prefix}.q_a_proj", shape.query_rank)
            self._query_norm = _compressed_norm(f"{prefix}.q_a_layernorm", shape.query_rank, ops)
        order = RowOrder(shape.cached_dim, shape.rope_dim, config.interleaved_rope, before=shape.rank)
        name = f"{prefix}.kv_a_proj_with_mqa"
        self._cached = compressing_linear(config, name, shape.cached_dim, order)
        self._cached_norm = _compressed_norm(f"{prefix}.kv_a_layernorm", shape.rank, ops)
        self._by_head = _HeadMatrices(shape, f"{prefix}.kv_b_proj.weight", config, heads)
        self._output = output_linear(config, prefix, heads, bias=adds_bias)

    @property
    def linears(self) -> tuple[ShardedLinear, ...]:
        """See `Attention.linears`."""
        linears = (self._compressed_query, self._query, self._cached, self._output)
        return tuple(linear for linear in linears if linear is not None)

    @property
    def _norms(self) -> tuple[RmsNorm, ...]:
        return tuple(norm for norm in (self._norm, self._query_norm, self._cached_norm) if norm is not None)

    def weight_bytes(self, dtype: torch.dtype, kernel: LinearKernel | None = None) -> int:
        """See `Attention.weight_bytes`."""
        return super().weight_bytes(dtype, kernel) + self._by_head.weight_bytes(dtype)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """See `Attention.tensors`."""
        return *super().tensors, *self._by_head.tensors

    def load(
        self, checkpoint: Checkpoint, *, dtype: torch.dtype, kernel: LinearKernel, device: torch.device = HOST
    ) -> None:
        """Read this rank's slices. Raises ModelError."""
        super().load(checkpoint, dtype=dtype, kernel=kernel, device=device)
        self._by_head.load(checkpoint, dtype=dtype, kernel=kernel, device=device)

    def of_stream(
        self,
        stream: ResidualStream,
        rotation: Rotation,
        attention: StepAttention,
        cache: LayerCache,
        sum_over_ranks: SumOverRanks = lambda _: None,  # noqa: ARG002 - ranks need nothing of one another
    ) -> torch.Tensor:
        """Return the partial sum [tokens, hidden] of the residual stream."""
        normed, shape = stream.normed(self._norm), self._shape
        query = self._query(self._query_source(normed)).view(len(normed), self._num_heads, shape.query_dim)
        norm = LatentNorm(self._cached_norm.weight, self._cached_norm.eps)
        write = LatentWrite(cache.keys, attention.slot_mapping)
        in_cache_space = self._ops.rotate_latent(query, self._cached(normed), rotation, norm, write)
        width = self._num_heads * shape.value_dim
        values = self._ops.empty(len(normed), width, dtype=normed.dtype, device=normed.device)
        by_head = values.view(len(normed), -1, shape.value_dim)
        for span in attention.expanded:
            rows = slice(span.begin, span.end)
            parts = query[rows, :, : shape.nope_dim], in_cache_space[rows, :, shape.rank :]
            self._attend_expanded(torch.cat(parts, dim=2), span, attention, cache, by_head[rows])
        rest = attention.expanded[0].begin if attention.expanded else len(normed)
        if rest:
            query, in_cache_space = query[:rest], in_cache_space[:rest]
            self._by_head.to_cache(query[:, :, : shape.nope_dim], in_cache_space[:, :, : shape.rank])
            attended = attention.attend_written(in_cache_space, cache, self._rule).view(in_cache_space.shape)
            self._by_head.from_cache(attended[:, :, : shape.rank], by_head[:rest])
        return self._output(values)

    def _attend_expanded(
        self, query: torch.Tensor, span: PrefillSpan, attention: StepAttention, cache: LayerCache, out: torch.Tensor
    ) -> None:
        """Attend with a span's rotated queries [rows, heads, query_dim]; write `out` [rows, heads, value_dim]."""
        assert attention.expansion is not None
        seen = attention.once(_SeenBySpans).of(span, cache.block_size, query.dtype)
        cached = cache.keys.index_select(0, seen.slots).squeeze(1).to(query.dtype)
        step = attention.expansion.heads_at_once(span)
        for first in range(0, self._num_heads, step):
            heads = slice(first, first + step)
            keys, values = self._by_head.expand(cached, heads)
            attended = F.scaled_dot_product_attention(
                query[:, heads].transpose(0, 1).unsqueeze(0),
                keys.unsqueeze(0),
                values.unsqueeze(0),
                attn_mask=seen.mask,
                is_causal=not span.num_computed,
                scale=self._rule.scale,
            )
            out[:, heads] = attended[0, :, :, : self._shape.value_dim].transpose(0, 1)

    def _query_source(self, normed: torch.Tensor) -> torch.Tensor:
        """Return what queries are made of: [tokens, hidden or query_rank]."""
        if self._compressed_query is None or self._query_norm is None:
            return normed
        return self._query_norm(self._compressed_query(normed))


class _HeadMatrices:
    """Matrices of each head to the cache's space and back. Not usable before `load`."""

    def __init__(self, shape: LatentShape, name: str, config: ModelConfig, heads: UnitRange) -> None:
        rows = shape.nope_dim + shape.value_dim
        self._shape = shape
        self._num_heads = heads.size
        self._source = TensorSlice(name, (config.num_heads * rows, shape.rank), rows=heads.scaled(rows))
        self.tensors: tuple[torch.Tensor, ...] = ()
        """Loaded weights, unless a kernel has packed them."""
        self._products: tuple[PackedHeads, ...] = ()

    def weight_bytes(self, dtype: torch.dtype) -> int:
        """Return the most bytes that the loaded weights take."""
        return self._source.shape[0] * self._source.shape[1] * dtype.itemsize

    def load(
        self, checkpoint: Checkpoint, *, dtype: torch.dtype, kernel: LinearKernel, device: torch.device = HOST
    ) -> None:
        """Read this rank's heads. Raises ModelError."""
        stored = torch.empty(self._source.shape, dtype=floats_dtype(checkpoint, [self._source], dtype, kernel))
        checkpoint.read(self._source, stored)
        by_head = stored.view(self._num_heads, -1, self._shape.rank).to(device)
        to_cache = by_head[:, : self._shape.nope_dim].transpose(1, 2).contiguous()
        from_cache = by_head[:, self._shape.nope_dim :].contiguous()
        self._products = kernel.pack_heads(to_cache), kernel.pack_heads(from_cache)
        self.tensors = () if kernel.copies_weight else (to_cache, from_cache)

    def to_cache(self, query: torch.Tensor, out: torch.Tensor) -> None:
        """Write [tokens, heads, rank] of queries [tokens, heads, nope_dim]."""
        self._products[0](query, out)

    def from_cache(self, attended: torch.Tensor, out: torch.Tensor) -> None:
        """Write [tokens, heads, value_dim] of [tokens, heads, rank]."""
        self._products[1](attended, out)

    def expand(self, cached: torch.Tensor, heads: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of some heads, both [heads, tokens, query_dim], of cached [tokens, cached_dim].

        Narrower values end in zeros: torch's fastest attention wants them as wide as keys. Only for weights that no
        kernel has packed.
        """
        to_cache, from_cache = (weight[heads] for weight in self.tensors)
        latent, rope = cached[:, : self._shape.rank], cached[:, self._shape.rank :]
        width = max(self._shape.query_dim, self._shape.value_dim)
        values = cached.new_zeros(len(to_cache), len(cached), width)
        values[:, :, : self._shape.value_dim] = latent @ from_cache.transpose(1, 2)
        keys = torch.cat([latent @ to_cache, rope.expand(len(to_cache), -1, -1)], dim=2)
        return keys, values


class _SeenBySpans:
    """Tokens that spans of a step attend to, found for its first layer."""

    def __init__(self, batch: AttentionBatch) -> None:
        self._device = batch.slot_mapping.device
        self._seen: dict[int, SeenTokens] = {}

    def of(self, span: PrefillSpan, block_size: int, dtype: torch.dtype) -> SeenTokens:
        """Return the span's. A sequence's first rows have no mask of their own: the triangle is torch's."""
        if span.begin not in self._seen:
            rows = SequenceRows(span.begin, span.end, span.length, span.block_ids)
            mask_dtype = dtype if span.num_computed else None
            self._seen[span.begin] = rows.view(None, block_size, device=self._device, mask_dtype=mask_dtype)
        return self._seen[span.begin]


def _compressed_norm(name: str, width: int, ops: FusedOps) -> RmsNorm:
    return RmsNorm(f"{name}.weight", width=width, eps=_EPS, ops=ops)
