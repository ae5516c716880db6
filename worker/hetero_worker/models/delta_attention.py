"""Gated delta rule of one rank's heads, in place of a layer's attention.

Ranks have the key heads, each with its value heads, that are dealt with their KV heads of the layer. The cache is not
that of tokens: `LayerCache.keys` are matrices of value heads and `values` inputs of the convolution, a row for each
slot of the batch. What they hold after a step is the state behind the sequence's last computed token, so a sequence can
only go on where it stopped, or begin again.
"""

from __future__ import annotations

import torch

from hetero_api.model_config import ModelConfig
from hetero_api.model_parts import DeltaShape
from hetero_api.sharding import UnitRange
from hetero_worker.attention.base import AttentionRule, StepAttention
from hetero_worker.attention.delta_rule import DeltaInputs, DeltaWeights
from hetero_worker.attention.kv_cache import LayerCache, Zeros
from hetero_worker.checkpoints.checkpoint import Checkpoint
from hetero_worker.checkpoints.store import TensorSlice
from hetero_worker.layers.blocks import Attention, SumOverRanks
from hetero_worker.layers.fused_ops import PLAIN_OPS, FusedOps
from hetero_worker.layers.linear import ShardedLinear, delta_gates_linear, delta_inputs_linear, delta_output_linear
from hetero_worker.layers.linear_kernels import LinearKernel
from hetero_worker.layers.norm import ResidualStream, RmsNorm
from hetero_worker.layers.rotary import Rotation
from hetero_worker.memory.huge_pages import empty_on_huge_pages
from hetero_worker.memory.streams import HOST


class DeltaAttention(Attention):
    """norm → queries, keys, values and gates → convolution, delta rule, gated norm of heads → output projection."""

    def __init__(self, config: ModelConfig, layer: int, heads: UnitRange, *, ops: FusedOps = PLAIN_OPS) -> None:
        """`heads`: KV heads that the rank has of the layer. Raises ValueError for a model without the delta rule."""
        if config.delta is None:
            raise ValueError(f"{config.architecture} has no gated delta rule")
        super().__init__(config, layer, AttentionRule(scale=1.0), cached_heads=0, cached_dim=0, ops=ops)
        prefix, shape = f"model.layers.{layer}.linear_attn", config.delta
        own = UnitRange(*shape.heads_of(heads.begin, heads.end, of=config.num_kv_heads))
        self._shape, self._num_heads = shape, own.size
        self._inputs = delta_inputs_linear(config, shape, prefix, own)
        self._gates = delta_gates_linear(config, shape, prefix, own)
        self._output = delta_output_linear(config, shape, prefix, own)
        self._eps = config.rms_norm_eps
        self._sources = _sources(shape, prefix, own)
        self._weights: DeltaWeights | None = None

    @property
    def _norms(self) -> tuple[RmsNorm, ...]:
        return (self._norm,)

    @property
    def linears(self) -> tuple[ShardedLinear, ...]:
        """See `Attention.linears`."""
        return self._inputs, self._gates, self._output

    def weight_bytes(self, dtype: torch.dtype, kernel: LinearKernel | None = None) -> int:
        """See `Attention.weight_bytes`."""
        shape = self._shape
        beside = self._num_heads * (shape.channels * shape.taps + 2 * shape.group) + shape.value_dim
        return super().weight_bytes(dtype, kernel) + beside * torch.float32.itemsize

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """See `Attention.tensors`."""
        weights = self._weights
        if weights is None:
            return super().tensors
        return *super().tensors, weights.convolution, weights.decay, weights.decay_bias, weights.norm

    def load(
        self, checkpoint: Checkpoint, *, dtype: torch.dtype, kernel: LinearKernel, device: torch.device = HOST
    ) -> None:
        """Read this rank's slices. Raises ModelError."""
        super().load(checkpoint, dtype=dtype, kernel=kernel, device=device)
        convolution, decay, bias, norm = (_read(checkpoint, parts).to(device) for parts in self._sources)
        by_tap = convolution.squeeze(1).T.contiguous()
        self._weights = DeltaWeights(by_tap, -decay.exp(), bias, norm, self._eps, self._num_heads, self._shape.key_dim)

    def allocate_cache(
        self,
        *,
        num_blocks: int,  # noqa: ARG002 - nothing is cached of a token
        block_size: int,  # noqa: ARG002
        num_slots: int,
        dtype: torch.dtype,  # noqa: ARG002 - states are float32
        zeros: Zeros = empty_on_huge_pages,
    ) -> LayerCache:
        """Return empty states of `num_slots` sequences."""
        shape = self._shape
        value_heads = self._num_heads * shape.group
        matrices = zeros((num_slots, value_heads, shape.key_dim, shape.value_dim), torch.float32)
        windows = zeros((num_slots, shape.taps - 1, self._num_heads * shape.channels), torch.float32)
        return LayerCache(matrices, windows, 1, has_states=True)

    def of_stream(
        self,
        stream: ResidualStream,
        rotation: Rotation,  # noqa: ARG002 - states keep the order of tokens
        attention: StepAttention,
        cache: LayerCache,
        sum_over_ranks: SumOverRanks = lambda _: None,  # noqa: ARG002 - ranks need nothing of one another
    ) -> torch.Tensor:
        """Return the partial sum [tokens, hidden] of the residual stream. Raises RuntimeError before `load`."""
        if self._weights is None:
            raise RuntimeError("a layer was used before its weights were loaded")
        normed = stream.normed(self._norm)
        inputs = DeltaInputs(self._inputs(normed), self._gates(normed))
        return self._output(self._ops.delta_rule(inputs, self._weights, cache, attention))


def _sources(shape: DeltaShape, prefix: str, own: UnitRange) -> tuple[list[TensorSlice], ...]:
    """Return what the convolution, the decays, their biases and the norm are read from."""
    keys, value = shape.key_heads * shape.key_dim, shape.group * shape.value_dim
    full = (shape.key_heads * shape.channels, 1, shape.taps)
    kinds = ((0, shape.key_dim), (keys, shape.key_dim), (2 * keys, value))
    convolution = [
        TensorSlice(f"{prefix}.conv1d.weight", full, rows=UnitRange(at + own.begin * width, at + own.end * width))
        for at, width in kinds
    ]
    of_heads = [
        [TensorSlice(f"{prefix}.{name}", (shape.value_heads,), rows=own.scaled(shape.group))]
        for name in ("A_log", "dt_bias")
    ]
    return convolution, *of_heads, [TensorSlice(f"{prefix}.norm.weight", (shape.value_dim,))]


def _read(checkpoint: Checkpoint, parts: list[TensorSlice]) -> torch.Tensor:
    rows = sum(part.shape[0] for part in parts)
    read = torch.empty((rows, *parts[0].shape[1:]), dtype=torch.float32)
    checkpoint.read_all(parts, read)
    return read
