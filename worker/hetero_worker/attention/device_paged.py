"""Paged attention of a device, by operators that torch has on every device.

Block tables and lengths come from the host once a step; from them the device makes its indices, once for all layers
with the same window. Decode rows gather what they attend to and go through scaled_dot_product_attention with the query
heads of a group folded into the query length, some rows at a time, so that what is gathered stays within bounds however
long the sequences are. Spans of several tokens are worked off one by one.

Nothing here waits for the device, and nothing is kept from step to step. Kernels written for one device may take this
one's place behind the same interface.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
import torch
from torch.nn import functional as F

from hetero_worker.attention.base import AttentionBatch, AttentionRule, DecodeRows, StepAttention
from hetero_worker.attention.kv_cache import LayerCache
from hetero_worker.attention.soft_cap import capped_attention
from hetero_worker.attention.spans import Span, expanded
from hetero_worker.platforms.host_copies import to_device

GATHER_BYTES: Final = 256 * 1024 * 1024
"""Keys and values that are gathered at a time: many rows of usual length, few of very long ones."""
_COPIES_AT_ONCE: Final = 2
"""What is gathered, and as much again for indices, masks and whatever the product's kernel makes of them."""


class DevicePagedAttention:
    """AttentionBackend of a device."""

    name = "paged-device"

    def __init__(self, device: torch.device, *, gather_bytes: int = GATHER_BYTES) -> None:
        self._device = device
        self._gather_bytes = gather_bytes

    @property
    def gather_bytes(self) -> int:
        return _COPIES_AT_ONCE * self._gather_bytes

    def begin(self, batch: AttentionBatch) -> StepAttention:
        return _DeviceStep(batch, self._device, self._gather_bytes)

    def release(self) -> None:
        """Nothing is kept."""


class _DeviceStep:
    """Indices are made by the first layer that needs them and shared by all of its kind."""

    def __init__(self, batch: AttentionBatch, device: torch.device, gather_bytes: int) -> None:
        self._batch = batch
        self._device = device
        self._gather_bytes = gather_bytes
        self._tables: _DecodeTables | None = None
        self._prepared: dict[tuple[int, int | None], list[_Rows]] = {}
        self._spans = [Span(span, product=expanded, device=device) for span in batch.prefills]

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cache: LayerCache, rule: AttentionRule
    ) -> torch.Tensor:
        cache.write(self._batch.slot_mapping, key, value)
        out = query.new_empty(query.shape[0], query.shape[1] * query.shape[2])
        for rows in self._decode_rows(cache, rule.window):
            out[rows.range] = rows.attend(query[rows.range], cache, rule)
        for span in self._spans:
            part = span.rows
            out[part] = span.attend(query[part], key[part], value[part], cache, rule)
        return out

    def _decode_rows(self, cache: LayerCache, window: int | None) -> list[_Rows]:
        if not self._batch.decode.num_rows:
            return []
        kind = (cache.num_kv_heads, window)
        if kind not in self._prepared:
            if self._tables is None:
                self._tables = _DecodeTables(self._batch.decode, cache.block_size, self._device)
            token_bytes = 2 * cache.keys[0].nbytes
            self._prepared[kind] = list(self._tables.cut(window, self._gather_bytes // token_bytes))
        return self._prepared[kind]


class _DecodeTables:
    """A step's decode rows, on the device; the lengths on the host too, which decides about shapes."""

    def __init__(self, decode: DecodeRows, block_size: int, device: torch.device) -> None:
        self._host_lengths = decode.lengths
        self._block_size = block_size
        num_blocks = -(-int(decode.lengths[0]) // block_size)
        tables = np.ascontiguousarray(decode.block_tables[:, :num_blocks])
        self._lengths = to_device(torch.from_numpy(decode.lengths), device).long()
        self._tables = to_device(torch.from_numpy(tables), device).long()

    def cut(self, window: int | None, max_tokens: int) -> Iterator[_Rows]:
        """Rows, longest first, in pieces of at most so many tokens to gather, padding included; a row at least."""
        reach = self._host_lengths if window is None else np.minimum(self._host_lengths, window)
        begin = 0
        while begin < len(reach):
            longest = int(reach[begin])
            end = min(len(reach), begin + max(1, max_tokens // longest))
            is_padded = int(reach[end - 1]) < longest
            yield self._rows(begin, end, longest, is_padded=is_padded)
            begin = end

    def _rows(self, begin: int, end: int, longest: int, *, is_padded: bool) -> _Rows:
        """Of the last `longest` tokens of each row; a shorter row's are all of its own, and what is behind them."""
        lengths = self._lengths[begin:end, None]
        first = (lengths - longest).clamp_(min=0)
        positions = first + torch.arange(longest, device=lengths.device)
        blocks = torch.div(positions, self._block_size, rounding_mode="floor")
        slots = self._tables[begin:end].gather(1, blocks) * self._block_size + positions % self._block_size
        if not is_padded:
            return _Rows(slice(begin, end), slots, None)
        visible = positions < lengths
        return _Rows(slice(begin, end), slots.mul_(visible), visible[:, None, None, :])


class _Rows:
    """Some decode rows that go through the product together."""

    def __init__(self, rows: slice, slots: torch.Tensor, visible: torch.Tensor | None) -> None:
        """`slots` [rows, longest]; `visible` [rows, 1, 1, longest] where a row is shorter, None if none is."""
        self.range = rows
        self._shape = slots.shape
        self._slots = slots.view(-1)
        self._visible = visible

    def attend(self, query: torch.Tensor, cache: LayerCache, rule: AttentionRule) -> torch.Tensor:
        """query [rows, heads, head_dim] → [rows, heads · head_dim]."""
        num_rows, num_kv_heads = len(query), cache.num_kv_heads
        folded = query.reshape(num_rows, num_kv_heads, -1, query.shape[-1])
        keys, values = self._gather(cache.keys), self._gather(cache.values)
        mask = None if self._visible is None else self._visible.expand(-1, 1, folded.shape[2], -1)
        if rule.soft_cap is not None:
            out = capped_attention(folded, keys, values, mask=mask, scale=rule.scale, soft_cap=rule.soft_cap)
        else:
            out = F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=rule.scale)
        return out.reshape(num_rows, -1)

    def _gather(self, cache_rows: torch.Tensor) -> torch.Tensor:
        """[rows, kv_heads, longest, head_dim]."""
        gathered = cache_rows.index_select(0, self._slots)
        return gathered.view(*self._shape, *cache_rows.shape[1:]).transpose(1, 2)
