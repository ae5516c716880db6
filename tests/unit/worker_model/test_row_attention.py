"""Attention row by row: a row has the same bits in any step, however its sequence came to the cache."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hetero_worker.attention.base import AttentionBatch, AttentionRule, DecodeRows, PrefillSpan
from hetero_worker.attention.torch_paged import TorchPagedAttention
from tests.support.paged_cases import PagedCase

pytestmark = pytest.mark.unit

HEAD_DIM = 16
RULES = {
    "all": AttentionRule(HEAD_DIM**-0.5),
    "a window": AttentionRule(HEAD_DIM**-0.5, window=7),
    "capped": AttentionRule(0.3, soft_cap=2.0),
    "a window, capped": AttentionRule(0.3, window=50, soft_cap=2.0),
}
each_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def attended(case: PagedCase, batch: AttentionBatch, rows: torch.Tensor, rule: AttentionRule) -> torch.Tensor:
    """What a step of its own makes of these rows of the case."""
    given = (case.query[rows], case.key[rows], case.value[rows])
    return TorchPagedAttention(batch_invariant=True).begin(batch).attend(*given, case.cache, rule)


@each_rule
def test_it_is_attention_by_the_definition(rule: AttentionRule) -> None:
    case = PagedCase(decode=[70, 21, 1], spans=[(0, 9), (30, 5)], head_dim=HEAD_DIM)
    got = attended(case, case.batch, torch.arange(len(case.query)), rule)
    torch.testing.assert_close(got.double(), case.expected(rule), rtol=1e-5, atol=1e-5)


@each_dtype
@each_rule
def test_a_sequence_alone_has_the_bits_that_it_has_in_company(rule: AttentionRule, dtype: torch.dtype) -> None:
    case = PagedCase(decode=[300, 70, 21, 1], spans=[(0, 33), (30, 5), (128, 2)], head_dim=HEAD_DIM, dtype=dtype)
    whole = attended(case, case.batch, torch.arange(len(case.query)), rule)
    for i in range(len(case.lengths)):
        rows = torch.arange(len(case.query))[case.rows_of(i)]
        alone = case.batch_of([i], num_decode=int(i < 4))
        assert torch.equal(attended(case, alone, rows, rule), whole[rows]), f"sequence {i}"


@each_dtype
@each_rule
@pytest.mark.parametrize("kv_heads", [1, 3])
def test_a_prompt_in_pieces_and_token_by_token_has_the_bits_of_the_whole(
    rule: AttentionRule, dtype: torch.dtype, kv_heads: int
) -> None:
    """Odd numbers of heads: what one thread gets begins elsewhere than what another gets."""
    length = 67
    case = PagedCase(spans=[(0, length)], kv_heads=kv_heads, head_dim=HEAD_DIM, dtype=dtype)
    whole = attended(case, case.batch, torch.arange(length), rule)
    slots, blocks = case.slots(0), case.blocks[0]
    nothing = DecodeRows(np.zeros(0, dtype=np.int32), np.zeros((0, 1), dtype=np.int32))
    for begin, end in ((0, 1), (1, 13), (13, 64), (64, length)):
        piece = AttentionBatch(slots[begin:end], nothing, (PrefillSpan(0, end - begin, begin, blocks),))
        assert torch.equal(attended(case, piece, torch.arange(begin, end), rule), whole[begin:end])
    for position in range(length):
        row = DecodeRows(np.array([position + 1], dtype=np.int32), blocks[None])
        one = AttentionBatch(slots[position : position + 1], row, ())
        assert torch.equal(attended(case, one, torch.tensor([position]), rule)[0], whole[position])


@each_dtype
def test_where_and_in_what_blocks_the_keys_lie_makes_no_difference(dtype: torch.dtype) -> None:
    rule, results = RULES["a window"], []
    reference = PagedCase(decode=[45], head_dim=HEAD_DIM, dtype=dtype)
    kept = [rows[reference.slots(0)] for rows in (reference.cache.keys, reference.cache.values)]
    for block_size in (1, 4, 7, 128):
        case = PagedCase(decode=[45], head_dim=HEAD_DIM, block_size=block_size, dtype=dtype, seed=block_size)
        for rows, known in zip((case.cache.keys, case.cache.values), kept, strict=True):
            rows[case.slots(0)] = known
        given = (reference.query, reference.key, reference.value)
        results.append(TorchPagedAttention(batch_invariant=True).begin(case.batch).attend(*given, case.cache, rule))
    assert all(torch.equal(result, results[0]) for result in results)


def test_what_lies_behind_a_sequences_end_is_not_read() -> None:
    case = PagedCase(decode=[5], head_dim=HEAD_DIM)
    clean = attended(case, case.batch, torch.arange(1), RULES["all"])
    free = torch.ones(len(case.cache.keys), dtype=torch.bool)
    free[case.slots(0)] = False
    for rows in (case.cache.keys, case.cache.values):
        rows[free] = float("nan")
    assert torch.equal(attended(case, case.batch, torch.arange(1), RULES["all"]), clean)


def test_layers_one_after_another_and_what_comes_after_a_release_are_the_same() -> None:
    backend, rule = TorchPagedAttention(batch_invariant=True), RULES["all"]
    case = PagedCase(decode=[20, 20], head_dim=HEAD_DIM)
    step = backend.begin(case.batch)
    first, second = (step.attend(case.query, case.key, case.value, case.cache, rule) for _ in range(2))
    backend.release()
    after = backend.begin(case.batch).attend(case.query, case.key, case.value, case.cache, rule)
    assert torch.equal(first, second)
    assert torch.equal(first, after)
