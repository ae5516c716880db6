"""Sequences scattered over a paged cache, a step that goes on with them, and what attention then has to give.

The expected values are computed in float64, by the definition, from the very cache and inputs that the backend gets.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from hetero_worker.attention.base import AttentionBatch, AttentionRule, DecodeRows, PrefillSpan
from hetero_worker.attention.kv_cache import LayerCache
from tests.support.seeded import seeded, zeros

_JUNK_BLOCK = 9999
"""Behind a sequence's last block lies whatever was there before."""


class PagedCase:
    """Decode rows of `decode` tokens each, longest first, then spans of (computed tokens, rows)."""

    def __init__(
        self,
        *,
        decode: Sequence[int] = (),
        spans: Sequence[tuple[int, int]] = (),
        kv_heads: int = 2,
        group: int = 3,
        head_dim: int = 16,
        block_size: int = 4,
        dtype: torch.dtype = torch.float32,
        cache_dtype: torch.dtype | None = None,
        seed: int = 0,
    ) -> None:
        """`cache_dtype` None: keys and values are cached as `dtype`, that of queries."""
        self.group, self.dtype = group, dtype
        self.lengths = [*decode, *(computed + rows for computed, rows in spans)]
        self.rows = [1] * len(decode) + [rows for _, rows in spans]
        self._generator = seeded(seed)
        counts = [-(-length // block_size) for length in self.lengths]
        self.cache = LayerCache.allocate(
            num_blocks=1 + sum(counts), block_size=block_size, num_kv_heads=kv_heads, head_dim=head_dim,
            dtype=cache_dtype or dtype, zeros=zeros,
        )  # fmt: skip
        for tensor in (self.cache.keys, self.cache.values):
            tensor[block_size:] = self._random(*tensor[block_size:].shape)
        ids = np.random.default_rng(seed).permutation(np.arange(1, 1 + sum(counts), dtype=np.int32))
        self.blocks = np.split(ids, np.cumsum(counts)[:-1])
        total = sum(self.rows)
        self.query = self._random(total, kv_heads * group, head_dim)
        self.key, self.value = (self._random(total, kv_heads, head_dim) for _ in range(2))
        self.batch = self.batch_of(range(len(self.lengths)), num_decode=len(decode))

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator).to(self.dtype)

    def slots(self, sequence: int) -> torch.Tensor:
        """int64 [tokens]."""
        positions, size = np.arange(self.lengths[sequence]), self.cache.block_size
        slots = self.blocks[sequence][positions // size].astype(np.int64) * size + positions % size
        return torch.tensor(slots)

    def rows_of(self, sequence: int) -> slice:
        """Rows of the step."""
        end = sum(self.rows[: sequence + 1])
        return slice(end - self.rows[sequence], end)

    def batch_of(self, sequences: Sequence[int], *, num_decode: int) -> AttentionBatch:
        """The same sequences, or some, as another step: rows are counted from its first."""
        decode = sequences[:num_decode]
        tables = np.full((num_decode, max((len(self.blocks[i]) for i in decode), default=1)), _JUNK_BLOCK, np.int32)
        for row, i in enumerate(decode):
            tables[row, : len(self.blocks[i])] = self.blocks[i]
        spans, begin = [], num_decode
        for i in sequences[num_decode:]:
            end = begin + self.rows[i]
            spans.append(PrefillSpan(begin, end, self.lengths[i] - self.rows[i], self.blocks[i]))
            begin = end
        return AttentionBatch(
            slot_mapping=torch.cat([self.slots(i)[-self.rows[i] :] for i in sequences]),
            decode=DecodeRows(np.array([self.lengths[i] for i in decode], dtype=np.int32), tables),
            prefills=tuple(spans),
        )

    def expected(self, rule: AttentionRule) -> torch.Tensor:
        """float64 [rows, heads · head_dim], of the cache as it is: the step's keys and values are in it."""
        return torch.cat([self._of_sequence(i, rule) for i in range(len(self.lengths))])

    def _of_sequence(self, sequence: int, rule: AttentionRule) -> torch.Tensor:
        slots, rows = self.slots(sequence), self.rows[sequence]
        query = self.query[self.rows_of(sequence)].double().transpose(0, 1)
        key, value = (
            tensor[slots].double().repeat_interleave(self.group, dim=1).transpose(0, 1)
            for tensor in (self.cache.keys, self.cache.values)
        )
        scores = rule.scale * query @ key.transpose(1, 2)
        if rule.soft_cap is not None:
            scores = rule.soft_cap * torch.tanh(scores / rule.soft_cap)
        own = torch.arange(len(slots) - rows, len(slots))[:, None]
        tokens = torch.arange(len(slots))[None, :]
        is_seen = tokens <= own
        if rule.window is not None:
            is_seen &= tokens > own - rule.window
        scores = scores.masked_fill(~is_seen, float("-inf"))
        if rule.sinks is not None:
            sinks = rule.sinks.double().view(-1, 1, 1).expand(-1, rows, 1)
            scores = torch.cat([scores, sinks], dim=-1)
        weights = scores.softmax(dim=-1)[..., : len(slots)]
        # What no row sees is not read, and may be no number.
        return (weights @ value.nan_to_num()).transpose(0, 1).flatten(1)
