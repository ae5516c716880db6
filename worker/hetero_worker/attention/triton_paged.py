"""Paged attention of a GPU by our Triton kernels (`kernels.paged_attention`). Import it only where Triton is installed.

Decode rows take one launch, or two where their tokens are cut into splits: where there are few rows, or long ones. All
spans together take another. The kernels
read a step's sequences from tables on the device, which go there in one copy per step.

Batch-invariant, everything goes through the kernel of spans, in which a row's result depends on its own sequence alone.
Its bits do not depend on the rest of the batch, nor on whether it is computed as a decode row, in one span with its
prompt or in any piece of the prompt.

A graph of a decode step needs tables at fixed addresses. `reserve` allocates them. A step that begins within
`prepared` uses them and copies nothing, so its launches can be captured, and replayed after the next `prepared` of as
many rows. Programs and splits then follow from the longest reserved sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from hetero_worker.attention.base import (
    AttentionBackend,
    AttentionBatch,
    AttentionRule,
    DecodeRows,
    IntArray,
    LatentExpansion,
    StepAttention,
)
from hetero_worker.attention.kv_cache import LayerCache
from hetero_worker.kernels.attention_tiles import PagedKeys, Scoring
from hetero_worker.kernels.availability import attention_problem
from hetero_worker.kernels.paged_attention import LEAST_SPLIT_TOKENS, MAX_SPLITS, attend_decode, attend_spans
from hetero_worker.memory.streams import to_device

_LONG_SPLIT_TOKENS: Final = 2048
"""A longer split keeps one program busy when the others of its step are done, however many these are."""
_MOST_TURNS: Final = 16
"""Times as many programs as the device runs at a time that splits of long rows may make."""
_ALIGNED: Final = 4
"""int32 elements in 16 bytes, the alignment of pointers that kernels get."""


class TritonPagedAttention(AttentionBackend):
    """Capturable AttentionBackend of a GPU."""

    is_capturable = True

    def __init__(
        self,
        device: torch.device,
        *,
        head_dim: int,
        group_size: int,
        value_dim: int | None = None,
        expansion: LatentExpansion | None = None,
        batch_invariant: bool = False,
        num_programs: int,
    ) -> None:
        """Support layers of this head_dim and `group_size` query heads per KV head.

        `value_dim`, of latent attention: values are the first elements of keys; the others of a result are zeros.
        `expansion`: of its long spans.
        Decode rows are cut into splits for `num_programs` programs: as many as the device runs at a time.
        Raises ValueError for shapes that the kernels lack.
        """
        if (problem := attention_problem(head_dim=head_dim, group_size=group_size, value_dim=value_dim)) is not None:
            raise ValueError(problem)
        self._device = device
        self._num_programs = num_programs
        self._is_invariant = batch_invariant
        self._value_dim = value_dim
        self.expansion = None if batch_invariant else expansion
        # Rows are cut only until there are so many splits; these are the splits' partial sums.
        split_bytes = group_size * (head_dim + 2) * torch.float32.itemsize
        self.gather_bytes = 0 if batch_invariant else _MOST_TURNS * self._num_programs * split_bytes
        self._reserved: _ReservedTables | None = None
        self._prepared: _SequenceTables | None = None

    @property
    def name(self) -> str:
        """The name that is reported."""
        return "paged-triton-invariant" if self._is_invariant else "paged-triton"

    def begin(self, batch: AttentionBatch) -> StepAttention:
        """Prepare a step. Raises ValueError within `prepared` if the batch is not the prepared one."""
        if self._prepared is not None:
            _check_is_prepared(batch, self._prepared)
        num_programs = None if self._is_invariant else self._num_programs
        return _TritonStep(
            batch,
            self._prepared,
            device=self._device,
            num_programs=num_programs,
            value_dim=self._value_dim,
            expansion=self.expansion,
        )

    def reserve(self, *, max_rows: int, max_blocks: int, block_size: int) -> None:
        """Allocate tables for decode-only steps of up to `max_rows` rows of `max_blocks` blocks.

        Graphs that were captured over earlier tables must not be replayed any more.
        """
        self._reserved = _ReservedTables(
            max_rows=max_rows, max_blocks=max_blocks, block_size=block_size, device=self._device
        )

    @contextmanager
    def prepared(self, batch: AttentionBatch) -> Iterator[None]:
        """Fill the reserved tables for a decode-only step; steps that begin inside use them.

        Raises ValueError without reserved tables, if they are too small, or for a batch with spans.
        """
        if self._reserved is None:
            raise ValueError("no tables are reserved: call reserve before prepared")
        if batch.prefills:
            raise ValueError(f"reserved tables are for decode rows; this step has {len(batch.prefills)} spans, too")
        self._prepared = self._reserved.fill(batch.decode)
        try:
            yield
        finally:
            self._prepared = None

    def release(self) -> None:
        """Free the reserved tables; graphs captured over them must not be replayed any more."""
        self._reserved = None


class _TritonStep(StepAttention):
    """One step. Unless they are prepared, the first layer copies the tables: it knows the block size."""

    def __init__(
        self,
        batch: AttentionBatch,
        tables: _SequenceTables | None,
        *,
        device: torch.device,
        num_programs: int | None,
        value_dim: int | None,
        expansion: LatentExpansion | None,
    ) -> None:
        """`num_programs` None: batch-invariant."""
        self.batch, self.slot_mapping, self.expansion = batch, batch.slot_mapping, expansion
        self._kept, self.expanded = (batch, ()) if expansion is None else expansion.split(batch)
        self._tables = tables
        self._device = device
        self._num_programs = num_programs
        self._value_dim = value_dim

    def attend_written(self, query: torch.Tensor, cache: LayerCache, rule: AttentionRule) -> torch.Tensor:
        """See `StepAttention.attend_written`."""
        new = query.new_empty if self._value_dim is None else query.new_zeros
        out = new(query.shape[0], query.shape[1] * query.shape[2])
        if not len(query):
            return out
        if self._tables is None:
            self._tables = _tables_of(self._kept, block_size=cache.block_size, device=self._device)
        tables, scoring = self._tables, Scoring(rule.scale, rule.window, rule.soft_cap, rule.sinks)
        paged = PagedKeys(
            cache.keys, cache.values, cache.block_size, tables.tables, tables.lengths, value_dim=self._value_dim
        )
        first_span, longest = tables.num_decode, tables.longest_span
        if self._num_programs is None:
            first_span, longest = 0, max(longest, 1)  # decode rows are spans of one row
        if first_span:
            splits = self._num_splits(first_span, cache.num_kv_heads, tables.longest_decode, rule.window)
            attend_decode(query[:first_span], out, paged, scoring, num_splits=splits)
        if longest:
            attend_spans(query, out, paged, scoring, starts=tables.starts, first_span=first_span, longest=longest)
        return out

    def _num_splits(self, num_rows: int, num_kv_heads: int, longest: int, window: int | None) -> int:
        """Return the largest power of two that keeps the device busy, or long rows from ending last."""
        assert self._num_programs is not None
        reach, rows = longest if window is None else min(longest, window), num_rows * num_kv_heads
        of_long_rows = min(-(-reach // _LONG_SPLIT_TOKENS), _MOST_TURNS * self._num_programs // rows)
        most = min(max(self._num_programs // rows, of_long_rows), reach // LEAST_SPLIT_TOKENS, MAX_SPLITS)
        return 1 << (most.bit_length() - 1) if most > 1 else 1


def _check_is_prepared(batch: AttentionBatch, tables: _SequenceTables) -> None:
    if batch.prefills or batch.decode.num_rows != tables.num_decode:
        raise ValueError(
            f"tables are prepared for {tables.num_decode} decode rows, but the step that begins has "
            f"{batch.decode.num_rows} and {len(batch.prefills)} spans"
        )


@dataclass(frozen=True, slots=True)
class _SequenceTables:
    """A step's sequences on the device: decode rows first, each a sequence of one row, then the spans."""

    starts: torch.Tensor
    """int32 [sequences + 1]: sequence i has rows [starts[i], starts[i + 1]) of the step."""
    lengths: torch.Tensor
    """int32 [sequences]: tokens, those of this step included."""
    tables: torch.Tensor
    """int32 [sequences, blocks]: block ids; entries behind a sequence's last block are arbitrary."""
    num_decode: int
    longest_decode: int
    """Most tokens of a decode row, over all steps that may use these tables."""
    longest_span: int
    """Most rows of a span; 0 without spans."""


def _tables_of(batch: AttentionBatch, *, block_size: int, device: torch.device) -> _SequenceTables:
    """Return new tables of a step with at least one row."""
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
    return _SequenceTables(
        starts=on_device[0],
        lengths=on_device[1],
        tables=on_device[2].view(tables.shape),
        num_decode=num_decode,
        longest_decode=int(lengths[:num_decode].max(initial=0)),
        longest_span=max((span.end - span.begin for span in spans), default=0),
    )


def _copied(arrays: Sequence[IntArray], device: torch.device) -> list[torch.Tensor]:
    """Copy the arrays to the device in one piece; each begins at an aligned address."""
    sizes = [-(-len(array) // _ALIGNED) * _ALIGNED for array in arrays]
    packed = np.zeros(sum(sizes), dtype=np.int32)
    parts = np.split(packed, np.cumsum(sizes)[:-1])
    for part, array in zip(parts, arrays, strict=True):
        part[: len(array)] = array
    copies = torch.split(to_device(torch.from_numpy(packed), device), sizes)
    return [copy[: len(array)] for copy, array in zip(copies, arrays, strict=True)]


class _ReservedTables:
    """Room for decode rows, at fixed addresses.

    Launches over it are made for the longest sequence that fits; kernels read the actual lengths on the device.
    """

    def __init__(self, *, max_rows: int, max_blocks: int, block_size: int, device: torch.device) -> None:
        self._starts = torch.arange(max_rows + 1, dtype=torch.int32, device=device)
        self._lengths = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._tables = torch.zeros(max_rows, max_blocks, dtype=torch.int32, device=device)
        self._block_size = block_size

    def fill(self, decode: DecodeRows) -> _SequenceTables:
        """Copy the rows' lengths and tables, in the order of the current stream.

        Raises ValueError if the rows are more, or longer, than the reservation.
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
        lengths, tables = _copied((decode.lengths, blocks.reshape(-1)), device)
        self._lengths[:num_rows].copy_(lengths)
        self._tables[:num_rows, :num_blocks].copy_(tables.view(num_rows, num_blocks))
        return _SequenceTables(
            starts=self._starts[: num_rows + 1],
            lengths=self._lengths[:num_rows],
            tables=self._tables[:num_rows],
            num_decode=num_rows,
            longest_decode=max_blocks * self._block_size,
            longest_span=0,
        )
