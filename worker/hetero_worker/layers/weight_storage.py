"""What width a rank keeps a weight in: what its kernel can multiply with.

A kernel that says nothing of it (`LinearKernel` alone) is handed weights in the arithmetic type: quantised ones are
widened, the same numbers as on ranks that keep them narrow. A kernel may say more by having the methods below.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final, Protocol, runtime_checkable

import torch

from hetero_api.model_config import ModelConfig
from hetero_api.weight_format import COLUMN_UNIT, WeightFormat
from hetero_worker.checkpoints.quantized_matrix import QuantizedMatrix
from hetero_worker.layers.linear_kernels import LinearKernel, PackedWeight

FLOAT_TYPES: Final[Mapping[str, torch.dtype]] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""By the names that config.json has for them."""


@runtime_checkable
class StoredFloatsKernel(Protocol):
    """A kernel that can multiply with floats of another type than its inputs have."""

    def storage(self, stored: torch.dtype, dtype: torch.dtype) -> torch.dtype:
        """What `pack` wants a weight in that is `stored` in the checkpoint, beside inputs of `dtype`: one of the two.

        The stored one only where widening it to `dtype` loses nothing.
        """
        ...


@runtime_checkable
class QuantizedKernel(Protocol):
    """A kernel that can multiply with quantised weights."""

    def takes(self, weights: WeightFormat) -> bool:
        """Whether it multiplies with weights of this format, beside inputs of the type that it was chosen for."""
        ...

    def pack_quantized(self, matrix: QuantizedMatrix) -> PackedWeight:
        """As `pack`; the matrix is free to go afterwards, whatever `copies_weight` says of floats."""
        ...


@runtime_checkable
class RowSource(Protocol):
    """A packed weight whose rows can be had: an embedding may then lie in the same memory as a tied output head."""

    def embed(self, ids: torch.Tensor, *, first: int = 0, scale: float = 1.0) -> torch.Tensor:
        """int64 [n] → [n, in]: rows ids - first, times scale; zeros where there is no such row.

        In the type of the inputs that it multiplies with; free to be changed.
        """
        ...


@runtime_checkable
class RowSourceKernel(Protocol):
    """A kernel that packs weights so."""

    @property
    def packs_row_sources(self) -> bool: ...


def kept_format(weights: WeightFormat | None, kernel: LinearKernel | None) -> WeightFormat | None:
    """The format of a weight in memory; None: floats."""
    if weights is None or not isinstance(kernel, QuantizedKernel) or not kernel.takes(weights):
        return None
    return weights


def kept_dtype(stored: torch.dtype, dtype: torch.dtype, kernel: LinearKernel | None) -> torch.dtype:
    """The type of a weight in memory that is floats in the checkpoint."""
    return kernel.storage(stored, dtype) if isinstance(kernel, StoredFloatsKernel) else dtype


def matrix_bytes(
    shape: tuple[int, int],
    bound: WeightFormat | None,
    floats: str,
    *,
    dtype: torch.dtype,
    kernel: LinearKernel | None,
) -> int:
    """Of a matrix in memory, at most: `bound` is the widest format that it may come in, None of one that is floats."""
    weights = kept_format(bound, kernel)
    if weights is not None:
        return weights.matrix_bytes(*shape)
    stored = FLOAT_TYPES.get(floats) if bound is None else None
    kept = dtype if stored is None else kept_dtype(stored, dtype, kernel)
    return math.prod(shape) * kept.itemsize


def kept_bits(kernel: LinearKernel, dtype: torch.dtype, config: ModelConfig) -> frozenset[int]:
    """Widths below the arithmetic type's in which a rank with this kernel keeps a model's weights, whatever its part.

    Of each of 16, 8 and 4 either all of the model's formats are kept, or none counts.
    """
    stored = config.weights
    units = (0, COLUMN_UNIT, config.group_size * config.head_dim)
    formats = {*(stored.within(unit).layers for unit in units), stored.vocabulary} - {None}
    widened = {weights.bits for weights in formats if weights and kept_format(weights, kernel) is None}
    kept = {weights.bits for weights in formats if weights} - widened
    floats = FLOAT_TYPES.get(stored.floats, dtype)
    if kept_dtype(floats, dtype, kernel).itemsize < dtype.itemsize:
        kept.add(8 * floats.itemsize)
    return frozenset(kept)


def packs_row_sources(kernel: LinearKernel | None) -> bool:
    """Whether what it packs is a RowSource."""
    return isinstance(kernel, RowSourceKernel) and kernel.packs_row_sources
