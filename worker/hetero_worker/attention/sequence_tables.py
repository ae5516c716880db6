"""A step's sequences, as kernels take them: block tables, lengths and where each one's rows begin, on the device.

They go there in one copy a step. `ReservedTables` are at the same addresses in every step, for kernels that a CUDA
graph has captured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from hetero_worker.attention.base import AttentionBatch, DecodeRows, IntArray
from hetero_worker.platforms.host_copies import to_device

_ALIGNED: Final = 4
"""int32 elements in 16 bytes, to which pointers that kernels get are aligned."""


@dataclass(frozen=True, slots=True)
class SequenceTables:
    """Decode rows first, each a sequence of one row, then the spans."""

    starts: torch.Tensor
    """int32 [sequences + 1]: sequence i has rows [starts[i], starts[i + 1]) of the step."""
    lengths: torch.Tensor
    """int32 [sequences]: tokens, those of this step included."""
    tables: torch.Tensor
    """int32 [sequences, blocks]; behind a sequence's last block lies anything."""
    num_decode: int
    longest_decode: int
    """Tokens; of all steps that may use these tables."""
    longest_span: int
    """Rows; 0 without spans."""
    longest: int
    """Tokens of the longest sequence; of all steps that may use these tables."""

    @property
    def num_spans(self) -> int:
        return len(self.lengths) - self.num_decode


def tables_of(batch: AttentionBatch, *, block_size: int, device: torch.device) -> SequenceTables:
    """Of a step with at least one row."""
    decode, spans = batch.decode, batch.prefills
    lengths = np.array([*decode.lengths.tolist(), *(span.length for span in spans)], dtype=np.int32)
    num_decode, longest = decode.num_rows, int(lengths.max())
    starts = np.arange(len(lengths) + 1, dtype=np.int32)
    starts[num_decode:] = [num_decode, *(span.end for span in spans)]
    tables = np.zeros((len(lengths), -(-longest // block_size)), dtype=np.int32)
    width = min(tables.shape[1], decode.block_tables.shape[1])
    tables[:num_decode, :width] = decode.block_tables[:, :width]
    for row, span in zip(tables[num_decode:], spans, strict=True):
        count = min(len(row), len(span.block_ids))
        row[:count] = span.block_ids[:count]
    on_device = _copied((starts, lengths, tables.reshape(-1)), device)
    return SequenceTables(
        starts=on_device[0],
        lengths=on_device[1],
        tables=on_device[2].view(tables.shape),
        num_decode=num_decode,
        longest_decode=int(lengths[:num_decode].max(initial=0)),
        longest_span=max((span.end - span.begin for span in spans), default=0),
        longest=longest,
    )


def _copied(arrays: tuple[IntArray, ...], device: torch.device) -> list[torch.Tensor]:
    """In one copy; each begins at an aligned address."""
    sizes = [-(-len(array) // _ALIGNED) * _ALIGNED for array in arrays]
    packed = np.zeros(sum(sizes), dtype=np.int32)
    parts = np.split(packed, np.cumsum(sizes)[:-1])
    for part, array in zip(parts, arrays, strict=True):
        part[: len(array)] = array
    copies = torch.split(to_device(torch.from_numpy(packed), device), sizes)
    return [copy[: len(array)] for copy, array in zip(copies, arrays, strict=True)]


class ReservedTables:
    """Room for decode rows, at addresses that stay.

    What is launched over it is made for the longest sequence that it has room for: lengths are the device's to read.
    """

    def __init__(self, *, max_rows: int, max_blocks: int, block_size: int, device: torch.device) -> None:
        self._starts = torch.arange(max_rows + 1, dtype=torch.int32, device=device)
        self._lengths = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._tables = torch.zeros(max_rows, max_blocks, dtype=torch.int32, device=device)
        self._block_size = block_size

    def fill(self, decode: DecodeRows) -> SequenceTables:
        """Copy the rows' lengths and tables, in the order of the present stream.

        Raises ValueError for more rows or longer ones than there is room for.
        """
        num_rows, (max_rows, max_blocks) = decode.num_rows, self._tables.shape
        num_blocks = -(-int(decode.lengths.max(initial=0)) // self._block_size)
        if num_rows > max_rows or num_blocks > max_blocks:
            raise ValueError(
                f"{num_rows} decode rows of up to {num_blocks} blocks: tables are reserved for {max_rows} rows of "
                f"{max_blocks} blocks; reserve more, or begin the step without them"
            )
        device = self._tables.device
        blocks = np.ascontiguousarray(decode.block_tables[:, :num_blocks])
        self._lengths[:num_rows].copy_(to_device(torch.from_numpy(decode.lengths), device))
        self._tables[:num_rows, :num_blocks].copy_(to_device(torch.from_numpy(blocks), device))
        return SequenceTables(
            starts=self._starts[: num_rows + 1],
            lengths=self._lengths[:num_rows],
            tables=self._tables[:num_rows],
            num_decode=num_rows,
            longest_decode=max_blocks * self._block_size,
            longest_span=0,
            longest=max_blocks * self._block_size,
        )
