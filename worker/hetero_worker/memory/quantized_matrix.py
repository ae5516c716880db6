"""A quantised matrix between the file that it came from and the kernel that packs it: one value a byte.

The only form that layers and kernels are handed, whatever the checkpoint's. What the values mean is told by
`hetero_api.weight_format`. Scales and minima are float32 tensors of float16 numbers: a kernel may store them in 16 bits
and loses nothing, so a weight is the same on a rank that multiplies with the values and on one that widens them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Final

import torch

from hetero_api.sharding import UnitRange
from hetero_api.weight_format import WeightFormat

_MIDDLE: Final = 8
"""What 4-bit values without minima are zero at."""


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """[out, in]; tensors are on the host."""

    format: WeightFormat
    values: torch.Tensor
    """[out, in], int8 of 8 bits, uint8 0…15 of 4 bits; not padded."""
    scales: torch.Tensor
    """float32 [out, groups]."""
    minima: torch.Tensor | None = None
    """float32 [out, groups], if the format has them."""

    @property
    def shape(self) -> tuple[int, int]:
        outputs, inputs = self.values.shape
        return outputs, inputs

    @property
    def num_bytes(self) -> int:
        """Once packed."""
        return self.format.matrix_bytes(*self.shape)

    def dequantized(self, into: torch.Tensor | None = None) -> torch.Tensor:
        """[out, in]: float32, or written into a tensor of any type and device."""
        result = self.values.to(torch.float32)
        if self.format.bits == 4 and self.minima is None:
            result -= _MIDDLE
        result *= self._spread(self.scales)
        if self.minima is not None:
            result += self._spread(self.minima)
        return result if into is None else into.copy_(result)

    def in_format(self, wanted: WeightFormat) -> QuantizedMatrix:
        """The same numbers in a format that holds them (`WeightFormat.joined`)."""
        if wanted == self.format:
            return self
        values, minima = self.values, self.minima
        is_centred = self.format.bits == 4 and minima is None
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

    def columns(self, columns: UnitRange) -> QuantizedMatrix:
        """Some of its columns. Where these cut a group in two, groups become so small that none is cut."""
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
        """Of each group of this size among some columns, the group of ours that it lies in."""
        if not group:
            return torch.zeros(1, dtype=torch.int64)
        begins = torch.arange(*columns, group)
        return begins // self.format.group if self.format.group else torch.zeros_like(begins)

    def _spread(self, numbers: torch.Tensor) -> torch.Tensor:
        """One of each group for every value of it."""
        if numbers.shape[1] <= 1:
            return numbers
        return numbers.repeat_interleave(self.format.group, dim=1)[:, : self.values.shape[1]]


def stacked(matrices: Sequence[QuantizedMatrix]) -> QuantizedMatrix:
    """Along rows, in the narrowest format that holds all of them."""
    if len(matrices) == 1:
        return matrices[0]
    weights = reduce(WeightFormat.joined, (matrix.format for matrix in matrices))
    parts = [matrix.in_format(weights) for matrix in matrices]
    minima = [part.minima for part in parts if part.minima is not None]
    return QuantizedMatrix(
        weights,
        torch.cat([part.values for part in parts]),
        torch.cat([part.scales for part in parts]),
        torch.cat(minima) if minima else None,
    )
