"""Rotary embedding of the fused q, k and v projection, with head norms and cache writes, in one pass.

Query and key heads are normed, if the model does so, and rotated; keys and values go to their slots of the paged cache.
A program takes some heads of one token. Heads do not mix, so a head's bits do not depend on the rest of the batch. All
arithmetic is in float32 and rounded once; values are copied unchanged.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl

_TILE_ELEMENTS: Final = 512
"""Elements of one program in each half of its heads."""


@triton.jit
def _as_cached(x, place):  # type: ignore[no-untyped-def]
    """Return what a cache keeps: float16 becomes its largest number, not infinite."""
    if place.dtype.element_ty == tl.float16:
        x = tl.where(x > 65504.0, 65504.0, tl.where(x < -65504.0, -65504.0, x))
    return x


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _rotate(  # type: ignore[no-untyped-def]
    qkv,
    cos,
    signed_sin,
    weights,
    mean_squares,
    keys,
    values,
    slots,
    row_stride,
    eps,
    num_heads: tl.constexpr,
    num_kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    norms: tl.constexpr,
    over_all_heads: tl.constexpr,
    tile_heads: tl.constexpr,
    block: tl.constexpr,
):
    half: tl.constexpr = head_dim // 2
    first_value: tl.constexpr = num_heads + num_kv_heads
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * tile_heads + tl.arange(0, tile_heads)
    column = tl.arange(0, block)
    inside = (column < half)[None, :]
    exists = (head < first_value + num_kv_heads)[:, None] & inside
    rotates = (head < first_value)[:, None] & inside
    within_heads = head[:, None] * head_dim + column[None, :]

    place = qkv + token * row_stride + within_heads
    left = tl.load(place, mask=exists, other=0.0).to(tl.float32)
    right = tl.load(place + half, mask=exists, other=0.0).to(tl.float32)
    x, y = left, right
    if norms:
        if over_all_heads:
            mean_square = tl.load(mean_squares + token * 2 + (head >= num_heads).to(tl.int32))
        else:
            mean_square = (tl.sum(x * x, axis=1) + tl.sum(y * y, axis=1)) / head_dim
        factor = tl.rsqrt(mean_square + eps)[:, None]
        x *= factor * tl.load(weights + within_heads, mask=rotates, other=0.0).to(tl.float32)
        y *= factor * tl.load(weights + within_heads + half, mask=rotates, other=0.0).to(tl.float32)

    angle = token * head_dim + column
    is_angle = column < half
    cos_x = tl.load(cos + angle, mask=is_angle, other=0.0).to(tl.float32)[None, :]
    cos_y = tl.load(cos + angle + half, mask=is_angle, other=0.0).to(tl.float32)[None, :]
    sin_x = tl.load(signed_sin + angle, mask=is_angle, other=0.0).to(tl.float32)[None, :]
    sin_y = tl.load(signed_sin + angle + half, mask=is_angle, other=0.0).to(tl.float32)[None, :]
    rotated_x = x * cos_x + y * sin_x
    rotated_y = y * cos_y + x * sin_y

    is_query = (head < num_heads)[:, None] & inside
    tl.store(place, rotated_x, mask=is_query)
    tl.store(place + half, rotated_y, mask=is_query)
    slot = tl.load(slots + token) * (num_kv_heads * head_dim)
    is_key = rotates & (head >= num_heads)[:, None]
    key_place = keys + slot + within_heads - num_heads * head_dim
    tl.store(key_place, _as_cached(rotated_x, key_place), mask=is_key)
    tl.store(key_place + half, _as_cached(rotated_y, key_place), mask=is_key)
    is_value = exists & (head >= first_value)[:, None]
    value_place = values + slot + within_heads - first_value * head_dim
    tl.store(value_place, _as_cached(left, value_place), mask=is_value)
    tl.store(value_place + half, _as_cached(right, value_place), mask=is_value)


class HeadNorms(NamedTuple):
    """Norms of query and key heads."""

    weight: torch.Tensor
    """[heads + kv_heads, head_dim], contiguous."""
    eps: float
    """Term added to the mean square."""
    mean_squares: torch.Tensor | None = None
    """Contiguous float32 [tokens, 2]: of all query heads and of all key heads; None: each head has its own."""


class CacheWrite(NamedTuple):
    """Destination of keys and values: contiguous [slots, kv_heads, head_dim] each, and int64 [tokens] slots."""

    keys: torch.Tensor
    values: torch.Tensor
    slots: torch.Tensor


def rotate_and_write(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    signed_sin: torch.Tensor,
    *,
    num_heads: int,
    norms: HeadNorms | None = None,
    write: CacheWrite,
) -> None:
    """Norm and rotate query and key heads of qkv [tokens, heads + 2 · kv_heads, head_dim].

    Tokens are at any stride, heads contiguous. `cos` and `signed_sin` are the tokens' angles, contiguous
    [tokens, 1, head_dim]. Keys and values go to the cache; queries replace those in qkv.
    """
    tokens, all_heads, head_dim = qkv.shape
    if not tokens:
        return
    mean_squares = norms.mean_squares if norms is not None else None
    block = triton.next_power_of_2(head_dim // 2)
    tile_heads = max(1, _TILE_ELEMENTS // block)
    _rotate[(tokens, triton.cdiv(all_heads, tile_heads))](
        qkv,
        cos,
        signed_sin,
        norms.weight if norms is not None else None,
        mean_squares,
        *write,
        qkv.stride(0),
        norms.eps if norms is not None else 0.0,
        num_heads=num_heads,
        num_kv_heads=(all_heads - num_heads) // 2,
        head_dim=head_dim,
        norms=norms is not None,
        over_all_heads=mean_squares is not None,
        tile_heads=tile_heads,
        block=block,
        enable_fp_fusion=True,
    )
