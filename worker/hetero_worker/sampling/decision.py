"""Rank 0's side of sampling: tokens from the shards' bests. Shards without rows do not take part."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from hetero_api.errors import ModelError
from hetero_worker.errors import ProtocolError
from hetero_worker.sampling.request import SamplingRow
from hetero_worker.sampling.shard import Float64Array


def merge_best(best: Sequence[Float64Array]) -> Float64Array:
    """Return the best (score, id) of each draw over the shards: float64 [draws, 2], of [draws, 2] of each shard.

    Shards come in ascending order of their rows, so that among equal scores the lowest id wins; NaN comes before all.
    """
    if len(best) == 1:
        return best[0]
    shards = np.stack(best)
    winner = shards[:, :, 0].argmax(axis=0)
    merged: Float64Array = shards[winner, np.arange(shards.shape[1])]
    return merged


def decide(best: Float64Array, rows: Sequence[SamplingRow]) -> list[int]:
    """Return the tokens of the best (score, id) of each draw, float64 [draws, 2]. Raises as `check_drawable` does."""
    scores, ids = best.T.tolist()
    for row, score in zip(rows, scores, strict=True):
        if not math.isfinite(score):
            check_drawable(score, row)
    return list(map(int, ids))


def check_drawable(best: float, row: SamplingRow) -> None:
    """Raise ProtocolError if a draw's edits leave no token, and ModelError if its best score or logit is not finite."""
    if best == -math.inf and row.edits is not None:
        raise ProtocolError(
            f"no token can be drawn at position {row.position}: the mask, the bias and min_tokens leave none; "
            "TokenMasks must allow at least one token of a draw"
        )
    check_finite(best)


def check_finite(number: float) -> None:
    """Raise ModelError unless a number computed from the model's logits is finite."""
    if not math.isfinite(number):
        raise ModelError("the model's logits are not finite; the weights are damaged or overflow their dtype")
