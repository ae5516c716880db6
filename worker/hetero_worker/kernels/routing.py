"""Router logits of experts by the rule of `expert_choice`, in one kernel.

A program computes some experts of one token. Products and sums must not be fused (`enable_fp_fusion`).
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from hetero_worker.kernels.expert_choice import BLOCK, RouterWeights

_EXPERTS: Final = 32


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
        _router[(tokens, triton.cdiv(num_experts, _EXPERTS))](
            hidden,
            router.norm,
            router.weight,
            out,
            hidden.stride(0),
            eps=router.eps,
            width=width,
            num_experts=num_experts,
            tile_experts=_EXPERTS,
            depth=BLOCK,
            enable_fp_fusion=False,
        )
    return out
