"""Products of single rows with weights of floats, y = x · Wᵀ + b: they are bound by reading W.

A program reads a few of W's rows, a long piece of each at a time, and adds up by element what it multiplies; the sum
over the elements comes last. So it waits for nothing but memory, and there are programs enough to keep a large GPU's
busy. Sums are of float32.

Of experts, the first of two kernels computes the gated inner rows of all choices, the second each token's sum. Experts
are found by a table of addresses, as in `grouped_matmul`; here each choice reads its expert's weights by itself.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from hetero_api.model_parts import Activation
from hetero_worker.kernels.activations import opened
from hetero_worker.kernels.grouped_matmul import ADDRESSES

_COLUMNS: Final = 2
"""Rows of W of a program: of tiles on an H200 within 3 % of the best at nine shapes of 11 (`bench/NOTES.md`)."""
_DEPTH: Final = 2048
"""Elements of a row that a program reads at a time, at most."""
_WARPS: Final = 4


@triton.jit(do_not_specialize=["out_features"])
def _row_product(  # type: ignore[no-untyped-def]
    x,
    weight,
    bias,
    out,
    out_features,
    in_features: tl.constexpr,
    has_bias: tl.constexpr,
    columns: tl.constexpr,
    depth: tl.constexpr,
):
    """Compute some columns of the result."""
    column = tl.program_id(0).to(tl.int64) * columns + tl.arange(0, columns)
    # Surplus columns are read from the last one, and not stored.
    own = weight + tl.minimum(column, out_features - 1)[:, None] * in_features
    offset = tl.arange(0, depth)
    sums = tl.zeros([columns, depth], tl.float32)
    for begin in range(0, in_features, depth):
        if in_features % depth == 0:
            left = tl.load(x + begin + offset)
            right = tl.load(own + (begin + offset)[None, :])
        else:
            inside = offset < in_features - begin
            left = tl.load(x + begin + offset, mask=inside, other=0.0)
            right = tl.load(own + (begin + offset)[None, :], mask=inside[None, :], other=0.0)
        sums += right.to(tl.float32) * left.to(tl.float32)[None, :]
    total = tl.sum(sums, axis=1)
    if has_bias:
        total += tl.load(bias + column, mask=column < out_features, other=0.0).to(tl.float32)
    tl.store(out + column, total.to(out.dtype.element_ty), mask=column < out_features)


def row_product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return x · weightᵀ + bias, new [1, out], of contiguous x [1, in], weight [out, in] and bias [out] of one type.

    `dtype`: of the result, which is rounded once; None: of x.
    """
    out_features, in_features = weight.shape
    out = torch.empty((1, out_features), dtype=dtype or x.dtype, device=x.device)
    _row_product[(triton.cdiv(out_features, _COLUMNS),)](
        x,
        weight,
        bias,
        out,
        out_features,
        in_features=in_features,
        has_bias=bias is not None,
        columns=_COLUMNS,
        depth=_depth(in_features),
        num_warps=_WARPS,
        enable_fp_fusion=True,
    )
    return out


@triton.jit
def _inner_rows(  # type: ignore[no-untyped-def]
    x,
    chosen,
    table,
    counts,
    inner,
    per_token: tl.constexpr,
    in_features: tl.constexpr,
    width: tl.constexpr,
    activation: tl.constexpr,
    has_bias: tl.constexpr,
    depth: tl.constexpr,
):
    """Compute one column (program 0) of one choice's (program 1) gated inner row, and count the choice."""
    column = tl.program_id(0).to(tl.int64)
    choice = tl.program_id(1).to(tl.int64)
    expert = tl.load(chosen + choice)
    address = tl.load(table + expert * ADDRESSES)
    if address != 0:
        weights = tl.multiple_of(address.to(tl.pointer_type(x.dtype.element_ty)), 16)
        own = x + choice // per_token * in_features
        offset = tl.arange(0, depth)
        gates = tl.zeros([depth], tl.float32)
        ups = tl.zeros([depth], tl.float32)
        for begin in range(0, in_features, depth):
            inside = offset < in_features - begin
            left = tl.load(own + begin + offset, mask=inside, other=0.0).to(tl.float32)
            place = weights + column * in_features + begin + offset
            gates += tl.load(place, mask=inside, other=0.0).to(tl.float32) * left
            ups += tl.load(place + width * in_features, mask=inside, other=0.0).to(tl.float32) * left
        gate, up = tl.sum(gates, axis=0), tl.sum(ups, axis=0)
        if has_bias:
            bias = tl.load(table + expert * ADDRESSES + 3).to(tl.pointer_type(x.dtype.element_ty))
            gate += tl.load(bias + column).to(tl.float32)
            up += tl.load(bias + width + column).to(tl.float32)
        tl.store(inner + choice * width + column, opened(gate, up, activation).to(inner.dtype.element_ty))
        if column == 0:
            tl.atomic_add(counts + expert, 1)


@triton.jit
def _expert_sums(  # type: ignore[no-untyped-def]
    inner,
    chosen,
    shares,
    table,
    total,
    per_token: tl.constexpr,
    hidden: tl.constexpr,
    width: tl.constexpr,
    adds: tl.constexpr,
    has_bias: tl.constexpr,
    columns: tl.constexpr,
    depth: tl.constexpr,
):
    """Add up some columns (program 0) of one token's (program 1) experts."""
    column = tl.program_id(0).to(tl.int64) * columns + tl.arange(0, columns)
    token = tl.program_id(1).to(tl.int64)
    own = tl.minimum(column, hidden - 1)
    offset = tl.arange(0, depth)
    target = total + token * hidden + column
    sums = tl.zeros([columns], tl.float32)
    if adds:
        sums += tl.load(target, mask=column < hidden, other=0.0).to(tl.float32)
    for number in tl.static_range(per_token):
        choice = token * per_token + number
        place = table + tl.load(chosen + choice) * ADDRESSES
        address = tl.load(place)
        is_held = address != 0
        weights = tl.multiple_of(address.to(tl.pointer_type(inner.dtype.element_ty)), 16)
        products = tl.zeros([columns, depth], tl.float32)
        for begin in range(0, width, depth):
            inside = offset < tl.where(is_held, width - begin, 0)
            left = tl.load(inner + choice * width + begin + offset, mask=inside, other=0.0).to(tl.float32)
            right = tl.load(weights + own[:, None] * width + (begin + offset)[None, :], mask=inside[None, :], other=0.0)
            products += right.to(tl.float32) * left[None, :]
        found = tl.sum(products, axis=1)
        if has_bias:
            bias = tl.load(place + 3).to(tl.pointer_type(inner.dtype.element_ty))
            found += tl.load(bias + own, mask=own < tl.where(is_held, hidden, 0), other=0.0).to(tl.float32)
        sums += tl.load(shares + choice) * found
    tl.store(target, sums.to(total.dtype.element_ty), mask=column < hidden)


def add_experts(
    x: torch.Tensor,
    chosen: torch.Tensor,
    shares: torch.Tensor,
    tables: torch.Tensor,
    total: torch.Tensor,
    *,
    width: int,
    activation: Activation,
    counts: torch.Tensor,
    has_bias: tuple[bool, bool],
    adds: bool,
) -> None:
    """Write each token's sum of experts to `total` [tokens, hidden], of contiguous x [tokens, hidden] and few tokens.

    `chosen` is int64 and `shares` float32 [tokens, choices]. `tables`, int64 [2, experts, 4]: addresses of [2 · width,
    hidden] and of [hidden, width] floats of x's type, and of their biases if they have any (`has_bias`). Experts that
    are not in the tables count nothing. `counts`, int64 [experts]: choices are added to it. `adds`: what is in `total`
    counts, too.
    """
    (tokens, per_token), hidden = chosen.shape, x.shape[1]
    inner = torch.empty((tokens * per_token, width), dtype=x.dtype, device=x.device)
    _inner_rows[(width, tokens * per_token)](
        *(x, chosen, tables[0], counts, inner),
        per_token=per_token,
        in_features=hidden,
        width=width,
        activation=activation,
        has_bias=has_bias[0],
        depth=_depth(hidden),
        num_warps=_WARPS,
        enable_fp_fusion=True,
    )
    _expert_sums[(triton.cdiv(hidden, _COLUMNS), tokens)](
        *(inner, chosen, shares, tables[1], total),
        per_token=per_token,
        hidden=hidden,
        width=width,
        adds=adds,
        has_bias=has_bias[1],
        columns=_COLUMNS,
        depth=_depth(width),
        num_warps=_WARPS,
        enable_fp_fusion=True,
    )


def _depth(in_features: int) -> int:
    return max(16, min(_DEPTH, int(triton.next_power_of_2(in_features))))
