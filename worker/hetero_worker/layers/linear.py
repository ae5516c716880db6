"""Linear layers of one rank's shard, each with its own loading rule.

A layer knows from its construction the slices of the checkpoint that it is made of, stacked along its output rows
(fused q, k, v; fused gate and up). Loading reads them into one weight on the rank's device, packs it for the kernel,
and drops the unpacked weight if packing copied it. A rank that owns nothing of a layer has no such object.

Weights are kept as narrow as they are stored or quantised, if the kernel can multiply with them so
(`linear_kernels.LinearKernel`); otherwise they are widened to the arithmetic type. Slices of one layer may be quantised
in different formats. They are packed in one format that can hold all of them or, if the kernel does not take that,
separately, and their outputs are joined.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import accumulate, groupby, pairwise
from typing import NamedTuple

import torch

from hetero_api.model_config import ModelConfig
from hetero_api.model_parts import Activation, DeltaShape, ExpertsConfig, LatentShape, RowOrder
from hetero_api.sharding import UnitRange
from hetero_api.weight_format import COLUMN_UNIT, FLOAT_WEIGHTS, StoredWeights, WeightFormat
from hetero_worker.adapters.low_rank import AdapterRows, LowRank
from hetero_worker.checkpoints.checkpoint import Checkpoint
from hetero_worker.checkpoints.store import Stack, StackEntry, TensorSlice
from hetero_worker.layers.fused_ops import FusedOps
from hetero_worker.layers.linear_kernels import LinearKernel, PackedMlp, PackedWeight, kept_format, matrix_bytes
from hetero_worker.layers.packing import floats_dtype, pack_in_place, pack_quantized, read_floats
from hetero_worker.memory.streams import HOST


class ShardedLinear:
    """y = x · Wᵀ + b for this rank's part of W. Not usable before `load`."""

    def __init__(
        self,
        weights: Sequence[TensorSlice],
        biases: Sequence[TensorSlice] = (),
        *,
        stored: StoredWeights = FLOAT_WEIGHTS,
    ) -> None:
        """`stored.layers` is the widest format in which the weights may be stored; None: they are floats."""
        self._weights = tuple(weights)
        self._biases = tuple(biases)
        self._stored = stored
        self._packed: PackedWeight = _NotLoaded()
        self._bias: torch.Tensor | None = None
        self._tensors: tuple[torch.Tensor, ...] = ()
        self._low_rank: LowRank | None = None

    @property
    def slices(self) -> tuple[TensorSlice, ...]:
        """Slices of the checkpoint that the weight is made of, along its output rows."""
        return self._weights

    @property
    def shape(self) -> tuple[int, int]:
        """(out features, in features) on this rank."""
        return sum(part.shape[0] for part in self._weights), self._weights[0].shape[1]

    def weight_bytes(self, dtype: torch.dtype, kernel: LinearKernel | None = None) -> int:
        """Return the most bytes that the loaded layer takes; `kernel` None: in the arithmetic type."""
        biases = sum(part.shape[0] for part in self._biases) * dtype.itemsize
        stored = self._stored
        return biases + matrix_bytes(self.shape, stored.layers, stored.floats, dtype=dtype, kernel=kernel)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All tensors of the loaded weights, except memory of a kernel's own and tensors of a tied layer."""
        return self._tensors

    @property
    def packed(self) -> PackedWeight:
        """The loaded weight, packed by its kernel."""
        return self._packed

    @property
    def bias(self) -> torch.Tensor | None:
        """The loaded bias [out]; None: there is none."""
        return self._bias

    def load(
        self, checkpoint: Checkpoint, *, dtype: torch.dtype, kernel: LinearKernel, device: torch.device = HOST
    ) -> None:
        """Read and pack this rank's slices. Raises ModelError."""
        weights_here = [checkpoint.located(part) for part in self._weights]
        runs = _runs(weights_here, checkpoint, kernel)
        packed = [
            pack_quantized(checkpoint, parts, kernel)
            if weights is not None
            else self._pack_floats(checkpoint, parts, dtype=dtype, kernel=kernel, device=device)
            for weights, parts in runs
        ]
        for weights, parts in runs:
            for part in parts:
                checkpoint.measure_loss(part, weights or floats_dtype(checkpoint, parts, dtype, kernel))
        heights = [sum(part.shape[0] for part in parts) for _, parts in runs]
        self._packed = packed[0] if len(packed) == 1 else JoinedWeights(packed, heights)
        self._tensors = tuple(self._packed.tensors)
        if self._biases:
            self._bias = torch.empty(self.shape[0], dtype=dtype, device=device)
            checkpoint.read_all(self._biases, self._bias)
            self._tensors = (*self._tensors, self._bias)

    def _pack_floats(
        self,
        checkpoint: Checkpoint,
        parts: Sequence[TensorSlice],
        *,
        dtype: torch.dtype,
        kernel: LinearKernel,
        device: torch.device,
    ) -> PackedWeight:
        packed = pack_in_place(checkpoint, parts, dtype=dtype, kernel=kernel)
        if packed is not None:
            return packed
        shape = sum(part.shape[0] for part in parts), self.shape[1]
        stored = floats_dtype(checkpoint, parts, dtype, kernel)
        if kernel.copies_weight:  # then it is in host memory, and needs it for a moment only
            weight = checkpoint.unpacked(shape, stored)
        else:
            weight = torch.empty(shape, dtype=stored, device=device)
        read_floats(checkpoint, parts, weight)
        return kernel.pack(weight)

    def tie(self, packed: PackedWeight) -> None:
        """Use a weight that another layer has loaded and keeps."""
        self._packed = packed
        self._tensors = ()

    def take_adapters(self, kernel: LinearKernel, rows: AdapterRows, *, device: torch.device) -> LowRank:
        """Return the adapters' products, which the layer adds to its outputs from now on; the first call makes them."""
        if self._low_rank is None:
            self._low_rank = kernel.low_rank([part.shape[0] for part in self._weights], rows, device=device)
        return self._low_rank

    def drop_adapter(self, number: int) -> None:
        """Forget an adapter, if the layer holds it."""
        if self._low_rank is not None:
            self._low_rank.drop(number)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return [rows, out] of x [rows, in]."""
        y = self._packed(x, self._bias)
        if self._low_rank is not None:
            self._low_rank.add(x, y)
        return y

    def gated(self, x: torch.Tensor, activation: Activation, ops: FusedOps) -> torch.Tensor:
        """Return activation(gate) · up, new [rows, out / 2], of the layer's outputs [gate | up] for x [rows, in]."""
        if self._low_rank is not None and self._low_rank.is_asked:
            return ops.gated(self(x), activation)
        return self._packed.gated(x, self._bias, activation, ops)


def _runs(
    parts: Sequence[TensorSlice], checkpoint: Checkpoint, kernel: LinearKernel
) -> list[tuple[WeightFormat | None, list[TensorSlice]]]:
    """Return runs of slices that are packed together, with their format; None: floats."""
    stored = [checkpoint.format_of(part) for part in parts]
    formats = [weights for weights in stored if weights is not None]
    if len(formats) == len(stored) and all(formats[0].joins(weights) for weights in formats):
        joined = reduce(WeightFormat.joined, formats)
        if kept_format(joined, kernel) is not None:
            return [(joined, list(parts))]
    kept = [kept_format(weights, kernel) for weights in stored]
    runs = groupby(zip(kept, parts, strict=True), key=lambda pair: pair[0])
    return [(weights, [part for _, part in pairs]) for weights, pairs in runs]


def packed_mlp(gate_up: ShardedLinear, down: ShardedLinear) -> PackedMlp:
    """Return the loaded weights of a gated MLP."""
    return PackedMlp(gate_up.packed, gate_up.bias, down.packed, down.bias)


class JoinedWeights(PackedWeight):
    """Weights of one layer that are packed separately, in the order of their rows."""

    def __init__(self, parts: Sequence[PackedWeight], heights: Sequence[int]) -> None:
        """`heights`: number of rows of each part."""
        self._parts = tuple(parts)
        self._bounds = tuple(pairwise(accumulate(heights, initial=0)))

    @property
    def parts(self) -> Sequence[PackedWeight]:
        """See `PackedWeight.parts`."""
        return self._parts

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        """See `PackedWeight.tensors`."""
        return tuple(tensor for part in self._parts for tensor in part.tensors)

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None, /) -> torch.Tensor:
        """Return the parts' outputs, joined: [rows, out] of x [rows, in]."""
        outputs = [
            part(x, None if bias is None else bias[begin:end])
            for part, (begin, end) in zip(self._parts, self._bounds, strict=True)
        ]
        return torch.cat(outputs, dim=1)


def qkv_linear(config: ModelConfig, prefix: str, heads: UnitRange) -> ShardedLinear:
    """Return the fused q, k and v projection of the KV heads `heads` and their query heads; output [q | k | v].

    Layers that read another's keys and values have q only.
    """
    unit = config.kv_heads_a_unit * config.head_dim
    key, width = heads.scaled(unit), config.num_kv_heads * unit
    values = "k_proj" if config.keys_are_values else "v_proj"
    made = [_Rows(f"{prefix}.k_proj", width, key, config.head_order), _Rows(f"{prefix}.{values}", width, key)]
    parts = [*_query_rows(config, prefix, heads), *(made if config.makes_kv else ())]
    return _column_parallel(parts, config=config, bias=config.qkv_bias)


def gate_linear(config: ModelConfig, prefix: str, heads: UnitRange) -> ShardedLinear:
    """Return the projection to the gates of the query heads of KV heads `heads`."""
    dim, name = config.head_dim, f"{prefix}.q_proj"
    gates = (UnitRange((2 * head + 1) * dim, (2 * head + 2) * dim) for head in range(*heads.scaled(config.group_size)))
    return _column_parallel(
        [_Rows(name, 2 * config.num_heads * dim, rows) for rows in gates], config=config, bias=config.qkv_bias
    )


def _query_rows(config: ModelConfig, prefix: str, heads: UnitRange) -> list[_Rows]:
    """Return the rows of the query heads of KV heads; each head's gates, if there are any, stand behind it."""
    dim, name, own = config.head_dim, f"{prefix}.q_proj", heads.scaled(config.group_size)
    if not config.gated_attention:
        return [_Rows(name, config.num_heads * dim, own.scaled(dim), config.head_order)]
    queries = (UnitRange(2 * head * dim, (2 * head + 1) * dim) for head in range(*own))
    return [_Rows(name, 2 * config.num_heads * dim, rows, config.head_order) for rows in queries]


def delta_inputs_linear(config: ModelConfig, delta: DeltaShape, prefix: str, heads: UnitRange) -> ShardedLinear:
    """Return the projection to the key heads `heads` of the gated delta rule; output [q | k | v | z]."""
    key, value = delta.key_dim, delta.group * delta.value_dim
    if delta.by_head:
        parts = _rows_by_head(f"{prefix}.in_proj_qkvz", delta.key_heads, (key, key, value, value), heads)
    else:
        keys, height = delta.key_heads * key, delta.key_heads * delta.channels
        qkv = [(0, key), (keys, key), (2 * keys, value)]
        parts = [_Rows(f"{prefix}.in_proj_qkv", height, _shifted(heads.scaled(width), at)) for at, width in qkv]
        parts.append(_Rows(f"{prefix}.in_proj_z", delta.key_heads * value, heads.scaled(value)))
    return _column_parallel(parts, config=config, bias=False)


def delta_gates_linear(config: ModelConfig, delta: DeltaShape, prefix: str, heads: UnitRange) -> ShardedLinear:
    """Return the projection to what opens and decays the states of these key heads, always floats; output [b | a]."""
    group = delta.group
    if delta.by_head:
        parts = _rows_by_head(f"{prefix}.in_proj_ba", delta.key_heads, (group, group), heads)
    else:
        own = heads.scaled(group)
        parts = [_Rows(f"{prefix}.in_proj_{name}", delta.value_heads, own) for name in ("b", "a")]
    return _column_parallel(parts, config=config, bias=False, stored=StoredWeights(floats=config.weights.floats))


def delta_output_linear(config: ModelConfig, delta: DeltaShape, prefix: str, heads: UnitRange) -> ShardedLinear:
    """Return the output projection of the gated delta rule from this rank's key heads: a partial sum."""
    unit = delta.group * delta.value_dim
    inputs = delta.key_heads * unit, heads.scaled(unit)
    return _row_parallel(f"{prefix}.out_proj", config, inputs, unit=unit, bias=False)


def _rows_by_head(name: str, num_heads: int, widths: Sequence[int], heads: UnitRange) -> list[_Rows]:
    """Return rows of a projection that is stored head by head, in the order of their kinds, which are so wide."""
    unit, begins = sum(widths), accumulate(widths, initial=0)
    return [
        _Rows(name, num_heads * unit, UnitRange(head * unit + begin, head * unit + begin + width))
        for begin, width in zip(begins, widths, strict=False)
        for head in range(*heads)
    ]


def _shifted(rows: UnitRange, by: int) -> UnitRange:
    return UnitRange(rows.begin + by, rows.end + by)


def output_linear(config: ModelConfig, prefix: str, heads: UnitRange, *, bias: bool) -> ShardedLinear:
    """Return the output projection of attention from this rank's heads: a partial sum. One rank adds the bias."""
    unit = config.output_unit
    inputs = config.num_kv_heads * unit, heads.scaled(unit)
    return _row_parallel(f"{prefix}.o_proj", config, inputs, unit=unit, bias=bias and config.o_bias)


def latent_query_linear(config: ModelConfig, latent: LatentShape, prefix: str, heads: UnitRange) -> ShardedLinear:
    """Return the projection to the query heads `heads` of latent attention."""
    dim = latent.query_dim
    order = RowOrder(dim, latent.rope_dim, config.interleaved_rope, before=latent.nope_dim)
    name, width = (f"{prefix}.q_b_proj", latent.query_rank) if latent.query_rank else (f"{prefix}.q_proj", None)
    rows = _Rows(name, config.num_heads * dim, heads.scaled(dim), order)
    return _column_parallel([rows], config=config, bias=False, width=width)


def compressing_linear(config: ModelConfig, name: str, height: int, order: RowOrder | None = None) -> ShardedLinear:
    """Return a whole projection of latent attention, to so many elements, that all ranks with heads have."""
    rows = _Rows(name, height, UnitRange(0, height), order)
    return _column_parallel([rows], config=config, bias=config.qkv_bias)


def whole_linear(config: ModelConfig, name: str, height: int, *, width: int | None = None) -> ShardedLinear:
    """Return a whole projection of `width` elements, None: of hidden states, to `height`, without a bias."""
    return _column_parallel([_Rows(name, height, UnitRange(0, height))], config=config, bias=False, width=width)


def joining_linear(config: ModelConfig, name: str, part: int) -> ShardedLinear:
    """Return the columns, for the first (0) or the second (1) of two joined hidden states, of a whole projection."""
    hidden = config.hidden_size
    inputs = 2 * hidden, UnitRange(part * hidden, (part + 1) * hidden)
    return _row_parallel(name, config, inputs, unit=hidden, bias=False, stored=config.weights.at_load)


def gate_up_linear(config: ModelConfig, prefix: str, width: int, columns: UnitRange) -> ShardedLinear:
    """Return the fused gate and up projections of this rank's columns of `width`; output [gate | up]."""
    if config.fused_gate_up:
        up = UnitRange(width + columns.begin, width + columns.end)
        parts = [_Rows(f"{prefix}.gate_up_proj", 2 * width, rows) for rows in (columns, up)]
    else:
        parts = [_Rows(f"{prefix}.{name}", width, columns) for name in ("gate_proj", "up_proj")]
    return _column_parallel(parts, config=config, bias=config.mlp_bias)


def down_linear(config: ModelConfig, prefix: str, width: int, columns: UnitRange, *, bias: bool) -> ShardedLinear:
    """Return the MLP's down projection from this rank's columns: a partial sum. One rank adds the bias."""
    inputs = width, columns
    return _row_parallel(f"{prefix}.down_proj", config, inputs, unit=COLUMN_UNIT, bias=bias and config.mlp_bias)


def expert_gate_up_linear(
    config: ModelConfig, experts: ExpertsConfig, block: str, number: int, columns: UnitRange | None = None
) -> ShardedLinear:
    """Return the fused gate and up projections of an expert, or of a slice of it; output [gate | up]."""
    width, names = experts.intermediate_size, experts.names
    rows = columns or UnitRange(0, width)
    if names.rows_first:
        halves = [StackEntry(number, experts.number, first=half * width, height=2 * width) for half in range(2)]
        parts = [_Rows(f"{block}.experts.{names.gate}", width, rows, entry=entry) for entry in halves]
    elif names.stacked:
        entries = [StackEntry(number, experts.number, first=half, step=2) for half in range(2)]
        parts = [_Rows(f"{block}.experts.{names.gate}", width, rows, entry=entry) for entry in entries]
    else:
        parts = [
            _Rows(f"{block}.experts.{number}.{name}", width, rows, stack=_gate_up_stack(experts, block, number, half))
            for half, name in enumerate((names.gate, names.up))
        ]
    stored = config.weights.of_experts
    return _column_parallel(parts, config=config, bias=experts.biased, stored=stored)


def expert_down_linear(
    config: ModelConfig, experts: ExpertsConfig, block: str, number: int, columns: UnitRange | None = None
) -> ShardedLinear:
    """Return the down projection of an expert, or of a slice of it: a partial sum. The first slice adds the bias."""
    width, names, stored = experts.intermediate_size, experts.names, config.weights.of_experts
    height = config.hidden_size if names.rows_first else None
    entry = StackEntry(number, experts.number, height=height) if names.stacked else None
    name = f"{block}.experts.{names.down}" if names.stacked else f"{block}.experts.{number}.{names.down}"
    inputs, unit = (width, columns or UnitRange(0, width)), config.expert_unit if columns else 0
    bias, stack = experts.biased and inputs[1].begin == 0, None
    if not names.stacked:
        stack = Stack(f"{block}.experts.down_proj", StackEntry(number, experts.number, height=config.hidden_size))
    return _row_parallel(name, config, inputs, unit=unit, bias=bias, entry=entry, stack=stack, stored=stored)


def _gate_up_stack(experts: ExpertsConfig, block: str, number: int, half: int) -> Stack:
    """Return the stack in which transformers keeps gate (half 0) and up projections of all experts."""
    width = experts.intermediate_size
    entry = StackEntry(number, experts.number, first=half * width, height=2 * width)
    return Stack(f"{block}.experts.gate_up_proj", entry)


class _Rows(NamedTuple):
    """Rows of a projection that this rank owns."""

    name: str
    height: int
    """Rows of the whole projection."""
    rows: UnitRange
    order: RowOrder | None = None
    entry: StackEntry | None = None
    stack: Stack | None = None


def _column_parallel(
    parts: Sequence[_Rows],
    *,
    config: ModelConfig,
    bias: bool,
    width: int | None = None,
    stored: StoredWeights | None = None,
) -> ShardedLinear:
    """Return a layer whose outputs are split over ranks; its inputs are whole.

    `width` None: they are hidden states. `stored` None: weights are stored as most layers are.
    """
    width, stored = width or config.hidden_size, stored or config.weights
    wanted = stored.at_load.layers
    weights = [
        TensorSlice(
            _weight_name(part.name, part.entry), (part.height, width),
            rows=part.rows, quantize_to=wanted, order=part.order, entry=part.entry, stack=part.stack,
        )
        for part in parts
    ]  # fmt: skip
    biases = [
        TensorSlice(
            _bias_name(part.name, part.entry), (part.height,), rows=part.rows, order=part.order, entry=part.entry
        )
        for part in parts
    ]
    return ShardedLinear(weights, biases if bias else (), stored=stored)


def _row_parallel(
    name: str,
    config: ModelConfig,
    inputs: tuple[int, UnitRange],
    *,
    unit: int,
    bias: bool,
    entry: StackEntry | None = None,
    stack: Stack | None = None,
    stored: StoredWeights | None = None,
) -> ShardedLinear:
    """Return a layer whose inputs are split over ranks in units of `unit`; 0: they are not split."""
    width, columns = inputs
    stored, height = (stored or config.weights).within(unit), config.hidden_size
    weight = TensorSlice(
        _weight_name(name, entry), (height, width),
        columns=columns, quantize_to=stored.at_load.layers, entry=entry, stack=stack,
    )  # fmt: skip
    biases = (TensorSlice(_bias_name(name, entry), (height,), entry=entry),) if bias else ()
    return ShardedLinear([weight], biases, stored=stored)


def _weight_name(name: str, entry: StackEntry | None) -> str:
    return f"{name}.weight" if entry is None else name


def _bias_name(name: str, entry: StackEntry | None) -> str:
    return f"{name}.bias" if entry is None else f"{name}_bias"


class _NotLoaded(PackedWeight):
    def __call__(self, _x: torch.Tensor, _bias: torch.Tensor | None, /) -> torch.Tensor:
        raise RuntimeError("a layer was used before its weights were loaded")
