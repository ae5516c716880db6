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
import numpy.typing as npt
import torch

from hetero_worker.attention.base import DecodeRows, IntArray
from hetero_worker.attention.workspace import Workspace


@dataclass(frozen=True, slots=True)
class LengthGroup:
    """Decode rows [begin, end) that go through a kernel as one rectangle."""

    begin: int
    end: int
    slots: IntArray
    """[rows, longest], contiguous: cache slots of the tokens that each row attends to, in order; 0 (the null block)
    behind a row's end."""
    padding: npt.NDArray[np.bool_] | None
    """[rows, longest]: where there is no token; None when all rows are equally long."""

    @property
    def num_rows(self) -> int:
        return self.end - self.begin

    @property
    def longest(self) -> int:
        return int(self.slots.shape[1])


def group_by_length(
    decode: DecodeRows,
    *,
    block_size: int,
    num_heads: int,
    launch_cost_elements: int,
    workspace: Workspace,
    window: int | None = None,
) -> list[LengthGroup]:
    """Groups that cover the rows in order, in the workspace's memory.

    `num_heads` query heads make as many scores of a token; `launch_cost_elements` padded scores cost as much time as
    one group more. A row attends to its last `window` tokens.
    """
    reach = decode.lengths if window is None else np.minimum(decode.lengths, window)
    lengths = reach.tolist()
    cuts = [0, *_cuts(lengths, num_heads, launch_cost_elements), len(lengths)]
    bounds = list(itertools.pairwise(cuts))
    size = sum((end - begin) * lengths[begin] for begin, end in bounds)
    all_slots = workspace.take("slots", (size,), torch.int32).numpy()
    all_padding = workspace.take("padding", (size,), torch.bool).numpy()
    groups, used = [], 0
    for begin, end in bounds:
        until = used + (end - begin) * lengths[begin]
        room = (all_slots[used:until], all_padding[used:until])
        groups.append(_group(decode, reach, begin, end, block_size=block_size, room=room, workspace=workspace))
        used = until
    return groups


def _cuts(lengths: Sequence[int], num_heads: int, launch_cost_elements: int) -> list[int]:
    cuts, longest = [], lengths[0]
    for row, length in enumerate(lengths):
        if (longest - length) * (len(lengths) - row) * num_heads > launch_cost_elements:
            cuts.append(row)
            longest = length
    return cuts


def _group(
    decode: DecodeRows,
    reach: IntArray,
    begin: int,
    end: int,
    *,
    block_size: int,
    room: tuple[IntArray, npt.NDArray[np.bool_]],
    workspace: Workspace,
) -> LengthGroup:
    """`reach`: how many of its tokens, the last ones, each row attends to; like the lengths, longest first."""
    lengths, tables = reach[begin:end], decode.block_tables[begin:end]
    rows, longest = end - begin, int(lengths[0])
    slots = room[0].reshape(rows, longest)
    first = decode.lengths[begin:end] - lengths
    if first.any():
        _fill_last_slots(slots, tables, first, block_size, workspace)
    else:
        _fill_slots(slots, tables, block_size, workspace)
    if int(lengths[-1]) == longest:
        return LengthGroup(begin, end, slots, None)
    padding = room[1].reshape(rows, longest)
    np.greater_equal(workspace.counting(longest).numpy(), lengths[:, None], out=padding)
    np.copyto(slots, np.int32(0), where=padding)
    return LengthGroup(begin, end, slots, padding)


def _fill_slots(slots: IntArray, tables: IntArray, block_size: int, workspace: Workspace) -> None:
    """Of the first tokens of each row."""
    rows, longest = slots.shape
    num_blocks = -(-longest // block_size)
    whole = workspace.take("whole blocks", (rows, num_blocks, block_size), torch.int32).numpy()
    np.multiply(tables[:, :num_blocks, None], np.int32(block_size), out=whole)
    np.add(whole, workspace.counting(block_size).numpy(), out=whole)
    np.copyto(slots, whole.reshape(rows, -1)[:, :longest])


def _fill_last_slots(slots: IntArray, tables: IntArray, first: IntArray, block_size: int, workspace: Workspace) -> None:
    """Of the tokens of each row from `first` on. A row that has less than the longest begins at 0, so that what is
    read of its table beyond its end still lies in it."""
    positions = workspace.take("positions", slots.shape, torch.int32).numpy()
    np.add(first[:, None], workspace.counting(slots.shape[1]).numpy(), out=positions)
    blocks = positions // np.int32(block_size)
    np.multiply(np.take_along_axis(tables, blocks, axis=1), np.int32(block_size), out=slots)
    np.add(slots, positions - blocks * np.int32(block_size), out=slots)
