"""Router logits of experts, computed in float64 from the normed residual stream.

A program computes one token, alone. Its sums run over the hidden dimension in order, a tile at
a time, and are rounded to float32 at the end. Host ranks add in another order, and still come to the same choice.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

_EXPERTS: Final = 32
_DEPTH: Final = 128


@triton.jit
def _router(  # type: ignore[no-untyped-def]
    hidden,
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
    sums = tl.zeros([tile_experts], tl.float64)
    squares = tl.zeros([depth], tl.float64)
    for begin in range(0, width, depth):
        inside = offset < width - begin
        state = tl.load(hidden + token * hidden_stride + begin + offset, mask=inside, other=0.0).to(tl.float64)
        place = router + expert[:, None] * width + begin + offset[None, :]
        weights = tl.load(place, mask=is_expert[:, None] & inside[None, :], other=0.0)
        sums += tl.sum(weights * state[None, :], axis=1)
        squares += state * state
    root = tl.sqrt(tl.sum(squares, axis=0) / width + eps)
    tl.store(logits + token * num_experts + expert, (sums / root).to(tl.float32), mask=is_expert)


def router_logits(hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return hidden / rms(hidden) · weightᵀ, float32 [tokens, experts].

    hidden is [tokens, hidden], of any type, with rows at any stride. weight is float64 [experts, hidden], contiguous,
    with the norm's weight multiplied in.
    """
    tokens, width = hidden.shape
    num_experts = len(weight)
    out = torch.empty((tokens, num_experts), dtype=torch.float32, device=hidden.device)
    if tokens:
        _router[(tokens, triton.cdiv(num_experts, _EXPERTS))](
            hidden,
            weight,
            out,
            hidden.stride(0),
            eps=eps,
            width=width,
            num_experts=num_experts,
            tile_experts=_EXPERTS,
            depth=_DEPTH,
        )
    return out
