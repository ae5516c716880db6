"""Attention of host cores in which a row's bits depend on its own sequence and position alone.

Every row, be it one that decodes or one of a prompt, attends by itself to just the tokens that it sees, which were
copied from the cache into one piece. So whatever else is in the step, and however a sequence was cut into steps, the
same operators get the same numbers in the same shapes, at addresses that are as aligned: nothing is padded, masked or
grouped. That holds with the number of threads that there is; it must not become another.

It costs a call a row and layer, and a prompt's rows do not share the reading of their keys: prompts take several times
as long as with PagedAttention, rows that decode about as long.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional as F

from hetero_worker.attention.base import AttentionBatch, AttentionRule, IntArray, StepAttention
from hetero_worker.attention.kv_cache import LayerCache
from hetero_worker.attention.soft_cap import capped_attention
from hetero_worker.attention.workspace import Workspace


class RowAttention:
    """AttentionBackend of host tensors. It keeps memory for one sequence's keys and values."""

    name = "paged-rows"
    gather_bytes = 0

    def __init__(self) -> None:
        self._workspace = Workspace()

    def begin(self, batch: AttentionBatch) -> StepAttention:
        return _RowStep(batch, self._workspace)

    def release(self) -> None:
        self._workspace = Workspace()


@dataclass(frozen=True, slots=True)
class _Sequence:
    """Rows [begin, end) of the step: one that decodes, or a span."""

    begin: int
    end: int
    length: int
    """Tokens, the last row included."""
    block_ids: IntArray

    def first_seen(self, row: int, window: int | None) -> int:
        return 0 if window is None else max(0, self.num_seen(row) - window)

    def num_seen(self, row: int) -> int:
        """Tokens up to the row's own."""
        return self.length - (self.end - 1 - row)

    def slots(self, first: int, block_size: int) -> torch.Tensor:
        """Of the tokens from the first one on."""
        positions = np.arange(first, self.length, dtype=np.int32)
        return torch.from_numpy(self.block_ids[positions // block_size] * block_size + positions % block_size)


def _sequences(batch: AttentionBatch) -> Iterator[_Sequence]:
    decode = batch.decode
    for row, (length, table) in enumerate(zip(decode.lengths.tolist(), decode.block_tables, strict=True)):
        yield _Sequence(row, row + 1, length, table)
    for span in batch.prefills:
        yield _Sequence(span.begin, span.end, span.length, span.block_ids)


class _RowStep:
    """Slots are found by the first layer that has a window."""

    def __init__(self, batch: AttentionBatch, workspace: Workspace) -> None:
        self._slot_mapping = batch.slot_mapping
        self._sequences = list(_sequences(batch))
        self._slots: dict[int | None, list[torch.Tensor]] = {}
        self._workspace = workspace

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cache: LayerCache, rule: AttentionRule
    ) -> torch.Tensor:
        cache.write(self._slot_mapping, key, value)
        out = query.new_empty(query.shape[0], query.shape[1] * query.shape[2])
        for sequence, slots in zip(self._sequences, self._slots_seen(cache.block_size, rule.window), strict=True):
            first = sequence.first_seen(sequence.begin, rule.window)
            keys, values = self._gather("keys", cache.keys, slots), self._gather("values", cache.values, slots)
            for row in range(sequence.begin, sequence.end):
                begin, end = sequence.first_seen(row, rule.window) - first, sequence.num_seen(row) - first
                out[row] = _attend(query[row], _aligned(keys, begin, end), _aligned(values, begin, end), rule)
        return out

    def _slots_seen(self, block_size: int, window: int | None) -> list[torch.Tensor]:
        """Of all tokens that any of a sequence's rows sees."""
        if window not in self._slots:
            self._slots[window] = [
                sequence.slots(sequence.first_seen(sequence.begin, window), block_size) for sequence in self._sequences
            ]
        return self._slots[window]

    def _gather(self, name: str, cache_rows: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """[tokens, kv_heads, head_dim], until the next of that name."""
        gathered = self._workspace.take(name, (len(slots), *cache_rows.shape[1:]), cache_rows.dtype)
        return torch.index_select(cache_rows, 0, slots, out=gathered)


def _aligned(rows: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    """rows[begin:end], at an address as aligned as that of any new tensor."""
    return rows[begin:end].clone() if begin else rows[:end]


def _attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rule: AttentionRule) -> torch.Tensor:
    """query [heads, head_dim], keys and values [tokens, kv_heads, head_dim] → [heads · head_dim]."""
    keys, values = keys.transpose(0, 1), values.transpose(0, 1)
    grouped = query.reshape(len(keys), -1, query.shape[-1]).clone()
    if rule.soft_cap is not None:
        out = capped_attention(grouped, keys, values, mask=None, scale=rule.scale, soft_cap=rule.soft_cap)
    else:
        out = F.scaled_dot_product_attention(grouped[None], keys[None], values[None], scale=rule.scale)
    return out.flatten()
