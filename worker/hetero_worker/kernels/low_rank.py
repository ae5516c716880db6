"""Low-rank products of adapters, y += up · (down · x), each row of x with the factors of its own adapter.

The first of two kernels shrinks rows to down · x; the second expands what it left into y. Rows say on the device which
adapter is theirs, and factors are found by a table of addresses there. So the host waits for nothing, and a step that
was recorded serves any mix of adapters, those that came later included.

Rows lie in tiles. The first row of a tile that has an adapter leads all rows of the tile that have the same one. With
few rows each row has programs of its own, most of which lead. With many rows, mostly of long prompts, a program serves
a whole tile, and inputs are not divided among programs. Either way a row's bits depend on that row and its adapter
alone: a tile's products are the same, and are added up in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
import triton
import triton.language as tl

FACTORS: Final = tl.constexpr(3)
"""Numbers of an adapter's part in the table: its rank, and the addresses of `down` and `up`."""
_BLOCK: Final = tl.constexpr(4)
"""Numbers of a block of columns: its part, where that begins and ends in y, and its own first column."""
_TILE_ROWS: Final = 16
_TILE_RANKS: Final = 16
_COLUMNS: Final = 64
"""Columns of y of a program."""
_PIECE: Final = 1024
"""Inputs whose products are added up apart from others': the more pieces, the more programs read `down`."""
_DEPTH_BYTES: Final = 256
"""Bytes of a row that a program reads at a time."""
_FEW_ROWS: Final = 64
_ALIGNMENT: Final = 16
"""Alignment of x in bytes. Triton specialises on it, and all calls must use the same code."""


@triton.jit
def _leads(numbers, row, tile, rows):  # type: ignore[no-untyped-def]
    """Return the adapter of a row, 0 if another row of its tile leads, and which rows of the tile have the same."""
    own = tl.load(numbers + row, mask=row < rows, other=0)
    is_own = tl.load(numbers + tile, mask=tile < rows, other=0) == own
    earlier = tl.sum((is_own & (tile < row)).to(tl.int32), 0)
    return tl.where(earlier == 0, own, 0), is_own & (tile < rows)


@triton.jit(do_not_specialize=["rows"])
def _shrink(  # type: ignore[no-untyped-def]
    x,
    numbers,
    table,
    products,
    rows,
    in_features: tl.constexpr,
    parts: tl.constexpr,
    most_rank: tl.constexpr,
    piece: tl.constexpr,
    leaders: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_ranks: tl.constexpr,
    depth: tl.constexpr,
):
    """Compute some ranks (program 1, part by part) of rows (program 0), of a piece of the inputs (program 2) or all."""
    blocks: tl.constexpr = (most_rank + tile_ranks - 1) // tile_ranks
    part = tl.program_id(1) // blocks
    rank_at = tl.program_id(1) % blocks * tile_ranks + tl.arange(0, tile_ranks)
    first_row = tl.program_id(0) * leaders
    tile = first_row // tile_rows * tile_rows + tl.arange(0, tile_rows)
    offset = tl.arange(0, depth)
    begin = tl.program_id(2) * piece
    end = in_features if leaders > 1 else tl.minimum(begin + piece, in_features)
    for row in range(first_row, first_row + leaders):
        adapter, is_own = _leads(numbers, row, tile, rows)
        place = table + (adapter * parts + part) * FACTORS
        rank = tl.load(place, mask=adapter != 0, other=0)
        if tl.min(rank_at, 0) < rank:
            down = tl.multiple_of(tl.load(place + 1).to(tl.pointer_type(x.dtype.element_ty)), 16)
            own_rows = x + tile.to(tl.int64)[:, None] * in_features
            own_ranks = down + tl.minimum(rank_at, rank - 1)[:, None] * in_features
            total = tl.zeros([tile_rows, tile_ranks], tl.float32)
            for from_piece in range(begin, end, piece):
                sums = tl.zeros([tile_rows, tile_ranks], tl.float32)
                for at in range(from_piece, tl.minimum(from_piece + piece, in_features), depth):
                    inside = (offset < in_features - at)[None, :]
                    left = tl.load(own_rows + (at + offset)[None, :], mask=is_own[:, None] & inside, other=0.0)
                    right = tl.load(own_ranks + (at + offset)[None, :], mask=inside, other=0.0)
                    sums += tl.dot(left, tl.trans(right), input_precision="ieee")
                total += sums
            target = (tl.program_id(2) * rows + tile).to(tl.int64) * parts + part
            tl.store(
                products + target[:, None] * most_rank + rank_at[None, :],
                total,
                mask=is_own[:, None] & (rank_at < rank)[None, :],
            )


@triton.jit(do_not_specialize=["rows"])
def _expand(  # type: ignore[no-untyped-def]
    x,
    products,
    numbers,
    table,
    blocks,
    y,
    rows,
    out_features: tl.constexpr,
    parts: tl.constexpr,
    most_rank: tl.constexpr,
    pieces: tl.constexpr,
    leaders: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_ranks: tl.constexpr,
    tile_columns: tl.constexpr,
):
    """Add to a block of columns (program 1) of rows (program 0). Factors have the type of x."""
    block = blocks + tl.program_id(1) * _BLOCK
    part, begin, end = tl.load(block), tl.load(block + 1), tl.load(block + 2)
    column = tl.load(block + 3) + tl.arange(0, tile_columns)
    first_row = tl.program_id(0) * leaders
    tile = first_row // tile_rows * tile_rows + tl.arange(0, tile_rows)
    offset = tl.arange(0, tile_ranks)
    for row in range(first_row, first_row + leaders):
        adapter, is_own = _leads(numbers, row, tile, rows)
        place = table + (adapter * parts + part) * FACTORS
        rank = tl.load(place, mask=adapter != 0, other=0)
        if rank > 0:
            up = tl.multiple_of(tl.load(place + 2).to(tl.pointer_type(x.dtype.element_ty)), 16)
            own_columns = up + (tl.minimum(column, end - 1) - begin).to(tl.int64)[:, None] * rank
            sums = tl.zeros([tile_rows, tile_columns], tl.float32)
            for at in range(0, rank, tile_ranks):
                inside = (offset < rank - at)[None, :]
                is_found = is_own[:, None] & inside
                found = tl.zeros([tile_rows, tile_ranks], tl.float32)
                for piece in range(pieces):
                    source = (piece * rows + tile).to(tl.int64) * parts + part
                    source_ranks = products + source[:, None] * most_rank + (at + offset)[None, :]
                    found += tl.load(source_ranks, mask=is_found, other=0.0)
                right = tl.load(own_columns + (at + offset)[None, :], mask=inside, other=0.0)
                sums += tl.dot(found.to(right.dtype), tl.trans(right), input_precision="ieee")
            target = y + tile.to(tl.int64)[:, None] * out_features + column[None, :]
            is_target = is_own[:, None] & (column < end)[None, :]
            sums += tl.load(target, mask=is_target, other=0.0).to(tl.float32)
            tl.store(target, sums.to(y.dtype.element_ty), mask=is_target)


def column_blocks(bounds: Sequence[tuple[int, int]], device: torch.device) -> torch.Tensor:
    """Return the blocks of columns that programs of the second kernel have, int32 [blocks, 4] on the device.

    `bounds`: where each part's columns begin and end in y.
    """
    found = [
        (part, begin, end, column) for part, (begin, end) in enumerate(bounds) for column in range(begin, end, _COLUMNS)
    ]
    return torch.tensor(found, dtype=torch.int32).reshape(-1, int(_BLOCK.value)).to(device)


def place_factors(
    factors: Sequence[tuple[torch.Tensor, torch.Tensor] | None], place: torch.Tensor, dtype: torch.dtype
) -> list[torch.Tensor]:
    """Write an adapter's factors to its place [parts, 3] in a table; return what has to be kept for as long.

    `factors`: `down` and `up` of each part, kept in a type; None: the adapter leaves the part as it is.
    """
    kept: list[torch.Tensor] = []
    entries = torch.zeros(place.shape, dtype=torch.int64)
    for part, each in enumerate(factors):
        if each is not None:
            down, up = (factor.to(place.device, dtype).contiguous() for factor in each)
            kept += (down, up)
            entries[part] = torch.tensor([len(down), down.data_ptr(), up.data_ptr()])
    place.copy_(entries)
    return kept


def add_low_rank(
    x: torch.Tensor,
    y: torch.Tensor,
    numbers: torch.Tensor,
    table: torch.Tensor,
    blocks: torch.Tensor,
    *,
    most_rank: int,
) -> None:
    """Add to contiguous y [rows, out] the low-rank products of each row of x [rows, in].

    `numbers`, int64 [rows], are of the rows' adapters, 0: none. `table`, int64 [adapters, parts, 3], has an adapter's
    rank, at most `most_rank`, and the addresses of its factors [rank, in] and [columns of the part, rank], of x's type.
    A part of rank 0 stays as it is. `blocks` as `column_blocks` returns them.
    """
    (rows, in_features), parts = x.shape, table.shape[1]
    if not y.numel():
        return
    if not x.is_contiguous() or x.data_ptr() % _ALIGNMENT:
        x = x.clone(memory_format=torch.contiguous_format)
    leaders = 1 if rows <= _FEW_ROWS else _TILE_ROWS
    pieces = triton.cdiv(in_features, _PIECE) if leaders == 1 else 1
    programs = triton.cdiv(rows, leaders)
    products = torch.empty((pieces, rows, parts, most_rank), dtype=torch.float32, device=x.device)
    tiles = {"leaders": leaders, "tile_rows": _TILE_ROWS, "tile_ranks": _TILE_RANKS}
    shape = {"parts": parts, "most_rank": most_rank}
    _shrink[(programs, parts * triton.cdiv(most_rank, _TILE_RANKS), pieces)](
        *(x, numbers, table, products, rows),
        in_features=in_features,
        piece=_PIECE,
        depth=_DEPTH_BYTES // x.element_size(),
        **shape,
        **tiles,
        num_warps=4,
        num_stages=3,
        enable_fp_fusion=True,
    )
    _expand[(programs, len(blocks))](
        *(x, products, numbers, table, blocks, y, rows),
        out_features=y.shape[1],
        pieces=pieces,
        tile_columns=_COLUMNS,
        **shape,
        **tiles,
        num_warps=4,
        num_stages=1,
        enable_fp_fusion=True,
    )
