"""Linear layers of one rank's shard, each with its own loading rule.

A layer is told at construction which slices of the checkpoint it is made of, stacked along its output rows
(fused q, k, v; fused gate and up). Loading reads them into one weight on the rank's device, packs it for the kernel
and lets the unpacked weight go where packing copies it. A rank that owns nothing of a layer has no such object.

Weights are kept as narrow as they are stored, or are to be quantised to, where the kernel multiplies with that
(weight_storage.py); else they are widened to the arithmetic type. Slices of one layer that are quantised in different
ways are packed in a format that holds them all, or, where the kernel takes none, apart, and their outputs joined.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import accumulate, groupby, pairwise

import torch

from hetero_api.model_config import ModelConfig
from hetero_api.model_parts import ExpertsConfig
from hetero_api.sharding import UnitRange
from hetero_api.weight_format import COLUMN_UNIT, FLOAT_WEIGHTS, StoredWeights, WeightFormat
from hetero_worker.checkpoints.checkpoint import Checkpoint
from hetero_worker.checkpoints.store import TensorSlice
from hetero_worker.layers.linear_kernels import LinearKernel, PackedWeight
from hetero_worker.layers.packing import floats_dtype, pack_in_place, pack_quantized, read_floats
from hetero_worker.layers.weight_storage import QuantizedKernel, kept_format, matrix_bytes
from hetero_worker.platforms.base import HOST


class ShardedLinear:
    """y = x · Wᵀ + b for this rank's part of W. Not usable before `load`."""

    def __init__(
        self,
        weights: Sequence[TensorSlice],
        biases: Sequence[TensorSlice] = (),
        *,
        stored: StoredWeights = FLOAT_WEIGHTS,
    ) -> None:
        """`stored.layers`: the widest format that the weights may come in; None: they are floats."""
        self._weights = tuple(weights)
        self._biases = tuple(biases)
        self._stored = stored
        self._packed: PackedWeight = _not_loaded
        self._bias: torch.Tensor | None = None
        self._tensors: tuple[torch.Tensor, ...] = ()

    @property
    def shape(self) -> tuple[int, int]:
        """(out features, in features) on this rank."""
        return sum(part.shape[0] for part in self._weights), self._weights[0].shape[1]

    def weight_bytes(self, dtype: torch.dtype, kernel: LinearKernel | None = None) -> int:
        """Once loaded, at most. Without a kernel: in the arithmetic type."""
        biases = sum(part.shape[0] for part in self._biases) * dtype.itemsize
        stored = self._stored
        return biases + matrix_bytes(self.shape, stored.layers, stored.floats, dtype=dtype, kernel=kernel)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What of the weights lies in tensors: nothing that a kernel has packed its own way, nor what is tied."""
        return self._tensors

    @property
    def packed(self) -> PackedWeight:
        """The weight as its kernel has it, once loaded."""
        return self._packed

    @property
    def bias(self) -> torch.Tensor | None:
        """[out], once loaded."""
        return self._bias

    def load(
        self, checkpoint: Checkpoint, *, dtype: torch.dtype, kernel: LinearKernel, device: torch.device = HOST
    ) -> None:
        """Raises ModelError."""
        self._tensors = ()
        runs = self._runs(checkpoint, kernel)
        packed = [
            pack_quantized(checkpoint, parts, kernel)
            if weights is not None and isinstance(kernel, QuantizedKernel)
            else self._pack_floats(checkpoint, parts, dtype=dtype, kernel=kernel, device=device)
            for weights, parts in runs
        ]
        heights = [sum(part.shape[0] for part in parts) for _, parts in runs]
        self._packed = packed[0] if len(packed) == 1 else JoinedWeights(packed, heights)
        if self._biases:
            self._bias = torch.empty(self.shape[0], dtype=dtype, device=device)
            checkpoint.read_all(self._biases, self._bias)
            self._tensors = (*self._tensors, self._bias)

    def _runs(
        self, checkpoint: Checkpoint, kernel: LinearKernel
    ) -> list[tuple[WeightFormat | None, list[TensorSlice]]]:
        """Slices that are packed together, and the format that these are in; None: floats."""
        stored = [checkpoint.format_of(part) for part in self._weights]
        formats = [weights for weights in stored if weights is not None]
        if len(formats) == len(stored):
            joined = reduce(WeightFormat.joined, formats)
            if kept_format(joined, kernel) is not None:
                return [(joined, list(self._weights))]
        kept = [kept_format(weights, kernel) for weights in stored]
        runs = groupby(zip(kept, self._weights, strict=True), key=lambda pair: pair[0])
        return [(weights, [part for _, part in pairs]) for weights, pairs in runs]

    def _pack_floats(
        self,
        checkpoint: Checkpoint,
        parts: Sequence[TensorSlice],
        *,
        dtype: torch.dtype,
        kernel: LinearKernel,
        device: torch.device,
    ) -> PackedWeight:
        packed = pack_in_place(checkpoint, parts, dtype=dtype, kernel=kernel, device=device)
        if packed is not None:
            return packed
        shape = sum(part.shape[0] for part in parts), self.shape[1]
        stored = floats_dtype(checkpoint, parts, dtype, kernel)
        if kernel.copies_weight and device == HOST:
            weight = checkpoint.unpacked(shape, stored)
        else:
            weight = torch.empty(shape, dtype=stored, device=device)
        read_floats(checkpoint, parts, weight)
        if not kernel.copies_weight:
            self._tensors = (*self._tensors, weight)
        return kernel.pack(weight)

    def tie(self, packed: PackedWeight) -> None:
        """Use a weight that another layer loaded and keeps."""
        self._packed = packed
        self._tensors = ()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, in] → [rows, out]."""
        return self._packed(x, self._bias)


class JoinedWeights:
    """Weights of one layer that are packed apart, in the order of their rows."""

    def __init__(self, parts: Sequence[PackedWeight], heights: Sequence[int]) -> None:
        """`heights`: rows of each."""
        self.parts = tuple(parts)
        self._bounds = tuple(pairwise(accumulate(heights, initial=0)))

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [rows, in] → [rows, out]."""
        outputs = [
            part(x, None if bias is None else bias[begin:end])
            for part, (begin, end) in zip(self.parts, self._bounds, strict=True)
        ]
        return torch.cat(outputs, dim=1)


def qkv_linear(config: ModelConfig, prefix: str, heads: UnitRange) -> ShardedLinear:
    """Fused q, k and v of the KV heads `heads` and their query heads; output [q | k | v]."""
    query = heads.scaled(config.group_size * config.head_dim)
    key = heads.scaled(config.head_dim)
    rows = {"q_proj": query, "k_proj": key, "v_proj": key}
    widths = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads, "v_proj": config.num_kv_heads}
    return _column_parallel(
        {f"{prefix}.{name}": (widths[name] * config.head_dim, rows[name]) for name in rows},
        config=config,
        bias=config.qkv_bias,
    )


def output_linear(config: ModelConfig, prefix: str, heads: UnitRange, *, bias: bool) -> ShardedLinear:
    """The attention's output projection from this rank's heads: a partial sum. One rank adds the bias."""
    unit = config.group_size * config.head_dim
    inputs = config.num_heads * config.head_dim, heads.scaled(unit)
    return _row_parallel(f"{prefix}.o_proj", config, inputs, unit=unit, bias=bias and config.o_bias)


def gate_up_linear(config: ModelConfig, prefix: str, columns: UnitRange) -> ShardedLinear:
    """Fused gate and up projections of this rank's columns; output [gate | up]."""
    return _column_parallel(
        {f"{prefix}.{name}": (config.intermediate_size, columns) for name in ("gate_proj", "up_proj")},
        config=config,
        bias=config.mlp_bias,
    )


def down_linear(config: ModelConfig, prefix: str, columns: UnitRange, *, bias: bool) -> ShardedLinear:
    """The MLP's down projection from this rank's columns: a partial sum. One rank adds the bias."""
    inputs = config.intermediate_size, columns
    return _row_parallel(f"{prefix}.down_proj", config, inputs, unit=COLUMN_UNIT, bias=bias and config.mlp_bias)


def expert_gate_up_linear(config: ModelConfig, experts: ExpertsConfig, prefix: str) -> ShardedLinear:
    """Fused gate and up projections of a whole expert; output [gate | up]."""
    width = experts.intermediate_size
    return _column_parallel(
        {f"{prefix}.{name}": (width, UnitRange(0, width)) for name in (experts.names.gate, experts.names.up)},
        config=config,
        bias=False,
    )


def expert_down_linear(config: ModelConfig, experts: ExpertsConfig, prefix: str) -> ShardedLinear:
    """The down projection of a whole expert."""
    width = experts.intermediate_size
    return _row_parallel(f"{prefix}.{experts.names.down}", config, (width, UnitRange(0, width)), unit=0, bias=False)


def _column_parallel(parts: dict[str, tuple[int, UnitRange]], *, config: ModelConfig, bias: bool) -> ShardedLinear:
    """Inputs are the hidden states, whole."""
    width, wanted = config.hidden_size, config.weights.at_load.layers
    weights = [
        TensorSlice(f"{name}.weight", (height, width), rows=rows, quantize_to=wanted)
        for name, (height, rows) in parts.items()
    ]
    biases = [TensorSlice(f"{name}.bias", (height,), rows=rows) for name, (height, rows) in parts.items()]
    return ShardedLinear(weights, biases if bias else (), stored=config.weights)


def _row_parallel(
    name: str, config: ModelConfig, inputs: tuple[int, UnitRange], *, unit: int, bias: bool
) -> ShardedLinear:
    """Inputs are dealt to ranks, `unit` of them together; 0: not dealt."""
    width, columns = inputs
    stored = config.weights.within(unit)
    weight = TensorSlice(
        f"{name}.weight", (config.hidden_size, width), columns=columns, quantize_to=stored.at_load.layers
    )
    biases = (TensorSlice(f"{name}.bias", (config.hidden_size,)),) if bias else ()
    return ShardedLinear([weight], biases, stored=stored)


def _not_loaded(_x: torch.Tensor, _bias: torch.Tensor | None) -> torch.Tensor:
    raise RuntimeError("a layer was used before its weights were loaded")
