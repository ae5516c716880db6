"""A linear kernel that keeps weights as narrow as they come, and remembers what it was handed."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional as F

from hetero_api.weight_format import WeightFormat
from hetero_worker.checkpoints.quantized_matrix import QuantizedMatrix
from hetero_worker.layers.linear_kernels import LinearKernel, PackedWeight


class NarrowKernel(LinearKernel):
    """Widens weights each time that it multiplies. Takes no groups of one."""

    name = "narrow"
    copies_weight = True

    def __init__(self, *, widest: float = 16.0) -> None:
        """`widest`: most bits of a weight, its part of a scale and minimum included, that it takes."""
        self._widest = widest
        self.matrices: list[QuantizedMatrix] = []
        self.floats: list[torch.Tensor] = []

    @property
    def num_bytes(self) -> int:
        """Of all that it was handed, packed."""
        return sum(matrix.num_bytes for matrix in self.matrices) + sum(weight.nbytes for weight in self.floats)

    def storage(self, stored: torch.dtype, dtype: torch.dtype) -> torch.dtype:
        return stored if stored.itemsize == 2 else dtype

    def takes(self, weights: WeightFormat) -> bool:
        return weights.group != 1 and weights.row_bytes(256) * 8 <= 256 * self._widest

    def pack(self, weight: torch.Tensor) -> PackedWeight:
        copied = weight.clone()
        self.floats.append(copied)
        return self._packed(lambda: copied)

    def pack_quantized(self, matrix: QuantizedMatrix) -> PackedWeight:
        self.matrices.append(matrix)
        return self._packed(matrix.dequantized)

    def _packed(self, weight: Callable[[], torch.Tensor]) -> PackedWeight:
        return _Widened(weight)


class NarrowRowsKernel(NarrowKernel):
    """The same, and what it packs can be looked up."""

    embeds = True

    def _packed(self, weight: Callable[[], torch.Tensor]) -> PackedWeight:
        return _Rows(weight)


class _Widened(PackedWeight):
    def __init__(self, weight: Callable[[], torch.Tensor]) -> None:
        self._weight = weight

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None, /) -> torch.Tensor:
        return F.linear(x, self._weight().to(x.dtype), bias)


class _Rows(_Widened):
    def embed(self, ids: torch.Tensor, *, first: int = 0, scale: float = 1.0) -> torch.Tensor:
        weight, rows = self._weight().float(), ids - first
        is_own = (rows >= 0) & (rows < len(weight))
        return weight[rows.where(is_own, 0)] * is_own.unsqueeze(1) * scale
