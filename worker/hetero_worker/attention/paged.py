"""The host's attention backend: a batched kernel for decode rows, SDPA span by span for the rest."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from hetero_worker.attention.base import AttentionBatch, PrefillSpan, StepAttention
from hetero_worker.attention.decode import DecodeAttention, DecodeKernel, GatherDecode, SparseDecode
from hetero_worker.attention.kv_cache import LayerCache


class PagedAttention:
    """Holds no state between steps."""

    def __init__(self, decode: DecodeKernel) -> None:
        self._decode = decode

    @property
    def name(self) -> str:
        return self._decode.name

    def begin(self, batch: AttentionBatch) -> StepAttention:
        return _PagedStep(batch, self._decode)


def paged_attention(dtype: torch.dtype) -> PagedAttention:
    """The backend for a dtype: the sparse kernel where its operators support it."""
    return PagedAttention(SparseDecode() if dtype == torch.float32 else GatherDecode())


class _PagedStep:
    """Indices are made by the first layer that needs them and shared by all with as many heads."""

    def __init__(self, batch: AttentionBatch, decode: DecodeKernel) -> None:
        self._batch = batch
        self._decode = decode
        self._prepared: dict[int, DecodeAttention] = {}
        self._spans = [_Span(span) for span in batch.prefills]

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cache: LayerCache) -> torch.Tensor:
        cache.write(self._batch.slot_mapping, key, value)
        if not self._spans:
            return self._attend_decode(query, cache)
        out = torch.empty(query.shape[0], query.shape[1] * query.shape[2], dtype=query.dtype)
        if num_decode := self._batch.decode.num_rows:
            out[:num_decode] = self._attend_decode(query[:num_decode], cache)
        for span in self._spans:
            rows = span.rows
            out[rows] = span.attend(query[rows], key[rows], value[rows], cache)
        return out

    def _attend_decode(self, query: torch.Tensor, cache: LayerCache) -> torch.Tensor:
        num_heads = query.shape[1]
        attention = self._prepared.get(num_heads)
        if attention is None:
            attention = self._decode.prepare(self._batch.decode, num_heads=num_heads, cache=cache)
            self._prepared[num_heads] = attention
        return attention(query, cache)


class _Span:
    """One sequence's rows: causal among themselves, after what is cached."""

    def __init__(self, span: PrefillSpan) -> None:
        self.rows = slice(span.begin, span.end)
        self._length = span.length
        self._block_ids: torch.Tensor | None = None
        self._mask: torch.Tensor | None = None
        if span.num_computed:
            self._block_ids = torch.from_numpy(span.block_ids)
            # Row i sees the cached tokens and the rows up to itself: a lower triangle, aligned bottom right.
            future = torch.full((span.end - span.begin, span.length), float("-inf"))
            self._mask = future.triu_(span.num_computed + 1)

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cache: LayerCache) -> torch.Tensor:
        if self._block_ids is not None and self._mask is not None:
            key, value = cache.read_blocks(self._block_ids, self._length)
            self._mask = self._mask.to(query.dtype)
        out = F.scaled_dot_product_attention(
            _heads_first(query),
            _heads_first(key),
            _heads_first(value),
            attn_mask=self._mask,
            is_causal=self._mask is None,
            enable_gqa=True,
        )
        return out.squeeze(0).transpose(0, 1).flatten(1)


def _heads_first(x: torch.Tensor) -> torch.Tensor:
    """[tokens, heads, head_dim] → [1, heads, tokens, head_dim]."""
    return x.transpose(0, 1).unsqueeze(0)
