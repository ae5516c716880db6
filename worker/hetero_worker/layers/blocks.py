"""The two halves of a decoder layer on one rank: self-attention over its heads, and a gated MLP over its columns.

Both return a partial sum of the layer's output; ranks' partial sums add up. Each holds its own input norm, since only a
rank that owns a part of the layer computes it. A layer may have an MLP of experts instead (`moe`). Norms of the halves'
outputs, if a model has them, apply to whole sums, so they belong to the layer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar

import torch

from hetero_api.model_config import ModelConfig
from hetero_api.sharding import UnitRange
from hetero_worker.attention.base import AttentionRule, StepAttention
from hetero_worker.attention.kv_cache import LayerCache, Zeros
from hetero_worker.checkpoints.checkpoint import Checkpoint
from hetero_worker.checkpoints.store import TensorSlice
from hetero_worker.layers.fused_ops import PLAIN_OPS, FusedOps, HeadWeights
from hetero_worker.layers.linear import (
    ShardedLinear,
    down_linear,
    gate_linear,
    gate_up_linear,
    output_linear,
    packed_mlp,
    qkv_linear,
)
from hetero_worker.layers.linear_kernels import LinearKernel, PackedMlp
from hetero_worker.layers.norm import HeadNorms, ResidualStream, RmsNorm
from hetero_worker.layers.rotary import Rotation
from hetero_worker.memory.huge_pages import empty_on_huge_pages
from hetero_worker.memory.streams import HOST

SumOverRanks = Callable[[torch.Tensor], None]
"""Replaces a tensor by its sum over the ranks that hold heads of the layer."""


class Attention(ABC):
    """Attention of some KV heads of a layer: norm → what kinds do in their own ways → output projection."""

    keys_only: ClassVar[bool] = False
    """True if the cached keys are the values, too."""

    def __init__(
        self, config: ModelConfig, layer: int, rule: AttentionRule, *, cached_heads: int, cached_dim: int, ops: FusedOps
    ) -> None:
        """`cached_heads` of `cached_dim` elements are cached for each token."""
        self._ops = ops
        self._rule = rule
        self._cached_heads, self._cached_dim = cached_heads, cached_dim
        self._norm = layer_norm(config, layer, config.norms.attention, ops)

    @property
    @abstractmethod
    def _norms(self) -> tuple[RmsNorm | HeadNorms, ...]:
        """Norms, that of the input first."""

    @property
    @abstractmethod
    def linears(self) -> tuple[ShardedLinear, ...]:
        """Linear layers, in the order in which a step needs them."""

    @property
    def linear_shapes(self) -> tuple[tuple[int, int], ...]:
        """(out, in) of each linear layer."""
        return tuple(linear.shape for linear in self.linears)

    @property
    def cached_shape(self) -> tuple[int, int]:
        """KV heads that are cached for each token, and their elements."""
        return self._cached_heads, self._cached_dim

    @property
    def window(self) -> int | None:
        """Number of tokens that a row attends to, its own included; None: all."""
        return self._rule.window

    def weight_bytes(self, dtype: torch.dtype, kernel: LinearKernel | None = None) -> int:
        """Return the most bytes that the loaded weights take; `kernel` None: in the arithmetic type."""
        norms = sum(norm.weight_bytes(dtype) for norm in self._norms)
        return norms + sum(linear.weight_bytes(dtype, kernel) for linear in self.linears)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All tensors of the loaded weights, except those that a kernel has packed."""
        return tuple(tensor for part in (*self._norms, *self.linears) for tensor in part.tensors)

    def load(
        self, checkpoint: Checkpoint, *, dtype: torch.dtype, kernel: LinearKernel, device: torch.device = HOST
    ) -> None:
        """Read this rank's slices. Raises ModelError."""
        for norm in self._norms:
            norm.load(checkpoint, dtype=dtype, device=device)
        for linear in self.linears:
            linear.load(checkpoint, dtype=dtype, kernel=kernel, device=device)

    def allocate_cache(
        self,
        *,
        num_blocks: int,
        block_size: int,
        num_slots: int,  # noqa: ARG002 - for kinds that keep states of sequences
        dtype: torch.dtype,
        zeros: Zeros = empty_on_huge_pages,
    ) -> LayerCache:
        """Return an empty cache of what this rank caches; states of sequences have `num_slots` rows."""
        return LayerCache.allocate(
            num_blocks=num_blocks,
            block_size=block_size,
            num_kv_heads=self._cached_heads,
            head_dim=self._cached_dim,
            dtype=dtype,
            zeros=zeros,
            keys_only=self.keys_only,
        )

    def __call__(
        self, hidden: torch.Tensor, rotation: Rotation, attention: StepAttention, cache: LayerCache
    ) -> torch.Tensor:
        """Return the partial sum [tokens, hidden] of hidden states [tokens, hidden]."""
        return self.of_stream(ResidualStream(hidden), rotation, attention, cache)

    @abstractmethod
    def of_stream(
        self,
        stream: ResidualStream,
        rotation: Rotation,
        attention: StepAttention,
        cache: LayerCache,
        sum_over_ranks: SumOverRanks = lambda _: None,
    ) -> torch.Tensor:
        """Return the partial sum [tokens, hidden] of the residual stream."""


class SelfAttention(Attention):
    """norm → fused qkv → head norms → rotation → cache and attention → output projection.

    Some models multiply what was attended by the sigmoid of gates, which are made of the normed input. Layers that make
    no keys and values read those that another layer has written to its cache.
    """

    def __init__(
        self, config: ModelConfig, layer: int, heads: UnitRange, *, adds_bias: bool, ops: FusedOps = PLAIN_OPS
    ) -> None:
        config = config.of_layer(layer)
        self._makes_kv = config.makes_kv
        rule = AttentionRule(config.attention_scale, config.windows[layer], config.attention_soft_cap)
        cached_heads = heads.size * config.kv_heads_a_unit
        super().__init__(config, layer, rule, cached_heads=cached_heads, cached_dim=config.head_dim, ops=ops)
        prefix = f"model.layers.{layer}.self_attn"
        self._num_heads = heads.size * config.group_size
        self._head_dim = config.head_dim
        self._qkv = qkv_linear(config, prefix, heads)
        self._gate = gate_linear(config, prefix, heads) if config.gated_attention else None
        self._output = output_linear(config, prefix, heads, bias=adds_bias)
        self._head_norms = HeadNorms(config, prefix, heads) if config.qk_norm else None
        self._sinks: TensorSlice | None = None
        if config.has_sinks:
            self._sinks = TensorSlice(f"{prefix}.sinks", (config.num_heads,), rows=heads.scaled(config.group_size))

    @property
    def _norms(self) -> tuple[RmsNorm | HeadNorms, ...]:
        return (self._norm,) if self._head_norms is None else (self._norm, self._head_norms)

    @property
    def linears(self) -> tuple[ShardedLinear, ...]:
        """See `Attention.linears`."""
        return (self._qkv, self._output) if self._gate is None else (self._qkv, self._gate, self._output)

    def weight_bytes(self, dtype: torch.dtype, kernel: LinearKernel | None = None) -> int:
        """See `Attention.weight_bytes`."""
        sinks = 0 if self._sinks is None else self._sinks.shape[0] * torch.float32.itemsize
        return sinks + super().weight_bytes(dtype, kernel)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """See `Attention.tensors`."""
        return super().tensors if self._rule.sinks is None else (*super().tensors, self._rule.sinks)

    def load(
        self, checkpoint: Checkpoint, *, dtype: torch.dtype, kernel: LinearKernel, device: torch.device = HOST
    ) -> None:
        """Read this rank's slices. Raises ModelError."""
        super().load(checkpoint, dtype=dtype, kernel=kernel, device=device)
        if self._sinks is not None:
            sinks = torch.empty(self._sinks.shape, dtype=torch.float32, device=device)
            checkpoint.read(self._sinks, sinks)
            self._rule = replace(self._rule, sinks=sinks)

    def of_stream(
        self,
        stream: ResidualStream,
        rotation: Rotation,
        attention: StepAttention,
        cache: LayerCache,
        sum_over_ranks: SumOverRanks = lambda _: None,
    ) -> torch.Tensor:
        """Return the partial sum [tokens, hidden] of the residual stream."""
        normed = stream.normed(self._norm)
        qkv = self._qkv(normed)
        by_head = qkv.view(len(qkv), -1, self._head_dim)
        heads, norms = self._num_heads, self._norms_of(by_head, sum_over_ranks)
        if self._makes_kv:
            query = self._ops.rotate_and_write(
                by_head, rotation, num_heads=heads, norms=norms, cache=cache, slots=attention.slot_mapping
            )
        else:
            query = self._ops.rotate(by_head, rotation, num_heads=heads, norms=norms).query
        attended = attention.attend_written(query, cache, self._rule)
        return self._output(attended if self._gate is None else self._ops.opened(attended, self._gate(normed)))

    def _norms_of(self, qkv: torch.Tensor, sum_over_ranks: SumOverRanks) -> HeadWeights | None:
        """Return the norms of [tokens, heads + 2 · kv_heads, head_dim]; ranks meet if they are over all heads."""
        norms = self._head_norms
        if norms is None or not norms.over_all_heads:
            return None if norms is None else norms.weights()
        mean_squares = self._ops.mean_squares(qkv, num_heads=self._num_heads, widths=norms.widths)
        sum_over_ranks(mean_squares)
        return norms.weights(mean_squares)


class GatedMlp:
    """norm → fused gate and up → activation(gate) · up → down projection.

    In a layer with experts it is the expert that serves all tokens.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        columns: UnitRange,
        *,
        adds_bias: bool,
        norm: RmsNorm | None = None,
        ops: FusedOps = PLAIN_OPS,
    ) -> None:
        """`norm`: of the input, if it is shared with other parts."""
        prefix, width = mlp_prefix(config, layer), config.mlp_columns(layer)
        self._adds_apart = config.mlp_sum_width > config.hidden_size
        self._activation = config.activation
        self._ops = ops
        self._norm = norm or mlp_norm(config, layer, ops)
        self._gate_up = gate_up_linear(config, prefix, width, columns)
        self._down = down_linear(config, prefix, width, columns, bias=adds_bias)
        self._factor = _SharedGate.of_layer(config, layer, ops)

    @property
    def linears(self) -> tuple[ShardedLinear, ...]:
        """Linear layers, in the order in which a step needs them."""
        return self._gate_up, self._down

    @property
    def linear_shapes(self) -> tuple[tuple[int, int], ...]:
        """(out, in) of each linear layer."""
        return self._gate_up.shape, self._down.shape

    def weight_bytes(self, dtype: torch.dtype, kernel: LinearKernel | None = None) -> int:
        """Return the most bytes that the loaded weights take; `kernel` None: in the arithmetic type."""
        return self._norm.weight_bytes(dtype) + self.linear_bytes(dtype, kernel)

    def linear_bytes(self, dtype: torch.dtype, kernel: LinearKernel | None = None) -> int:
        """Return the most bytes that the loaded weights take, without the norm."""
        factor = 0 if self._factor is None else self._factor.weight_bytes
        return factor + sum(part.weight_bytes(dtype, kernel) for part in (self._gate_up, self._down))

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All tensors of the loaded weights, except those that a kernel has packed."""
        parts = (self._norm, self._gate_up, self._down, self._factor)
        return tuple(tensor for part in parts if part is not None for tensor in part.tensors)

    def load(
        self, checkpoint: Checkpoint, *, dtype: torch.dtype, kernel: LinearKernel, device: torch.device = HOST
    ) -> None:
        """Read this rank's slices. Raises ModelError."""
        self._norm.load(checkpoint, dtype=dtype, device=device)
        self._gate_up.load(checkpoint, dtype=dtype, kernel=kernel, device=device)
        self._down.load(checkpoint, dtype=dtype, kernel=kernel, device=device)
        if self._factor is not None:
            self._factor.load(checkpoint, device)

    @property
    def packed(self) -> PackedMlp:
        """The loaded weights."""
        return packed_mlp(self._gate_up, self._down)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the partial sum [tokens, hidden] of hidden states [tokens, hidden]."""
        return self.of_stream(ResidualStream(hidden))

    def of_stream(self, stream: ResidualStream) -> torch.Tensor:
        """Return the partial sum [tokens, hidden] of the residual stream, with zeros for experts that add up apart."""
        partial = self.of_normed(stream.normed(self._norm))
        return self._ops.beside(partial, None) if self._adds_apart else partial

    def apart(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the partial sum [tokens, hidden] of hidden states, by the norm of this part alone."""
        return self.of_normed(self._norm(hidden))

    def of_normed(self, normed: torch.Tensor) -> torch.Tensor:
        """Return the partial sum [tokens, hidden] of normed hidden states [tokens, hidden]."""
        result = self._down(self._gate_up.gated(normed, self._activation, self._ops))
        return result if self._factor is None else self._ops.opened(result, self._factor(normed))


class _SharedGate:
    """Logit of the factor that the expert of all tokens has for each token. Not usable before `load`."""

    def __init__(self, name: str, hidden_size: int, ops: FusedOps) -> None:
        self._source = TensorSlice(name, (1, hidden_size))
        self._ops = ops
        self.tensors: tuple[torch.Tensor, ...] = ()

    @classmethod
    def of_layer(cls, config: ModelConfig, layer: int, ops: FusedOps) -> _SharedGate | None:
        """Return the gate of a layer's expert of all tokens; None where it has none."""
        experts = config.experts
        if experts is None or layer not in experts.layers or not experts.has_shared_gate:
            return None
        name = f"{experts.names.block_of(layer)}.{experts.names.shared_gate}.weight"
        return cls(name, config.hidden_size, ops)

    @property
    def weight_bytes(self) -> int:
        """Bytes that the loaded weight takes."""
        return self._source.shape[1] * torch.float32.itemsize

    def load(self, checkpoint: Checkpoint, device: torch.device) -> None:
        """Read the weight. Raises ModelError."""
        weight = torch.empty(self._source.shape, dtype=torch.float32)
        checkpoint.read(self._source, weight)
        self.tensors = (weight.to(device),)

    def __call__(self, normed: torch.Tensor) -> torch.Tensor:
        """Return float32 [tokens, 1] of normed hidden states [tokens, hidden]."""
        (weight,) = self.tensors
        return self._ops.row_products(normed, weight)


def mlp_prefix(config: ModelConfig, layer: int) -> str:
    """Return the name of the MLP of a layer that serves all tokens."""
    if config.experts is None or layer not in config.expert_layers:
        return f"model.layers.{layer}.mlp"
    names = config.experts.names
    return f"{names.block_of(layer)}.{names.shared}"


def mlp_norm(config: ModelConfig, layer: int, ops: FusedOps = PLAIN_OPS) -> RmsNorm:
    """Return the norm of an MLP's input."""
    return layer_norm(config, layer, config.norms.mlp, ops)


def layer_norm(config: ModelConfig, layer: int, name: str, ops: FusedOps = PLAIN_OPS) -> RmsNorm:
    """Return one of a layer's norms of the residual stream's width."""
    return RmsNorm(
        f"model.layers.{layer}.{name}.weight",
        width=config.hidden_size,
        eps=config.rms_norm_eps,
        offset=config.norm_offset,
        ops=ops,
    )
