"""A capturable attention backend by torch: it gathers as many tokens as the longest sequence may have, and masks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn import functional as F

from hetero_worker.attention.base import AttentionBatch, AttentionRule, StepAttention
from hetero_worker.attention.kv_cache import LayerCache
from hetero_worker.attention.torch_paged import TorchPagedAttention


class StaticAttention(TorchPagedAttention):
    """Steps that begin within `prepared` read its tables; others are those of TorchPagedAttention."""

    is_capturable = True

    def __init__(self) -> None:
        super().__init__()
        self._lengths = torch.empty(0)
        self._tables = torch.empty(0)
        self._block_size = 0
        self._is_prepared = False

    def reserve(self, *, max_rows: int, max_blocks: int, block_size: int) -> None:
        self._lengths = torch.zeros(max_rows, dtype=torch.int64)
        self._tables = torch.zeros(max_rows, max_blocks, dtype=torch.int64)
        self._block_size = block_size

    @contextmanager
    def prepared(self, batch: AttentionBatch) -> Iterator[None]:
        assert not batch.prefills
        rows, width = batch.decode.num_rows, min(batch.decode.block_tables.shape[1], self._tables.shape[1])
        self._lengths[:rows] = torch.from_numpy(batch.decode.lengths.copy())
        self._tables[:rows, :width] = torch.from_numpy(batch.decode.block_tables[:, :width].copy())
        self._is_prepared = True
        yield
        self._is_prepared = False

    def begin(self, batch: AttentionBatch) -> StepAttention:
        if not self._is_prepared:
            return super().begin(batch)
        rows = batch.decode.num_rows
        return _StaticStep(batch, self._lengths[:rows], self._tables[:rows], self._block_size)


class _StaticStep(StepAttention):
    def __init__(self, batch: AttentionBatch, lengths: torch.Tensor, tables: torch.Tensor, block_size: int) -> None:
        self.batch, self.slot_mapping = batch, batch.slot_mapping
        self._lengths = lengths
        self._tables = tables
        self._block_size = block_size

    def attend_written(self, query: torch.Tensor, cache: LayerCache, rule: AttentionRule) -> torch.Tensor:
        assert rule.window is None, "this double has no windows"
        assert rule.soft_cap is None, "this double has no soft caps"
        rows, size = len(query), self._block_size
        slots = (self._tables[:, :, None] * size + torch.arange(size)).view(rows, -1)
        visible = torch.arange(slots.shape[1]) < self._lengths[:, None]
        slots = slots.masked_fill(~visible, 0)
        keys, values = (part[slots].transpose(1, 2) for part in (cache.keys, cache.values))
        folded = query.reshape(rows, cache.num_kv_heads, -1, query.shape[-1])
        mask = visible[:, None, None, :]
        return F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=rule.scale).reshape(rows, -1)
