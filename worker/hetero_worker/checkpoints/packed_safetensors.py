"""Reads quantised linear layers of safetensors files: AWQ, GPTQ, compressed-tensors and MXFP4.

A layer consists of several tensors: values v packed into int32 words, scales, and zero points z that stand for a weight
of zero. A weight is w = (v - z) · scale, so the minimum is -z · scale. Only the words that hold a rank's rows and
columns are read and unpacked. Wider scales are rounded to float16.

Layouts are those of AutoAWQ (gemm), AutoGPTQ and compressed-tensors (pack-quantized, int-quantized), and of GPT-OSS.
Scales of MXFP4 below 2^-23, whose weights are less than 10^-6, become zero: float16 has no smaller numbers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import torch

from hetero_api.errors import ModelError
from hetero_api.hf_config import read_json
from hetero_api.model_config import CONFIG_FILE
from hetero_api.packed_weights import PackedWeights, Packing
from hetero_api.sharding import UnitRange
from hetero_api.weight_format import WeightFormat
from hetero_worker.checkpoints.quantized_matrix import QuantizedMatrix
from hetero_worker.checkpoints.safetensors_store import SafetensorsStore
from hetero_worker.checkpoints.store import TensorSlice

_WORD_BITS: Final = 32
_MXFP4_TWICE: Final = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=torch.int8)
"""Twice the 4-bit floats (E2M1), by their bits."""
_MXFP4_EXPONENT: Final = 128
"""What a stored exponent of half a scale is larger by."""
_MXFP4_BYTES: Final = 16
"""Bytes of a group of 32."""
_AWQ_ORDER: Final = (0, 4, 1, 5, 2, 6, 3, 7)
"""Position within a word, in units of four bits from the lowest, of each of 8 outputs."""
_MARKS: Final = {
    Packing.AWQ: "qweight",
    Packing.GPTQ: "qweight",
    Packing.GPTQ_V2: "qweight",
    Packing.PACKED_INTS: "weight_packed",
    Packing.INTS: "weight_scale",
    Packing.MXFP4: "_blocks",
}
"""Tensor whose presence marks a quantised layer."""


class PackedStore(SafetensorsStore):
    """Safetensors files with floats and packed linear layers."""

    def __init__(self, directory: Path, packed: PackedWeights) -> None:
        """Find the files. Raises ModelError."""
        super().__init__(directory)
        self._packing = packed.packing
        self._weights = packed.weights

    def format_of(self, name: str) -> WeightFormat | None:
        """See `WeightStore.format_of`."""
        mark = _MARKS[self._packing]
        if self._packing is Packing.MXFP4:
            return self._weights if self.has(f"{name}{mark}") else None
        stem, _, kind = name.rpartition(".")
        is_packed = kind == "weight" and self.has(f"{stem}.{mark}")
        return self._weights if is_packed else None

    def quantized(self, part: TensorSlice) -> QuantizedMatrix:
        """See `WeightStore.quantized`."""
        if self._packing is Packing.MXFP4:
            return self._mxfp4(part)
        layer = _Layer(self, self._weights, part)
        match self._packing:
            case Packing.AWQ:
                return layer.awq()
            case Packing.GPTQ | Packing.GPTQ_V2:
                return layer.gptq(zero_offset=int(self._packing is Packing.GPTQ))
            case Packing.PACKED_INTS:
                return layer.packed_ints()
            case Packing.INTS:
                return layer.ints()

    def _mxfp4(self, part: TensorSlice) -> QuantizedMatrix:
        """Read blocks [experts, out, groups, 16], the lower half of a byte first, and exponents [experts, out, groups].

        Rows are those of the entry of the stack.
        """
        entry, (outputs, inputs), group = part.entry, part.full_shape, self._weights.group
        if entry is None or inputs % group:
            raise ModelError(f"{self.directory}: {part.name} is no stack of experts with groups of {group} inputs")
        shape = entry.entries, outputs * entry.step, inputs // group
        blocks, exponents = f"{part.name}_blocks", f"{part.name}_scales"
        self.check_shape(blocks, (*shape, _MXFP4_BYTES))
        self.check_shape(exponents, shape)
        rows = slice(entry.first, None, entry.step), slice(*part.row_range)
        packed, stored = (self.slice(name)[entry.number][rows[0]][rows[1]] for name in (blocks, exponents))
        values = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)
        scales = torch.exp2(stored.float() - _MXFP4_EXPONENT).half().float()
        if not torch.isfinite(scales).all():
            raise ModelError(f"{self.directory}: {exponents} has scales that are too large for float16")
        whole = QuantizedMatrix(self._weights, _MXFP4_TWICE[values.int()], scales)
        return whole if part.columns is None else whole.columns(part.columns)


def open_packed_safetensors(directory: Path) -> PackedStore | None:
    """Open a directory whose config.json declares a supported quantisation; None if it declares none.

    Raises ModelError.
    """
    path = directory / CONFIG_FILE
    packed = PackedWeights.of_config(read_json(path), source=str(path)) if path.exists() else None
    return None if packed is None else PackedStore(directory, packed)


class _Layer:
    """One slice of one layer. Columns are read in whole groups, and cut afterwards."""

    def __init__(self, files: SafetensorsStore, weights: WeightFormat, part: TensorSlice) -> None:
        self._files = files
        self._weights = weights
        self._stem = part.name.rpartition(".")[0]
        self._outputs, self._inputs = part.full_shape
        self._rows = part.row_range
        self._wanted = part.column_range
        group = weights.group or self._inputs
        self._groups = UnitRange(self._wanted.begin // group, -(-self._wanted.end // group))
        self._columns = UnitRange(self._groups.begin * group, min(self._groups.end * group, self._inputs))
        self._num_groups = weights.groups(self._inputs)

    def awq(self) -> QuantizedMatrix:
        """Read qweight [in, out / 8], qzeros [groups, out / 8] and scales [groups, out]."""
        values = self._unpacked("qweight", (self._inputs, self._outputs), (self._columns, self._rows), 1, _AWQ_ORDER)
        zeros = self._unpacked("qzeros", (self._num_groups, self._outputs), (self._groups, self._rows), 1, _AWQ_ORDER)
        return self._matrix(values.T, self._scales_by_group(), zeros.T)

    def gptq(self, *, zero_offset: int) -> QuantizedMatrix:
        """Read qweight [in / 8, out], qzeros [groups, out / 8], scales [groups, out]; of 8 bits, 4 go to a word."""
        self._check_order()
        values = self._unpacked("qweight", (self._inputs, self._outputs), (self._columns, self._rows), 0)
        zeros = self._unpacked("qzeros", (self._num_groups, self._outputs), (self._groups, self._rows), 1)
        zeros = (zeros + zero_offset) & self._most
        return self._matrix(values.T, self._scales_by_group(), zeros.T)

    def packed_ints(self) -> QuantizedMatrix:
        """Read weight_packed [out, in / 8], weight_scale [out, groups] and weight_zero_point [out / 8, groups]."""
        values = self._unpacked("weight_packed", (self._outputs, self._inputs), (self._rows, self._columns), 1)
        zeros = None
        if self._weights.has_minimum:
            shape = self._outputs, self._num_groups
            zeros = self._unpacked("weight_zero_point", shape, (self._rows, self._groups), 0)
        return self._matrix(values, self._scales_by_row(), zeros)

    def ints(self) -> QuantizedMatrix:
        """Read int8 weight [out, in], weight_scale [out, groups] and int8 weight_zero_point [out, groups]."""
        values = self._signed("weight", self._inputs, self._columns)
        has_zeros = self._weights.has_minimum
        zeros = self._signed("weight_zero_point", self._num_groups, self._groups) if has_zeros else None
        return self._matrix(values, self._scales_by_row(), zeros)

    def _matrix(self, values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None) -> QuantizedMatrix:
        """Return the matrix of unsigned values [rows, columns], scales and unsigned zero points [rows, groups]."""
        middle, is_wide = self._middle, self._weights.bits == 8
        rounded, minima = scales.half().float(), None
        if zeros is not None and self._weights.has_minimum:
            minima = (rounded * -(zeros - middle if is_wide else zeros)).half().float()
        elif zeros is not None and not (zeros == middle).all():
            raise self._error("has zero points, though config.json says that weights are symmetric")
        if not all(torch.isfinite(numbers).all() for numbers in (rounded, minima) if numbers is not None):
            raise self._error("has scales that are not finite, or too large for float16")
        stored = (values - middle).to(torch.int8) if is_wide else values.to(torch.uint8)
        begin = self._columns.begin
        wanted = UnitRange(self._wanted.begin - begin, self._wanted.end - begin)
        whole = QuantizedMatrix(self._weights, stored.contiguous(), rounded.contiguous(), minima)
        return whole.columns(wanted)

    @property
    def _middle(self) -> int:
        """Unsigned value that stands for zero."""
        return 1 << self._weights.bits - 1

    @property
    def _most(self) -> int:
        return (1 << self._weights.bits) - 1

    def _scales_by_group(self) -> torch.Tensor:
        """Return scales as [rows, groups]."""
        return self._read("scales", (self._num_groups, self._outputs), self._groups, self._rows).T

    def _scales_by_row(self) -> torch.Tensor:
        """Return scales as [rows, groups]."""
        return self._read("weight_scale", (self._outputs, self._num_groups), self._rows, self._groups)

    def _signed(self, name: str, width: int, columns: UnitRange) -> torch.Tensor:
        """Read int8 [rows, columns] as unsigned numbers in int32."""
        return self._read(name, (self._outputs, width), self._rows, columns).to(torch.int32) + self._middle

    def _unpacked(
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
        each = _WORD_BITS // self._weights.bits
        stored, ranges = list(shape), list(wanted)
        begin, end = wanted[axis]
        stored[axis] = -(-shape[axis] // each)
        ranges[axis] = UnitRange(begin // each, -(-end // each))
        words = self._read(name, tuple(stored), *ranges)
        if words.dtype != torch.int32:
            raise self._error(f"has {name} of {words.dtype}, which must be int32")
        shifts = torch.tensor(order or range(each), dtype=torch.int32) * self._weights.bits
        numbers = (words.unsqueeze(axis + 1) >> (shifts if axis else shifts.unsqueeze(1))) & self._most
        first = ranges[axis].begin * each
        return numbers.flatten(axis, axis + 1).narrow(axis, begin - first, end - begin)

    def _read(self, name: str, shape: tuple[int, ...], *ranges: UnitRange) -> torch.Tensor:
        tensor = f"{self._stem}.{name}"
        self._files.check_shape(tensor, shape)
        return self._files.slice(tensor, *ranges)

    def _check_order(self) -> None:
        """Raise ModelError unless inputs are assigned to groups in ascending order."""
        if not self._files.has(f"{self._stem}.g_idx"):
            return
        group = self._weights.group or self._inputs
        if not torch.equal(self._read("g_idx", (self._inputs,), self._columns), self._in_order(group)):
            raise self._error("has its inputs in an order of their own (g_idx), which is not supported in gptq")

    def _in_order(self, group: int) -> torch.Tensor:
        return (torch.arange(*self._columns) // group).to(torch.int32)

    def _error(self, problem: str) -> ModelError:
        return ModelError(f"{self._files.directory}: layer {self._stem} {problem}")
