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
    logits: torch.Tensor, rows: Sequence[SamplingRow], *, begin: int, whole: bool = False
) -> list[ShardCandidates]:
    """Each draw's top rows of a shard (all when `whole`); `logits` is float32 [draws, shard rows]."""
    size = logits.shape[1]
    scaled = logits / torch.tensor([[row.temperature] for row in rows])
    totals = torch.logsumexp(scaled, dim=-1).tolist()
    candidates = []
    for i, row in enumerate(rows):
        ids = _best_first(scaled[i], size if whole else row.num_candidates(size))
        noise = gumbel_noise(seed=row.seed, position=row.position, begin=begin, count=size)
        candidates.append(
            ShardCandidates(
                log_sum_exp=totals[i],
                scaled=scaled[i, ids].double(),
                noise=noise[ids].double(),
                ids=(ids + begin).double(),
                complete=len(ids) == size,
            )
        )
    return candidates


def _scores(logits: torch.Tensor, row: SamplingRow, begin: int) -> torch.Tensor:
    if row.is_greedy:
        return logits
    noise = gumbel_noise(seed=row.seed, position=row.position, begin=begin, count=len(logits))
    return noise.add_(logits / row.temperature)


def _best_first(scaled: torch.Tensor, count: int) -> torch.Tensor:
    """Ids of the `count` largest in the order (value descending, id ascending)."""
    if count == len(scaled):
        return torch.sort(scaled, descending=True, stable=True).indices
    # One more than asked for shows whether the value at the edge occurs again behind it: which of equal
    # values topk takes is left open.
    values, ids = scaled.topk(count + 1)
    ids = _lowest_top_ids(scaled, count) if bool(values[-2] == values[-1]) else ids[:count].sort().values
    return ids[torch.sort(scaled[ids], descending=True, stable=True).indices]


def _lowest_top_ids(scaled: torch.Tensor, count: int) -> torch.Tensor:
    """Ids of the `count` largest, of equal values at the edge the lowest ids; ascending."""
    edge = scaled.topk(count).values[-1]
    above = (scaled > edge).nonzero().view(-1)
    equal = (scaled == edge).nonzero().view(-1)
    return torch.cat([above, equal[: count - len(above)]]).sort().values
