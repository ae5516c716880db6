"""Cuts decode rows into runs of similar length, so that a long sequence does not pad all others.

Softmax, and kernels that gather, want rectangles [rows, longest]. Padding costs time in proportion to the padded
elements, another run costs a fixed number of kernel launches. Rows come longest first, and are cut where what
padding would cost exceeds what a launch does.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hetero_worker.attention.base import DecodeRows, IntArray


@dataclass(frozen=True, slots=True)
class LengthGroup:
    """Decode rows [begin, end) that go through a kernel as one rectangle."""

    begin: int
    end: int
    slots: IntArray
    """[rows, longest]: cache slot of every token of every row; 0 (the null block) behind a row's end."""
    lengths: IntArray
    """[rows], longest first."""

    @property
    def padding(self) -> np.ndarray[tuple[int, int], np.dtype[np.bool_]] | None:
        """[rows, longest]: where there is no token; None when all rows are equally long."""
        if int(self.lengths[-1]) == self.slots.shape[1]:
            return None
        return np.arange(self.slots.shape[1]) >= self.lengths[:, None]


def group_by_length(
    decode: DecodeRows, *, block_size: int, num_heads: int, launch_cost_elements: int
) -> list[LengthGroup]:
    """Groups that cover the rows in order.

    `num_heads` query heads make as many scores of a token; `launch_cost_elements` padded scores cost as much time as
    one group more.
    """
    lengths = decode.lengths.tolist()
    cuts = [0, *_cuts(lengths, num_heads, launch_cost_elements), len(lengths)]
    return [_group(decode, begin, end, block_size) for begin, end in itertools.pairwise(cuts)]


def _cuts(lengths: Sequence[int], num_heads: int, launch_cost_elements: int) -> list[int]:
    cuts, longest = [], lengths[0]
    for row, length in enumerate(lengths):
        if (longest - length) * (len(lengths) - row) * num_heads > launch_cost_elements:
            cuts.append(row)
            longest = length
    return cuts


def _group(decode: DecodeRows, begin: int, end: int, block_size: int) -> LengthGroup:
    lengths, tables = decode.lengths[begin:end], decode.block_tables[begin:end]
    longest = int(lengths[0])
    num_blocks = -(-longest // block_size)
    offsets = np.arange(block_size, dtype=np.int32)
    slots = (tables[:, :num_blocks, None] * np.int32(block_size) + offsets).reshape(end - begin, -1)[:, :longest]
    group = LengthGroup(begin, end, np.ascontiguousarray(slots), lengths)
    if (padding := group.padding) is not None:
        group.slots[padding] = 0
    return group
