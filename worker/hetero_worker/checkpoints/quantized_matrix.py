"""Quantised matrices: one value per byte between a file and the kernel that packs them, and an embedding at rest.

Layers and kernels get quantised weights in this form only, for every checkpoint format. `hetero_api.weight_format`
defines the meaning of the values. Scales and minima are float32 tensors of float16 numbers: a kernel may store them in
16 bits without loss, so a weight is the same on a rank that multiplies with the values and on one that widens them.

`quantize` rounds floats at load to the nearest numbers of a format. A group's numbers depend on that group alone, so a
weight becomes the same number on every rank and in every slice. Therefore only whole groups are quantised; for rows
with one scale, the whole row. Scales and minima are rounded outwards to float16, so that no value is clipped. Values
are then rounded against the rounded scales and minima.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Final

import torch
from torch.nn import functional as F

from hetero_api.errors import ModelError
from hetero_api.sharding import UnitRange
from hetero_api.weight_format import WeightFormat

_WIDE_UNIT: Final = 2.0**-8
"""What an 8-bit float counts in."""
TWICE_E2M1: Final = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=torch.int8)
"""Twice the 4-bit floats (E2M1), by their bits."""
_MIDDLE: Final = 8
"""4-bit value that stands for zero, in formats without minima."""
_MOST: Final = {8: 127, 4: 15}
"""Number of steps from the least value to the greatest; for 8 bits, from zero to the greatest."""
_FLOAT_ERROR: Final = 2**-20


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """A matrix [out, in]; its tensors are on the host."""

    format: WeightFormat
    values: torch.Tensor
    """[out, in]: int8 for 8 bits, uint8 0…15 for 4 bits; not padded. Of floats, their bits."""
    scales: torch.Tensor
    """float32 [out, groups]."""
    minima: torch.Tensor | None = None
    """float32 [out, groups], if the format has minima."""

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in) features."""
        outputs, inputs = self.values.shape
        return outputs, inputs

    @property
    def num_bytes(self) -> int:
        """Size when packed."""
        return self.format.matrix_bytes(*self.shape)

    def dequantized(self, into: torch.Tensor | None = None) -> torch.Tensor:
        """Return float32 [out, in], or write it into a tensor of any type and device and return that."""
        result = self._numbers()
        result *= self._spread(self.scales)
        if self.minima is not None:
            result += self._spread(self.minima)
        return result if into is None else into.copy_(result)

    def in_format(self, wanted: WeightFormat) -> QuantizedMatrix:
        """Return the same numbers in a format that can hold them (`WeightFormat.joined`)."""
        if wanted == self.format:
            return self
        values, minima = self.values, self.minima
        is_centred = self.format.bits == 4 and minima is None and not self.format.is_float
        if self.format.is_float and not wanted.is_float:
            values = TWICE_E2M1[values.int()]
        if wanted.has_minimum and minima is None:
            minima = self.scales * -_MIDDLE if is_centred else torch.zeros_like(self.scales)
        elif wanted.bits == 8 and is_centred:
            values = values.to(torch.int8) - _MIDDLE
        firsts = self._firsts(UnitRange(0, self.shape[1]), wanted.group)
        return QuantizedMatrix(
            wanted,
            values.to(torch.int8) if wanted.bits == 8 else values,
            self.scales[:, firsts],
            None if minima is None else minima[:, firsts],
        )

    def rounded(self) -> QuantizedMatrix:
        """Return the matrix with scales and minima rounded to float16."""
        minima = None if self.minima is None else self.minima.half().float()
        return replace(self, scales=self.scales.half().float(), minima=minima)

    def _numbers(self) -> torch.Tensor:
        """Return float32 [out, in]: weights without their scales and minima."""
        if self.format.is_wide:
            return self.values.view(torch.float8_e4m3fn).to(torch.float32) * _WIDE_UNIT
        if self.format.is_float:
            return TWICE_E2M1[self.values.int()].to(torch.float32)
        numbers = self.values.to(torch.float32)
        return numbers - _MIDDLE if self.format.bits == 4 and self.minima is None else numbers

    def columns(self, columns: UnitRange) -> QuantizedMatrix:
        """Return a range of columns. If it cuts a group in two, groups become small enough that none is cut."""
        begin, end = columns
        weights = self.format.cut(begin, end, self.shape[1])
        firsts = self._firsts(columns, weights.group)
        return QuantizedMatrix(
            weights,
            self.values[:, begin:end],
            self.scales[:, firsts],
            None if self.minima is None else self.minima[:, firsts],
        )

    def _firsts(self, columns: UnitRange, group: int) -> torch.Tensor:
        """Return for each group of this size among the columns the index of our group that contains it."""
        if not group:
            return torch.zeros(1, dtype=torch.int64)
        begins = torch.arange(*columns, group)
        return begins // self.format.group if self.format.group else torch.zeros_like(begins)

    def _spread(self, numbers: torch.Tensor) -> torch.Tensor:
        """Repeat the number of each group for all values of the group."""
        if numbers.shape[1] <= 1:
            return numbers
        return numbers.repeat_interleave(self.format.group, dim=1)[:, : self.values.shape[1]]


def stacked(matrices: Sequence[QuantizedMatrix]) -> QuantizedMatrix:
    """Return the matrices stacked along rows, in the narrowest format that holds all of them."""
    return _concatenated(matrices, dim=0)


def side_by_side(matrices: Sequence[QuantizedMatrix]) -> QuantizedMatrix:
    """Return matrices of whole groups joined along their columns, in the narrowest format that holds all of them."""
    return _concatenated(matrices, dim=1)


def _concatenated(matrices: Sequence[QuantizedMatrix], *, dim: int) -> QuantizedMatrix:
    if len(matrices) == 1:
        return matrices[0]
    weights = reduce(WeightFormat.joined, (matrix.format for matrix in matrices))
    parts = [matrix.in_format(weights) for matrix in matrices]
    minima = [part.minima for part in parts if part.minima is not None]
    return QuantizedMatrix(
        weights,
        torch.cat([part.values for part in parts], dim=dim),
        torch.cat([part.scales for part in parts], dim=dim),
        torch.cat(minima, dim=dim) if minima else None,
    )


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """A packed matrix [rows, in] whose rows are looked up, and widened row by row.

    It takes the bytes that its format says, or less if rows end within a group.
    """

    format: WeightFormat
    inputs: int
    values: torch.Tensor
    """int8 [rows, in]; for 4 bits uint8 [rows, in / 2], two in a byte, the lower half first."""
    scales: torch.Tensor
    """float16 [rows, groups]."""
    minima: torch.Tensor | None
    dtype: torch.dtype
    """Type of the rows that are looked up."""

    @classmethod
    def of(cls, matrix: QuantizedMatrix, dtype: torch.dtype) -> QuantizedRows:
        """Pack a matrix."""
        values = matrix.values
        if matrix.format.bits == 4:
            even = F.pad(values, (0, values.shape[1] % 2))
            values = even[:, ::2] | even[:, 1::2] << 4
        minima = None if matrix.minima is None else matrix.minima.half()
        return cls(matrix.format, matrix.shape[1], values, matrix.scales.half(), minima, dtype)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All that it holds."""
        return (self.values, self.scales) if self.minima is None else (self.values, self.scales, self.minima)

    def rows(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return [n, in] for int64 [n] row numbers."""
        return self._matrix(*(part[numbers] for part in self.tensors)).dequantized().to(self.dtype)

    def matrix(self) -> QuantizedMatrix:
        """Return all rows with one value per byte."""
        return self._matrix(*self.tensors)

    def _matrix(
        self, values: torch.Tensor, scales: torch.Tensor, minima: torch.Tensor | None = None
    ) -> QuantizedMatrix:
        if self.format.bits == 4:
            values = torch.stack((values & 15, values >> 4), dim=2).flatten(1)[:, : self.inputs]
        return QuantizedMatrix(self.format, values, scales.float(), None if minima is None else minima.float())


def quantize(weight: torch.Tensor, weights: WeightFormat) -> QuantizedMatrix:
    """Quantise float32 [out, in] to 8 bits without minima, or to 4 bits with minima.

    Raises ModelError for numbers that are not finite or too large for float16, ValueError for another format.
    """
    if (weights.bits, weights.has_minimum) not in _METHODS or weights.is_float:
        raise ValueError(f"weights are not quantised to {weights} here")
    method = _METHODS[weights.bits, weights.has_minimum]
    pieces = [method(groups) for groups in _grouped(weight, weights.group or max(1, weight.shape[1]))]
    values, scales, *minima = (_joined(parts) for parts in zip(*pieces, strict=True))
    return QuantizedMatrix(weights, values, scales, *minima)


def _symmetric(groups: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return 8-bit values and scales of [out, groups, group]."""
    least, greatest = _bounds(groups)
    scales = _checked(_rounded_up(torch.maximum(-least, greatest) / _MOST[8]))
    values = (groups / _divisor(scales)).round_().clamp_(-_MOST[8], _MOST[8])
    return values.to(torch.int8), scales


def _with_minima(groups: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return 4-bit values, scales and minima of [out, groups, group]."""
    least, greatest = _bounds(groups)
    minima = _checked(-_rounded_up(-least))
    scales = _checked(_rounded_up((greatest - minima) / _MOST[4]))
    values = (groups - minima).div_(_divisor(scales)).round_().clamp_(0, _MOST[4])
    return values.to(torch.uint8), scales, minima


def _bounds(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each group's least and greatest, [out, groups, 1]. torch's aminmax would take eight times as long."""
    return groups.amin(dim=2, keepdim=True), groups.amax(dim=2, keepdim=True)


_METHODS: Final = {(8, False): _symmetric, (4, True): _with_minima}
"""Keys: bits, and whether there are minima."""


def _grouped(weight: torch.Tensor, group: int) -> Iterator[torch.Tensor]:
    """Yield [out, groups, group] of whole groups, then of the rest of the rows."""
    full = weight.shape[1] // group
    if full or not weight.shape[1]:
        yield weight[:, : full * group].reshape(len(weight), full, group)
    if weight.shape[1] % group:
        yield weight[:, full * group :].unsqueeze(1)


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Join pieces [out, groups, n] to [out, sum of groups · n]."""
    flat = [part.flatten(1) for part in parts]
    return flat[0] if len(flat) == 1 else torch.cat(flat, dim=1)


def _divisor(scales: torch.Tensor) -> torch.Tensor:
    """Replace scales of zero, whose weights are all zero or all the minimum: any other scale gives the same values."""
    return scales.masked_fill(scales == 0, 1.0)


def _rounded_up(numbers: torch.Tensor) -> torch.Tensor:
    """Return the least float16 numbers that are not less, up to float32's own error, as float32."""
    nearest = numbers.half()
    is_less = nearest.float() < numbers - numbers.abs() * _FLOAT_ERROR
    return torch.where(is_less, torch.nextafter(nearest, torch.full_like(nearest, torch.inf)), nearest).float()


def _checked(numbers: torch.Tensor) -> torch.Tensor:
    if not torch.isfinite(numbers).all():
        raise ModelError("weights are not finite, or too large to be quantised; use spec.model.quantization: none")
    return numbers
