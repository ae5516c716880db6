"""Rank 0's side of sampling: tokens from the shards' messages.

For filtered draws the shards' candidates are merged in one global order. The merged list equals the head of the
whole vocabulary's order only up to the first place where a shard that held rows back ends: behind it, one of
the rows it kept could stand. If a filter ends within that proven head the draw is exact. If none does, the draw stays
UNDECIDED and the caller asks for whole rows. Shards without rows do not take part.

A shard's message holds the bests of all plain draws, then the candidates of each filtered one. Its layout follows
from the draws and the shard's size, which every rank knows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from hetero_api.errors import ModelError
from hetero_worker.errors import ProtocolError
from hetero_worker.sampling.request import SamplingRow
from hetero_worker.sampling.shard import (
    BEST_FIELDS,
    Float64Array,
    ShardCandidates,
    ShardDraws,
    log_sum_exp_of,
    merged_order,
)

UNDECIDED: Final = -1
"""Stands for the token of a draw whose candidates did not suffice."""


class DrawBatch:
    """The draws of one step, and the layout of messages about them."""

    def __init__(self, rows: Sequence[SamplingRow], *, shards_filter: bool = False) -> None:
        """Create a batch; with `shards_filter` the one shard applies filters by itself and sends no candidates."""
        self._rows = rows
        self._filtered = [] if shards_filter else [i for i, row in enumerate(rows) if row.is_filtered]
        self._plain = [i for i, row in enumerate(rows) if not row.is_filtered] if self._filtered else range(len(rows))

    def message_size(self, shard_rows: int) -> int:
        """Return the number of elements of a shard's message; the shard has at least one row."""
        return sum(self._field_sizes(shard_rows))

    def pack(self, draws: ShardDraws) -> Float64Array:
        """Return a shard's message: float64, 1-d."""
        if not self._filtered:
            return draws.best.reshape(-1)
        best = draws.best[self._plain].reshape(-1)
        return np.concatenate([best, *(draws.candidates[i].pack() for i in self._filtered)])

    def decide(self, messages: Sequence[Float64Array], shard_rows: Sequence[int]) -> list[int]:
        """Return the tokens of the draws, some UNDECIDED, from one message a shard in the shards' order.

        Raises as `check_drawable` does.
        """
        if not self._filtered:
            return decide_best([part.reshape(-1, BEST_FIELDS) for part in messages], self._rows)
        shards = [self._fields(part, n) for part, n in zip(messages, shard_rows, strict=True)]
        tokens = [UNDECIDED] * len(self._rows)
        if self._plain:
            best = [fields[0].reshape(-1, BEST_FIELDS) for fields in shards]
            for i, token in zip(self._plain, decide_best(best, [self._rows[i] for i in self._plain]), strict=True):
                tokens[i] = token
        for field, i in enumerate(self._filtered, start=1):
            candidates = [
                ShardCandidates.unpack(fields[field], shard_rows=n)
                for fields, n in zip(shards, shard_rows, strict=True)
            ]
            decided = decide_filtered(candidates, self._rows[i])
            tokens[i] = UNDECIDED if decided is None else decided
        return tokens

    def _fields(self, message: Float64Array, shard_rows: int) -> list[Float64Array]:
        """Split a message into the bests of plain draws and the candidates of each filtered one."""
        return np.split(message, np.cumsum(self._field_sizes(shard_rows))[:-1])

    def _field_sizes(self, shard_rows: int) -> list[int]:
        candidates = [self._rows[i].num_candidates(shard_rows) for i in self._filtered]
        return [BEST_FIELDS * len(self._plain), *map(ShardCandidates.packed_size, candidates)]


def decide_best(best: Sequence[Float64Array], rows: Sequence[SamplingRow]) -> list[int]:
    """Return the ids of the best scores over the shards, from float64 [draws, 2] of each shard.

    Shards come in ascending order of their rows, so that among equal scores the lowest id wins. Raises as
    `check_drawable` does.
    """
    decided = best[0] if len(best) == 1 else _best_of(np.stack(best))
    scores, ids = decided.T.tolist()
    for row, score in zip(rows, scores, strict=True):
        if not math.isfinite(score):
            check_drawable(score, row)
    return list(map(int, ids))


def _best_of(best: Float64Array) -> Float64Array:
    """Reduce [shards, draws, 2] to float64 [draws, 2]: the first of equals, and NaN before all."""
    winner = best[:, :, 0].argmax(axis=0)
    decided: Float64Array = best[winner, np.arange(best.shape[1])]
    return decided


def decide_filtered(shards: Sequence[ShardCandidates], row: SamplingRow) -> int | None:
    """Return the token of a filtered draw, or None when the candidates do not prove the filters' outcome.

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


def _merge(shards: Sequence[ShardCandidates]) -> tuple[Float64Array, Float64Array, Float64Array, int]:
    """Return scaled logits, noise and ids in the order (scaled descending, id ascending), and the proven length."""
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
    """Return how many leading rows first reach the mass top_p; None when they do not, or without the filter."""
    if not row.has_nucleus:
        return None
    reached = np.exp(scaled - log_total).cumsum() >= row.top_p
    return int(reached.argmax()) + 1 if reached.any() else None


def _likely_size(scaled: Float64Array, min_p: float) -> int | None:
    """Return how many rows are at least min_p times as likely as the first; None when all, or without the filter."""
    if min_p <= 0.0:
        return None
    size = int((scaled >= scaled[0] + math.log(min_p)).sum())
    return size if size < len(scaled) else None
