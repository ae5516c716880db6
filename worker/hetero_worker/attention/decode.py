"""Decode attention over scattered cache slots: two kernels behind one protocol.

`SparseDecode` never copies the cache. Scores are a sampled matrix product: a CSR pattern names, for every
(row, head), the cache rows it may see, and only these dot products are computed. The weighted sum of values is
an embedding bag with the softmax as per-sample weights. At 32 rows of 300 tokens (3 KV heads of 64, 2 cores)
that takes 0.7 ms a layer, against 1.7 ms for gathering into a rectangle first, three quarters of which is the
gathering.

`GatherDecode` does gather, and calls scaled_dot_product_attention with the query heads of a group folded into
the query length. It serves dtypes that the sparse product lacks, and is what the other is tested against.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Final, Protocol

import numpy as np
import torch
from torch.nn import functional as F

from hetero_worker.attention.base import DecodeRows
from hetero_worker.attention.kv_cache import LayerCache
from hetero_worker.attention.length_groups import LengthGroup, group_by_length

_MASKED_SCORE: Final = -1e30
"""Finite, so that 0 · score stays 0 when the buffer is reused; softmax makes an exact 0 of it."""
_SOFTMAX_COST_ELEMENTS: Final = 1000
"""Padded scores that cost as much time as one softmax more: measured 8 µs against 8 ns a score."""
_GATHER_COST_ELEMENTS: Final = 6000
"""The same for one gather and product more: measured 40 µs."""


class DecodeAttention(Protocol):
    """A kernel prepared for one step's decode rows; every layer with as many heads may call it."""

    def __call__(self, query: torch.Tensor, cache: LayerCache) -> torch.Tensor:
        """query [rows, heads, head_dim] → [rows, heads · head_dim]."""
        ...


class DecodeKernel(Protocol):
    """A way to attend with one query token a sequence."""

    @property
    def name(self) -> str: ...

    def prepare(self, decode: DecodeRows, *, num_heads: int, cache: LayerCache) -> DecodeAttention:
        """`cache` is any of the caches that will be attended to: it tells their shape."""
        ...


class SparseDecode:
    """float32 only."""

    name = "paged-sparse"

    def __init__(self) -> None:
        # torch says once a process that CSR is in beta; the two operators used here are tested against SDPA.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            _csr(torch.tensor([0, 1]), torch.tensor([0]), num_columns=1)

    def prepare(self, decode: DecodeRows, *, num_heads: int, cache: LayerCache) -> DecodeAttention:
        groups = group_by_length(
            decode, block_size=cache.block_size, num_heads=num_heads, launch_cost_elements=_SOFTMAX_COST_ELEMENTS
        )
        return _SparseRows(groups, num_heads=num_heads, cache=cache)


class _SparseRows:
    """One product and one bag for all rows; only the softmax goes group by group, on views of the scores."""

    def __init__(self, groups: Sequence[LengthGroup], *, num_heads: int, cache: LayerCache) -> None:
        num_columns = cache.keys.shape[0] * cache.num_kv_heads
        sizes = [group.slots.size * num_heads for group in groups]
        dtype = torch.int64 if max(sum(sizes), num_columns) >= 2**31 else torch.int32
        self._columns = torch.cat([_cache_rows(group, num_heads, cache.num_kv_heads, dtype) for group in groups])
        starts = _row_starts(groups, num_heads, dtype)
        self._bags = starts[:-1]
        self._scores = _csr(starts, self._columns, num_columns=num_columns)
        self._values = self._scores.values()
        self._mask = _additive_mask(groups, num_heads)
        self._rectangles = [
            part.view(-1, group.slots.shape[1])
            for part, group in zip(torch.split(self._values, sizes), groups, strict=True)
        ]

    def __call__(self, query: torch.Tensor, cache: LayerCache) -> torch.Tensor:
        head_dim = query.shape[-1]
        torch.sparse.sampled_addmm(
            self._scores,
            query.reshape(-1, head_dim),
            cache.keys.view(-1, head_dim).t(),
            beta=0.0,
            alpha=head_dim**-0.5,
            out=self._scores,
        )
        if self._mask is not None:
            self._values.add_(self._mask)
        for rectangle in self._rectangles:
            torch.softmax(rectangle, dim=-1, out=rectangle)
        summed = F.embedding_bag(
            self._columns,
            cache.values.view(-1, head_dim),
            self._bags,
            mode="sum",
            per_sample_weights=self._values,
        )
        return summed.view(query.shape[0], -1)


class GatherDecode:
    """Any floating dtype."""

    name = "paged-gather"

    def prepare(self, decode: DecodeRows, *, num_heads: int, cache: LayerCache) -> DecodeAttention:
        groups = group_by_length(
            decode, block_size=cache.block_size, num_heads=num_heads, launch_cost_elements=_GATHER_COST_ELEMENTS
        )
        return _GatherRows([_GatherGroup(group, num_heads, cache.num_kv_heads) for group in groups])


class _GatherRows:
    def __init__(self, groups: Sequence[_GatherGroup]) -> None:
        self._groups = groups

    def __call__(self, query: torch.Tensor, cache: LayerCache) -> torch.Tensor:
        return torch.cat([group(query[group.rows], cache) for group in self._groups])


class _GatherGroup:
    def __init__(self, group: LengthGroup, num_heads: int, num_kv_heads: int) -> None:
        self.rows = slice(group.begin, group.end)
        self._num_rows, self._longest = group.slots.shape
        self._slots = torch.from_numpy(group.slots).view(-1)
        self._folding = (num_kv_heads, num_heads // num_kv_heads)
        self._visible: torch.Tensor | None = None
        if (padding := group.padding) is not None:
            visible = torch.from_numpy(~padding)[:, None, None, :]
            self._visible = visible.expand(self._num_rows, 1, self._folding[1], self._longest)

    def __call__(self, query: torch.Tensor, cache: LayerCache) -> torch.Tensor:
        folded = query.reshape(self._num_rows, *self._folding, query.shape[-1])
        out = F.scaled_dot_product_attention(
            folded, self._gather(cache.keys), self._gather(cache.values), attn_mask=self._visible
        )
        return out.reshape(self._num_rows, -1)

    def _gather(self, cache_rows: torch.Tensor) -> torch.Tensor:
        gathered = cache_rows.index_select(0, self._slots)
        return gathered.view(self._num_rows, self._longest, *cache_rows.shape[1:]).transpose(1, 2)


def _cache_rows(group: LengthGroup, num_heads: int, num_kv_heads: int, dtype: torch.dtype) -> torch.Tensor:
    """Row in the cache seen as [slots · kv_heads, head_dim], for every (row, head, token), flat."""
    slots = torch.from_numpy(group.slots).to(dtype)
    heads = torch.arange(num_kv_heads, dtype=dtype)
    per_kv_head = slots[:, None, None, :] * num_kv_heads + heads[:, None, None]
    rows, longest = group.slots.shape
    return per_kv_head.expand(rows, num_kv_heads, num_heads // num_kv_heads, longest).reshape(-1)


def _row_starts(groups: Sequence[LengthGroup], num_heads: int, dtype: torch.dtype) -> torch.Tensor:
    """Where each (row, head)'s scores begin, and the end of the last: [rows · heads + 1]."""
    widths = np.repeat([g.slots.shape[1] for g in groups], [len(g.lengths) * num_heads for g in groups])
    return torch.from_numpy(np.concatenate([[0], np.cumsum(widths)])).to(dtype)


def _csr(starts: torch.Tensor, columns: torch.Tensor, *, num_columns: int) -> torch.Tensor:
    return torch.sparse_csr_tensor(
        starts,
        columns,
        torch.zeros(len(columns)),
        size=(len(starts) - 1, num_columns),
        check_invariants=False,
    )


def _additive_mask(groups: Sequence[LengthGroup], num_heads: int) -> torch.Tensor | None:
    """Flat, as the scores: 0 at tokens, very negative behind a row's end; None when nothing is padded."""
    if all(group.padding is None for group in groups):
        return None
    return torch.cat([_group_mask(group, num_heads) for group in groups])


def _group_mask(group: LengthGroup, num_heads: int) -> torch.Tensor:
    rows, longest = group.slots.shape
    hidden = torch.zeros(rows, 1, longest)
    if (padding := group.padding) is not None:
        hidden.masked_fill_(torch.from_numpy(padding).unsqueeze(1), _MASKED_SCORE)
    return hidden.expand(rows, num_heads, longest).reshape(-1)
