"""The torch backend, whole and row by row, equals attention written out over the same tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from hetero_worker.attention.base import AttentionBackend, AttentionBatch, AttentionRule, DecodeRows, PrefillSpan
from hetero_worker.attention.kv_cache import LayerCache
from hetero_worker.attention.torch_paged import TorchPagedAttention

pytestmark = pytest.mark.unit

HEAD_DIM = 16
RULE = AttentionRule(HEAD_DIM**-0.5)
each_backend = pytest.mark.parametrize(
    "backend", [TorchPagedAttention(), TorchPagedAttention(batch_invariant=True)], ids=lambda backend: backend.name
)


class _Pool:
    """A cache with random content everywhere but in the null block, and sequences scattered in it."""

    def __init__(
        self, lengths: Sequence[int], *, kv_heads: int = 3, block_size: int = 4, dtype: torch.dtype = torch.float32
    ) -> None:
        generator = torch.Generator().manual_seed(len(lengths))
        counts = [-(-length // block_size) for length in lengths]
        num_blocks = 1 + sum(counts)
        self.cache = LayerCache.allocate(
            num_blocks=num_blocks, block_size=block_size, num_kv_heads=kv_heads, head_dim=HEAD_DIM, dtype=dtype
        )
        for rows in (self.cache.keys, self.cache.values):
            rows[block_size:] = torch.randn(rows[block_size:].shape, generator=generator).to(dtype)
        ids = np.random.default_rng(0).permutation(np.arange(1, num_blocks, dtype=np.int32))
        self.tables = np.zeros((len(lengths), max(counts)), dtype=np.int32)
        for row, (end, count) in enumerate(zip(np.cumsum(counts), counts, strict=True)):
            self.tables[row, :count] = ids[end - count : end]
        self.lengths = np.array(lengths, dtype=np.int32)

    def slots(self, row: int) -> torch.Tensor:
        """Cache slots of a sequence's tokens, int64."""
        positions = np.arange(self.lengths[row])
        size = self.cache.block_size
        return torch.from_numpy(self.tables[row, positions // size] * size + positions % size).long()

    def expected(self, query: torch.Tensor, row: int, *, last: int, rule: AttentionRule | None = None) -> torch.Tensor:
        """Causal attention of the sequence's last `last` tokens, query [last, heads, head_dim], in float32."""
        slots = self.slots(row)
        group = query.shape[1] // self.cache.num_kv_heads
        key, value = (
            rows[slots].float().repeat_interleave(group, dim=1).transpose(0, 1)
            for rows in (self.cache.keys, self.cache.values)
        )
        hidden = torch.ones(last, len(slots), dtype=torch.bool).tril(len(slots) - last)
        if rule is not None:
            return _by_rule(query.float().transpose(0, 1), key, value, rule)
        out = F.scaled_dot_product_attention(query.float().transpose(0, 1), key, value, attn_mask=hidden)
        return out.transpose(0, 1).flatten(1)


def _by_rule(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: AttentionRule) -> torch.Tensor:
    """The definition, written out: [heads, rows, head_dim] → [rows, heads · head_dim]."""
    rows, tokens = query.shape[1], key.shape[1]
    scores = rule.scale * query @ key.transpose(1, 2)
    if rule.soft_cap is not None:
        scores = rule.soft_cap * torch.tanh(scores / rule.soft_cap)
    for i in range(rows):
        own = tokens - rows + i
        for j in range(tokens):
            if j > own or (rule.window is not None and j <= own - rule.window):
                scores[:, i, j] = float("-inf")
    return (scores.softmax(dim=-1) @ value).transpose(0, 1).flatten(1)


@each_backend
@pytest.mark.parametrize(
    "lengths", [[1], [9], [4, 4, 4], [5, 4, 3, 2, 1], [90, *[19] * 3, *[7] * 4], [8, 8, 1], [900, *[40] * 30]], ids=str
)
@pytest.mark.parametrize("window", [None, 1, 4, 6])
def test_decode_equals_plain_attention(backend: AttentionBackend, lengths: list[int], window: int | None) -> None:
    pool, rule = _Pool(lengths), AttentionRule(0.25, window=window)
    torch.manual_seed(1)
    query, key, value = (torch.randn(len(lengths), heads, HEAD_DIM) for heads in (6, 3, 3))
    # Behind a row's last block lies whatever was there before.
    for row, length in enumerate(lengths):
        pool.tables[row, -(-length // 4) :] = 9999
    mapping = torch.stack([pool.slots(i)[-1] for i in range(len(lengths))])
    batch = AttentionBatch(mapping, DecodeRows(pool.lengths, pool.tables), ())
    out = backend.begin(batch).attend(query, key, value, pool.cache, rule)
    expected = [pool.expected(query[i : i + 1], i, last=1, rule=rule) for i in range(len(lengths))]
    assert torch.allclose(out, torch.cat(expected), atol=2e-6)


@each_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_backend_mixes_decode_fresh_spans_and_continued_spans(backend: AttentionBackend, dtype: torch.dtype) -> None:
    lengths, last = [7, 6, 9, 13], [1, 1, 9, 5]
    pool = _Pool(lengths, dtype=dtype)
    ends = np.cumsum(last)
    torch.manual_seed(2)
    total = int(ends[-1])
    query = torch.randn(total, 6, HEAD_DIM).to(dtype)
    key, value = torch.randn(2, total, 3, HEAD_DIM).to(dtype)
    mapping = torch.cat([pool.slots(i)[lengths[i] - last[i] :] for i in range(4)])
    batch = AttentionBatch(
        slot_mapping=mapping,
        decode=DecodeRows(pool.lengths[:2], pool.tables[:2]),
        prefills=(PrefillSpan(2, 11, 0, pool.tables[2, :3]), PrefillSpan(11, 16, 8, pool.tables[3, :4])),
    )
    out = backend.begin(batch).attend(query, key, value, pool.cache, RULE)
    assert torch.equal(pool.cache.keys[mapping], key)
    expected = torch.cat(
        [pool.expected(query[end - n : end], i, last=n) for i, (end, n) in enumerate(zip(ends, last, strict=True))]
    )
    assert out.is_contiguous()
    assert torch.allclose(out.float(), expected, atol=2e-6 if dtype == torch.float32 else 3e-2)


@each_backend
def test_one_step_serves_layers_with_different_heads(backend: AttentionBackend) -> None:
    lengths = [8, 5]
    wide, narrow = _Pool(lengths, kv_heads=3), _Pool(lengths, kv_heads=1)
    mapping = torch.stack([wide.slots(0)[-1], wide.slots(1)[-1]])
    batch = AttentionBatch(mapping, DecodeRows(wide.lengths, wide.tables), ())
    step = backend.begin(batch)
    for pool in (wide, narrow, wide):
        heads = pool.cache.num_kv_heads
        query, key, value = (torch.randn(2, heads, HEAD_DIM) for _ in range(3))
        out = step.attend(query, key, value, pool.cache, RULE)
        expected = torch.cat([pool.expected(query[i : i + 1], i, last=1) for i in range(2)])
        assert torch.allclose(out, expected, atol=2e-6)


RULES = {
    "scale": AttentionRule(0.31),
    "window": AttentionRule(0.25, window=5),
    "window of one": AttentionRule(0.25, window=1),
    "window of a block": AttentionRule(0.25, window=4),
    "wide window": AttentionRule(0.25, window=10_000),
    "soft cap": AttentionRule(0.7, soft_cap=1.5),
    "window and soft cap": AttentionRule(0.7, window=6, soft_cap=1.5),
}


@each_backend
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_step_serves_layers_of_different_rules(
    backend: AttentionBackend, rule: AttentionRule, dtype: torch.dtype
) -> None:
    """Decode rows, a fresh span and continued ones, longer and shorter than the window."""
    lengths, last = [11, 2, 9, 13, 21], [1, 1, 9, 5, 2]
    ends = np.cumsum(last)
    layers = [_Pool(lengths, dtype=dtype), _Pool(lengths, dtype=dtype)]
    mapping = torch.cat([layers[0].slots(i)[lengths[i] - last[i] :] for i in range(5)])
    tables = layers[0].tables
    spans = (
        PrefillSpan(2, 11, 0, tables[2, :3]),
        PrefillSpan(11, 16, 8, tables[3, :4]),
        PrefillSpan(16, 18, 19, tables[4, :6]),
    )
    step = backend.begin(AttentionBatch(mapping, DecodeRows(layers[0].lengths[:2], tables[:2]), spans))
    for pool, own in zip(layers, (rule, RULE), strict=True):
        torch.manual_seed(2)
        query = torch.randn(18, 6, HEAD_DIM).to(dtype)
        key, value = torch.randn(2, 18, 3, HEAD_DIM).to(dtype)
        out = step.attend(query, key, value, pool.cache, own)
        expected = [
            pool.expected(query[end - n : end], i, last=n, rule=own)
            for i, (end, n) in enumerate(zip(ends, last, strict=True))
        ]
        assert out.is_contiguous()
        assert torch.allclose(out.float(), torch.cat(expected), atol=2e-6 if dtype == torch.float32 else 3e-2)


@each_backend
def test_a_window_reads_no_more_of_the_cache_than_it_reaches(backend: AttentionBackend) -> None:
    """What lies before the window's first block may be anything, even no number."""
    pool = _Pool([21])
    pool.cache.keys[pool.slots(0)[:12]] = float("nan")
    pool.cache.values[pool.slots(0)[:12]] = float("nan")
    span = PrefillSpan(0, 2, 19, pool.tables[0])
    step = backend.begin(AttentionBatch(pool.slots(0)[19:], DecodeRows(pool.lengths[:0], pool.tables[:0]), (span,)))
    query, key, value = (torch.randn(2, heads, HEAD_DIM) for heads in (6, 3, 3))
    assert step.attend(query, key, value, pool.cache, AttentionRule(0.25, window=8)).isfinite().all()
