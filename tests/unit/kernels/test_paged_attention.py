"""Our attention kernels, interpreted, equal plain attention in float64; batch-invariant, they do so bit for bit."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from hetero_api.model_parts import LatentShape
from hetero_worker.attention.base import AttentionRule, DecodeRows, LatentExpansion, StepAttention
from hetero_worker.attention.kv_cache import LayerCache
from hetero_worker.attention.torch_paged import TorchPagedAttention
from hetero_worker.attention.triton_paged import TritonPagedAttention
from hetero_worker.kernels.attention_tiles import PagedKeys, Scoring
from hetero_worker.kernels.paged_attention import attend_decode
from tests.support.paged_cases import PagedCase

pytestmark = pytest.mark.unit

DEVICE = torch.get_default_device()
RULE = AttentionRule(0.25)
RULES = {
    "plain": RULE,
    "window": AttentionRule(0.25, window=5),
    "window of one": AttentionRule(0.25, window=1),
    "window of a block": AttentionRule(0.25, window=4),
    "wide window": AttentionRule(0.25, window=10_000),
    "soft cap": AttentionRule(0.7, soft_cap=1.5),
    "window and soft cap": AttentionRule(0.7, window=70, soft_cap=1.5),
    "sinks": AttentionRule(0.25, sinks=torch.linspace(-4, 9, 6)),
    "window and sinks": AttentionRule(0.25, window=5, sinks=torch.linspace(-4, 9, 6)),
}
TOLERANCE = {torch.float32: 3e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}
each_group = pytest.mark.parametrize("group", [1, 3, 4, 7])


def backend_for(case: PagedCase, *, batch_invariant: bool = False, num_programs: int = 16) -> TritonPagedAttention:
    return TritonPagedAttention(
        DEVICE,
        head_dim=case.cache.keys.shape[2],
        group_size=case.group,
        batch_invariant=batch_invariant,
        num_programs=num_programs,
    )


def attended(step: StepAttention, case: PagedCase, rule: AttentionRule = RULE) -> torch.Tensor:
    return step.attend(case.query, case.key, case.value, case.cache, rule)


def check(case: PagedCase, rule: AttentionRule = RULE, *, batch_invariant: bool = False) -> None:
    out = attended(backend_for(case, batch_invariant=batch_invariant).begin(case.batch), case, rule)
    assert out.is_contiguous()
    assert out.dtype == case.dtype
    expected = case.expected(rule)
    assert (out.double() - expected).abs().max().item() <= TOLERANCE[case.dtype]


@each_group
@pytest.mark.parametrize("lengths", [[1], [4, 4], [70, 5, 4, 3, 1]], ids=str)
def test_decode_rows(lengths: list[int], group: int) -> None:
    check(PagedCase(decode=lengths, group=group))


@each_group
@pytest.mark.parametrize(
    "spans",
    [[(0, 1)], [(0, 9), (3, 5), (8, 4)], [(66, 30), (0, 70)]],
    ids=["one token", "prefix of none, of part of a block, of blocks", "several tiles"],
)
def test_spans(spans: list[tuple[int, int]], group: int) -> None:
    check(PagedCase(spans=spans, group=group))


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("batch_invariant", [False, True], ids=["", "invariant"])
def test_decode_rows_and_spans_follow_the_layers_rule(rule: AttentionRule, *, batch_invariant: bool) -> None:
    check(PagedCase(decode=[131, 7, 1], spans=[(0, 6), (65, 25)]), rule, batch_invariant=batch_invariant)


def test_a_row_whose_tokens_are_split_has_its_sinks_once() -> None:
    rule = RULES["sinks"]
    case = PagedCase(decode=[400, 390])
    out = attended(backend_for(case, num_programs=64).begin(case.batch), case, rule)
    assert (out.double() - case.expected(rule)).abs().max().item() <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("head_dim", [48, 80, 256, 512])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_any_width_and_type(head_dim: int, dtype: torch.dtype) -> None:
    rule = AttentionRule(head_dim**-0.5)
    check(PagedCase(decode=[33, 2], spans=[(5, 7)], head_dim=head_dim, dtype=dtype), rule)


@pytest.mark.parametrize(
    ("dtype", "cached"),
    [(torch.float32, torch.bfloat16), (torch.float32, torch.float16), (torch.bfloat16, torch.float32)],
)
def test_a_cache_of_another_type(dtype: torch.dtype, cached: torch.dtype) -> None:
    check(PagedCase(decode=[9, 4], spans=[(3, 5)], dtype=dtype, cache_dtype=cached))


@pytest.mark.parametrize("block_size", [1, 3, 16, 100])
def test_any_size_of_blocks(block_size: int) -> None:
    check(PagedCase(decode=[67, 3], spans=[(2, 33)], block_size=block_size))


def test_one_kv_head_for_more_query_heads_than_a_tile_has_lanes() -> None:
    check(PagedCase(decode=[9], spans=[(2, 3)], kv_heads=1, group=71))


@pytest.mark.parametrize("num_splits", [2, 16])
@pytest.mark.parametrize("window", [None, 90])
def test_splits_that_find_no_tokens_count_for_nothing(num_splits: int, window: int | None) -> None:
    """16 splits of 3 tiles, and of one; a row without any token gives zeros."""
    case, rule = PagedCase(decode=[150, 8, 1], kv_heads=1, head_dim=32), AttentionRule(0.25, window=window)
    tables = torch.tensor(np.vstack([case.batch.decode.block_tables, case.batch.decode.block_tables[:1]]))
    paged = PagedKeys(case.cache.keys, case.cache.values, 4, tables, torch.tensor([150, 8, 1, 0], dtype=torch.int32))
    query = torch.cat([case.query, torch.ones(1, 3, 32)])
    out = torch.full((4, 3 * 32), float("nan"))
    attend_decode(query, out, paged, Scoring(rule.scale, rule.window, None), num_splits=num_splits)
    assert (out[:3].double() - case.expected(rule)).abs().max().item() <= TOLERANCE[torch.float32]
    assert torch.equal(out[3], torch.zeros(3 * 32))


def test_long_rows_are_split_among_the_programs_there_are() -> None:
    """The sums of splits are added up in another order: equal, though not in every bit."""
    case = PagedCase(decode=[700], kv_heads=1, group=2)
    whole, split = (
        attended(backend_for(case, num_programs=number).begin(case.batch), case).double() for number in (1, 8)
    )
    expected = case.expected(RULE)
    assert not torch.equal(whole, split)
    assert max((whole - expected).abs().max().item(), (split - expected).abs().max().item()) <= 3e-6


def test_what_splits_leave_fits_what_is_accounted_for() -> None:
    """Rows of any number, and of any length, are cut into no more splits than sixteen times the programs."""
    backend = TritonPagedAttention(DEVICE, head_dim=16, group_size=3, num_programs=16)
    step = backend.begin(PagedCase(decode=[1]).batch)
    most = max(
        rows * 2 * splits
        for rows in range(1, 200)
        if (splits := step._num_splits(rows, 2, 100_000, None)) > 1  # type: ignore[attr-defined]
    )
    assert most == 16 * 16
    assert backend.gather_bytes == most * 3 * (16 + 2) * 4


@pytest.mark.parametrize(
    ("rows", "longest", "window", "splits"),
    [(1, 100_000, None, 32), (1, 1000, None, 4), (64, 1000, None, 1), (64, 5000, None, 2), (64, 100_000, None, 2),
     (16, 100_000, None, 8), (16, 100_000, 3000, 2), (500, 100_000, None, 1)],
)  # fmt: skip
def test_long_rows_are_cut_however_many_others_there_are(
    rows: int, longest: int, window: int | None, splits: int
) -> None:
    """Or a step would end when the one program of its longest row does."""
    step = TritonPagedAttention(DEVICE, head_dim=16, group_size=3, num_programs=16).begin(PagedCase(decode=[1]).batch)
    assert step._num_splits(rows, 2, longest, window) == splits  # type: ignore[attr-defined]


def test_a_query_may_be_a_view_of_wider_rows() -> None:
    """As the rows of one projection that makes queries, keys and values."""
    case = PagedCase(decode=[9, 6], spans=[(3, 4)])
    wide = torch.full((len(case.query), 10, 16), float("nan"))
    wide[:, :6] = case.query
    backend = backend_for(case)
    expected = attended(backend.begin(case.batch), case)
    step = backend.begin(case.batch)
    assert torch.equal(step.attend(wide[:, :6], case.key, case.value, case.cache, RULE), expected)


def test_keys_that_are_written_already_need_not_be_handed_over() -> None:
    case = PagedCase(decode=[9, 6], spans=[(3, 4)])
    backend = backend_for(case)
    expected = attended(backend.begin(case.batch), case)
    written = backend.begin(case.batch).attend_written(case.query, case.cache, RULE)
    assert torch.equal(written, expected)


def test_one_step_serves_layers_of_different_rules_and_heads() -> None:
    wide = PagedCase(decode=[9, 6], spans=[(3, 4)], kv_heads=3)
    narrow = PagedCase(decode=[9, 6], spans=[(3, 4)], kv_heads=1)
    step = backend_for(wide).begin(wide.batch)
    for case, rule in ((wide, RULE), (narrow, RULES["window"]), (wide, RULES["soft cap"])):
        out = attended(step, case, rule)
        assert (out.double() - case.expected(rule)).abs().max().item() <= 3e-6


@pytest.mark.parametrize("batch_invariant", [False, True], ids=["", "invariant"])
def test_a_window_reads_no_more_of_the_cache_than_it_reaches(*, batch_invariant: bool) -> None:
    """What lies before it may be anything, even no number."""
    case, rule = PagedCase(decode=[90], spans=[(86, 3)]), AttentionRule(0.25, window=8)
    for tensor in (case.cache.keys, case.cache.values):
        tensor[case.slots(0)[: 90 - 8]] = float("nan")
        tensor[case.slots(1)[: 87 - 8]] = float("nan")
    out = attended(backend_for(case, batch_invariant=batch_invariant).begin(case.batch), case, rule)
    assert out.isfinite().all()


@pytest.mark.parametrize("seed", range(6))
def test_random_batches_equal_those_of_plain_operators(seed: int) -> None:
    chance = random.Random(seed)
    case = PagedCase(
        decode=sorted((chance.randint(1, 140) for _ in range(chance.randint(0, 4))), reverse=True),
        spans=[(chance.randint(0, 40), chance.randint(1, 30)) for _ in range(chance.randint(1, 3))],
        group=chance.choice([1, 2, 5]),
        kv_heads=chance.choice([1, 3]),
        block_size=chance.choice([2, 16]),
        seed=seed,
    )
    rule = chance.choice([rule for rule in RULES.values() if rule.sinks is None])
    expected = attended(TorchPagedAttention(DEVICE).begin(case.batch), case, rule)
    assert torch.allclose(attended(backend_for(case).begin(case.batch), case, rule), expected, atol=3e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rule", [RULE, RULES["window and soft cap"]], ids=["plain", "window and soft cap"])
def test_batch_invariant_rows_have_the_same_bits_alone(rule: AttentionRule, dtype: torch.dtype) -> None:
    case = PagedCase(decode=[140, 77, 5], spans=[(0, 9), (61, 40)], kv_heads=1, dtype=dtype)
    backend = backend_for(case, batch_invariant=True)
    together = attended(backend.begin(case.batch), case, rule)
    for i in range(5):
        rows = case.rows_of(i)
        step = backend.begin(case.batch_of([i], num_decode=int(i < 3)))
        alone = step.attend(case.query[rows], case.key[rows], case.value[rows], case.cache, rule)
        assert torch.equal(alone, together[rows])


@pytest.mark.parametrize("rule", [RULE, RULES["window and soft cap"]], ids=["plain", "window and soft cap"])
def test_batch_invariant_rows_have_the_same_bits_in_any_piece_of_a_prompt(rule: AttentionRule) -> None:
    """In one span, in two, and the last one as a decode row."""
    case = PagedCase(spans=[(20, 90)])
    backend = backend_for(case, batch_invariant=True)
    whole = attended(backend.begin(case.batch), case, rule)
    for rows in (37, 89, 1):
        piece = PagedCase(spans=[(20, 90)])
        piece.rows = [rows]
        step = backend.begin(piece.batch_of([0], num_decode=int(rows == 1)))
        out = step.attend(case.query[-rows:], case.key[-rows:], case.value[-rows:], case.cache, rule)
        assert torch.equal(out, whole[-rows:])


def reserved(case: PagedCase, *, max_rows: int = 4, max_blocks: int = 100) -> TritonPagedAttention:
    backend = backend_for(case)
    backend.reserve(max_rows=max_rows, max_blocks=max_blocks, block_size=case.cache.block_size)
    return backend


def test_prepared_steps_of_as_many_rows_launch_the_same_on_the_same_addresses() -> None:
    short, long = PagedCase(decode=[3, 2]), PagedCase(decode=[390, 7], seed=1)
    backend = reserved(short)
    assert backend.is_capturable
    launched = []
    for case in (short, long, short):
        with backend.prepared(case.batch):
            step = backend.begin(case.batch)
            out = attended(step, case)
        assert (out.double() - case.expected(RULE)).abs().max().item() <= 3e-6
        tables = step._tables  # type: ignore[attr-defined]
        splits = step._num_splits(2, 2, tables.longest_decode, None)  # type: ignore[attr-defined]
        launched.append((tables.tables.data_ptr(), tables.lengths.data_ptr(), tables.tables.shape, splits))
    assert launched[0] == launched[1] == launched[2]
    assert launched[0][3] == 2, "as the longest that is reserved asks for"


def test_a_replayed_step_reads_what_was_prepared_last() -> None:
    """A step that began for one batch, as a graph holds it, serves the next one."""
    first, second = PagedCase(decode=[30, 9]), PagedCase(decode=[44, 13], seed=1)
    backend = reserved(first)
    with backend.prepared(first.batch):
        step = backend.begin(first.batch)
    with backend.prepared(second.batch):
        second.cache.write(second.batch.slot_mapping, second.key, second.value)
        out = step.attend_written(second.query, second.cache, RULE)
    assert (out.double() - second.expected(RULE)).abs().max().item() <= 3e-6


def test_a_row_of_one_token_in_the_null_block_pads_a_prepared_step() -> None:
    case = PagedCase(decode=[30, 9])
    decode = case.batch.decode
    padded = DecodeRows(
        np.append(decode.lengths, np.int32(1)), np.vstack([decode.block_tables, decode.block_tables[:1] * 0])
    )
    backend = reserved(case)
    expected = attended(backend.begin(case.batch), case)
    batch = type(case.batch)(torch.cat([case.batch.slot_mapping, torch.tensor([0])]), padded, ())
    with backend.prepared(batch):
        query = torch.cat([case.query, case.query[:1]])
        out = backend.begin(batch).attend_written(query, case.cache, RULE)
    assert torch.allclose(out[:2], expected, atol=3e-6)
    assert torch.equal(out[2], torch.zeros_like(out[2]))


def test_steps_outside_of_prepared_have_tables_of_their_own() -> None:
    case, other = PagedCase(decode=[30, 9]), PagedCase(decode=[44, 13], seed=1)
    backend = reserved(case)
    before = backend.begin(case.batch)
    with backend.prepared(other.batch):
        pass
    for step in (before, backend.begin(case.batch)):
        assert (attended(step, case).double() - case.expected(RULE)).abs().max().item() <= 3e-6


def test_what_there_is_no_room_for_is_refused() -> None:
    case = PagedCase(decode=[30, 9])
    mixed = PagedCase(decode=[30], spans=[(0, 2)])
    refused: list[tuple[TritonPagedAttention, PagedCase, str]] = [
        (backend_for(case), case, "call reserve before prepared"),
        (reserved(case, max_rows=1), case, "2 decode rows of up to 8 blocks: tables are reserved for 1 rows of 100 bl"),
        (reserved(case, max_blocks=7), case, "of up to 8 blocks: tables are reserved for 4 rows of 7 blocks"),
        (reserved(case), mixed, "for decode rows; this step has 1 spans"),
    ]
    for backend, step, message in refused:
        with pytest.raises(ValueError, match=message), backend.prepared(step.batch):
            pass
    backend = reserved(case)
    with (
        backend.prepared(case.batch),
        pytest.raises(ValueError, match=r"prepared for 2 decode rows, but .* has 1 and 1"),
    ):
        backend.begin(mixed.batch)


def test_shapes_without_a_kernel_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="head_dim 72 is no multiple of 16 up to 512"):
        TritonPagedAttention(DEVICE, head_dim=72, group_size=1, num_programs=16)
    with pytest.raises(ValueError, match="head_dim 528 is no multiple of 16 up to 512"):
        TritonPagedAttention(DEVICE, head_dim=528, group_size=1, num_programs=16)
    with pytest.raises(ValueError, match="129 query heads share a KV head, more than 128"):
        TritonPagedAttention(DEVICE, head_dim=64, group_size=129, num_programs=16)
    for head_dim, value_dim in ((600, 512), (576, 568), (64, 64), (1088, 1024)):
        with pytest.raises(ValueError, match=f"latent keys of {value_dim} and {head_dim - value_dim} elements"):
            TritonPagedAttention(DEVICE, head_dim=head_dim, group_size=128, value_dim=value_dim, num_programs=16)


def latent_case(value_dim: int, rest: int, **shape: object) -> PagedCase:
    """A case whose values are the first elements of its keys."""
    case = PagedCase(kv_heads=1, head_dim=value_dim + rest, **shape)  # type: ignore[arg-type]
    case.cache = LayerCache(case.cache.keys, case.cache.keys, case.cache.block_size)
    return case


def latent_attended(
    case: PagedCase, value_dim: int, *, batch_invariant: bool = False, num_programs: int = 16
) -> torch.Tensor:
    backend = TritonPagedAttention(
        DEVICE, head_dim=case.cache.keys.shape[2], group_size=case.group, value_dim=value_dim,
        batch_invariant=batch_invariant, num_programs=num_programs,
    )  # fmt: skip
    return backend.begin(case.batch).attend_written(case.query, case.cache, RULE)


def check_latent(case: PagedCase, value_dim: int, out: torch.Tensor) -> None:
    expected = case.expected(RULE).view(len(out), case.group, -1)
    expected[:, :, value_dim:] = 0.0
    assert out.is_contiguous()
    assert (out.double() - expected.flatten(1)).abs().max().item() <= TOLERANCE[case.dtype]


@pytest.mark.parametrize("group", [1, 3, 16, 20, 40])
@pytest.mark.parametrize("batch_invariant", [False, True], ids=["", "invariant"])
def test_latent_attention_reads_its_values_from_the_keys(group: int, *, batch_invariant: bool) -> None:
    """Of a group with more heads than lanes, too, whose last program has fewer."""
    case = latent_case(48, 16, group=group, decode=[70, 5, 1], spans=[(0, 9), (66, 4)])
    check_latent(case, 48, latent_attended(case, 48, batch_invariant=batch_invariant))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_latent_attention_of_published_widths(dtype: torch.dtype) -> None:
    case = latent_case(512, 64, group=18, decode=[33, 2], spans=[(5, 3)], dtype=dtype)
    case.query *= 0.1
    check_latent(case, 512, latent_attended(case, 512))


def test_latent_rows_that_are_split() -> None:
    case = latent_case(32, 16, group=20, decode=[700, 390])
    check_latent(case, 32, latent_attended(case, 32, num_programs=64))


def test_spans_that_are_expanded_are_left_to_the_layer() -> None:
    """The other rows are asked for, and get what they get beside spans that are not expanded."""
    shape = LatentShape(48, query_rank=None, nope_dim=16, rope_dim=16, value_dim=16)
    case = latent_case(48, 16, group=3, decode=[70, 5], spans=[(30, 3), (0, 40), (9, 2)])
    backend = TritonPagedAttention(
        DEVICE, head_dim=64, group_size=3, value_dim=48, expansion=LatentExpansion(shape, least_rows=8), num_programs=16
    )
    step, whole = backend.begin(case.batch), latent_attended(case, 48)
    assert step.expanded == case.batch.prefills[1:]
    rest = step.expanded[0].begin
    assert rest == 5
    assert torch.equal(step.attend_written(case.query[:rest], case.cache, RULE), whole[:rest])
    only = latent_case(48, 16, group=3, spans=[(0, 40)])
    assert backend.begin(only.batch).expanded == only.batch.prefills


def test_latent_rows_have_the_same_bits_alone_in_any_piece_of_a_prompt() -> None:
    whole = latent_case(32, 16, group=20, spans=[(0, 40)])
    expected = latent_attended(whole, 32, batch_invariant=True)
    for begin, end in ((0, 7), (7, 8), (8, 40)):
        piece = latent_case(32, 16, group=20, spans=[(begin, end - begin)])
        piece.cache.keys.copy_(0 * piece.cache.keys)
        piece.cache.keys[piece.slots(0)] = whole.cache.keys[whole.slots(0)[:end]]
        piece.query = whole.query[begin:end]
        assert torch.equal(latent_attended(piece, 32, batch_invariant=True), expected[begin:end])
