"""Products of experts: each row of x with the weight of the expert that it chose, in one kernel for all experts.

Choices are sorted by expert on the device, and programs find their expert and rows from the sorted bounds, so that the
host waits for nothing: their number is a bound that follows from the number of choices. Weights are found by a table
of addresses, which may change between two steps, recorded ones included. Experts that are not in the table are skipped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl

from hetero_worker.kernels.quantized_matmul import CHUNK, QuantizedTile, tile_sums

ADDRESSES: Final = tl.constexpr(4)
"""Of an expert in the table: values, scales, minima, bias; 0 where there is none."""
_BLOCK: Final = 256
_SORTED_AT_ONCE: Final = 128
"""Choices that one program sorts, by comparing each with each."""


@dataclass(frozen=True, slots=True)
class SortedChoices:
    """Choices of experts, sorted by expert."""

    order: torch.Tensor
    """int64 [choices]: number of a choice, token by token."""
    bounds: torch.Tensor
    """int32 [experts + 1]: where each expert's choices begin in `order`."""
    per_token: int

    @classmethod
    def of(cls, chosen: torch.Tensor, numbers: torch.Tensor) -> SortedChoices:
        """Return the choices of int64 [tokens, choices], of experts `numbers` [experts + 1]: 0, 1, 2 and so on.

        A choice may be the number of experts: it is of none.
        """
        number, experts = chosen.numel(), len(numbers) - 1
        if 0 < number <= _SORTED_AT_ONCE:
            order = torch.empty(number, dtype=torch.int64, device=chosen.device)
            bounds = torch.empty(experts + 1, dtype=torch.int32, device=chosen.device)
            size, padded = max(16, triton.next_power_of_2(number)), triton.next_power_of_2(experts + 1)
            _sort[(1,)](
                chosen, order, bounds, number, experts, size=size, padded_experts=padded, enable_fp_fusion=False
            )
            return cls(order, bounds, chosen.shape[1])
        found, order = chosen.reshape(-1).sort(stable=True)
        return cls(order, torch.searchsorted(found, numbers, out_int32=True), chosen.shape[1])

    @property
    def num_experts(self) -> int:
        """Number of experts that could be chosen."""
        return len(self.bounds) - 1


@dataclass(frozen=True, slots=True)
class ExpertKind:
    """Everything but the address that all weights [out, in] of a layer's experts have in common."""

    outputs: int
    inputs: int
    group: int
    chunk: int
    bits: int
    """Of a value; 16 or 32: floats of the inputs' type."""
    middle: int
    is_float: bool
    has_minima: bool
    has_bias: bool
    lane: int = 0
    """Elements that lie side by side where weights lie as host cores have them (`memory.panels`); 0: they do not ..."""
    panel_size: int = 0
    """... and elements of a panel."""


@triton.jit(do_not_specialize=["number", "num_experts"])
def _sort(chosen, order, bounds, number, num_experts, size: tl.constexpr, padded_experts: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sort `number` choices by expert, those of an expert in their order."""
    at = tl.arange(0, size)
    own = tl.load(chosen + at, mask=at < number, other=1 << 30).to(tl.int32)
    is_before = (own[None, :] < own[:, None]) | ((own[None, :] == own[:, None]) & (at[None, :] < at[:, None]))
    tl.store(order + tl.sum(is_before.to(tl.int32), axis=1), at.to(tl.int64), mask=at < number)
    expert = tl.arange(0, padded_experts)
    begin = tl.sum((own[None, :] < expert[:, None]).to(tl.int32), axis=1)
    tl.store(bounds + expert, begin, mask=expert <= num_experts)


@triton.jit(do_not_specialize=["rows", "out_features", "per_token", "num_experts"])
def _grouped(  # type: ignore[no-untyped-def]
    x,
    order,
    bounds,
    table,
    counts,
    out,
    rows,
    out_features,
    in_features,
    per_token,
    num_experts,
    group: tl.constexpr,
    chunk: tl.constexpr,
    bits: tl.constexpr,
    middle: tl.constexpr,
    is_float: tl.constexpr,
    has_minima: tl.constexpr,
    has_bias: tl.constexpr,
    has_tail: tl.constexpr,
    is_first: tl.constexpr,
    padded_experts: tl.constexpr,
    tile_columns: tl.constexpr,
    tile_rows: tl.constexpr,
    lane: tl.constexpr,
    panel_size: tl.constexpr,
):
    """Compute tile (rows of one expert, columns) in programs (0, 1).

    The first of two products reads rows of tokens and writes rows in sorted order, the second reads these and writes
    rows of choices. The first counts the choices of experts that are in the table.
    """
    number = tl.program_id(0)
    expert = tl.arange(0, padded_experts)
    is_expert = expert < num_experts
    begins = tl.load(bounds + expert, mask=is_expert, other=rows)
    ends = tl.load(bounds + expert + 1, mask=is_expert, other=rows)
    if is_first:
        is_counted = expert < tl.where(number + tl.program_id(1) == 0, num_experts, 0)
        is_counted &= tl.load(table + expert * ADDRESSES, mask=is_counted, other=0) != 0
        counted = tl.load(counts + expert, mask=is_counted, other=0)
        tl.store(counts + expert, counted + (ends - begins), mask=is_counted)
    tiles = (ends - begins + tile_rows - 1) // tile_rows
    own = tl.sum((tl.cumsum(tiles, 0) <= number).to(tl.int32), 0)
    if own < num_experts:
        place = table + own * ADDRESSES
        address = tl.load(place)
        if address != 0:
            before = tl.sum(tl.where(expert < own, tiles, 0), 0)
            begin = tl.load(bounds + own) + (number - before) * tile_rows
            end = tl.load(bounds + own + 1)
            row = begin + tl.arange(0, tile_rows)
            column = tl.program_id(1).to(tl.int64) * tile_columns + tl.arange(0, tile_columns)
            own_column = tl.minimum(column, out_features - 1)
            last = tl.minimum(row, end - 1)
            choice = tl.load(order + last)
            if is_first:
                inputs = x + choice // per_token * in_features
                target = last.to(tl.int64)
            else:
                inputs = x + last.to(tl.int64) * in_features
                target = choice
            if bits == 32 and lane:
                values = address.to(tl.pointer_type(tl.float32))
            elif bits == 16 and lane == 2:
                values = address.to(tl.pointer_type(tl.bfloat16))
            elif bits == 16 and lane:
                values = address.to(tl.pointer_type(tl.float16))
            elif bits >= 16:
                values = address.to(tl.pointer_type(x.dtype.element_ty))
            else:
                values = address.to(tl.pointer_type(tl.uint8))
            sums = tile_sums(
                inputs,
                tl.multiple_of(values, 16),
                tl.load(place + 1).to(tl.pointer_type(tl.float16)),
                tl.load(place + 2).to(tl.pointer_type(tl.float16)),
                own_column,
                out_features,
                in_features,
                0,
                tl.cdiv(in_features, chunk),
                group,
                chunk,
                bits,
                middle,
                is_float,
                has_minima,
                has_tail,
                tile_columns,
                tile_rows,
                lane,
                panel_size,
            )
            if has_bias:
                bias = tl.load(place + 3).to(tl.pointer_type(x.dtype.element_ty))
                sums += tl.load(bias + own_column).to(tl.float32)[:, None]
            tl.store(
                out + target[None, :] * out_features + column[:, None],
                sums.to(out.dtype.element_ty),
                mask=(row < end)[None, :] & (column < out_features)[:, None],
            )


@triton.jit(do_not_specialize=["width"])
def _add_choices(  # type: ignore[no-untyped-def]
    results, chosen, shares, table, total, width, per_token: tl.constexpr, adds: tl.constexpr, block: tl.constexpr
):
    """Add up a token's (program 0) results of experts that are in the table, for a block of columns (program 1)."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < width
    place = total + token * width + column
    sums = tl.zeros([block], tl.float32)
    if adds:
        sums += tl.load(place, mask=inside, other=0.0).to(tl.float32)
    for number in tl.static_range(per_token):
        choice = token * per_token + number
        is_held = tl.load(table + tl.load(chosen + choice) * ADDRESSES) != 0
        found = tl.load(results + choice * width + column, mask=column < tl.where(is_held, width, 0), other=0.0)
        sums += tl.load(shares + choice) * found
    tl.store(place, sums.to(total.dtype.element_ty), mask=inside)


def grouped_linear(
    x: torch.Tensor,
    choices: SortedChoices,
    table: torch.Tensor,
    kind: ExpertKind,
    *,
    counts: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """Return each choice's product with its expert's weight, new [choices, out].

    `table`, int64 [experts, 4], has the addresses of weights of this kind. With `counts`, int64 [experts], x is of
    tokens [tokens, in] and results are in sorted order, zeros for experts that are not in the table. Without, x is in
    sorted order and results are of choices, without meaning for such experts. `dtype`: of the results; None: of x.
    """
    rows = len(choices.order)
    make = torch.empty if counts is None else torch.zeros
    out = make((rows, kind.outputs), dtype=dtype or x.dtype, device=x.device)
    if not out.numel():
        return out
    tile = QuantizedTile.of_rows(rows // choices.num_experts, x.element_size(), batch_invariant=batch_invariant)
    most = min(choices.num_experts, rows) + rows // tile.rows
    _grouped[(most, triton.cdiv(kind.outputs, tile.columns))](
        x,
        choices.order,
        choices.bounds,
        table,
        counts,
        out,
        rows,
        kind.outputs,
        kind.inputs,
        choices.per_token,
        choices.num_experts,
        group=kind.group,
        chunk=kind.chunk,
        bits=kind.bits,
        middle=kind.middle,
        is_float=kind.is_float,
        has_minima=kind.has_minima,
        has_bias=kind.has_bias,
        has_tail=kind.inputs % kind.chunk != 0,
        is_first=counts is not None,
        padded_experts=triton.next_power_of_2(choices.num_experts),
        tile_columns=tile.columns,
        tile_rows=tile.rows,
        lane=kind.lane,
        panel_size=kind.panel_size,
        num_warps=tile.warps,
        num_stages=tile.stages,
        enable_fp_fusion=True,
    )
    return out


def add_choices(
    results: torch.Tensor,
    chosen: torch.Tensor,
    shares: torch.Tensor,
    table: torch.Tensor,
    total: torch.Tensor,
    *,
    adds: bool,
) -> None:
    """Write to `total` [tokens, width] the sums of float32 `results` [tokens · choices, width], times their shares.

    `chosen` is int64 and `shares` float32 [tokens, choices]; experts that are not in the table count nothing.
    `adds`: what is there already counts, too.
    """
    tokens, width = total.shape
    if total.numel():
        _add_choices[(tokens, triton.cdiv(width, _BLOCK))](
            *(results, chosen, shares, table, total, width),
            per_token=chosen.shape[1],
            adds=adds,
            block=_BLOCK,
            enable_fp_fusion=True,
        )


def float_kind(shape: tuple[int, int], dtype: torch.dtype, *, has_bias: bool) -> ExpertKind:
    """Return the kind of weights (out, in) that are floats of the inputs' type."""
    return ExpertKind(*shape, 0, CHUNK, 8 * dtype.itemsize, 0, True, False, has_bias)
