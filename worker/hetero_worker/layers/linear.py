"""Linear layers of one rank's shard, each with its own loading rule.

A layer is told at construction which slices of the checkpoint it is made of, stacked along its output rows
(fused q, k, v; fused gate and up). Loading reads them into one weight on the rank's device, packs it for the kernel
and lets the unpacked weight go where packing copies it. A rank that owns nothing of a layer has no such object.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from hetero_api.model_config import ModelConfig
from hetero_api.model_parts import ExpertsConfig
from hetero_api.sharding import UnitRange
from hetero_worker.layers.linear_kernels import LinearKernel, PackedWeight
from hetero_worker.memory.loader import Checkpoint, TensorSlice
from hetero_worker.platforms.base import HOST


class ShardedLinear:
    """y = x · Wᵀ + b for this rank's part of W. Not usable before `load`."""

    def __init__(self, weights: Sequence[TensorSlice], biases: Sequence[TensorSlice] = ()) -> None:
        self._weights = tuple(weights)
        self._biases = tuple(biases)
        self._packed: PackedWeight = _not_loaded
        self._bias: torch.Tensor | None = None
        self._tensors: tuple[torch.Tensor, ...] = ()

    @property
    def shape(self) -> tuple[int, int]:
        """(out features, in features) on this rank."""
        return sum(part.shape[0] for part in self._weights), self._weights[0].shape[1]

    def weight_bytes(self, dtype: torch.dtype) -> int:
        """Once loaded."""
        return (math.prod(self.shape) + sum(part.shape[0] for part in self._biases)) * dtype.itemsize

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What of the weights lies in tensors: nothing that a kernel has packed its own way, nor what is tied."""
        return self._tensors

    def load(
        self, checkpoint: Checkpoint, *, dtype: torch.dtype, kernel: LinearKernel, device: torch.device = HOST
    ) -> None:
        weight = torch.empty(self.shape, dtype=dtype, device=device)
        checkpoint.read_all(self._weights, weight)
        if self._biases:
            self._bias = torch.empty(self.shape[0], dtype=dtype, device=device)
            checkpoint.read_all(self._biases, self._bias)
        self._packed = kernel.pack(weight)
        kept = () if kernel.copies_weight else (weight,)
        self._tensors = kept if self._bias is None else (*kept, self._bias)

    def tie(self, weight: torch.Tensor, kernel: LinearKernel) -> None:
        """Use a weight that another layer loaded and keeps."""
        self._packed = kernel.pack(weight)
        self._tensors = ()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, in] → [rows, out]."""
        return self._packed(x, self._bias)


def qkv_linear(config: ModelConfig, prefix: str, heads: UnitRange) -> ShardedLinear:
    """Fused q, k and v of the KV heads `heads` and their query heads; output [q | k | v]."""
    query = heads.scaled(config.group_size * config.head_dim)
    key = heads.scaled(config.head_dim)
    rows = {"q_proj": query, "k_proj": key, "v_proj": key}
    widths = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads, "v_proj": config.num_kv_heads}
    return _column_parallel(
        {f"{prefix}.{name}": (widths[name] * config.head_dim, rows[name]) for name in rows},
        in_features=config.hidden_size,
        bias=config.qkv_bias,
    )


def output_linear(config: ModelConfig, prefix: str, heads: UnitRange, *, bias: bool) -> ShardedLinear:
    """The attention's output projection from this rank's heads: a partial sum. One rank adds the bias."""
    columns = heads.scaled(config.group_size * config.head_dim)
    width = config.num_heads * config.head_dim
    return _row_parallel(f"{prefix}.o_proj", config, (width, columns), bias=bias and config.o_bias)


def gate_up_linear(config: ModelConfig, prefix: str, columns: UnitRange) -> ShardedLinear:
    """Fused gate and up projections of this rank's columns; output [gate | up]."""
    return _column_parallel(
        {f"{prefix}.{name}": (config.intermediate_size, columns) for name in ("gate_proj", "up_proj")},
        in_features=config.hidden_size,
        bias=config.mlp_bias,
    )


def down_linear(config: ModelConfig, prefix: str, columns: UnitRange, *, bias: bool) -> ShardedLinear:
    """The MLP's down projection from this rank's columns: a partial sum. One rank adds the bias."""
    return _row_parallel(
        f"{prefix}.down_proj", config, (config.intermediate_size, columns), bias=bias and config.mlp_bias
    )


def expert_gate_up_linear(config: ModelConfig, experts: ExpertsConfig, prefix: str) -> ShardedLinear:
    """Fused gate and up projections of a whole expert; output [gate | up]."""
    width = experts.intermediate_size
    return _column_parallel(
        {f"{prefix}.{name}": (width, UnitRange(0, width)) for name in (experts.names.gate, experts.names.up)},
        in_features=config.hidden_size,
        bias=False,
    )


def expert_down_linear(config: ModelConfig, experts: ExpertsConfig, prefix: str) -> ShardedLinear:
    """The down projection of a whole expert."""
    width = experts.intermediate_size
    return _row_parallel(f"{prefix}.{experts.names.down}", config, (width, UnitRange(0, width)), bias=False)


def _column_parallel(parts: dict[str, tuple[int, UnitRange]], *, in_features: int, bias: bool) -> ShardedLinear:
    weights = [TensorSlice(f"{name}.weight", (width, in_features), rows=rows) for name, (width, rows) in parts.items()]
    biases = [TensorSlice(f"{name}.bias", (width,), rows=rows) for name, (width, rows) in parts.items()]
    return ShardedLinear(weights, biases if bias else ())


def _row_parallel(name: str, config: ModelConfig, inputs: tuple[int, UnitRange], *, bias: bool) -> ShardedLinear:
    width, columns = inputs
    weight = TensorSlice(f"{name}.weight", (config.hidden_size, width), columns=columns)
    biases = (TensorSlice(f"{name}.bias", (config.hidden_size,)),) if bias else ()
    return ShardedLinear([weight], biases)


def _not_loaded(_x: torch.Tensor, _bias: torch.Tensor | None) -> torch.Tensor:
    raise RuntimeError("a layer was used before its weights were loaded")
