"""From slices of a checkpoint to a weight as a kernel has it, with no more copies between than need be.

Quantised weights are looked up on disk first, as this kernel packed them before (`checkpoints.packed_cache`), because
quantising and packing takes many times as long as reading. Packed floats are not kept: they are only reordered, which
takes as long as reading them, and they would be on the disk twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Protocol, runtime_checkable

import torch

from hetero_api.weight_format import WeightFormat
from hetero_worker.checkpoints.checkpoint import Checkpoint
from hetero_worker.checkpoints.packed_cache import PackedMatrix
from hetero_worker.checkpoints.quantized_matrix import stacked
from hetero_worker.checkpoints.store import TensorSlice
from hetero_worker.layers.linear_kernels import LinearKernel, PackedWeight
from hetero_worker.layers.weight_storage import QuantizedKernel, kept_dtype
from hetero_worker.platforms.base import HOST


class RestorableWeight(PackedMatrix, PackedWeight, Protocol):
    """A packed weight that is the bytes of its memory and nothing else."""


@runtime_checkable
class RestoringKernel(Protocol):
    """A QuantizedKernel whose packed weights can be kept as bytes."""

    @property
    def layout(self) -> str:
        """What the bytes of a packed weight depend on, beside the matrix."""
        ...

    def blank_quantized(self, shape: tuple[int, int], weights: WeightFormat) -> RestorableWeight:
        """What `pack_quantized` makes of such a matrix, with memory that is to be filled."""
        ...


def pack_quantized(checkpoint: Checkpoint, parts: Sequence[TensorSlice], kernel: QuantizedKernel) -> PackedWeight:
    """Of slices that have formats, stacked along rows. Raises ModelError."""
    kept = checkpoint.kept_matrices
    if kept is None or not isinstance(kernel, RestoringKernel):
        return kernel.pack_quantized(stacked([checkpoint.read_quantized(part) for part in parts]))
    question = f"{kernel.layout} {list(parts)}"
    if (found := kept.find(question, kernel.blank_quantized)) is not None:
        return found
    matrix = stacked([checkpoint.read_quantized(part) for part in parts])
    packed = kernel.pack_quantized(matrix)
    if isinstance(packed, PackedMatrix):
        kept.keep(question, matrix.format, packed)
    return packed


def pack_in_place(
    checkpoint: Checkpoint,
    parts: Sequence[TensorSlice],
    *,
    dtype: torch.dtype,
    kernel: LinearKernel,
    device: torch.device,
) -> PackedWeight | None:
    """A weight that the kernel takes as it lies in the checkpoint's file, without a copy between; None of others."""
    if len(parts) != 1 or device != HOST or not kernel.copies_weight:
        return None
    if checkpoint.dtype_of(parts[0]) != floats_dtype(checkpoint, parts, dtype, kernel):
        return None
    weight = checkpoint.in_place(parts[0])
    if weight is None:
        return None
    packed = kernel.pack(weight)
    checkpoint.release_pages()
    return packed


def floats_dtype(
    checkpoint: Checkpoint, parts: Sequence[TensorSlice], dtype: torch.dtype, kernel: LinearKernel | None
) -> torch.dtype:
    """The type in memory of one weight made of these slices, which is kept as floats."""
    stored = [kind for kind in map(checkpoint.dtype_of, parts) if kind is not None]
    return kept_dtype(reduce(torch.promote_types, stored), dtype, kernel) if len(stored) == len(parts) else dtype


def read_floats(checkpoint: Checkpoint, parts: Sequence[TensorSlice], into: torch.Tensor) -> None:
    """Read slices into consecutive rows; what is quantised, or is to be, as the numbers that it then has."""
    begin = 0
    for part in parts:
        rows = into[begin : begin + part.shape[0]]
        if checkpoint.format_of(part) is None:
            checkpoint.read(part, rows)
        else:
            checkpoint.read_quantized(part).dequantized(rows)
        begin += part.shape[0]
