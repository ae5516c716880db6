"""Factors of adapters for tests of low-rank products, and what these products are."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hetero_worker.adapters.peft_files import LowRankFactors
from tests.support.seeded import seeded


def factors_of(
    heights: Sequence[int], width: int, ranks: Sequence[int | None], seed: int, stored: torch.dtype = torch.float32
) -> list[LowRankFactors | None]:
    """Of parts with so many output rows; `stored`: type whose numbers they are."""

    def factor(rows: int, columns: int, seed: int) -> torch.Tensor:
        return torch.randn((rows, columns), generator=seeded(seed)).to(stored).float()

    return [
        None
        if rank is None
        else LowRankFactors(factor(rank, width, seed + part), factor(height, rank, seed + 50 + part))
        for part, (height, rank) in enumerate(zip(heights, ranks, strict=True))
    ]


def expected(
    heights: Sequence[int], x: torch.Tensor, y: torch.Tensor, factors: Sequence[LowRankFactors | None]
) -> torch.Tensor:
    """y with the products added, in float64."""
    parts = [
        torch.zeros(len(x), height, dtype=torch.float64)
        if each is None
        else x.double() @ each.down.to(x.dtype).double().T @ each.up.to(x.dtype).double().T
        for height, each in zip(heights, factors, strict=True)
    ]
    return y.double() + torch.cat(parts, dim=1)
