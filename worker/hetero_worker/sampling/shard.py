"""A rank's side of sampling: what it sends about its own vocabulary rows.

For a row without filters that is one pair (score, id), the best of the shard. For a row with filters it is the
shard's log-sum-exp and its top candidates in the order (scaled logit descending, id ascending), each with its
noise. Numbers travel as float64, which holds every id and every float32 exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hetero_worker.sampling.noise import gumbel_noise
from hetero_worker.sampling.request import SamplingRow

BEST_FIELDS = 2
"""Score and id."""
_CANDIDATE_FIELDS = 3


@dataclass(frozen=True, slots=True)
class ShardCandidates:
    """Top rows of one shard for one draw; each tensor is float64 of shape [candidates], best first."""

    log_sum_exp: float
    """Over all rows of the shard, of scaled logits."""
    scaled: torch.Tensor
    noise: torch.Tensor
    ids: torch.Tensor
    complete: bool
    """Whether the candidates are all rows of the shard."""

    def pack(self) -> torch.Tensor:
        head = torch.tensor([self.log_sum_exp], dtype=torch.float64)
        return torch.cat([head, self.scaled, self.noise, self.ids])

    @classmethod
    def unpack(cls, packed: torch.Tensor, *, complete: bool) -> ShardCandidates:
        scaled, noise, ids = packed[1:].view(_CANDIDATE_FIELDS, -1)
        return cls(float(packed[0]), scaled, noise, ids, complete)

    @staticmethod
    def packed_size(candidates: int) -> int:
        """Elements of `pack()`; 0 for a shard without rows, which sends nothing."""
        return 1 + _CANDIDATE_FIELDS * candidates if candidates else 0


def best_of_shard(logits: torch.Tensor, rows: Sequence[SamplingRow], begin: int) -> torch.Tensor:
    """The best (score, id) of each draw: float64 [draws, 2].

    `logits` is float32 [draws, shard rows], the shard's first row being vocabulary row `begin`. The score of a
    greedy draw is the logit, of another one the scaled logit plus noise. Of equal scores the lowest id wins.
    """
    scores = logits
    if any(not row.is_greedy for row in rows):
        scores = torch.stack([_scores(logits[i], row, begin) for i, row in enumerate(rows)])
    ids = scores.argmax(dim=-1, keepdim=True)
    return torch.cat([scores.gather(-1, ids).double(), (ids + begin).double()], dim=-1)


def candidates_of_shard(
    logits: torch.Tensor, row: SamplingRow, *, begin: int, count: int | None = None
) -> ShardCandidates:
    """The top `count` rows of a shard (all when None) for one draw; `logits` is float32 [shard rows]."""
    scaled = logits / row.temperature
    count = len(scaled) if count is None else count
    ids = _top_ids(scaled, count)
    order = torch.sort(scaled[ids], descending=True, stable=True).indices
    ids = ids[order]
    noise = gumbel_noise(seed=row.seed, position=row.position, begin=begin, count=len(scaled))
    return ShardCandidates(
        log_sum_exp=float(torch.logsumexp(scaled.double(), dim=0)),
        scaled=scaled[ids].double(),
        noise=noise[ids].double(),
        ids=(ids + begin).double(),
        complete=count == len(scaled),
    )


def _scores(logits: torch.Tensor, row: SamplingRow, begin: int) -> torch.Tensor:
    if row.is_greedy:
        return logits
    noise = gumbel_noise(seed=row.seed, position=row.position, begin=begin, count=len(logits))
    return noise.add_(logits / row.temperature)


def _top_ids(scaled: torch.Tensor, count: int) -> torch.Tensor:
    """Ids of the `count` largest, ascending; of equal values the lowest ids (topk leaves that open)."""
    if count >= len(scaled):
        return torch.arange(len(scaled))
    threshold = scaled.topk(count, sorted=True).values[-1]
    above = (scaled > threshold).nonzero().view(-1)
    equal = (scaled == threshold).nonzero().view(-1)
    return torch.cat([above, equal[: count - len(above)]]).sort().values
