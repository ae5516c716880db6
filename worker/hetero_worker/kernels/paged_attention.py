"""Attention over the paged cache: one kernel for decode rows, one for spans of several rows.

A program serves one KV head and the query heads of its group, so they share its reads of the cache; where these are
more than it has lanes, some of them. Its lanes are (row, head) pairs. Tokens come in tiles (`attention_tiles`) that
always begin at multiples of the tile's size, and a tile that a lane sees nothing of does not change the lane's numbers.
Hence in `attend_spans` a row's result does not depend on the rows that are computed along with it.

`attend_decode` may cut a row's tokens into splits, since there are few rows and many multiprocessors; a second kernel
adds up the splits' partial sums. The number of splits changes the order of additions, and so the last bits.

Tokens that no lane of a program sees are never read. Shapes are compile-time constants; lengths, tables, windows and
the number of splits are not, because compiling a kernel while requests wait costs them a second. No launch waits, and
all of them can be captured into a graph.

Latent attention has one KV head, whose keys are the values, too, but for their last elements. These are read once, and
are a product of their own (`Widths`).

Two tiles of keys and values are on their way while a third is computed (`Tile.stages`, `blocks_of_tile`), one of latent
attention in float32. Programs of
one row's KV heads follow one another, for they read the same blocks.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from hetero_worker.kernels.attention_tiles import (
    PagedKeys,
    Scoring,
    Tile,
    Widths,
    blocks_of_tile,
    fold,
    load_queries,
    with_sink,
)

_ALL: Final = 2**31 - 1
"""Window of a layer without one."""
_LEAST_LANES: Final = 16
"""Rows of the smallest product of tensor cores."""
_MOST_LANES_PER_WARP: Final = 8
_WIDE: Final = 256
"""Elements of a head beyond which sums of all splits need more registers than four warps have."""
_LEAST_WARPS: Final = 4
MAX_SPLITS: Final = 64
"""Most splits of a decode row: as many as one program adds up at once."""
LEAST_SPLIT_TOKENS: Final = 128
"""A shorter split costs more, in partial sums that are written and read, than it saves; short rows have fewer."""


@triton.jit(do_not_specialize=["window", "num_splits", "table_stride"])
def _decode(  # type: ignore[no-untyped-def]
    query,
    keys,
    values,
    tables,
    lengths,
    sinks,
    out,
    partial_sums,
    partial_maxima,
    partial_totals,
    factor,
    cap_factor,
    window,
    num_splits,
    table_stride,
    query_row_stride,
    query_head_stride,
    out_row_stride,
    slot_stride,
    head_stride,
    first_dim: tl.constexpr,
    padded_dim: tl.constexpr,
    rest_dim: tl.constexpr,
    padded_rest: tl.constexpr,
    block_size: tl.constexpr,
    group: tl.constexpr,
    heads: tl.constexpr,
    lanes: tl.constexpr,
    tile: tl.constexpr,
    least_tiles: tl.constexpr,
    has_cap: tl.constexpr,
    has_sinks: tl.constexpr,
):
    """Attend to the split's share of the row's tiles, `least_tiles` at least.

    Program (KV head and `heads` of its query heads, row, split).
    """
    pieces: tl.constexpr = (group + heads - 1) // heads
    kv_head = tl.program_id(0) // pieces
    row = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    lane = tl.arange(0, lanes)
    dims = tl.arange(0, padded_dim)
    member = tl.program_id(0) % pieces * heads + lane
    head = kv_head * group + member
    is_lane = (lane < heads) & (member < group)
    is_element = is_lane[:, None] & (dims[None, :] < first_dim)
    from_head = query + row * query_row_stride + head[:, None] * query_head_stride
    queries, rest_queries = load_queries(from_head, is_lane, first_dim, padded_dim, rest_dim, padded_rest)
    length = tl.load(lengths + row)
    begin = tl.maximum(length - window, 0)
    first_tile = begin // tile
    share = tl.maximum(tl.cdiv(tl.cdiv(length, tile) - first_tile, num_splits), least_tiles)
    first_tile += split * share
    end = tl.minimum((first_tile + share) * tile, length)
    first_seen = tl.full([lanes], 0, tl.int32) + begin
    last_seen = tl.full([lanes], -1, tl.int32) + length
    accumulated = tl.zeros([lanes, padded_dim], tl.float32)
    maximum = tl.full([lanes], float("-inf"), tl.float32)
    total = tl.zeros([lanes], tl.float32)
    table = tables + row * table_stride
    blocks = blocks_of_tile(table, first_tile * tile, begin, end, block_size, tile)
    for start in range(first_tile * tile, end, tile):
        next_blocks = blocks_of_tile(table, start + tile, begin, end, block_size, tile)
        accumulated, maximum, total = fold(
            queries,
            rest_queries,
            accumulated,
            maximum,
            total,
            start,
            begin,
            end,
            first_seen,
            last_seen,
            keys + kv_head * head_stride,
            values + kv_head * head_stride,
            blocks,
            slot_stride,
            factor,
            cap_factor,
            first_dim,
            padded_dim,
            rest_dim,
            padded_rest,
            block_size,
            tile,
            has_cap,
        )
        blocks = next_blocks
    if num_splits > 1:
        place = (row * (tl.num_programs(0) // pieces) * group + head) * num_splits + split
        tl.store(partial_maxima + place, maximum, mask=is_lane)
        tl.store(partial_totals + place, total, mask=is_lane)
        tl.store(
            partial_sums + place[:, None] * first_dim + dims[None, :],
            accumulated,
            mask=is_element & (total[:, None] > 0.0),
        )
    else:
        total = with_sink(total, maximum, sinks, head, is_lane, has_sinks)
        accumulated = accumulated / tl.where(total > 0.0, total, 1.0)[:, None]
        tl.store(
            out + row * out_row_stride + head[:, None] * (first_dim + rest_dim) + dims[None, :],
            accumulated.to(out.dtype.element_ty),
            mask=is_element,
        )


@triton.jit(do_not_specialize=["num_splits"])
def _combine(  # type: ignore[no-untyped-def]
    partial_sums,
    partial_maxima,
    partial_totals,
    sinks,
    out,
    num_splits,
    out_row_stride,
    first_dim: tl.constexpr,
    padded_dim: tl.constexpr,
    rest_dim: tl.constexpr,
    most_splits: tl.constexpr,
    has_sinks: tl.constexpr,
):
    """Add up the splits' partial sums; program (row, head). A split without tokens has a total of 0, and no sums."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    dims = tl.arange(0, padded_dim)
    split = tl.arange(0, most_splits)
    place = (row * tl.num_programs(1) + head) * num_splits + split
    maxima = tl.load(partial_maxima + place, mask=split < num_splits, other=float("-inf"))
    totals = tl.load(partial_totals + place, mask=split < num_splits, other=0.0)
    largest = tl.max(maxima, 0)
    weights = tl.exp2(maxima - tl.where(largest == float("-inf"), 0.0, largest))
    is_element = (totals[:, None] > 0.0) & (dims[None, :] < first_dim)
    sums = tl.load(partial_sums + place[:, None] * first_dim + dims[None, :], mask=is_element, other=0.0)
    total = with_sink(tl.sum(weights * totals, 0), largest, sinks, head, head >= 0, has_sinks)
    combined = tl.sum(weights[:, None] * sums, 0) / tl.where(total > 0.0, total, 1.0)
    to = out + row * out_row_stride + head * (first_dim + rest_dim) + dims
    tl.store(to, combined.to(out.dtype.element_ty), mask=dims < first_dim)


@triton.jit(do_not_specialize=["first_span", "window", "table_stride"])
def _spans(  # type: ignore[no-untyped-def]
    query,
    keys,
    values,
    tables,
    lengths,
    starts,
    sinks,
    first_span,
    out,
    factor,
    cap_factor,
    window,
    table_stride,
    query_row_stride,
    query_head_stride,
    out_row_stride,
    slot_stride,
    head_stride,
    first_dim: tl.constexpr,
    padded_dim: tl.constexpr,
    rest_dim: tl.constexpr,
    padded_rest: tl.constexpr,
    block_size: tl.constexpr,
    group: tl.constexpr,
    heads: tl.constexpr,
    lanes: tl.constexpr,
    tile: tl.constexpr,
    has_cap: tl.constexpr,
    has_sinks: tl.constexpr,
):
    """Attend with as many rows of a span as there are lanes; program (piece, span, KV head and `heads` query heads).

    The last pieces see the most tokens, and come first.
    """
    span = first_span + tl.program_id(1)
    pieces: tl.constexpr = (group + heads - 1) // heads
    kv_head = tl.program_id(2) // pieces
    span_begin = tl.load(starts + span)
    num_rows = tl.load(starts + span + 1) - span_begin
    first_row = (tl.num_programs(0) - 1 - tl.program_id(0)) * (lanes // heads)
    if first_row < num_rows:
        num_computed = tl.load(lengths + span) - num_rows
        lane = tl.arange(0, lanes)
        dims = tl.arange(0, padded_dim)
        row = first_row + lane // heads
        member = tl.program_id(2) % pieces * heads + lane % heads
        head = kv_head * group + member
        is_lane = (lane < lanes // heads * heads) & (member < group) & (row < num_rows)
        is_element = is_lane[:, None] & (dims[None, :] < first_dim)
        step_row = (span_begin + row).to(tl.int64)
        from_head = query + step_row[:, None] * query_row_stride + head[:, None] * query_head_stride
        queries, rest_queries = load_queries(from_head, is_lane, first_dim, padded_dim, rest_dim, padded_rest)
        last_seen = num_computed + row
        first_seen = tl.maximum(last_seen + 1 - window, 0)
        begin = tl.maximum(num_computed + first_row + 1 - window, 0)
        end = num_computed + tl.minimum(first_row + lanes // heads, num_rows)
        accumulated = tl.zeros([lanes, padded_dim], tl.float32)
        maximum = tl.full([lanes], float("-inf"), tl.float32)
        total = tl.zeros([lanes], tl.float32)
        table = tables + span.to(tl.int64) * table_stride
        blocks = blocks_of_tile(table, begin // tile * tile, begin, end, block_size, tile)
        for start in range(begin // tile * tile, end, tile):
            next_blocks = blocks_of_tile(table, start + tile, begin, end, block_size, tile)
            accumulated, maximum, total = fold(
                queries,
                rest_queries,
                accumulated,
                maximum,
                total,
                start,
                begin,
                end,
                first_seen,
                last_seen,
                keys + kv_head * head_stride,
                values + kv_head * head_stride,
                blocks,
                slot_stride,
                factor,
                cap_factor,
                first_dim,
                padded_dim,
                rest_dim,
                padded_rest,
                block_size,
                tile,
                has_cap,
            )
            blocks = next_blocks
        total = with_sink(total, maximum, sinks, head, is_lane, has_sinks)
        accumulated = accumulated / tl.where(total > 0.0, total, 1.0)[:, None]
        tl.store(
            out + step_row[:, None] * out_row_stride + head[:, None] * (first_dim + rest_dim) + dims[None, :],
            accumulated.to(out.dtype.element_ty),
            mask=is_element,
        )


def attend_decode(
    query: torch.Tensor, out: torch.Tensor, paged: PagedKeys, scoring: Scoring, *, num_splits: int
) -> None:
    """Attend with row i of `query` [rows, heads, head_dim] as the last token of sequence i.

    Writes `out` [rows, heads · head_dim], of each head the elements that values have; a row of length 0 gets zeros.
    `num_splits`, up to MAX_SPLITS, multiplies the number of programs; more than one takes rows · heads · num_splits ·
    (elements of a value + 2) floats of memory.
    """
    num_rows, num_heads, _ = query.shape
    num_kv_heads, widths = paged.keys.shape[1], Widths.of(paged)
    group = num_heads // num_kv_heads
    heads = _heads_at_once(group, paged)
    shape = (num_rows, num_heads, num_splits) if num_splits > 1 else (0,)
    maxima = query.new_empty(shape, dtype=torch.float32)
    totals, sums = torch.empty_like(maxima), maxima.new_empty((*shape, widths.first))
    tile = _tile(query, paged)
    _decode[(num_kv_heads * triton.cdiv(group, heads), num_rows, num_splits)](
        query,
        paged.keys,
        paged.values,
        paged.tables,
        paged.lengths,
        out if scoring.sinks is None else scoring.sinks,
        out,
        sums,
        maxima,
        totals,
        *scoring.factors,
        _ALL if scoring.window is None else scoring.window,
        num_splits,
        *_strides(query, out, paged),
        **_shapes(paged, group, heads),
        lanes=max(_LEAST_LANES, triton.next_power_of_2(heads)),
        tile=tile.tokens,
        least_tiles=LEAST_SPLIT_TOKENS // tile.tokens,
        has_cap=scoring.soft_cap is not None,
        has_sinks=scoring.sinks is not None,
        num_warps=4,
        num_stages=tile.stages,
        enable_fp_fusion=True,
    )
    if num_splits > 1:
        _combine[(num_rows, num_heads)](
            sums,
            maxima,
            totals,
            out if scoring.sinks is None else scoring.sinks,
            out,
            num_splits,
            out.stride(0),
            first_dim=widths.first,
            padded_dim=widths.padded[0],
            rest_dim=widths.rest,
            most_splits=MAX_SPLITS,
            has_sinks=scoring.sinks is not None,
            num_warps=_LEAST_WARPS * (2 if widths.padded[0] > _WIDE else 1),
            enable_fp_fusion=True,
        )


def attend_spans(
    query: torch.Tensor,
    out: torch.Tensor,
    paged: PagedKeys,
    scoring: Scoring,
    *,
    starts: torch.Tensor,
    first_span: int,
    longest: int,
) -> None:
    """Attend with rows [starts[i], starts[i + 1]) of `query` [rows, heads, head_dim] as the last ones of sequence i.

    `starts` is int32 [sequences + 1]. Only sequences from `first_span` on are computed; none of them has more than
    `longest` rows. Writes `out` [rows, heads · head_dim], of each head the elements that values have. The step's keys
    and values must be in the cache already.
    """
    num_kv_heads = paged.keys.shape[1]
    group = query.shape[1] // num_kv_heads
    heads, tile = _heads_at_once(group, paged), _tile(query, paged)
    lanes = max(tile.lanes, triton.next_power_of_2(heads))
    programs = num_kv_heads * triton.cdiv(group, heads)
    _spans[(triton.cdiv(longest, lanes // heads), len(starts) - 1 - first_span, programs)](
        query,
        paged.keys,
        paged.values,
        paged.tables,
        paged.lengths,
        starts,
        out if scoring.sinks is None else scoring.sinks,
        first_span,
        out,
        *scoring.factors,
        _ALL if scoring.window is None else scoring.window,
        *_strides(query, out, paged),
        **_shapes(paged, group, heads),
        lanes=lanes,
        tile=tile.tokens,
        has_cap=scoring.soft_cap is not None,
        has_sinks=scoring.sinks is not None,
        num_warps=max(_LEAST_WARPS, lanes // _MOST_LANES_PER_WARP),
        num_stages=tile.stages,
        enable_fp_fusion=True,
    )


def _tile(query: torch.Tensor, paged: PagedKeys) -> Tile:
    return Tile.of(Widths.of(paged).first, max(query.element_size(), paged.keys.element_size()))


def _heads_at_once(group: int, paged: PagedKeys) -> int:
    """Return the query heads of a program: of latent attention, whose group is a rank's heads, as many as lanes."""
    return group if paged.value_dim is None else min(group, _LEAST_LANES)


def _shapes(paged: PagedKeys, group: int, heads: int) -> dict[str, int | bool]:
    """Return the constants that both kernels have."""
    widths = Widths.of(paged)
    padded, padded_rest = widths.padded
    return {
        "first_dim": widths.first,
        "padded_dim": padded,
        "rest_dim": widths.rest,
        "padded_rest": padded_rest,
        "block_size": paged.block_size,
        "group": group,
        "heads": heads,
    }


def _strides(query: torch.Tensor, out: torch.Tensor, paged: PagedKeys) -> tuple[int, ...]:
    """Return strides in the order of the kernels' parameters; elements of a head lie side by side."""
    assert query.stride(2) == 1
    assert out.stride(1) == 1
    assert paged.keys.stride() == paged.values.stride()
    assert paged.keys.stride(2) == 1
    assert paged.tables.stride(1) == 1
    slot_stride, head_stride, _ = paged.keys.stride()
    return (paged.tables.stride(0), query.stride(0), query.stride(1), out.stride(0), slot_stride, head_stride)
