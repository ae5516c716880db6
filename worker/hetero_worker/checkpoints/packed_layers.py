"""Reads slices of one quantised linear layer, which consists of several tensors.

Whole numbers v are packed into int32 words, beside scales and zero points z that stand for a weight of zero: a weight
is w = (v - z) · scale. Small floats lie in bytes, beside scales in one or two tensors. Only the words and bytes that
hold a rank's rows and columns are read and unpacked.

Layouts are those of AutoAWQ (gemm), AutoGPTQ and GPTQModel, compressed-tensors, ModelOpt and GPT-OSS.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

import torch

from hetero_api.errors import ModelError
from hetero_api.packed_weights import Packing, Scheme
from hetero_api.sharding import UnitRange
from hetero_worker.checkpoints.quantized_matrix import TWICE_E2M1
from hetero_worker.checkpoints.safetensors_store import SafetensorsStore
from hetero_worker.checkpoints.store import TensorSlice

E4M3: Final = "F8_E4M3"
"""safetensors' name of 8-bit floats."""
MARKS: Final = {
    Packing.AWQ: "qweight",
    Packing.GPTQ: "qweight",
    Packing.GPTQ_V2: "qweight",
    Packing.PACKED_INTS: "weight_packed",
    Packing.INTS: "weight_scale",
    Packing.PACKED_MXFP4: "weight_packed",
    Packing.PACKED_NVFP4: "weight_packed",
    Packing.NVFP4: "weight_scale_2",
}
"""Tensor whose presence marks a quantised layer. 8-bit floats are known by their type, stacks by another name."""
_E4M3_NONE: Final = 0x7F
"""Bits of what is no number, without the sign's."""
_BYTES: Final = "U8"
_WORD_BITS: Final = 32
_EXPONENT_ZERO: Final = 127
"""Stored exponent of a scale of 1."""
_AWQ_ORDER: Final = (0, 4, 1, 5, 2, 6, 3, 7)
"""Position within a word, in units of four bits from the lowest, of each of 8 outputs."""


class StoredNumbers(NamedTuple):
    """Rows of a layer, in whole groups of columns unless rows have one scale."""

    values: torch.Tensor
    """[rows, columns]: unsigned whole numbers, int32; or bits of floats, int8 of 8-bit and uint8 of 4-bit ones."""
    scales: torch.Tensor
    """float32 [rows, groups]."""
    zeros: torch.Tensor
    """int32 [rows, groups]: the whole number that stands for 0; empty of floats."""
    columns: UnitRange
    """Columns of the layer."""


class LayerSlice:
    """A slice of one layer, with the columns' whole groups, unless rows have one scale."""

    def __init__(self, files: SafetensorsStore, scheme: Scheme, part: TensorSlice, *, in_order: bool = True) -> None:
        """`in_order` False: columns belong to any of the groups, so that the scales of all groups are read."""
        self._files = files
        self.scheme = scheme
        self.stem = part.name.rpartition(".")[0]
        self.outputs, self.inputs = part.full_shape
        self.rows = part.row_range
        weights = scheme.weights
        group, self.num_groups = weights.group or self.inputs, weights.groups(self.inputs)
        wanted = part.column_range
        if in_order:
            self.groups = UnitRange(wanted.begin // group, -(-wanted.end // group))
            whole = UnitRange(self.groups.begin * group, min(self.groups.end * group, self.inputs))
            self.columns = whole if weights.group else wanted
        else:
            self.groups, self.columns = UnitRange(0, self.num_groups), wanted

    def numbers(self) -> StoredNumbers:
        """Read the slice. Raises ModelError for a missing tensor, and for one of another shape or type."""
        return _READERS[self.scheme.packing](self)

    @property
    def middle(self) -> int:
        """Unsigned value that stands for zero unless there are zero points."""
        return 1 << self.scheme.weights.bits - 1

    @property
    def most(self) -> int:
        """Greatest unsigned value."""
        return (1 << self.scheme.weights.bits) - 1

    def error(self, problem: str) -> ModelError:
        """Return an error that names directory and layer."""
        return ModelError(f"{self._files.directory}: layer {self.stem} {problem}")

    def read(self, name: str, shape: tuple[int, ...], *ranges: UnitRange) -> torch.Tensor:
        """Return a slice of one of the layer's tensors. Raises ModelError for another shape."""
        tensor = f"{self.stem}.{name}"
        self._files.check_shape(tensor, shape)
        return self._files.slice(tensor, *ranges)

    def bits(self, name: str, kind: str, shape: tuple[int, ...], *ranges: UnitRange) -> torch.Tensor:
        """Return a slice of a tensor of this shape and type of one byte, as uint8. Raises ModelError for another."""
        tensor = f"{self.stem}.{name}"
        self._files.check_shape(tensor, shape)
        found = self._files.kind_of(tensor)
        if found != kind:
            raise self.error(f"has {name} of {found}, which must be {kind}")
        return self._files.slice_as(tensor, torch.uint8, *ranges)

    def one(self, name: str) -> torch.Tensor:
        """Return a tensor of one number as float32 [1, 1]. Raises ModelError for more."""
        tensor = f"{self.stem}.{name}"
        found = self._files.slice(tensor)
        if found.numel() != 1:
            raise self.error(f"has {name} of shape {list(found.shape)}, which must be one number")
        return found.float().view(1, 1)

    def has(self, name: str) -> bool:
        """Return whether the layer has such a tensor."""
        return self._files.has(f"{self.stem}.{name}")

    def unpacked(
        self,
        name: str,
        shape: tuple[int, int],
        wanted: tuple[UnitRange, UnitRange],
        axis: int,
        order: tuple[int, ...] | None = None,
    ) -> torch.Tensor:
        """Read a rectangle of a tensor of this shape whose `axis` is packed into words, as unsigned int32.

        `order`: position of each number within its word; None: ascending.
        """
        each = _WORD_BITS // self.scheme.weights.bits
        stored, ranges = list(shape), list(wanted)
        begin, end = wanted[axis]
        stored[axis] = -(-shape[axis] // each)
        ranges[axis] = UnitRange(begin // each, -(-end // each))
        words = self.read(name, tuple(stored), *ranges)
        if words.dtype != torch.int32:
            raise self.error(f"has {name} of {words.dtype}, which must be int32")
        shifts = torch.tensor(order or range(each), dtype=torch.int32) * self.scheme.weights.bits
        numbers = (words.unsqueeze(axis + 1) >> (shifts if axis else shifts.unsqueeze(1))) & self.most
        first = ranges[axis].begin * each
        return numbers.flatten(axis, axis + 1).narrow(axis, begin - first, end - begin)

    def whole(self, values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None) -> StoredNumbers:
        """Return whole numbers; zeros None: the middle. Raises ModelError for zero points that config.json denies."""
        if zeros is None:
            zeros = torch.full(scales.shape, self.middle, dtype=torch.int32)
        elif not self.scheme.weights.has_minimum and not (zeros == self.middle).all():
            raise self.error("has zero points, though config.json says that weights are symmetric")
        return StoredNumbers(values, self.checked(scales), zeros, self.columns)

    def floats(self, values: torch.Tensor, scales: torch.Tensor) -> StoredNumbers:
        """Return floats by their bits."""
        return StoredNumbers(values, self.checked(scales), torch.empty(0, dtype=torch.int32), self.columns)

    def checked(self, scales: torch.Tensor) -> torch.Tensor:
        """Return scales as float32. Raises ModelError for some that are not finite."""
        if not torch.isfinite(scales).all():
            raise self.error("has scales that are not finite")
        return scales.float()


def _awq(layer: LayerSlice) -> StoredNumbers:
    """Read qweight [in, out / 8], qzeros [groups, out / 8] and scales [groups, out]."""
    shape, zeros_shape = (layer.inputs, layer.outputs), (layer.num_groups, layer.outputs)
    values = layer.unpacked("qweight", shape, (layer.columns, layer.rows), 1, _AWQ_ORDER)
    zeros = layer.unpacked("qzeros", zeros_shape, (layer.groups, layer.rows), 1, _AWQ_ORDER)
    return layer.whole(values.T, _scales_by_group(layer), zeros.T)


def _gptq(layer: LayerSlice) -> StoredNumbers:
    """Read qweight [in / 8, out], qzeros [groups, out / 8], scales [groups, out]; of 8 bits, 4 go to a word."""
    shape, zeros_shape = (layer.inputs, layer.outputs), (layer.num_groups, layer.outputs)
    values = layer.unpacked("qweight", shape, (layer.columns, layer.rows), 0)
    zeros = layer.unpacked("qzeros", zeros_shape, (layer.groups, layer.rows), 1)
    zeros = (zeros + int(layer.scheme.packing is Packing.GPTQ)) & layer.most
    return layer.whole(values.T, _scales_by_group(layer), zeros.T)


def _packed_ints(layer: LayerSlice) -> StoredNumbers:
    """Read weight_packed [out, in / 8], weight_scale [out, groups] and weight_zero_point [out / 8, groups]."""
    values = layer.unpacked("weight_packed", (layer.outputs, layer.inputs), (layer.rows, layer.columns), 1)
    zeros = None
    if layer.scheme.weights.has_minimum:
        shape = layer.outputs, layer.num_groups
        zeros = layer.unpacked("weight_zero_point", shape, (layer.rows, layer.groups), 0)
    return layer.whole(values, _scales_by_row(layer), zeros)


def _ints(layer: LayerSlice) -> StoredNumbers:
    """Read int8 weight [out, in], weight_scale [out, groups] and int8 weight_zero_point [out, groups]."""
    values = _signed(layer, "weight", layer.inputs, layer.columns)
    has_zeros = layer.scheme.weights.has_minimum
    zeros = _signed(layer, "weight_zero_point", layer.num_groups, layer.groups) if has_zeros else None
    return layer.whole(values, _scales_by_row(layer), zeros)


def _wide_floats(layer: LayerSlice) -> StoredNumbers:
    """Read weight [out, in] and a scale of each block, row or matrix, which is called by either name."""
    values = layer.bits("weight", E4M3, (layer.outputs, layer.inputs), layer.rows, layer.columns)
    if ((values & _E4M3_NONE) == _E4M3_NONE).any():
        raise layer.error("has weights that are no numbers")
    name = "weight_scale_inv" if layer.has("weight_scale_inv") else "weight_scale"
    if not layer.scheme.rows:
        scales = layer.one(name).expand(layer.rows.size, 1)
    else:
        (begin, end), high = layer.rows, layer.scheme.rows
        wanted = UnitRange(begin // high, -(-end // high))
        blocks = layer.read(name, (-(-layer.outputs // high), layer.num_groups), wanted, layer.groups)
        scales = blocks[torch.arange(begin, end) // high - wanted.begin]
    return layer.floats(values.view(torch.int8), scales)


def _nvfp4(layer: LayerSlice) -> StoredNumbers:
    """Read weight_packed, or ModelOpt's weight, [out, in / 2], weight_scale [out, groups] and the matrix's scale."""
    is_modelopt = layer.scheme.packing is Packing.NVFP4
    values = _two_a_byte(layer, "weight" if is_modelopt else "weight_packed")
    shape = layer.outputs, layer.num_groups
    bits = layer.bits("weight_scale", E4M3, shape, layer.rows, layer.groups)
    scales = bits.view(torch.float8_e4m3fn).float()
    if is_modelopt:
        return layer.floats(values, scales * layer.one("weight_scale_2"))
    return layer.floats(values, scales / layer.one("weight_global_scale"))


def _mxfp4(layer: LayerSlice) -> StoredNumbers:
    """Read weight_packed [out, in / 2] and exponents weight_scale [out, groups]."""
    exponents = layer.bits("weight_scale", _BYTES, (layer.outputs, layer.num_groups), layer.rows, layer.groups)
    return layer.floats(_two_a_byte(layer, "weight_packed"), powers_of_two(exponents))


_READERS: Final[Mapping[Packing, Callable[[LayerSlice], StoredNumbers]]] = {
    Packing.AWQ: _awq,
    Packing.GPTQ: _gptq,
    Packing.GPTQ_V2: _gptq,
    Packing.PACKED_INTS: _packed_ints,
    Packing.INTS: _ints,
    Packing.FLOATS: _wide_floats,
    Packing.PACKED_MXFP4: _mxfp4,
    Packing.PACKED_NVFP4: _nvfp4,
    Packing.NVFP4: _nvfp4,
}


def stacked_floats(files: SafetensorsStore, scheme: Scheme, part: TensorSlice) -> StoredNumbers:
    """Read 4-bit floats of an entry of a stack: blocks [experts, out, groups, 16] and exponents [experts, out, groups].

    Rows are those of the entry. Raises ModelError.
    """
    entry, (outputs, inputs), group = part.entry, part.full_shape, scheme.weights.group
    if entry is None or inputs % group:
        raise ModelError(f"{files.directory}: {part.name} is no stack of experts with groups of {group} inputs")
    shape = entry.entries, outputs * entry.step, inputs // group
    blocks, exponents = f"{part.name}_blocks", f"{part.name}_scales"
    files.check_shape(blocks, (*shape, group // 2))
    files.check_shape(exponents, shape)
    for name in (blocks, exponents):
        if (found := files.kind_of(name)) != _BYTES:
            raise ModelError(f"{files.directory}: tensor {name} is stored as {found}, which must be {_BYTES}")
    rows, wanted = (slice(entry.first, None, entry.step), slice(*part.row_range)), part.column_range
    groups = UnitRange(wanted.begin // group, -(-wanted.end // group))
    packed, stored = (files.slice(name)[entry.number][rows[0]][rows[1], slice(*groups)] for name in (blocks, exponents))
    none = torch.empty(0, dtype=torch.int32)
    return StoredNumbers(_halves(packed).flatten(1), powers_of_two(stored), none, groups.scaled(group))


def exact_numbers(stored: StoredNumbers, scheme: Scheme, groups: torch.Tensor) -> torch.Tensor:
    """Return the weights float32 [rows, columns] as they are stored; `groups`: index of each column's group."""
    scales = stored.scales[:, groups]
    if not scheme.weights.is_float:
        return (stored.values - stored.zeros[:, groups]) * scales
    if scheme.weights.is_wide:
        return stored.values.view(torch.float8_e4m3fn).float() * scales
    return TWICE_E2M1[stored.values.int()] * (scales / 2)


def powers_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """Return float32 scales of stored exponents."""
    return torch.exp2(exponents.float() - _EXPONENT_ZERO)


def _two_a_byte(layer: LayerSlice, name: str) -> torch.Tensor:
    """Return the bits of 4-bit floats, of a tensor [out, in / 2] with the lower half of a byte first."""
    begin, end = layer.columns
    wanted = UnitRange(begin // 2, -(-end // 2))
    packed = layer.bits(name, _BYTES, (layer.outputs, -(-layer.inputs // 2)), layer.rows, wanted)
    return _halves(packed)[:, : end - begin]  # groups begin with a byte


def _halves(packed: torch.Tensor) -> torch.Tensor:
    """Return [..., 2 · bytes] of [..., bytes], the lower half of each first."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def _scales_by_group(layer: LayerSlice) -> torch.Tensor:
    """Return scales as [rows, groups]."""
    return layer.read("scales", (layer.num_groups, layer.outputs), layer.groups, layer.rows).T


def _scales_by_row(layer: LayerSlice) -> torch.Tensor:
    """Return scales as [rows, groups]."""
    return layer.read("weight_scale", (layer.outputs, layer.num_groups), layer.rows, layer.groups)


def _signed(layer: LayerSlice, name: str, width: int, columns: UnitRange) -> torch.Tensor:
    """Read int8 [rows, columns] as unsigned numbers in int32."""
    stored = layer.bits(name, "I8", (layer.outputs, width), layer.rows, columns).view(torch.int8)
    return stored.to(torch.int32) + layer.middle
