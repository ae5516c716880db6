"""Router logits and choices of experts by the rule of `expert_choice`, in a kernel each.

A program computes the logits of some experts of one token, or one token's choices. Products and sums must not be fused
(`enable_fp_fusion`), and quotients must be rounded.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from hetero_worker.kernels import expert_choice
from hetero_worker.kernels.expert_choice import BLOCK, LANES, RouterWeights

_EXPERTS: Final = 32
_FEW_EXPERTS: Final = 2
"""Of a program of one warp, where there are few tokens."""
_FEW_TOKENS: Final = 32
_MOST_EXPERTS: Final = 2 * BLOCK
"""Experts whose scores one program chooses from: a sum of two blocks has no order."""
_TO_TWOS: Final = tl.constexpr(expert_choice.TO_TWOS)
_TWO_HIGH: Final = tl.constexpr(expert_choice.TWO_HIGH)
_TWO_LOW: Final = tl.constexpr(expert_choice.TWO_LOW)
_FACTORS: Final = tl.constexpr(expert_choice.FACTORS)
_NO_FRACTION: Final = tl.constexpr(12582912.0)
"""1.5 · 2^23: added and subtracted, it rounds to a whole number, to the even one of two as near."""


@triton.jit
def _sums_of_block(terms, rows: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add up vectors of 16 lanes: [rows, 256] to [rows, 16]. A sum of two has no order."""
    halves = tl.sum(tl.reshape(terms, [rows, 2, 8, 16]), axis=1)
    halves = tl.sum(tl.reshape(halves, [rows, 2, 4, 16]), axis=1)
    halves = tl.sum(tl.reshape(halves, [rows, 2, 2, 16]), axis=1)
    return tl.sum(halves, axis=1)


@triton.jit
def _sums_of_lanes(lanes, rows: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add up lanes: [rows, 16] to [rows]."""
    halves = tl.sum(tl.reshape(lanes, [rows, 2, 8]), axis=1)
    halves = tl.sum(tl.reshape(halves, [rows, 2, 4]), axis=1)
    halves = tl.sum(tl.reshape(halves, [rows, 2, 2]), axis=1)
    return tl.sum(halves, axis=1)


@triton.jit
def _router(  # type: ignore[no-untyped-def]
    hidden,
    norm,
    router,
    logits,
    hidden_stride,
    eps: tl.constexpr,
    width: tl.constexpr,
    num_experts: tl.constexpr,
    tile_experts: tl.constexpr,
    depth: tl.constexpr,
):
    """Compute a tile of experts of one token; program (token, tile)."""
    token = tl.program_id(0).to(tl.int64)
    expert = tl.program_id(1) * tile_experts + tl.arange(0, tile_experts)
    is_expert = expert < num_experts
    offset = tl.arange(0, depth)
    sums = tl.zeros([tile_experts, 16], tl.float32)
    squares = tl.zeros([1, 16], tl.float32)
    for begin in range(0, width, depth):
        inside = offset < width - begin
        state = tl.load(hidden + token * hidden_stride + begin + offset, mask=inside, other=0.0).to(tl.float32)
        normed = state * tl.load(norm + begin + offset, mask=inside, other=0.0).to(tl.float32)
        place = router + expert[:, None] * width + begin + offset[None, :]
        weights = tl.load(place, mask=is_expert[:, None] & inside[None, :], other=0.0).to(tl.float32)
        sums += _sums_of_block(normed[None, :] * weights, tile_experts)
        squares += _sums_of_block((state * state)[None, :], 1)
    mean = _sums_of_lanes(squares, 1) * (1.0 / width) + eps
    half = mean * 0.5
    factor = (0x5F375A86 - (mean.to(tl.int32, bitcast=True) >> 1)).to(tl.float32, bitcast=True)
    for _ in tl.static_range(4):
        factor = factor * (1.5 - half * factor * factor)
    result = _sums_of_lanes(sums, tile_experts) * factor
    tl.store(logits + token * num_experts + expert, result, mask=is_expert)


def router_logits(hidden: torch.Tensor, router: RouterWeights) -> torch.Tensor:
    """Return logits, float32 [tokens, experts], of the residual stream [tokens, hidden], with rows at any stride."""
    tokens, width = hidden.shape
    num_experts = len(router.weight)
    out = torch.empty((tokens, num_experts), dtype=torch.float32, device=hidden.device)
    if tokens:
        tile_experts = _FEW_EXPERTS if tokens <= _FEW_TOKENS else _EXPERTS
        _router[(tokens, triton.cdiv(num_experts, tile_experts))](
            hidden,
            router.norm,
            router.weight,
            out,
            hidden.stride(0),
            eps=router.eps,
            width=width,
            num_experts=num_experts,
            tile_experts=tile_experts,
            depth=BLOCK,
            num_warps=1 if tokens <= _FEW_TOKENS else 4,
            enable_fp_fusion=False,
        )
    return out


@triton.jit
def _fixed_exp(x):  # type: ignore[no-untyped-def]
    """Return e to the x, as `expert_choice.fixed_exp`."""
    x = tl.clamp(x, -86.0, 86.0, propagate_nan=tl.PropagateNan.ALL)
    twos = (x * _TO_TWOS + _NO_FRACTION) - _NO_FRACTION
    rest = x - twos * _TWO_HIGH
    rest -= twos * _TWO_LOW
    power = tl.full(rest.shape, _FACTORS[0], tl.float32)
    for number in tl.static_range(1, 5):
        power = power * rest + _FACTORS[number]
    power = power * (rest * rest) + rest + 1.0
    exponents = (tl.where(twos == twos, twos, 0.0).to(tl.int32) + 127) << 23
    return power * exponents.to(tl.float32, bitcast=True)


@triton.jit
def _sum_of_all(terms, size: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add up [size] terms, 16 to 512, in the fixed order. Terms that are not there are zeros."""
    rows: tl.constexpr = 2 if size > 256 else 1
    vectors: tl.constexpr = size // rows // 16
    halves = tl.reshape(terms, [rows, vectors, 16])
    if vectors > 8:
        halves = tl.sum(tl.reshape(halves, [rows, 2, 8, 16]), axis=1)
    if vectors > 4:
        halves = tl.sum(tl.reshape(halves, [rows, 2, 4, 16]), axis=1)
    if vectors > 2:
        halves = tl.sum(tl.reshape(halves, [rows, 2, 2, 16]), axis=1)
    if vectors > 1:
        halves = tl.reshape(tl.sum(halves, axis=1), [rows, 1, 16])
    lanes = tl.sum(tl.reshape(halves, [rows, 16]), axis=0)
    return tl.sum(_sums_of_lanes(tl.reshape(lanes, [1, 16]), 1), axis=0)


@triton.jit
def _choose(  # type: ignore[no-untyped-def]
    logits,
    bias,
    correction,
    factors,
    slots,
    chosen,
    shares,
    scale: tl.constexpr,
    num_experts: tl.constexpr,
    size: tl.constexpr,
    per_token: tl.constexpr,
    groups: tl.constexpr,
    kept_groups: tl.constexpr,
    score: tl.constexpr,
    normalised: tl.constexpr,
    by_share: tl.constexpr,
    has_bias: tl.constexpr,
    has_correction: tl.constexpr,
    has_factors: tl.constexpr,
    has_slots: tl.constexpr,
):
    """Choose one token's experts, best first; `size`: a power of two, of experts that are there and others."""
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, size)
    inside = expert < num_experts
    lane = tl.arange(0, 16)
    found = tl.load(logits + token * num_experts + expert, mask=inside, other=0.0)
    if has_bias:
        found += tl.load(bias + expert, mask=inside, other=0.0)
    scores = found
    if score == "sigmoid":
        scores = tl.div_rn(tl.full([size], 1.0, tl.float32), _fixed_exp(-found) + 1.0)
    preferred = scores
    if has_correction:
        preferred += tl.load(correction + expert, mask=inside, other=0.0)
    preferred = tl.where(inside, preferred, float("-inf"))
    if kept_groups < groups:
        width: tl.constexpr = num_experts // groups
        by_group = tl.reshape(preferred, [size // width, width])
        sums = tl.max(by_group, axis=1)
        if width > 1:
            best = tl.argmax(by_group, axis=1, tie_break_left=True)
            others = tl.where(tl.arange(0, width)[None, :] == best[:, None], float("-inf"), by_group)
            sums += tl.max(others, axis=1)
        group = tl.arange(0, size // width)
        is_kept = group < 0
        for _ in tl.static_range(kept_groups):
            best_group = tl.argmax(sums, axis=0, tie_break_left=True)
            is_kept |= group == best_group
            sums = tl.where(group == best_group, float("-inf"), sums)
        preferred = tl.reshape(tl.where(is_kept[:, None], by_group, float("-inf")), [size])
    parts = scores
    if score == "softmax":
        most = tl.max(tl.where(inside, found, float("-inf")), axis=0)
        parts = tl.where(inside, _fixed_exp(found - most), 0.0)
    ids = tl.zeros([16], tl.int32)
    own = tl.zeros([16], tl.float32)
    for number in tl.static_range(per_token):
        # Of scores that are no numbers any may be the best, if it is there.
        best_expert = tl.minimum(tl.argmax(preferred, axis=0, tie_break_left=True), num_experts - 1)
        is_best = expert == best_expert
        ids = tl.where(lane == number, best_expert, ids)
        own = tl.where(lane == number, tl.sum(tl.where(is_best, parts, 0.0), axis=0), own)
        preferred = tl.where(is_best, float("-inf"), preferred)
    if normalised:
        own = tl.div_rn(own, tl.zeros([16], tl.float32) + _sum_of_all(own, 16))
    elif score == "softmax":
        own = tl.div_rn(own, tl.zeros([16], tl.float32) + _sum_of_all(parts, size))
    own *= scale
    if has_factors:
        own *= tl.load(factors + ids)
    if by_share:
        left = tl.where(lane < per_token, own, float("-inf"))
        all_ids, all_shares = ids, own
        for number in tl.static_range(per_token):
            is_first = lane == tl.argmax(left, axis=0, tie_break_left=True)
            ids = tl.where(lane == number, tl.sum(tl.where(is_first, all_ids, 0), axis=0), ids)
            own = tl.where(lane == number, tl.sum(tl.where(is_first, all_shares, 0.0), axis=0), own)
            left = tl.where(is_first, float("-inf"), left)
    if has_slots:
        is_padding = tl.load(slots + token) == 0
        ids = tl.where(is_padding, num_experts, ids)
    place = token * per_token + lane
    tl.store(chosen + place, ids.to(tl.int64), mask=lane < per_token)
    tl.store(shares + place, own, mask=lane < per_token)


def choose(
    logits: torch.Tensor, router: RouterWeights, slots: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `expert_choice.choose` returns, of `router_logits`; in one kernel for routers of usual sizes.

    `slots`, int64 [tokens]: of the cache. Rows in slot 0, which is the null block's, are padding: they choose an expert
    that there is not, whose number is that of the experts.
    """
    experts, routing = router.experts, router.experts.routing
    size = max(LANES, triton.next_power_of_2(experts.number))
    width = experts.number // routing.groups
    is_grouped = routing.kept_groups < routing.groups
    if experts.per_token > LANES or size > _MOST_EXPERTS or (is_grouped and width & (width - 1)):
        chosen, shares = expert_choice.choose(logits, router)
        return chosen if slots is None else chosen.masked_fill((slots == 0).unsqueeze(1), experts.number), shares
    chosen = torch.empty((len(logits), experts.per_token), dtype=torch.int64, device=logits.device)
    shares = torch.empty(chosen.shape, dtype=torch.float32, device=logits.device)
    if len(logits):
        _choose[(len(logits),)](
            logits,
            router.bias,
            router.correction,
            router.factors,
            slots,
            chosen,
            shares,
            scale=routing.scale,
            num_experts=experts.number,
            size=size,
            per_token=experts.per_token,
            groups=routing.groups,
            kept_groups=routing.kept_groups,
            score=routing.score,
            normalised=routing.normalised,
            by_share=router.by_share,
            has_bias=router.bias is not None,
            has_correction=router.correction is not None,
            has_factors=router.factors is not None,
            has_slots=slots is not None,
            num_warps=1,
            enable_fp_fusion=False,
        )
    return chosen, shares
