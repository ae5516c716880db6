"""Batch-invariant matrix product y = x · Wᵀ + b: a row's bits do not depend on the number or place of other rows.

A library's matrix product picks its tiles by the number of rows. For few rows it splits the inner dimension among
programs, which changes the order of additions and thus the bits. Here the tiles follow from the weight's shape and type
alone, and one program sums each element over the whole inner dimension, in order, in float32. Surplus rows of a tile
are zeros and are not stored. Only the number of programs depends on the number of rows; the compiled code does not.

Compared with a library, prefills miss larger tiles, and decodes miss the split of the inner dimension where a weight
has too few columns to keep the device busy. The ablations of `bench.gpu` measure the difference.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl

_ROWS: Final = 64
"""Rows of a tile: the least for a Hopper GPU's largest matrix instruction. One tile serves a decoding batch."""
_BUSY: Final = 128
"""Number of column tiles from which wider tiles are better: about a large GPU's number of multiprocessors."""
_ALIGNMENT: Final = 16
"""Alignment of x in bytes. Triton specialises on it, and all calls must use the same code."""


@dataclass(frozen=True, slots=True)
class MatmulTile:
    """A program's share of the product. It depends on the weight's shape and type alone."""

    columns: int
    depth: int
    """Elements of the inner dimension per iteration."""
    stages: int
    """Iterations whose loads are in flight."""

    @classmethod
    def of(cls, out_features: int, element_bytes: int) -> MatmulTile:
        """Return a tile all of whose stages fit in the 96 KiB of shared memory that small GPUs have."""
        widest = 128 if element_bytes == 2 else 64
        columns = next((size for size in (widest, 64) if out_features >= size * _BUSY), 32)
        return cls(columns, 64, 4) if element_bytes == 2 else cls(columns, 32, 3)


@triton.jit(do_not_specialize=["rows"])
def _matmul(  # type: ignore[no-untyped-def]
    x,
    weight,
    bias,
    out,
    rows,
    out_features: tl.constexpr,
    in_features: tl.constexpr,
    has_bias: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
    depth: tl.constexpr,
):
    """Compute tile (rows, columns) in program (0, 1); neighbouring programs share the weight's tile."""
    row = tl.program_id(0).to(tl.int64) * tile_rows + tl.arange(0, tile_rows)
    column = tl.program_id(1).to(tl.int64) * tile_columns + tl.arange(0, tile_columns)
    is_row = (row < rows)[:, None]
    is_column = (column < out_features)[:, None]
    offset = tl.arange(0, depth)
    own_rows = x + row[:, None] * in_features + offset[None, :]
    own_columns = weight + column[:, None] * in_features + offset[None, :]
    sums = tl.zeros([tile_rows, tile_columns], tl.float32)
    for begin in range(0, in_features, depth):
        if in_features % depth == 0:
            left = tl.load(own_rows + begin, mask=is_row, other=0.0)
            right = tl.load(own_columns + begin, mask=is_column, other=0.0)
        else:
            inside = (offset < in_features - begin)[None, :]
            left = tl.load(own_rows + begin, mask=is_row & inside, other=0.0)
            right = tl.load(own_columns + begin, mask=is_column & inside, other=0.0)
        sums += tl.dot(left, tl.trans(right), input_precision="ieee")
    if has_bias:
        sums += tl.load(bias + column, mask=column < out_features, other=0.0).to(tl.float32)[None, :]
    tl.store(
        out + row[:, None] * out_features + column[None, :],
        sums.to(out.dtype.element_ty),
        mask=is_row & (column < out_features)[None, :],
    )


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return x · weightᵀ + bias, new and contiguous [rows, out].

    x is [rows, in], weight [out, in] and contiguous, bias [out], all of one type. Sums are in float32 and rounded once;
    float32 products are exact. An x that is not contiguous or not aligned to 16 bytes is copied.
    """
    rows, in_features = x.shape
    out_features = len(weight)
    out = torch.empty((rows, out_features), dtype=x.dtype, device=x.device)
    if not rows:
        return out
    if not x.is_contiguous() or x.data_ptr() % _ALIGNMENT:
        x = x.clone(memory_format=torch.contiguous_format)
    tile = MatmulTile.of(out_features, x.element_size())
    _matmul[(triton.cdiv(rows, _ROWS), triton.cdiv(out_features, tile.columns))](
        x,
        weight,
        bias,
        out,
        rows,
        out_features=out_features,
        in_features=in_features,
        has_bias=bias is not None,
        tile_rows=_ROWS,
        tile_columns=tile.columns,
        depth=tile.depth,
        num_warps=4,
        num_stages=tile.stages,
        enable_fp_fusion=True,
    )
    return out
