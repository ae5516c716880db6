"""Packs slices of a checkpoint for a kernel, with as few copies in between as possible.

Quantised weights are looked up on disk first, as this kernel packed them before (`checkpoints.packed_cache`), because
quantising and packing takes many times as long as reading. Packed floats are not kept: they are only reordered, which
takes as long as reading them, and they would be on the disk twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch

from hetero_worker.checkpoints.checkpoint import Checkpoint
from hetero_worker.checkpoints.quantized_matrix import stacked
from hetero_worker.checkpoints.store import TensorSlice
from hetero_worker.layers.linear_kernels import LinearKernel, PackedWeight, kept_dtype


def pack_quantized(checkpoint: Checkpoint, parts: Sequence[TensorSlice], kernel: LinearKernel) -> PackedWeight:
    """Pack quantised slices, stacked along rows. Raises ModelError."""
    kept = checkpoint.kept_matrices
    if kept is None or not kernel.layout:
        return kernel.pack_quantized(stacked([checkpoint.read_quantized(part) for part in parts]))
    question = f"{kernel.layout} {list(parts)}"
    if (found := kept.find(question, kernel.blank_quantized, memory=lambda packed: packed.memory)) is not None:
        return found
    matrix = stacked([checkpoint.read_quantized(part) for part in parts])
    packed = kernel.pack_quantized(matrix)
    kept.keep(question, matrix.format, matrix.shape, packed.memory)
    return packed


def pack_in_place(
    checkpoint: Checkpoint, parts: Sequence[TensorSlice], *, dtype: torch.dtype, kernel: LinearKernel
) -> PackedWeight | None:
    """Pack a slice of floats straight from its file; None if the kernel cannot take it as it lies there.

    Raises ModelError.
    """
    if len(parts) != 1 or not kernel.copies_weight:
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
    """Return the type in memory of one weight of floats that is made of these slices."""
    stored = [kind for kind in (_stored_dtype(checkpoint, part) for part in parts) if kind is not None]
    return kept_dtype(reduce(torch.promote_types, stored), dtype, kernel) if len(stored) == len(parts) else dtype


def _stored_dtype(checkpoint: Checkpoint, part: TensorSlice) -> torch.dtype | None:
    """Return the type of stored floats; of 8-bit ones, the narrowest that is multiplied with; None: of no floats."""
    weights = checkpoint.format_of(part)
    return torch.bfloat16 if weights is not None and weights.is_wide else checkpoint.dtype_of(part)


def read_floats(checkpoint: Checkpoint, parts: Sequence[TensorSlice], into: torch.Tensor) -> None:
    """Read slices into consecutive rows, and widen those that are quantised or to be quantised. Raises ModelError."""
    begin = 0
    for part in parts:
        rows = into[begin : begin + part.shape[0]]
        if checkpoint.format_of(part) is None:
            checkpoint.read(part, rows)
        else:
            checkpoint.read_quantized(part).dequantized(rows)
        begin += part.shape[0]
