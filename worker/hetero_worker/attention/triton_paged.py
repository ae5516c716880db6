"""Paged attention of a GPU by kernels of ours, `kernels.paged_attention`, which needs Triton: imported where that is.

Decode rows go through one launch, or two where their tokens are cut into splits, spans through another, however many
there are. All keys and values are read from the cache, this step's too.

Batch-invariant, everything goes through the kernel of spans, in which a row's result depends on its own sequence alone:
its bits are the same whatever else is in the batch, and whether it is computed as a decode row, in one span with its
prompt or in any piece of it.

A CUDA graph of a decode step needs tables that stay where they are. They are made by `reserve`; within `prepared`, a
step that begins takes them as they are and copies nothing, so that what it launches may be captured, and replayed after
the next `prepared` of as many rows. Programs and splits are then as many as the longest reserved sequence asks for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch

from hetero_worker.attention.base import (
    AttentionBatch,
    AttentionRule,
    CacheReadingAttention,
    StepAttention,
)
from hetero_worker.attention.kernel_limits import refusal
from hetero_worker.attention.kv_cache import LayerCache
from hetero_worker.attention.sequence_tables import ReservedTables, SequenceTables, tables_of
from hetero_worker.kernels.attention_tiles import PagedKeys, Scoring
from hetero_worker.kernels.paged_attention import MAX_SPLITS, attend_decode, attend_spans

_PROGRAMS_PER_MULTIPROCESSOR: Final = 4
"""That run at a time: as many warps as hide the memory's latency."""
_PROGRAMS_WITHOUT_GPU: Final = 16
"""Where kernels are interpreted."""
_LEAST_SPLIT_TOKENS: Final = 128
"""A split of fewer would cost more, in sums to be written and read, than it saves."""


class TritonPagedAttention:
    """AttentionBackend of a CUDA device, and CapturableAttention."""

    def __init__(
        self,
        device: torch.device,
        *,
        head_dim: int,
        group_size: int,
        batch_invariant: bool = False,
        num_programs: int | None = None,
    ) -> None:
        """For layers of this head_dim and so many query heads a KV head.

        `num_programs` are what decode rows are cut up for; None: what the device runs at a time. Raises ValueError for
        shapes that the kernels do not have.
        """
        if (reason := refusal(head_dim=head_dim, group_size=group_size)) is not None:
            raise ValueError(reason)
        self._device = device
        self._num_programs = num_programs or _programs_of(device)
        self._split_bytes = group_size * (head_dim + 2) * torch.float32.itemsize
        self._is_invariant = batch_invariant
        self._reserved: ReservedTables | None = None
        self._prepared: SequenceTables | None = None

    @property
    def name(self) -> str:
        return "paged-triton-invariant" if self._is_invariant else "paged-triton"

    @property
    def gather_bytes(self) -> int:
        """What splits leave for each other: rows are cut only until there are `num_programs`."""
        return 0 if self._is_invariant else self._num_programs * self._split_bytes

    def begin(self, batch: AttentionBatch) -> StepAttention:
        if self._prepared is not None:
            _check_is_prepared(batch, self._prepared)
        num_programs = None if self._is_invariant else self._num_programs
        return _TritonStep(batch, self._prepared, device=self._device, num_programs=num_programs)

    def reserve(self, *, max_rows: int, max_blocks: int, block_size: int) -> None:
        """Make the tables of steps that only decode, of up to so many rows and blocks a row.

        Graphs that were captured over tables of before are not to be replayed any more.
        """
        self._reserved = ReservedTables(
            max_rows=max_rows, max_blocks=max_blocks, block_size=block_size, device=self._device
        )

    @contextmanager
    def prepared(self, batch: AttentionBatch) -> Iterator[None]:
        """Fill the reserved tables for a step that only decodes; steps that begin within take them.

        Raises ValueError without reserved tables, or when they are too small, or for a batch with spans.
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
        """The reserved tables go; graphs captured over them are not to be replayed any more."""
        self._reserved = None


class _TritonStep(CacheReadingAttention):
    """Tables are copied by the first layer, which knows the blocks' size, unless they are there."""

    def __init__(
        self,
        batch: AttentionBatch,
        tables: SequenceTables | None,
        *,
        device: torch.device,
        num_programs: int | None,
    ) -> None:
        """`num_programs` None: batch-invariant."""
        self.slot_mapping = batch.slot_mapping
        self._batch = batch
        self._tables = tables
        self._device = device
        self._num_programs = num_programs

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cache: LayerCache, rule: AttentionRule
    ) -> torch.Tensor:
        cache.write(self.slot_mapping, key, value)
        return self.attend_written(query, cache, rule)

    def attend_written(self, query: torch.Tensor, cache: LayerCache, rule: AttentionRule) -> torch.Tensor:
        out = query.new_empty(query.shape[0], query.shape[1] * query.shape[2])
        if not len(query):
            return out
        if self._tables is None:
            self._tables = tables_of(self._batch, block_size=cache.block_size, device=self._device)
        tables, scoring = self._tables, Scoring(rule.scale, rule.window, rule.soft_cap)
        paged = PagedKeys(cache.keys, cache.values, cache.block_size, tables.tables, tables.lengths)
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
        """The largest power of two for which there are programs, and tokens."""
        assert self._num_programs is not None
        reach = longest if window is None else min(longest, window)
        most = min(self._num_programs // (num_rows * num_kv_heads), reach // _LEAST_SPLIT_TOKENS, MAX_SPLITS)
        return 1 << (most.bit_length() - 1) if most > 1 else 1


def _check_is_prepared(batch: AttentionBatch, tables: SequenceTables) -> None:
    if batch.prefills or batch.decode.num_rows != tables.num_decode:
        raise ValueError(
            f"tables are prepared for {tables.num_decode} decode rows, but the step that begins has "
            f"{batch.decode.num_rows} and {len(batch.prefills)} spans"
        )


def _programs_of(device: torch.device) -> int:
    if device.type != "cuda":
        return _PROGRAMS_WITHOUT_GPU
    return _PROGRAMS_PER_MULTIPROCESSOR * int(torch.cuda.get_device_properties(device).multi_processor_count)
