"""Attention whose scores are capped, which scaled_dot_product_attention cannot do."""

from __future__ import annotations

import torch


def capped_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    mask: torch.Tensor | None,
    scale: float,
    soft_cap: float,
) -> torch.Tensor:
    """softmax(cap · tanh(scale / cap · q · kᵀ)) · v, the softmax in float32.

    query [..., rows, head_dim], key and value [..., tokens, head_dim]; `mask` [..., rows, tokens] is True where a row
    may attend, or else is added to the scores.
    """
    scores = (query @ key.transpose(-1, -2)).float().mul_(scale / soft_cap).tanh_().mul_(soft_cap)
    if mask is not None:
        scores = scores.masked_fill_(~mask, float("-inf")) if mask.dtype == torch.bool else scores.add_(mask)
    return scores.softmax(dim=-1).to(value.dtype) @ value
