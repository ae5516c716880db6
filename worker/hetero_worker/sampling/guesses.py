"""What filtered draws seem to come to, found where their candidates lie.

The filters are those of `decision.decide_filtered`, in the device's arithmetic, over the candidates of one shard that
is the whole vocabulary. So a guess may be wrong: where rounding decides where a nucleus ends or which of two scores is
the larger, where the candidates do not reach the end of a filter, and where noise is coarse. Whoever takes guesses
learns later what the draws did come to. A guess is always one of the candidates, whatever the logits are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hetero_worker.backends.copies import to_device
from hetero_worker.sampling.device_scores import upper_noise
from hetero_worker.sampling.request import SamplingRow


@dataclass(frozen=True, slots=True)
class DrawnFrom:
    """Candidates of filtered draws on the device, best first; each tensor but the last is [draws, candidates]."""

    scaled: torch.Tensor
    """float32: logits divided by the temperature."""
    ids: torch.Tensor
    """int64: vocabulary rows."""
    words: torch.Tensor
    """int64: their words of noise."""
    log_sum_exp: torch.Tensor
    """float64 [draws]: of the scaled logits of the whole vocabulary."""


def guess_filtered(candidates: DrawnFrom, rows: Sequence[SamplingRow], counts: Sequence[int]) -> torch.Tensor:
    """The vocabulary row that each draw seems to come to: int64 [draws].

    Draw i has counts[i] candidates, which may be fewer than there is room for. Nothing here waits for the device; a
    dozen operators on [draws, candidates].
    """
    numbers = torch.tensor([_filters_of(row, count) for row, count in zip(rows, counts, strict=True)])
    limit, is_cut, top_p, min_log = to_device(numbers.T.contiguous(), candidates.ids.device).unsqueeze(2)
    places = torch.arange(candidates.ids.shape[1], device=candidates.ids.device)
    scaled = candidates.scaled.double().masked_fill(places >= limit, -torch.inf)
    of_cut = scaled.logsumexp(dim=1, keepdim=True)
    total = torch.where(is_cut > 0, of_cut, candidates.log_sum_exp.unsqueeze(1))
    shares = (scaled - total).exp()
    kept = (shares.cumsum(dim=1) - shares < top_p) & (scaled >= scaled[:, :1] + min_log)
    scores = torch.where(kept, scaled + upper_noise(candidates.words), -torch.inf)
    return candidates.ids.gather(1, scores.argmax(dim=1, keepdim=True)).squeeze(1)


def _filters_of(row: SamplingRow, count: int) -> tuple[float, float, float, float]:
    """How many candidates there are, whether top_k cut them off, the nucleus's mass, and min_p's logarithm."""
    return (
        count,
        bool(row.top_k),
        row.top_p if row.has_nucleus else math.inf,
        math.log(row.min_p) if row.min_p > 0.0 else -math.inf,
    )
