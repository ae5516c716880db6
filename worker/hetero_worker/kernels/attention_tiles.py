"""Common parts of the attention kernels: their arguments, their tiles, and the online softmax over a tile of tokens.

The online softmax is that of Milakov and Gimelshein (2018), as in FlashAttention, in float32 and in powers of two. A
tile that a lane sees nothing of leaves the lane's numbers unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl

LOG2_E: Final = 1.4426950408889634
_FULL_TILE_BYTES: Final = 256
"""Largest key or value of a token for which tiles have 64 tokens and 64 lanes."""
_LEAST_WIDTH: Final = 16
"""Width of a tensor core's tile in a product's inner dimension."""


@dataclass(frozen=True, slots=True)
class PagedKeys:
    """A layer's cache, and the blocks of a launch's sequences."""

    keys: torch.Tensor
    """[slots, kv_heads, head_dim]; `values` has the same shape and strides, the last stride is 1.

    Of any type of floats: elements become numbers of the queries' type where they are read.
    """
    values: torch.Tensor
    """`keys` itself where a token's value is a part of its key; see `value_dim`."""
    block_size: int
    tables: torch.Tensor
    """int32 [sequences, blocks]: block ids; entries behind a sequence's last block are not read."""
    lengths: torch.Tensor
    """int32 [sequences]: tokens, those of this step included."""
    value_dim: int | None = None
    """First elements of a key that are the token's value, where `values` is `keys`; None: they are tensors of two."""


@dataclass(frozen=True, slots=True)
class Widths:
    """Elements of a head: the first ones, of keys and values, and the rest, of keys only."""

    first: int
    rest: int

    @classmethod
    def of(cls, paged: PagedKeys) -> Widths:
        """Return those of a cache."""
        head_dim = paged.keys.shape[2]
        first = head_dim if paged.value_dim is None else paged.value_dim
        return cls(first, head_dim - first)

    @property
    def padded(self) -> tuple[int, int]:
        """Sizes of the kernels' vectors; the rest's is not used where there is none."""
        return triton.next_power_of_2(self.first), max(_LEAST_WIDTH, triton.next_power_of_2(self.rest))


@dataclass(frozen=True, slots=True)
class Scoring:
    """Rule that turns dot products into scores and hides tokens; see attention.base.AttentionRule."""

    scale: float
    window: int | None
    soft_cap: float | None
    sinks: torch.Tensor | None = None

    @property
    def factors(self) -> tuple[float, float]:
        """Factor of a product, and factor of its tanh, for exponents of 2."""
        if self.soft_cap is None:
            return self.scale * LOG2_E, 1.0
        return self.scale / self.soft_cap, self.soft_cap * LOG2_E


@dataclass(frozen=True, slots=True)
class Tile:
    """Size of a program's unit of work."""

    lanes: int
    tokens: int
    stages: int
    """Tiles of keys and values that are on their way or computed at a time."""

    @classmethod
    def of(cls, head_dim: int, element_bytes: int) -> Tile:
        """Return a tile of which two for keys, two for values, and the queries fit in 96 KiB of shared memory.

        That is what small GPUs have.
        """
        row_bytes = triton.next_power_of_2(head_dim) * element_bytes
        if row_bytes <= _FULL_TILE_BYTES:
            return cls(64, 64, stages=3)
        if row_bytes <= 2 * _FULL_TILE_BYTES:
            return cls(32, 32, stages=3)
        return cls(16, 16, stages=3 if row_bytes <= 4 * _FULL_TILE_BYTES else 2)


@triton.jit
def load_queries(  # type: ignore[no-untyped-def]
    from_lane,
    is_lane,
    first_dim: tl.constexpr,
    padded_dim: tl.constexpr,
    rest_dim: tl.constexpr,
    padded_rest: tl.constexpr,
):
    """Return the queries at `from_lane`, [lanes, 1], in the two parts of keys; the second only if there is one."""
    dims = tl.arange(0, padded_dim)
    queries = tl.load(from_lane + dims[None, :], mask=is_lane[:, None] & (dims[None, :] < first_dim), other=0.0)
    rest_queries = queries
    if rest_dim:
        rest = tl.arange(0, padded_rest)
        is_rest = is_lane[:, None] & (rest[None, :] < rest_dim)
        rest_queries = tl.load(from_lane + first_dim + rest[None, :], mask=is_rest, other=0.0)
    return queries, rest_queries


@triton.jit
def with_sink(total, maximum, sinks, head, is_lane, has_sinks: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the sum of weights with that of the heads' sinks, whose scores are for exponents of e."""
    if has_sinks:
        sink = tl.load(sinks + head, mask=is_lane, other=float("-inf")) * 1.4426950408889634
        total += tl.exp2(sink - tl.where(maximum == float("-inf"), 0.0, maximum))
    return total


@triton.jit
def blocks_of_tile(table, start, begin, end, block_size: tl.constexpr, tile: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the blocks of a tile's tokens, int32 [tile]; of tokens outside of [begin, end), 0.

    Loops load those of the next tile: addresses that are known an iteration ahead let keys and values of two tiles be
    on their way at a time.
    """
    tokens = start + tl.arange(0, tile)
    return tl.load(table + tokens // block_size, mask=(tokens >= begin) & (tokens < end), other=0)


@triton.jit
def fold(  # type: ignore[no-untyped-def]
    queries,
    rest_queries,
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
    blocks,
    slot_stride,
    factor,
    cap_factor,
    first_dim: tl.constexpr,
    padded_dim: tl.constexpr,
    rest_dim: tl.constexpr,
    padded_rest: tl.constexpr,
    block_size: tl.constexpr,
    tile: tl.constexpr,
    has_cap: tl.constexpr,
):
    """Add one KV head's tile of tokens from `start` on, as far as it lies in [begin, end), to the running sums.

    `blocks` are those of the tile's tokens. Keys have `rest_dim` elements behind those that queries and values have in
    `first_dim`; `rest_queries` meet these. If there are such, a token's value is the first part of its key.
    A lane sees tokens first_seen..last_seen. Over the tokens so far, `maximum` is the largest score, `total` the sum of
    weights 2^(score - maximum), and `accumulated` the sum of weighted values. Returns accumulated, maximum and total.
    """
    tokens = start + tl.arange(0, tile)
    is_read = (tokens >= begin) & (tokens < end)
    slots = blocks.to(tl.int64) * block_size + tokens % block_size
    dims = tl.arange(0, padded_dim)
    offsets = slots[:, None] * slot_stride + dims[None, :]
    is_element = is_read[:, None] & (dims[None, :] < first_dim)
    key = tl.load(keys + offsets, mask=is_element, other=0.0).to(queries.dtype)
    value = key if rest_dim else tl.load(values + offsets, mask=is_element, other=0.0).to(queries.dtype)
    scores = tl.dot(queries, tl.trans(key), input_precision="ieee")
    if rest_dim:
        rest = tl.arange(0, padded_rest)
        rest_key = tl.load(
            keys + slots[:, None] * slot_stride + first_dim + rest[None, :],
            mask=is_read[:, None] & (rest[None, :] < rest_dim),
            other=0.0,
        ).to(queries.dtype)
        scores += tl.dot(rest_queries, tl.trans(rest_key), input_precision="ieee")
    scores *= factor
    if has_cap:
        # Beyond 15, tanh is 1 in float32, and exp(2x) must not overflow.
        clamped = tl.minimum(tl.maximum(scores, -15.0), 15.0)
        scores = cap_factor * (1.0 - 2.0 / (tl.exp(2.0 * clamped) + 1.0))
    is_seen = (tokens[None, :] >= first_seen[:, None]) & (tokens[None, :] <= last_seen[:, None])
    scores = tl.where(is_seen & is_read[None, :], scores, float("-inf"))
    largest = tl.maximum(maximum, tl.max(scores, 1))
    # A lane that has seen nothing yet has no maximum to subtract.
    origin = tl.where(largest == float("-inf"), 0.0, largest)
    weights = tl.exp2(scores - origin[:, None])
    decay = tl.exp2(maximum - origin)
    total = total * decay + tl.sum(weights, 1)
    accumulated = accumulated * decay[:, None]
    accumulated += tl.dot(weights.to(value.dtype), value, input_precision="ieee")
    return accumulated, largest, total
