"""Rank 0's side of sampling: from what the shards sent, the token.

For filtered draws the shards' candidates are merged in one global order. The merged list equals the head of the
whole vocabulary's order only up to the first place where a shard that held rows back ends: behind it, one of
the rows it kept could stand. If a filter ends within that proven head the draw is exact; if none does, the
caller is told so (None) and asks for whole shards.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from hetero_worker.sampling.request import SamplingRow
from hetero_worker.sampling.shard import ShardCandidates


def decide_best(best: torch.Tensor) -> torch.Tensor:
    """Ids of the best scores over the shards: int64 [draws], from float64 [shards, draws, 2].

    Shards come in ascending order of their rows, so that of equal scores the lowest id wins.
    """
    winner = best[:, :, 0].argmax(dim=0, keepdim=True)
    return best[:, :, 1].gather(0, winner).squeeze(0).long()


def decide_filtered(shards: Sequence[ShardCandidates], row: SamplingRow) -> int | None:
    """The token of a filtered draw, or None when the candidates do not prove the filters' outcome."""
    scaled, noise, ids, proven = _merge(shards)
    closed = proven == len(ids) and all(shard.complete for shard in shards)
    scaled, log_total = scaled[:proven], _log_sum_exp([shard.log_sum_exp for shard in shards])
    if 0 < row.top_k <= proven:
        scaled, closed = scaled[: row.top_k], True
        log_total = float(torch.logsumexp(scaled, dim=0))
    cuts = [_nucleus_size(scaled, log_total, row.top_p), _likely_size(scaled, row.min_p)]
    if not closed and all(cut is None for cut in cuts):
        return None
    kept = min([len(scaled), *(cut for cut in cuts if cut is not None)])
    return int(ids[int((scaled[:kept] + noise[:kept]).argmax())])


def _merge(shards: Sequence[ShardCandidates]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """Scaled logits, noise and ids in the order (scaled descending, id ascending), and the proven length."""
    if len(shards) == 1:
        shard = shards[0]
        return shard.scaled, shard.noise, shard.ids.long(), len(shard.ids)
    ids = torch.cat([shard.ids for shard in shards])
    by_id = ids.argsort()
    scaled = torch.cat([shard.scaled for shard in shards])[by_id]
    order = torch.sort(scaled, descending=True, stable=True).indices
    ids, by_id = ids[by_id][order], by_id[order]
    last_ids = [shard.ids[-1] for shard in shards if not shard.complete]
    ends = [int((ids == last).nonzero()[0]) + 1 for last in last_ids]
    noise = torch.cat([shard.noise for shard in shards])[by_id]
    return scaled[order], noise, ids.long(), min([len(ids), *ends])


def _nucleus_size(scaled: torch.Tensor, log_total: float, top_p: float) -> int | None:
    """How many leading rows first reach the mass top_p; None when they do not, or without the filter."""
    if not 0.0 < top_p < 1.0:
        return None
    reached = (scaled - log_total).exp().cumsum(0) >= top_p
    return int(reached.int().argmax()) + 1 if bool(reached.any()) else None


def _likely_size(scaled: torch.Tensor, min_p: float) -> int | None:
    """How many rows are at least min_p times as likely as the first; None when all, or without the filter."""
    if min_p <= 0.0:
        return None
    size = int((scaled >= scaled[0] + math.log(min_p)).sum())
    return size if size < len(scaled) else None


def _log_sum_exp(values: Sequence[float]) -> float:
    return float(torch.logsumexp(torch.tensor(values, dtype=torch.float64), dim=0))
