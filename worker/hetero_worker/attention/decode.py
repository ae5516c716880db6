"""Decode attention over scattered cache slots: two kernels behind one protocol.

`SparseDecode` never copies the cache. Scores are a sampled matrix product: a CSR pattern names, for every
(row, head), the cache rows it may see, and only these dot products are computed. The weighted sum of values is
an embedding bag with the softmax as per-sample weights. At 32 rows of 300 tokens (3 KV heads of 64, 2 cores)
that takes 0.7 ms a layer, against 1.7 ms for gathering into a rectangle first, three quarters of which is the
gathering.

`GatherDecode` does gather, and calls scaled_dot_product_attention with the query heads of a group folded into
the query length. It serves dtypes that the sparse product lacks, and is what the other is tested against.

Indices, masks, scores and gathered rows lie in the step's workspace, which lasts. Neither the embedding bag nor
scaled_dot_product_attention can write where they are told: their results are temporaries of the step.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Final, Protocol

import numpy as np
import torch
from torch.nn import functional as F

from hetero_worker.attention.base import AttentionRule, DecodeRows
from hetero_worker.attention.kv_cache import LayerCache
from hetero_worker.attention.length_groups import LengthGroup, group_by_length
from hetero_worker.attention.soft_cap import capped_attention
from hetero_worker.attention.workspace import Workspace

_MASKED_SCORE: Final = -1e30
"""Finite, so that 0 · score stays 0 when the buffer is reused; softmax makes an exact 0 of it."""
_SOFTMAX_COST_ELEMENTS: Final = 1000
"""Padded scores that cost as much time as one softmax more: measured 8 µs against 8 ns a score."""
_GATHER_COST_ELEMENTS: Final = 6000
"""The same for one gather and product more: measured 40 µs."""


class DecodeAttention(Protocol):
    """A kernel prepared for one step's decode rows; every layer with as many heads, and the window, may call it."""

    def __call__(self, query: torch.Tensor, cache: LayerCache, rule: AttentionRule) -> torch.Tensor:
        """query [rows, heads, head_dim] → [rows, heads · head_dim]."""
        ...


class DecodeKernel(Protocol):
    """A way to attend with one query token a sequence."""

    @property
    def name(self) -> str: ...

    def prepare(
        self, decode: DecodeRows, *, num_heads: int, window: int | None, cache: LayerCache, workspace: Workspace
    ) -> DecodeAttention:
        """`cache` is any of the caches that will be attended to: it tells their shape.

        The workspace belongs to what is returned, for as long as that is used.
        """
        ...


class SparseDecode:
    """float32 only."""

    name = "paged-sparse"

    def __init__(self) -> None:
        # torch says once a process that CSR is in beta; the two operators used here are tested against SDPA.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            _csr(torch.tensor([0, 1]), torch.tensor([0]), torch.zeros(1), num_columns=1)

    def prepare(
        self, decode: DecodeRows, *, num_heads: int, window: int | None, cache: LayerCache, workspace: Workspace
    ) -> DecodeAttention:
        groups = group_by_length(
            decode,
            block_size=cache.block_size,
            window=window,
            num_heads=num_heads,
            launch_cost_elements=_SOFTMAX_COST_ELEMENTS,
            workspace=workspace,
        )
        return _SparseRows(groups, num_heads=num_heads, cache=cache, workspace=workspace)


class _SparseRows:
    """One product and one bag for all rows; only the softmax goes group by group, on views of the scores."""

    def __init__(
        self, groups: Sequence[LengthGroup], *, num_heads: int, cache: LayerCache, workspace: Workspace
    ) -> None:
        num_columns = cache.keys.shape[0] * cache.num_kv_heads
        sizes = [group.slots.size * num_heads for group in groups]
        total = sum(sizes)
        dtype = torch.int64 if max(total, num_columns) >= 2**31 else torch.int32
        self._columns = workspace.take("columns", (total,), dtype)
        starts = workspace.take("starts", (sum(group.num_rows for group in groups) * num_heads + 1,), dtype)
        _fill_starts(starts, groups, num_heads, workspace)
        for group, part in zip(groups, torch.split(self._columns, sizes), strict=True):
            _fill_columns(part, group, num_heads, cache.num_kv_heads, workspace)
        self._bags = starts[:-1]
        scores = workspace.take("scores", (total,), torch.float32)
        self._scores = _csr(starts, self._columns, scores, num_columns=num_columns)
        self._values = self._scores.values()
        self._mask = _additive_mask(groups, sizes, num_heads, workspace)
        self._rectangles = [
            part.view(-1, group.longest) for part, group in zip(torch.split(self._values, sizes), groups, strict=True)
        ]

    def __call__(self, query: torch.Tensor, cache: LayerCache, rule: AttentionRule) -> torch.Tensor:
        head_dim = query.shape[-1]
        torch.sparse.sampled_addmm(
            self._scores,
            query.reshape(-1, head_dim),
            cache.keys.view(-1, head_dim).t(),
            beta=0.0,
            alpha=rule.scale if rule.soft_cap is None else rule.scale / rule.soft_cap,
            out=self._scores,
        )
        if rule.soft_cap is not None:
            self._values.tanh_().mul_(rule.soft_cap)
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

    def prepare(
        self, decode: DecodeRows, *, num_heads: int, window: int | None, cache: LayerCache, workspace: Workspace
    ) -> DecodeAttention:
        groups = group_by_length(
            decode,
            block_size=cache.block_size,
            window=window,
            num_heads=num_heads,
            launch_cost_elements=_GATHER_COST_ELEMENTS,
            workspace=workspace,
        )
        return _GatherRows([_GatherGroup(group, num_heads, cache.num_kv_heads, workspace) for group in groups])


class _GatherRows:
    def __init__(self, groups: Sequence[_GatherGroup]) -> None:
        self._groups = groups

    def __call__(self, query: torch.Tensor, cache: LayerCache, rule: AttentionRule) -> torch.Tensor:
        return torch.cat([group(query[group.rows], cache, rule) for group in self._groups])


class _GatherGroup:
    def __init__(self, group: LengthGroup, num_heads: int, num_kv_heads: int, workspace: Workspace) -> None:
        self.rows = slice(group.begin, group.end)
        self._num_rows, self._longest = group.slots.shape
        self._slots = torch.from_numpy(group.slots).view(-1)
        self._folding = (num_kv_heads, num_heads // num_kv_heads)
        self._workspace = workspace
        self._visible: torch.Tensor | None = None
        if group.padding is not None:
            visible = torch.from_numpy(~group.padding)[:, None, None, :]
            self._visible = visible.expand(self._num_rows, 1, self._folding[1], self._longest)

    def __call__(self, query: torch.Tensor, cache: LayerCache, rule: AttentionRule) -> torch.Tensor:
        folded = query.reshape(self._num_rows, *self._folding, query.shape[-1])
        keys, values = self._gather("keys", cache.keys), self._gather("values", cache.values)
        if rule.soft_cap is not None:
            out = capped_attention(folded, keys, values, mask=self._visible, scale=rule.scale, soft_cap=rule.soft_cap)
        else:
            out = F.scaled_dot_product_attention(folded, keys, values, attn_mask=self._visible, scale=rule.scale)
        return out.reshape(self._num_rows, -1)

    def _gather(self, name: str, cache_rows: torch.Tensor) -> torch.Tensor:
        """[rows, kv_heads, longest, head_dim]; groups are worked off one after another, in the same memory."""
        gathered = self._workspace.take(name, (len(self._slots), *cache_rows.shape[1:]), cache_rows.dtype)
        torch.index_select(cache_rows, 0, self._slots, out=gathered)
        return gathered.view(self._num_rows, self._longest, *cache_rows.shape[1:]).transpose(1, 2)


def _fill_columns(
    columns: torch.Tensor, group: LengthGroup, num_heads: int, num_kv_heads: int, workspace: Workspace
) -> None:
    """Row in the cache seen as [slots · kv_heads, head_dim], for every (row, head, token), flat."""
    shape = (group.num_rows, num_kv_heads, num_heads // num_kv_heads, group.longest)
    of_heads = columns.numpy().reshape(shape)
    np.multiply(group.slots[:, None, None, :], num_kv_heads, out=of_heads)
    np.add(of_heads, workspace.counting(num_kv_heads).numpy()[:, None, None], out=of_heads)


def _fill_starts(starts: torch.Tensor, groups: Sequence[LengthGroup], num_heads: int, workspace: Workspace) -> None:
    """Where each (row, head)'s scores begin, and the end of the last: [rows · heads + 1]."""
    array, begin, first = starts.numpy(), 0, 0
    for group in groups:
        count = group.num_rows * num_heads
        part = array[begin : begin + count + 1]
        np.multiply(workspace.counting(count + 1).numpy(), group.longest, out=part)
        np.add(part, first, out=part)
        begin, first = begin + count, int(part[-1])


def _csr(starts: torch.Tensor, columns: torch.Tensor, values: torch.Tensor, *, num_columns: int) -> torch.Tensor:
    size = (len(starts) - 1, num_columns)
    return torch.sparse_csr_tensor(starts, columns, values, size=size, check_invariants=False)


def _additive_mask(
    groups: Sequence[LengthGroup], sizes: Sequence[int], num_heads: int, workspace: Workspace
) -> torch.Tensor | None:
    """Flat, as the scores: 0 at tokens, very negative behind a row's end; None when nothing is padded."""
    if all(group.padding is None for group in groups):
        return None
    mask = workspace.take("mask", (sum(sizes),), torch.float32).zero_()
    for group, part in zip(groups, torch.split(mask, list(sizes)), strict=True):
        if group.padding is not None:
            of_heads = part.view(group.num_rows, num_heads, group.longest).numpy()
            np.copyto(of_heads, np.float32(_MASKED_SCORE), where=group.padding[:, None, :])
    return mask
