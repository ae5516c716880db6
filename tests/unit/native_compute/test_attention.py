"""Native attention over a paged cache: by the definition, whatever the shape, the instruction set and the team; and a
row's bits, which depend on its sequence and position alone."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_api.model_config import ModelConfig
from hetero_worker.attention.base import AttentionBatch, AttentionRule, DecodeRows, PrefillSpan
from hetero_worker.attention.native_paged import NativePagedAttention
from hetero_worker.backends.cpu import cpu_backend
from hetero_worker.native.op_queue import Arena, OpQueue
from tests.support.examples import examples
from tests.support.native_compute import compute_library, computing_with, op_queue_of
from tests.support.paged_cases import PagedCase
from tests.support.random_model import save_random_llama

pytestmark = pytest.mark.unit

RULES = {
    "all": AttentionRule(0.2),
    "a window": AttentionRule(0.2, window=7),
    "a window of one": AttentionRule(0.2, window=1),
    "a window of chunks": AttentionRule(0.2, window=200),
    "capped": AttentionRule(0.3, soft_cap=2.0),
    "a window, capped": AttentionRule(0.3, window=130, soft_cap=2.0),
}
each_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
SHAPES = [(8, 1, 1, 1), (16, 2, 3, 4), (20, 1, 2, 3), (64, 3, 3, 16), (72, 2, 7, 5), (80, 1, 71, 64), (256, 2, 16, 32)]
"""head_dim, KV heads, query heads of each, tokens of a block."""
TYPES = {torch.float32: 1e-5, torch.bfloat16: 2**-8 + 1e-5}
"""Relative tolerances of results, by their type: bfloat16 is rounded once."""
each_type = pytest.mark.parametrize("dtype", TYPES, ids=str)
CACHED = [
    (torch.float32, torch.bfloat16), (torch.float32, torch.float16), (torch.bfloat16, torch.float16),
    (torch.bfloat16, torch.float32),
]  # fmt: skip
"""Types of queries and of what is cached, where they differ."""
DECODE, SPANS = (385, 300, 129, 128, 127, 3, 1), ((0, 33), (30, 5), (250, 140), (128, 1))


def sinks_of(heads: int) -> torch.Tensor:
    """From next to nothing to nearly all."""
    return torch.linspace(-4, 9, heads)


@cache
def rule_with_sinks(heads: int, window: int | None) -> AttentionRule:
    return AttentionRule(0.2, window=window, sinks=sinks_of(heads))


def case_of(
    shape: tuple[int, int, int, int],
    *,
    decode: Sequence[int] = DECODE,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
) -> PagedCase:
    """What lies in free slots is no number: who reads it is found out."""
    head_dim, kv_heads, group, block_size = shape
    case = PagedCase(
        decode=decode,
        spans=SPANS,
        head_dim=head_dim,
        kv_heads=kv_heads,
        group=group,
        block_size=block_size,
        dtype=dtype,
        cache_dtype=cache_dtype,
    )  # fmt: skip
    free = torch.ones(len(case.cache.keys), dtype=torch.bool)
    for sequence in range(len(case.lengths)):
        free[case.slots(sequence)] = False
    for rows in (case.cache.keys, case.cache.values):
        rows[free] = float("nan")
    return case


@cache
def shared_case(
    shape: tuple[int, int, int, int], dtype: torch.dtype, cache_dtype: torch.dtype | None = None
) -> PagedCase:
    """The same case for all instruction sets, which only read it."""
    return case_of(shape, dtype=dtype, cache_dtype=cache_dtype)


@cache
def expected_of(case: PagedCase, rule: AttentionRule) -> torch.Tensor:
    """What every instruction set has to give of a shared case: computing it takes longer than attention does."""
    return case.expected(rule)


def attended(
    op_queue: OpQueue,
    case: PagedCase,
    rule: AttentionRule,
    batch: AttentionBatch | None = None,
    rows: slice = slice(None),
) -> torch.Tensor:
    """What a step of its own makes of these rows of the case, whose keys and values are in the cache."""
    step = NativePagedAttention(op_queue).begin(batch or case.batch)
    return step.attend_written(case.query[rows], case.cache, rule)


@each_type
@each_rule
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_attention_by_the_definition(
    tile_isa: str,
    op_queues: dict[int, OpQueue],
    shape: tuple[int, int, int, int],
    rule: AttentionRule,
    dtype: torch.dtype,
) -> None:
    case = shared_case(shape, dtype)
    by_team = [attended(op_queue, case, rule) for op_queue in op_queues.values()]
    assert by_team[0].dtype == dtype
    torch.testing.assert_close(by_team[0].double(), expected_of(case, rule), rtol=TYPES[dtype], atol=1e-5)
    assert all(torch.equal(out, by_team[0]) for out in by_team)


@pytest.mark.parametrize(("dtype", "cache_dtype"), CACHED, ids=str)
@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[4], SHAPES[6]], ids=str)
def test_a_cache_of_another_type_is_read_as_it_is(
    tile_isa: str,
    op_queues: dict[int, OpQueue],
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
) -> None:
    case, rule = shared_case(shape, dtype, cache_dtype), RULES["a window, capped"]
    by_team = [attended(op_queue, case, rule) for op_queue in op_queues.values()]
    assert by_team[0].dtype == dtype
    torch.testing.assert_close(by_team[0].double(), expected_of(case, rule), rtol=TYPES[dtype], atol=1e-5)
    assert all(torch.equal(out, by_team[0]) for out in by_team)


@each_type
@pytest.mark.parametrize("window", [None, 130])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sinks_take_their_part_of_the_weights(
    tile_isa: str,
    op_queues: dict[int, OpQueue],
    shape: tuple[int, int, int, int],
    window: int | None,
    dtype: torch.dtype,
) -> None:
    case = shared_case(shape, dtype)
    rule = rule_with_sinks(shape[1] * shape[2], window)
    by_team = [attended(op_queue, case, rule) for op_queue in op_queues.values()]
    torch.testing.assert_close(by_team[0].double(), expected_of(case, rule), rtol=TYPES[dtype], atol=1e-5)
    assert all(torch.equal(out, by_team[0]) for out in by_team)


@each_rule
def test_keys_and_values_are_written_first(op_queues: dict[int, OpQueue], rule: AttentionRule) -> None:
    case = PagedCase(decode=[70, 21], spans=[(0, 9), (30, 5)])
    given = (case.query, case.key, case.value)
    out = NativePagedAttention(op_queues[2]).begin(case.batch).attend(*given, case.cache, rule)
    assert torch.equal(case.cache.keys[case.batch.slot_mapping], case.key)
    torch.testing.assert_close(out.double(), case.expected(rule), rtol=1e-5, atol=1e-5)


@each_type
@each_rule
def test_a_sequence_alone_has_the_bits_that_it_has_in_company(
    tile_isa: str, op_queues: dict[int, OpQueue], rule: AttentionRule, dtype: torch.dtype
) -> None:
    case = case_of((16, 2, 3, 4), dtype=dtype)
    whole = attended(op_queues[2], case, rule)
    for i in range(len(case.lengths)):
        alone = case.batch_of([i], num_decode=int(i < len(DECODE)))
        for op_queue in op_queues.values():
            assert torch.equal(attended(op_queue, case, rule, alone, case.rows_of(i)), whole[case.rows_of(i)])


@each_type
@each_rule
@pytest.mark.parametrize("shape", [(16, 3, 1, 4), (40, 1, 5, 3)], ids=str)
def test_a_prompt_in_pieces_and_token_by_token_has_the_bits_of_the_whole(
    tile_isa: str,
    op_queues: dict[int, OpQueue],
    shape: tuple[int, int, int, int],
    rule: AttentionRule,
    dtype: torch.dtype,
) -> None:
    """Decode rows, and spans however they are cut, over borders of chunks."""
    head_dim, kv_heads, group, block_size = shape
    case = PagedCase(
        spans=[(0, 300)], head_dim=head_dim, kv_heads=kv_heads, group=group, block_size=block_size, dtype=dtype
    )
    whole, slots, blocks = attended(op_queues[2], case, rule), case.slots(0), case.blocks[0]
    nothing = DecodeRows(np.zeros(0, dtype=np.int32), np.zeros((0, 1), dtype=np.int32))
    cuts = (0, 1, 33, 127, 129, 130, 256, 300)
    for begin, end in pairwise(cuts):
        piece = AttentionBatch(slots[begin:end], nothing, (PrefillSpan(0, end - begin, begin, blocks),))
        for op_queue in op_queues.values():
            assert torch.equal(attended(op_queue, case, rule, piece, slice(begin, end)), whole[begin:end])
    lengths = np.arange(1, 301, dtype=np.int32)
    rows = AttentionBatch(slots, DecodeRows(lengths, np.tile(blocks, (300, 1))), ())
    for op_queue in op_queues.values():
        assert torch.equal(attended(op_queue, case, rule, rows), whole)


@settings(max_examples=examples(60))
@given(
    st.lists(st.integers(1, 700), min_size=1, max_size=9),
    st.sampled_from([None, 1, 60, 128, 129, 300]),
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(1, 64),
    st.sampled_from(compute_library().isas),
)
def test_whoever_computes_a_chunk(
    lengths: list[int], window: int | None, kv_heads: int, group: int, block_size: int, name: str
) -> None:
    """Rows that several members share, at any of their chunks and heads, equal rows that one has alone."""
    case = PagedCase(
        decode=sorted(lengths, reverse=True), head_dim=8, kv_heads=kv_heads, group=group, block_size=block_size
    )
    rule = AttentionRule(0.3, window=window)
    with computing_with(name):
        alone = attended(op_queue_of(1), case, rule)
        torch.testing.assert_close(alone.double(), case.expected(rule), rtol=1e-5, atol=1e-5)
        for size in (2, 3, 7):
            assert torch.equal(attended(op_queue_of(size), case, rule), alone)


def test_where_and_in_what_blocks_the_keys_lie_makes_no_difference(
    tile_isa: str, op_queues: dict[int, OpQueue]
) -> None:
    rule, results = RULES["a window of chunks"], []
    reference = PagedCase(decode=[345])
    kept = [rows[reference.slots(0)] for rows in (reference.cache.keys, reference.cache.values)]
    for block_size in (1, 4, 7, 64):
        case = PagedCase(decode=[345], block_size=block_size, seed=block_size)
        for rows, known in zip((case.cache.keys, case.cache.values), kept, strict=True):
            rows[case.slots(0)] = known
        case.query = reference.query
        results.append(attended(op_queues[2], case, rule))
    assert all(torch.equal(result, results[0]) for result in results)


def test_blocks_that_left_the_window_are_not_looked_at(tile_isa: str, op_queues: dict[int, OpQueue]) -> None:
    case, rule = PagedCase(decode=[300], spans=[(290, 5)]), AttentionRule(0.2, window=20)
    expected = case.expected(rule)
    for sequence in range(2):
        case.blocks[sequence][: 260 // 4] = 1 << 30
    batch = case.batch_of([0, 1], num_decode=1)
    batch = AttentionBatch(case.batch.slot_mapping, batch.decode, batch.prefills)
    torch.testing.assert_close(attended(op_queues[2], case, rule, batch).double(), expected, rtol=1e-5, atol=1e-5)


def test_scores_far_apart(tile_isa: str, op_queues: dict[int, OpQueue]) -> None:
    """The largest is of the last token, or of the first: neither overflows, and what is far below it weighs nothing."""
    for sign in (-1.0, 1.0):
        case, rule = PagedCase(decode=[280], kv_heads=1, group=1, head_dim=16), AttentionRule(1.0)
        case.query = torch.full_like(case.query, sign)
        case.cache.keys[case.slots(0)] = torch.linspace(-60, 60, 280).view(-1, 1, 1).expand(-1, 1, 16)
        torch.testing.assert_close(
            attended(op_queues[2], case, rule).double(), case.expected(rule), rtol=1e-5, atol=1e-5
        )


def test_what_is_no_number_does_not_vanish(tile_isa: str, op_queues: dict[int, OpQueue]) -> None:
    case = PagedCase(decode=[200])
    case.cache.keys[case.slots(0)[150]] = float("nan")
    assert attended(op_queues[2], case, RULES["all"]).isnan().all()


def test_a_recorded_step_follows_lengths_and_tables(tile_isa: str, op_queues: dict[int, OpQueue]) -> None:
    op_queue, rule = op_queues[2], RULES["all"]
    first, second = (PagedCase(decode=decode, seed=7) for decode in ([9, 4, 2], [480, 300, 1]))
    query, cache = first.query.clone(), second.cache
    rows = DecodeRows(np.zeros(3, dtype=np.int32), np.zeros((3, 120), dtype=np.int32))

    def fill(decode: DecodeRows) -> None:
        rows.lengths[:] = decode.lengths
        rows.block_tables[:, : decode.block_tables.shape[1]] = decode.block_tables

    fill(first.batch.decode)
    batch = AttentionBatch(first.batch.slot_mapping, rows, ())
    with op_queue.computing_in(Arena()), op_queue.recording() as recorded:
        step = NativePagedAttention(op_queue).begin(batch)
        out = step.attend_written(query, cache, rule)
    query.copy_(second.query)
    fill(second.batch.decode)
    op_queue.replay(recorded)
    assert torch.equal(out, attended(op_queue, second, rule))
    torch.testing.assert_close(out.double(), second.expected(rule), rtol=1e-5, atol=1e-5)


def test_tables_that_would_have_to_be_copied_are_refused(op_queues: dict[int, OpQueue]) -> None:
    case = PagedCase(decode=[9, 4])
    wide = np.zeros((2, 99), dtype=np.int32)
    batch = AttentionBatch(case.batch.slot_mapping, DecodeRows(case.batch.decode.lengths, wide[:, :5]), ())
    step = NativePagedAttention(op_queues[1]).begin(batch)
    with pytest.raises(ValueError, match="are to be contiguous"):
        step.attend_written(case.query, case.cache, RULES["all"])


def test_a_padding_row_of_the_null_block_attends_to_nothing(op_queues: dict[int, OpQueue]) -> None:
    case = PagedCase(decode=[9, 4])
    lengths, tables = case.batch.decode.lengths, case.batch.decode.block_tables
    padded = DecodeRows(np.append(lengths, np.int32(1)), np.vstack([tables, np.zeros_like(tables[:1])]))
    query = torch.cat([case.query, case.query[:1]])
    step = NativePagedAttention(op_queues[2]).begin(AttentionBatch(case.batch.slot_mapping, padded, ()))
    out = step.attend_written(query, case.cache, RULES["all"])
    assert torch.equal(out[:2], attended(op_queues[2], case, RULES["all"]))
    assert not out[2].any()


def test_tensors_that_the_kernels_cannot_read_are_refused(op_queues: dict[int, OpQueue]) -> None:
    case = PagedCase(decode=[9], dtype=torch.float16)
    with pytest.raises(ValueError, match="of float32 or bfloat16, not"):
        attended(op_queues[1], case, RULES["all"])
    whole = PagedCase(decode=[9])
    whole.query = torch.randn(1, 16, 6).transpose(1, 2)
    with pytest.raises(ValueError, match="side by side"):
        attended(op_queues[1], whole, RULES["all"])


def test_queries_may_be_a_view_of_the_projections(op_queues: dict[int, OpQueue]) -> None:
    case = PagedCase(decode=[9, 4], spans=[(0, 5)])
    expected = attended(op_queues[2], case, RULES["all"])
    projections = torch.randn(len(case.query), 10, 16)
    projections[:, :6] = case.query
    case.query = projections[:, :6]
    assert torch.equal(attended(op_queues[2], case, RULES["all"]), expected)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return ModelConfig.from_directory(save_random_llama(tmp_path_factory.mktemp("model")))


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_host_cores_with_the_library_get_the_kernels(config: ModelConfig, *, batch_invariant: bool) -> None:
    name = f"paged-native ({compute_library().isas[0]})"
    chosen = cpu_backend().attention(config, batch_invariant=batch_invariant)
    assert chosen.name == name
    assert chosen.gather_bytes == 0


def test_why_host_cores_have_none_is_told(config: ModelConfig, tmp_path: Path) -> None:
    backend = cpu_backend(library=tmp_path / "none.so")
    reason = backend.reason
    assert "not built" in reason
    assert "make native" in reason
    assert backend.attention(config, batch_invariant=False).name == f"paged-torch ({reason})"
    assert backend.attention(config, batch_invariant=True).name == f"paged-torch-invariant ({reason})"
