"""RMSNorm of rows, alone or fused with the addition to the residual stream before it.

One program computes one row, always in the same order, so a row's bits do not depend on the rest of the batch. All
arithmetic is in float32 and rounded once. A sum is rounded to the residual stream's type before it is normed, since
later readers see the rounded one.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

_ELEMENTS_PER_WARP: Final = 512
_MOST_WARPS: Final = 16


@triton.jit
def _normed(row, weight, columns, inside, eps, width: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return row / rms(row) · weight; the row is float32 [block], 0 outside of `inside`."""
    mean_square = tl.sum(row * row, axis=0) / width
    factors = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    return row * tl.rsqrt(mean_square + eps) * factors


@triton.jit
def _rms_norm(x, weight, out, x_stride, eps, width: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    index = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, block)
    inside = columns < width
    row = tl.load(x + index * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + index * width + columns, _normed(row, weight, columns, inside, eps, width), mask=inside)


@triton.jit
def _add_rms_norm(  # type: ignore[no-untyped-def]
    residual, delta, weight, out, residual_stride, delta_stride, eps, width: tl.constexpr, block: tl.constexpr
):
    index = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, block)
    inside = columns < width
    place = residual + index * residual_stride + columns
    row = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    row += tl.load(delta + index * delta_stride + columns, mask=inside, other=0.0).to(tl.float32)
    stored = row.to(residual.dtype.element_ty)
    tl.store(place, stored, mask=inside)
    normed = _normed(stored.to(tl.float32), weight, columns, inside, eps, width)
    tl.store(out + index * width + columns, normed, mask=inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return x / rms(x) · weight, new and contiguous, of x's type.

    x is [rows, width] with rows at any stride; weight is [width], of any type.
    """
    rows, width = x.shape
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    if rows:
        block = triton.next_power_of_2(width)
        _rms_norm[(rows,)](x, weight, out, x.stride(0), eps, width=width, block=block, **_options(block))
    return out


def add_rms_norm(residual: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Add delta to residual in place, and return the norm of the sum: new and contiguous, of residual's type.

    Both are [rows, width] with rows at any stride; weight is [width], of any type.
    """
    rows, width = residual.shape
    out = torch.empty((rows, width), dtype=residual.dtype, device=residual.device)
    if rows:
        block = triton.next_power_of_2(width)
        strides = residual.stride(0), delta.stride(0)
        _add_rms_norm[(rows,)](residual, delta, weight, out, *strides, eps, width=width, block=block, **_options(block))
    return out


def _options(block: int) -> dict[str, int]:
    """Return the launch's options; products and sums may be fused, whatever the environment says."""
    return {"num_warps": min(max(block // _ELEMENTS_PER_WARP, 1), _MOST_WARPS), "enable_fp_fusion": True}
