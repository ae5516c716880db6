"""Rank 0's side of sampling: from what the shards sent, the token.

For filtered draws the shards' candidates are merged in one global order. The merged list equals the head of the
whole vocabulary's order only up to the first place where a shard that held rows back ends: behind it, one of
the rows it kept could stand. If a filter ends within that proven head the draw is exact; if none does, the
caller is told so (None) and asks for whole shards. Shards without rows are not among the shards here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from hetero_api.errors import ModelError
from hetero_worker.errors import ProtocolError
from hetero_worker.sampling.ordering import merged_order
from hetero_worker.sampling.request import SamplingRow
from hetero_worker.sampling.shard import Float64Array, ShardCandidates


def decide_best(best: Sequence[Float64Array], rows: Sequence[SamplingRow]) -> list[int]:
    """Ids of the best scores over the shards, from float64 [draws, 2] of each.

    Shards come in ascending order of their rows, so that of equal scores the lowest id wins. Raises as
    `check_drawable` does.
    """
    decided = best[0] if len(best) == 1 else _best_of(np.stack(best))
    scores, ids = decided.T.tolist()
    for row, score in zip(rows, scores, strict=True):
        if not math.isfinite(score):
            check_drawable(score, row)
    return list(map(int, ids))


def _best_of(best: Float64Array) -> Float64Array:
    """The first of equals, and NaN before all: float64 [draws, 2], from [shards, draws, 2]."""
    winner = best[:, :, 0].argmax(axis=0)
    decided: Float64Array = best[winner, np.arange(best.shape[1])]
    return decided


def decide_filtered(shards: Sequence[ShardCandidates], row: SamplingRow) -> int | None:
    """The token of a filtered draw, or None when the candidates do not prove the filters' outcome.

    Raises as `check_drawable` does.
    """
    check_drawable(float(np.max([shard.largest for shard in shards])), row)
    scaled, noise, ids, proven = _merge(shards)
    closed = proven == len(ids) and all(shard.complete for shard in shards)
    scaled, log_total = scaled[:proven], log_sum_exp_of(np.array([shard.log_sum_exp for shard in shards]))
    if 0 < row.top_k <= proven:
        scaled, closed = scaled[: row.top_k], True
    if row.top_k and row.has_nucleus:
        log_total = log_sum_exp_of(scaled)
    cuts = [_nucleus_size(scaled, log_total, row), _likely_size(scaled, row.min_p)]
    if not closed and all(cut is None for cut in cuts):
        return None
    kept = min([len(scaled), *(cut for cut in cuts if cut is not None)])
    return int(ids[(scaled[:kept] + noise[:kept]).argmax()])


def check_drawable(best: float, row: SamplingRow) -> None:
    """Raise unless a draw's best score or logit is a number that a token can have.

    ModelError for what the model brought about, ProtocolError for what the row's edits did.
    """
    if best == -math.inf and row.edits is not None:
        raise ProtocolError(
            f"no token can be drawn at position {row.position}: the mask, the bias and min_tokens leave none; "
            "TokenMasks must allow at least one token of a draw"
        )
    check_finite(best)


def check_finite(number: float) -> None:
    """Raise ModelError unless a number that the model's logits make is finite."""
    if not math.isfinite(number):
        raise ModelError("the model's logits are not finite; the weights are damaged or overflow their dtype")


def log_sum_exp_of(values: Float64Array) -> float:
    """Of numbers none of which is NaN or +inf; -inf of nothing but -inf."""
    largest = float(values.max())
    return largest + math.log(np.exp(values - largest).sum()) if largest > -math.inf else largest


def _merge(shards: Sequence[ShardCandidates]) -> tuple[Float64Array, Float64Array, Float64Array, int]:
    """Scaled logits, noise and ids in the order (scaled descending, id ascending), and the proven length."""
    if len(shards) == 1:
        shard = shards[0]
        return shard.scaled, shard.noise, shard.ids, len(shard.ids)
    scaled = np.concatenate([shard.scaled for shard in shards])
    noise = np.concatenate([shard.noise for shard in shards])
    ids = np.concatenate([shard.ids for shard in shards])
    order = merged_order(scaled, ids)
    ids = ids[order]
    ends = [int((ids == shard.ids[-1]).argmax()) + 1 for shard in shards if not shard.complete]
    return scaled[order], noise[order], ids, min([len(ids), *ends])


def _nucleus_size(scaled: Float64Array, log_total: float, row: SamplingRow) -> int | None:
    """How many leading rows first reach the mass top_p; None when they do not, or without the filter."""
    if not row.has_nucleus:
        return None
    reached = np.exp(scaled - log_total).cumsum() >= row.top_p
    return int(reached.argmax()) + 1 if reached.any() else None


def _likely_size(scaled: Float64Array, min_p: float) -> int | None:
    """How many rows are at least min_p times as likely as the first; None when all, or without the filter."""
    if min_p <= 0.0:
        return None
    size = int((scaled >= scaled[0] + math.log(min_p)).sum())
    return size if size < len(scaled) else None
