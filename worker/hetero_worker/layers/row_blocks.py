"""Linear layers on host cores whose rows have the same bits whatever other rows are computed with them.

A library's matrix product chooses its algorithm by the number of rows, and what comes at the edge of its tiles may be
added up in another order. Which numbers of rows go the same way is no property of a library that could be looked up:
it depends on the CPU, the build, the weight's shape, its type and the number of threads. So it is tried, for every
shape: in blocks of 1, 2, 4, … rows some rows must come out the same at every place, and among others. Of the block
sizes that agree with each other the most are kept, and rows are then computed in blocks of just these sizes, filled up
with rows of zeros. A single row agrees with itself, so there always is a way, if a slow one.

What is multiplied to try it cancels out, but for what is lost to rounding: another order of additions then shows in
nearly every element, though results are rounded to bfloat16. And several rows are tried, for it may be one element only
that goes another way.

Blocks are copied to memory of their own, as libraries may also look at how rows are aligned.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import torch

from hetero_worker.layers.linear_kernels import LinearKernel, PackedWeight

logger = logging.getLogger(__name__)

BLOCK_SIZES: Final = (1, 2, 4, 8, 16, 32, 64)
"""Rows of a block. More would read a weight less often, but that is little of the work by then."""
_TRIED_ROWS: Final = 8
_SEED: Final = 0
_PATTERN: Final = 4099
"""Numbers that weights to try with repeat: a prime, so that their rows differ."""

Shape = tuple[int, int]
"""(out, in) features."""


class BlockKernel:
    """A LinearKernel that computes with another one, in blocks.

    Up to 64 rows cost what the next larger block does, so at most twice their time; of a shape of which single rows
    only agree, every row reads the whole weight.
    """

    def __init__(self, inner: LinearKernel, dtype: torch.dtype) -> None:
        self._inner = inner
        self._dtype = dtype
        self._sizes: dict[Shape, tuple[int, ...]] = {}

    @property
    def name(self) -> str:
        """With the shapes that are computed row by row, as far as they are known."""
        by_row = sorted(f"{out}x{width}" for (out, width), sizes in self._sizes.items() if sizes == (1,))
        return f"{self._inner.name}-invariant" + (f" (row by row: {', '.join(by_row)})" if by_row else "")

    @property
    def copies_weight(self) -> bool:
        return self._inner.copies_weight

    def prove(self, shapes: Iterable[Shape]) -> None:
        """Find the blocks of these shapes, before weights take the memory: it takes that of the largest, twice, and as
        long as 1143 rows through each."""
        for shape in shapes:
            self._sizes_of(shape)

    def pack(self, weight: torch.Tensor) -> PackedWeight:
        out_features, in_features = weight.shape
        return _Blocks(self._inner.pack(weight), self._sizes_of((out_features, in_features)), out_features)

    def _sizes_of(self, shape: Shape) -> tuple[int, ...]:
        if shape not in self._sizes:
            self._sizes[shape] = agreeing_sizes(self._inner, shape, self._dtype)
            logger.info("linear %s of %s: blocks of %s rows", self._inner.name, shape, self._sizes[shape])
        return self._sizes[shape]


class _Blocks:
    """A PackedWeight."""

    def __init__(self, packed: PackedWeight, sizes: Sequence[int], out_features: int) -> None:
        self._packed = packed
        self._sizes = sizes
        self._out_features = out_features

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None, /) -> torch.Tensor:
        rows, in_features = x.shape
        out = x.new_empty(rows, self._out_features)
        for begin, size in cut(rows, self._sizes):
            block = x.new_zeros(size, in_features)
            taken = x[begin : begin + size]
            block[: len(taken)] = taken
            out[begin : begin + len(taken)] = self._packed(block, None)[: len(taken)]
        return out if bias is None else out.add_(bias)


def cut(rows: int, sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Where blocks begin, and their sizes: the largest, at last the smallest that takes all that is left."""
    begin = 0
    while begin < rows:
        size = next((size for size in sizes if size >= rows - begin), sizes[-1])
        yield begin, size
        begin += size


def agreeing_sizes(kernel: LinearKernel, shape: Shape, dtype: torch.dtype) -> tuple[int, ...]:
    """The largest set of block sizes, ascending, that give a row the same bits.

    With the threads that there are now: they must not become others.
    """
    weight, rows = _cancelling(shape, dtype)
    agreeing: list[tuple[torch.Tensor, list[int]]] = []
    with torch.inference_mode():
        packed = kernel.pack(weight)
        for size in BLOCK_SIZES:
            results = _whatever_the_place(packed, rows, size)
            if results is None:
                continue
            known = next((sizes for bits, sizes in agreeing if torch.equal(bits, results)), None)
            if known is None:
                agreeing.append((results, [size]))
            else:
                known.append(size)
    largest: list[int] = max((sizes for _, sizes in agreeing), key=lambda sizes: (len(sizes), sizes))
    return tuple(largest)


def _whatever_the_place(packed: PackedWeight, rows: torch.Tensor, size: int) -> torch.Tensor | None:
    """The rows' results, if each is the same at all places of a block of nothing but this row, and in one of all."""
    results = []
    for row in rows:
        alike = packed(row.repeat(size, 1), None)
        results.append(alike[-1].clone())
        if not torch.equal(alike, results[-1].expand_as(alike)):
            return None
    known = torch.stack(results)
    order = torch.arange(size) % len(rows)
    return known if torch.equal(packed(rows[order], None), known[order]) else None


def _cancelling(shape: Shape, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight of the shape, and rows to multiply it with: for every term a sum has its negative, too, somewhere."""
    out_features, in_features = shape
    half = in_features // 2
    generator = torch.Generator().manual_seed(_SEED)
    pattern = torch.randn(_PATTERN, generator=generator).to(dtype)
    halves = pattern.repeat(-(-out_features * half // _PATTERN))[: out_features * half].view(out_features, half)
    order = torch.randperm(half, generator=generator)
    rows = torch.randn(_TRIED_ROWS, half, generator=generator).to(dtype)
    weight = torch.zeros(out_features, in_features, dtype=dtype)
    weight[:, :half] = halves
    weight[:, half : 2 * half] = halves[:, order]
    odd = rows.new_zeros(len(rows), in_features - 2 * half)
    return weight, torch.cat([rows, -rows[:, order], odd], dim=1)
