"""What the attention kernels have in common: their arguments, their tiles, and what they do with a tile of tokens.

The online softmax is that of Milakov and Gimelshein (2018), as in FlashAttention, in float32 and in powers of two. A
tile that a lane sees nothing of leaves the lane's numbers as they were.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl

LOG2_E: Final = 1.4426950408889634
_FULL_TILE_BYTES: Final = 256
"""Of a token's key or value: up to here, tiles are of 64 tokens and 64 lanes."""


@dataclass(frozen=True, slots=True)
class PagedKeys:
    """A layer's cache, and where the sequences of a launch are in it."""

    keys: torch.Tensor
    """[slots, kv_heads, head_dim], as `values`, with the same strides; the last one 1."""
    values: torch.Tensor
    block_size: int
    tables: torch.Tensor
    """int32 [sequences, blocks]: ids; those behind a sequence's last block are not read."""
    lengths: torch.Tensor
    """int32 [sequences]: tokens, those of this step included."""


@dataclass(frozen=True, slots=True)
class Scoring:
    """How dot products become scores and which tokens a row sees; see attention.base.AttentionRule."""

    scale: float
    window: int | None
    soft_cap: float | None

    @property
    def factors(self) -> tuple[float, float]:
        """What a product is multiplied by, and what its tanh is, for exponents of 2."""
        if self.soft_cap is None:
            return self.scale * LOG2_E, 1.0
        return self.scale / self.soft_cap, self.soft_cap * LOG2_E


@dataclass(frozen=True, slots=True)
class Tile:
    """What a program computes at a time."""

    lanes: int
    tokens: int

    @classmethod
    def of(cls, head_dim: int, element_bytes: int) -> Tile:
        """Two tiles of keys and of values, and the queries, fit the 96 KiB of shared memory that small GPUs have."""
        row_bytes = triton.next_power_of_2(head_dim) * element_bytes
        if row_bytes <= _FULL_TILE_BYTES:
            return cls(64, 64)
        return cls(32, 32) if row_bytes <= 2 * _FULL_TILE_BYTES else cls(16, 16)


@triton.jit
def fold(  # type: ignore[no-untyped-def]
    queries,
    accumulated,
    maximum,
    total,
    start,
    begin,
    end,
    first_seen,
    last_seen,
    keys,
    values,
    table,
    slot_stride,
    factor,
    cap_factor,
    head_dim: tl.constexpr,
    padded_dim: tl.constexpr,
    block_size: tl.constexpr,
    tile: tl.constexpr,
    has_cap: tl.constexpr,
):
    """Take in the tile of tokens from `start` on, as far as it lies in [begin, end), of one KV head.

    A lane sees tokens first_seen..last_seen. Of those so far, `maximum` is the largest score, `total` the sum of
    weights 2^(score - maximum), `accumulated` that of weighted values.
    """
    tokens = start + tl.arange(0, tile)
    is_read = (tokens >= begin) & (tokens < end)
    blocks = tl.load(table + tokens // block_size, mask=is_read, other=0)
    slots = blocks.to(tl.int64) * block_size + tokens % block_size
    dims = tl.arange(0, padded_dim)
    offsets = slots[:, None] * slot_stride + dims[None, :]
    is_element = is_read[:, None] & (dims[None, :] < head_dim)
    key = tl.load(keys + offsets, mask=is_element, other=0.0)
    value = tl.load(values + offsets, mask=is_element, other=0.0)
    scores = tl.dot(queries, tl.trans(key), input_precision="ieee") * factor
    if has_cap:
        # tanh; beyond 15 it is 1 in float32, and 2^(2x) must not overflow.
        clamped = tl.minimum(tl.maximum(scores, -15.0), 15.0)
        scores = cap_factor * (1.0 - 2.0 / (tl.exp(2.0 * clamped) + 1.0))
    is_seen = (tokens[None, :] >= first_seen[:, None]) & (tokens[None, :] <= last_seen[:, None])
    scores = tl.where(is_seen & is_read[None, :], scores, float("-inf"))
    largest = tl.maximum(maximum, tl.max(scores, 1))
    # A lane that has seen nothing yet has no maximum to count from.
    origin = tl.where(largest == float("-inf"), 0.0, largest)
    weights = tl.exp2(scores - origin[:, None])
    decay = tl.exp2(maximum - origin)
    total = total * decay + tl.sum(weights, 1)
    accumulated = accumulated * decay[:, None]
    accumulated += tl.dot(weights.to(value.dtype), value, input_precision="ieee")
    return accumulated, largest, total
