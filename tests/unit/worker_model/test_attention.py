"""Both decode kernels and the backend equal plain attention over the same tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from hetero_worker.attention.base import AttentionBatch, DecodeRows, PrefillSpan
from hetero_worker.attention.decode import DecodeKernel, GatherDecode, SparseDecode
from hetero_worker.attention.kv_cache import LayerCache
from hetero_worker.attention.length_groups import LengthGroup, group_by_length
from hetero_worker.attention.paged import PagedAttention, paged_attention

pytestmark = pytest.mark.unit

HEAD_DIM = 16


class _Pool:
    """A cache with random content everywhere but in the null block, and sequences scattered in it."""

    def __init__(
        self,
        lengths: Sequence[int],
        *,
        kv_heads: int = 3,
        block_size: int = 4,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        generator = torch.Generator().manual_seed(len(lengths))
        counts = [-(-length // block_size) for length in lengths]
        num_blocks = 1 + sum(counts)
        self.cache = LayerCache.allocate(
            num_blocks=num_blocks,
            block_size=block_size,
            num_kv_heads=kv_heads,
            head_dim=HEAD_DIM,
            dtype=dtype,
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

    def expected(self, query: torch.Tensor, row: int, *, last: int) -> torch.Tensor:
        """Causal attention of the sequence's last `last` tokens, query [last, heads, head_dim], in float32."""
        slots = self.slots(row)
        group = query.shape[1] // self.cache.num_kv_heads
        key, value = (
            rows[slots].float().repeat_interleave(group, dim=1).transpose(0, 1)
            for rows in (self.cache.keys, self.cache.values)
        )
        hidden = torch.ones(last, len(slots), dtype=torch.bool).tril(len(slots) - last)
        out = F.scaled_dot_product_attention(query.float().transpose(0, 1), key, value, attn_mask=hidden)
        return out.transpose(0, 1).flatten(1)


@pytest.mark.parametrize("kernel", [SparseDecode(), GatherDecode()], ids=lambda kernel: kernel.name)
@pytest.mark.parametrize(
    "lengths",
    [[1], [9], [4, 4, 4], [5, 4, 3, 2, 1], [900, *[40] * 30], [601, 600, 41, 40, 39, 3]],
    ids=str,
)
@pytest.mark.parametrize("group", [1, 3])
def test_decode_equals_plain_attention(kernel: DecodeKernel, lengths: list[int], group: int) -> None:
    pool = _Pool(lengths)
    heads = 3 * group
    torch.manual_seed(1)
    query = torch.randn(len(lengths), heads, HEAD_DIM)
    attention = kernel.prepare(DecodeRows(pool.lengths, pool.tables), num_heads=heads, cache=pool.cache)
    out = attention(query, pool.cache)
    expected = torch.cat([pool.expected(query[i : i + 1], i, last=1) for i in range(len(lengths))])
    assert torch.allclose(out, expected, atol=2e-6)


def test_a_prepared_group_serves_every_layer() -> None:
    """The score buffer is reused: what an earlier layer left in it must not matter."""
    first, second = _Pool([9, 5, 2]), _Pool([9, 5, 2])
    second.cache.keys.mul_(-3.0)
    query = torch.randn(3, 6, HEAD_DIM)
    attention = SparseDecode().prepare(DecodeRows(first.lengths, first.tables), num_heads=6, cache=first.cache)
    for pool in (first, second, first):
        expected = torch.cat([pool.expected(query[i : i + 1], i, last=1) for i in range(3)])
        assert torch.allclose(attention(query, pool.cache), expected, atol=2e-6)


def _groups(pool: _Pool) -> list[LengthGroup]:
    decode = DecodeRows(pool.lengths, pool.tables)
    return group_by_length(decode, block_size=4, num_heads=9, launch_cost_elements=1000)


def test_short_rows_are_not_padded_to_a_long_one() -> None:
    groups = _groups(_Pool([900, *[40] * 30]))
    assert [group.slots.shape for group in groups] == [(1, 900), (30, 40)]
    assert [(group.begin, group.end) for group in groups] == [(0, 1), (1, 31)]


def test_rows_of_similar_length_stay_together() -> None:
    (group,) = _groups(_Pool([310, 305, 300, 299]))
    assert (group.begin, group.end, group.slots.shape) == (0, 4, (4, 310))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_backend_mixes_decode_fresh_spans_and_continued_spans(dtype: torch.dtype) -> None:
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
        prefills=(
            PrefillSpan(2, 11, 0, pool.tables[2, :3]),
            PrefillSpan(11, 16, 8, pool.tables[3, :4]),
        ),
    )
    out = paged_attention(dtype).begin(batch).attend(query, key, value, pool.cache)
    assert torch.equal(pool.cache.keys[mapping], key)
    expected = torch.cat(
        [pool.expected(query[end - n : end], i, last=n) for i, (end, n) in enumerate(zip(ends, last, strict=True))]
    )
    assert out.is_contiguous()
    assert torch.allclose(out.float(), expected, atol=2e-6 if dtype == torch.float32 else 3e-2)


def test_one_step_serves_layers_with_different_heads() -> None:
    lengths = [8, 5]
    wide, narrow = _Pool(lengths, kv_heads=3), _Pool(lengths, kv_heads=1)
    mapping = torch.stack([wide.slots(0)[-1], wide.slots(1)[-1]])
    batch = AttentionBatch(mapping, DecodeRows(wide.lengths, wide.tables), ())
    step = PagedAttention(SparseDecode()).begin(batch)
    for pool in (wide, narrow, wide):
        heads = pool.cache.num_kv_heads
        query, key, value = (torch.randn(2, heads, HEAD_DIM) for _ in range(3))
        out = step.attend(query, key, value, pool.cache)
        expected = torch.cat([pool.expected(query[i : i + 1], i, last=1) for i in range(2)])
        assert torch.allclose(out, expected, atol=2e-6)


def test_the_kernel_is_chosen_by_dtype() -> None:
    assert paged_attention(torch.float32).name == "paged-sparse"
    assert paged_attention(torch.bfloat16).name == "paged-gather"
