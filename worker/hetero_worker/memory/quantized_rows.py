"""A quantised embedding at rest: packed, and widened row by row as rows are looked up."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from hetero_api.weight_format import WeightFormat
from hetero_worker.memory.quantized_matrix import QuantizedMatrix


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """Of a QuantizedMatrix [rows, in]; takes what its format says, or less where rows end within a group."""

    format: WeightFormat
    inputs: int
    values: torch.Tensor
    """int8 [rows, in], or of 4 bits uint8 [rows, in / 2]: two in a byte, the lower half first."""
    scales: torch.Tensor
    """float16 [rows, groups]."""
    minima: torch.Tensor | None
    dtype: torch.dtype
    """Of rows that are looked up."""

    @classmethod
    def of(cls, matrix: QuantizedMatrix, dtype: torch.dtype) -> QuantizedRows:
        values = matrix.values
        if matrix.format.bits == 4:
            even = F.pad(values, (0, values.shape[1] % 2))
            values = even[:, ::2] | even[:, 1::2] << 4
        minima = None if matrix.minima is None else matrix.minima.half()
        return cls(matrix.format, matrix.shape[1], values, matrix.scales.half(), minima, dtype)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self.values, self.scales) if self.minima is None else (self.values, self.scales, self.minima)

    def rows(self, numbers: torch.Tensor) -> torch.Tensor:
        """int64 [n] → [n, in]."""
        return self._matrix(*(part[numbers] for part in self.tensors)).dequantized().to(self.dtype)

    def matrix(self) -> QuantizedMatrix:
        """All rows, one value a byte."""
        return self._matrix(*self.tensors)

    def _matrix(
        self, values: torch.Tensor, scales: torch.Tensor, minima: torch.Tensor | None = None
    ) -> QuantizedMatrix:
        if self.format.bits == 4:
            values = torch.stack((values & 15, values >> 4), dim=2).flatten(1)[:, : self.inputs]
        return QuantizedMatrix(self.format, values, scales.float(), None if minima is None else minima.float())
