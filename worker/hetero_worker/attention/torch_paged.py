"""Paged attention by torch's operators: the reference that every other backend is tested against.

It serves any device, dtype, head size and block size, and is what a machine without native or Triton kernels computes
with. Sequences are worked off one after another: the keys and values that a sequence's rows can see are gathered from
the cache, and scaled_dot_product_attention, or its definition where scores are capped or heads have sinks, does the
rest. Index tensors and masks are made once per step and window, and shared by all layers. Nothing here waits for the
device.

Batch-invariant, every row attends by itself to exactly the tokens it sees. The same operators then get the same
numbers, in the same shapes, at equally aligned addresses, regardless of the rest of the batch and of how the sequence
was split into steps. This holds for a fixed number of threads. It is slow: prompt rows do not share the reading of
their keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional as F

from hetero_api.rank_memory import SCORES_AT_ONCE
from hetero_worker.attention.base import (
    AttentionBackend,
    AttentionBatch,
    AttentionRule,
    IntArray,
    LatentExpansion,
    StepAttention,
)
from hetero_worker.attention.kv_cache import LayerCache
from hetero_worker.memory.streams import HOST, to_device


class TorchPagedAttention(AttentionBackend):
    """AttentionBackend for tensors on any device.

    It keeps nothing from step to step, and gathers one sequence at a time, which the budget's `prefix_step` counts.
    """

    def __init__(
        self,
        device: torch.device = HOST,
        *,
        batch_invariant: bool = False,
        reason: str = "",
        expansion: LatentExpansion | None = None,
    ) -> None:
        """`reason`: why no faster attention serves, for reports. `expansion`: of latent attention's long spans."""
        self._device = device
        self.expansion = None if batch_invariant else expansion
        self._by_row = batch_invariant
        self._reason = reason

    @property
    def name(self) -> str:
        """ "paged-torch", or "paged-torch-invariant" if rows are computed one by one; and the reason."""
        name = "paged-torch-invariant" if self._by_row else "paged-torch"
        return f"{name} ({self._reason})" if self._reason else name

    def begin(self, batch: AttentionBatch) -> StepAttention:
        """Return the batch's attention. Indices are made by the first layer that needs them."""
        return _TorchStep(batch, self._device, by_row=self._by_row, expansion=self.expansion)


class _TorchStep(StepAttention):
    def __init__(
        self, batch: AttentionBatch, device: torch.device, *, by_row: bool, expansion: LatentExpansion | None
    ) -> None:
        self.batch, self.slot_mapping, self.expansion = batch, batch.slot_mapping, expansion
        kept, self.expanded = (batch, ()) if expansion is None else expansion.split(batch)
        self._sequences = list(_sequences(kept))
        self._device = device
        self._by_row = by_row
        self._views: dict[int | None, list[SeenTokens]] = {}

    def attend_written(self, query: torch.Tensor, cache: LayerCache, rule: AttentionRule) -> torch.Tensor:
        """See `StepAttention.attend_written`."""
        out = query.new_empty(query.shape[0], query.shape[1] * query.shape[2])
        for view in self._views_of(rule.window, cache.block_size, query.dtype):
            rows = slice(view.begin, view.end)
            keys = cache.keys.index_select(0, view.slots).to(query.dtype)
            values = keys
            if cache.values is not cache.keys:
                values = cache.values.index_select(0, view.slots).to(query.dtype)
            if self._by_row:
                _attend_by_row(query[rows], keys, values, rule, out[rows])
            else:
                out[rows] = _attend(query[rows], keys, values, view.mask, rule)
        return out

    def _views_of(self, window: int | None, block_size: int, dtype: torch.dtype) -> list[SeenTokens]:
        if window not in self._views:
            self._views[window] = [
                sequence.view(window, block_size, device=self._device, mask_dtype=None if self._by_row else dtype)
                for sequence in self._sequences
            ]
        return self._views[window]


@dataclass(frozen=True, slots=True)
class SeenTokens:
    """Tokens that the rows [begin, end) of a step see through a window."""

    begin: int
    end: int
    slots: torch.Tensor
    """int32 [tokens]: cache slots of the tokens that any of the rows sees, in order."""
    mask: torch.Tensor | None
    """[rows, tokens]: 0 where a row sees a token, else -∞; None if all rows see all tokens."""


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """Rows [begin, end) of the step: one row that decodes, or a span."""

    begin: int
    end: int
    length: int
    """Tokens, the last row included."""
    block_ids: IntArray

    def view(
        self, window: int | None, block_size: int, *, device: torch.device, mask_dtype: torch.dtype | None
    ) -> SeenTokens:
        """Return slots and mask on the device; `mask_dtype` None: without a mask."""
        num_rows = self.end - self.begin
        first = _first_seen(self.length - num_rows, window)
        positions = np.arange(first, self.length, dtype=np.int32)
        slots = self.block_ids[positions // block_size] * block_size + positions % block_size
        mask = None
        if num_rows > 1 and mask_dtype is not None:
            mask = _causal_mask(num_rows, len(positions), window, dtype=mask_dtype, device=device)
        return SeenTokens(self.begin, self.end, to_device(torch.from_numpy(slots), device), mask)


def _sequences(batch: AttentionBatch) -> Iterator[SequenceRows]:
    decode = batch.decode
    for row, (length, table) in enumerate(zip(decode.lengths.tolist(), decode.block_tables, strict=True)):
        yield SequenceRows(row, row + 1, length, table)
    for span in batch.prefills:
        yield SequenceRows(span.begin, span.end, span.length, span.block_ids)


def _first_seen(position: int, window: int | None) -> int:
    """Return the first position that the token at `position` sees."""
    return 0 if window is None else max(0, position + 1 - window)


def _causal_mask(
    num_rows: int, num_tokens: int, window: int | None, *, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return the additive mask [rows, tokens] of rows whose last one is the last token."""
    own = torch.arange(num_tokens - num_rows, num_tokens, device=device)[:, None]
    tokens = torch.arange(num_tokens, device=device)
    hidden = tokens > own
    if window is not None:
        hidden |= tokens <= own - window
    return torch.zeros(num_rows, num_tokens, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))


def _attend_by_row(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rule: AttentionRule, out: torch.Tensor
) -> None:
    """Attend row by row; the last row is the last token. Shapes as in `_attend`; `out` [rows, heads · head_dim]."""
    for row in range(len(query)):
        end = len(keys) - (len(query) - 1 - row)
        begin = _first_seen(end - 1, rule.window)
        seen = _aligned(keys, begin, end), _aligned(values, begin, end)
        out[row] = _attend(query[row : row + 1].clone(), *seen, None, rule)[0]


def _aligned(rows: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    """Return rows[begin:end] at an address that is as aligned as a new tensor's."""
    return rows[begin:end].clone() if begin else rows[:end]


def _attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, rule: AttentionRule
) -> torch.Tensor:
    """Attend with query [rows, heads, head_dim] to keys and values [tokens, kv_heads, head_dim].

    `mask` [rows, tokens] is added to the scores. Returns [rows, heads · head_dim].
    """
    if rule.soft_cap is not None or rule.sinks is not None:
        return _attend_by_definition(query, keys, values, mask, rule)
    if keys is values:  # of latent attention, whose heads are too wide for torch's fused kernels
        return _attend_in_pieces(query, keys, mask, rule)
    # KV heads become the batch, and a group's query heads share theirs by a stride of 0. A GPU's fused kernels take no
    # groups together with a mask, and without these kernels the scores of all heads would be in memory.
    by_group = query.reshape(len(query), keys.shape[1], -1, query.shape[-1]).permute(1, 2, 0, 3)
    expanded = (-1, by_group.shape[1], -1, -1)
    out = F.scaled_dot_product_attention(
        by_group,
        keys.transpose(0, 1).unsqueeze(1).expand(expanded),
        values.transpose(0, 1).unsqueeze(1).expand(expanded),
        attn_mask=mask,
        scale=rule.scale,
    )
    return out.permute(2, 0, 1, 3).flatten(1)


def _attend_in_pieces(
    query: torch.Tensor, keys: torch.Tensor, mask: torch.Tensor | None, rule: AttentionRule
) -> torch.Tensor:
    """Attend by definition with some rows at a time, so that no more than SCORES_AT_ONCE scores are in memory."""
    rows = max(1, SCORES_AT_ONCE // (query.shape[1] * max(1, len(keys))))
    masks = [None] * len(query) if mask is None else torch.split(mask, rows)
    pieces = [
        _attend_by_definition(piece, keys, keys, piece_mask, rule)
        for piece, piece_mask in zip(torch.split(query, rows), masks, strict=False)
    ]
    return torch.cat(pieces)


def _attend_by_definition(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, rule: AttentionRule
) -> torch.Tensor:
    """Return softmax(cap · tanh(scale / cap · q · kᵀ) + mask) · v, the softmax in float32; shapes as in `_attend`.

    Sinks are a column more of the scores, which meets no value.

    KV heads are computed one after another, so that the scores of one are in memory at a time.
    """
    by_group = query.reshape(len(query), keys.shape[1], -1, query.shape[-1])
    out = torch.empty_like(by_group, memory_format=torch.contiguous_format)
    for head in range(keys.shape[1]):
        scores = (by_group[:, head].transpose(0, 1) @ keys[:, head].t()).float()
        if rule.soft_cap is None:
            scores.mul_(rule.scale)
        else:
            scores.mul_(rule.scale / rule.soft_cap).tanh_().mul_(rule.soft_cap)
        if mask is not None:
            scores += mask
        if rule.sinks is not None:
            sinks = rule.sinks.view(keys.shape[1], -1, 1, 1)[head].expand(-1, len(query), -1)
            scores = torch.cat([scores, sinks], dim=-1)
        weights = scores.softmax(dim=-1)[..., : len(keys)].to(values.dtype)
        out[:, head] = (weights @ values[:, head]).transpose(0, 1)
    return out.flatten(1)
