"""Attention of several tokens of one sequence: causal among themselves, after what is cached.

Layers with the same window share a mask. A span that sees nothing but itself takes its keys and values from the step,
any other from the cache, where they have been written by then: with a window, only from the blocks that it reaches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from hetero_worker.attention.base import AttentionRule, PrefillSpan
from hetero_worker.attention.kv_cache import LayerCache
from hetero_worker.attention.soft_cap import capped_attention
from hetero_worker.platforms.base import HOST
from hetero_worker.platforms.host_copies import to_device

Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, float], torch.Tensor]
"""Attention of query [rows, heads, head_dim] to key and value [keys, kv_heads, head_dim], with an additive mask
[rows, keys], or causal without one, and the scale: [rows, heads · head_dim]."""


@dataclass(frozen=True, slots=True)
class _Sight:
    """What a span's rows see through a window."""

    block_ids: torch.Tensor | None
    """Where the keys and values are; None: they are the span's own."""
    num_keys: int
    mask: torch.Tensor | None
    """[rows, num_keys], to be added to scores; None: the lower triangle."""


def grouped(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """The host's Product: its kernel knows groups of query heads."""
    out = F.scaled_dot_product_attention(
        _heads_first(query),
        _heads_first(key),
        _heads_first(value),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=True,
    )
    return out.squeeze(0).transpose(0, 1).flatten(1)


def expanded(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """A device's Product: KV heads become the batch, and a group's query heads see theirs by a stride of 0.

    CUDA's fused kernels take no groups together with a mask, and without them the scores of all heads would be in
    memory.
    """
    num_rows, num_kv_heads, head_dim = len(query), key.shape[1], key.shape[2]
    of_groups = query.reshape(num_rows, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    num_grouped = of_groups.shape[1]
    out = F.scaled_dot_product_attention(
        of_groups,
        key.transpose(0, 1).unsqueeze(1).expand(-1, num_grouped, -1, -1),
        value.transpose(0, 1).unsqueeze(1).expand(-1, num_grouped, -1, -1),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
    )
    return out.permute(2, 0, 1, 3).flatten(1)


class Span:
    """A PrefillSpan, made ready by the first layer of each kind."""

    def __init__(self, span: PrefillSpan, *, product: Product = grouped, device: torch.device = HOST) -> None:
        self.rows = slice(span.begin, span.end)
        self._span = span
        self._product = product
        self._device = device
        self._sights: dict[int | None, _Sight] = {}

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cache: LayerCache, rule: AttentionRule
    ) -> torch.Tensor:
        """query [rows, heads, head_dim], key and value [rows, kv_heads, head_dim] → [rows, heads · head_dim]."""
        sight = self._sights.get(rule.window)
        if sight is None:
            sight = self._sights[rule.window] = self._look(rule, cache.block_size, query.dtype)
        if sight.block_ids is not None:
            key, value = cache.read_blocks(sight.block_ids, sight.num_keys)
        if rule.soft_cap is not None:
            return _capped(query, key, value, sight.mask, rule.scale, rule.soft_cap)
        return self._product(query, key, value, sight.mask, rule.scale)

    def _look(self, rule: AttentionRule, block_size: int, dtype: torch.dtype) -> _Sight:
        span, window = self._span, rule.window
        num_rows = span.end - span.begin
        if not span.num_computed:
            is_triangle = rule.soft_cap is None and (window is None or window >= num_rows)
            return _Sight(None, num_rows, None if is_triangle else self._mask(num_rows, num_rows, window, dtype))
        first_seen = 0 if window is None else max(0, span.num_computed + 1 - window)
        first_block = first_seen // block_size
        num_keys = span.length - first_block * block_size
        block_ids = torch.from_numpy(span.block_ids[first_block:])
        if self._device.type != HOST.type:
            block_ids = to_device(block_ids, self._device)
        return _Sight(block_ids, num_keys, self._mask(num_rows, num_keys, window, dtype))

    def _mask(self, num_rows: int, num_keys: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """0 where a row sees a key, else -∞. The last row sees the last key, each row before it one less."""
        own = num_keys - num_rows
        nothing = torch.full((num_rows, num_keys), float("-inf"), device=self._device)
        mask = nothing.triu(own + 1) if window is not None else nothing.triu_(own + 1)
        if window is not None:
            mask += nothing.tril_(own - window)
        return mask.to(dtype)


def _capped(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    soft_cap: float,
) -> torch.Tensor:
    """KV head by KV head: the scores of one are in memory at a time."""
    num_rows, num_kv_heads, head_dim = len(query), key.shape[1], query.shape[2]
    grouped = query.view(num_rows, num_kv_heads, -1, head_dim)
    out = torch.empty_like(grouped, memory_format=torch.contiguous_format)
    for head in range(num_kv_heads):
        of_group = grouped[:, head].transpose(0, 1)
        attended = capped_attention(of_group, key[:, head], value[:, head], mask=mask, scale=scale, soft_cap=soft_cap)
        out[:, head] = attended.transpose(0, 1)
    return out.flatten(1)


def _heads_first(x: torch.Tensor) -> torch.Tensor:
    """[tokens, heads, head_dim] → [1, heads, tokens, head_dim]."""
    return x.transpose(0, 1).unsqueeze(0)
