"""Paged attention of host cores by the native kernels (native/compute/attend*.c), which gather nothing.

Decode rows are one operation a layer, which cuts long sequences into chunks for all threads; each span is another. All
keys and values are read from the cache, this step's too. A row's bits depend on its sequence and its position alone:
they are the same in whatever batch, as a decode row, in one span with its prompt or in any piece of it. So this
serves batch-invariant mode, too.

An operation of a recorded step reads lengths and block tables whenever it is made again, where they were when it
was recorded: they are those of the batch, which keeps them in place (runners/input_batch.py), and are not copied.
"""

from __future__ import annotations

import numpy as np
import torch

from hetero_worker.attention.base import (
    AttentionBackend,
    AttentionBatch,
    AttentionRule,
    DecodeRows,
    IntArray,
    PrefillSpan,
    StepAttention,
)
from hetero_worker.attention.kv_cache import LayerCache
from hetero_worker.native.compute_library import FORMATS, attend_op, attend_span_op
from hetero_worker.native.op_queue import OpQueue


class NativePagedAttention(AttentionBackend):
    """AttentionBackend of host tensors, float32 or bfloat16, over a cache of float32, bfloat16 or float16."""

    def __init__(self, op_queue: OpQueue) -> None:
        self._op_queue = op_queue

    @property
    def name(self) -> str:
        """The name that reports give."""
        return f"paged-native ({self._op_queue.team.library.isa})"

    def release(self) -> None:
        """Free the scratch, which all operations of the rank share."""
        self._op_queue.release_scratch()

    def begin(self, batch: AttentionBatch) -> StepAttention:
        """Return the step's attention. Raises ValueError for lengths or tables that are not contiguous."""
        return _NativeStep(batch, self._op_queue)


class _NativeStep(StepAttention):
    """Operations of one step."""

    def __init__(self, batch: AttentionBatch, op_queue: OpQueue) -> None:
        self.batch, self.slot_mapping = batch, batch.slot_mapping
        self._decode = batch.decode
        self._spans = batch.prefills
        self._op_queue = op_queue

    def attend_written(self, query: torch.Tensor, cache: LayerCache, rule: AttentionRule) -> torch.Tensor:
        """Return the queries' attention over the cache, which has the step's keys and values: [rows, heads · head_dim].

        Raises ValueError for queries of another type, and for those whose heads do not lie side by side.
        """
        if query.dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"queries are to be of float32 or bfloat16, not {query.dtype}")
        if query.stride()[1:] != (query.shape[2], 1):
            raise ValueError(f"a row's query heads are to lie side by side, not with strides {query.stride()}")
        out = self._op_queue.empty(query.shape[0], query.shape[1] * query.shape[2], dtype=query.dtype)
        if num_decode := self._decode.num_rows:
            self._attend_rows(self._decode, query[:num_decode], cache, rule, out)
        for span in self._spans:
            self._attend_span(span, query[span.begin : span.end], cache, rule, out[span.begin : span.end])
        return out

    def _attend_rows(
        self, rows: DecodeRows, query: torch.Tensor, cache: LayerCache, rule: AttentionRule, out: torch.Tensor
    ) -> None:
        op = attend_op(len(rows.lengths), _described(cache, query, rule))
        op.query, op.query_stride, op.out = query.data_ptr(), query.stride(0), out.data_ptr()
        # Of all steps that may be made with these tables: scratch has to last for them.
        op.lengths, op.longest = _address(rows.lengths), rows.block_tables.shape[1] * cache.block_size
        op.tables, op.table_stride = _address(rows.block_tables), rows.block_tables.shape[1]
        op.scratch = self._op_queue.scratch(op)
        self._op_queue.submit(op, cache, rows, rule)

    def _attend_span(
        self, span: PrefillSpan, query: torch.Tensor, cache: LayerCache, rule: AttentionRule, out: torch.Tensor
    ) -> None:
        blocks = np.ascontiguousarray(span.block_ids)
        if len(query) == 1:  # the kernel of decode rows cuts its tokens up for all threads
            lengths = np.array([span.length], dtype=np.int32)
            self._attend_rows(DecodeRows(lengths, blocks[None]), query, cache, rule, out)
            return
        op = attend_span_op(len(query), _described(cache, query, rule))
        op.query, op.query_stride, op.out = query.data_ptr(), query.stride(0), out.data_ptr()
        op.num_computed, op.table = span.num_computed, blocks.ctypes.data
        op.scratch = self._op_queue.scratch(op)
        self._op_queue.submit(op, cache, blocks, rule)


def _address(array: IntArray) -> int:
    if not array.flags.c_contiguous:
        raise ValueError("lengths and block tables of a step are to be contiguous: they are read where they are")
    return array.ctypes.data


def _described(cache: LayerCache, query: torch.Tensor, rule: AttentionRule) -> tuple[float, ...]:
    """Return the fields of an hc_cache."""
    return (
        FORMATS[cache.keys.dtype],
        FORMATS[query.dtype],
        cache.keys.data_ptr(),
        cache.values.data_ptr(),
        cache.block_size,
        cache.num_kv_heads,
        query.shape[1],
        query.shape[2],
        rule.scale,
        rule.window or 0,
        rule.soft_cap or 0.0,
        0 if rule.sinks is None else rule.sinks.data_ptr(),
    )
