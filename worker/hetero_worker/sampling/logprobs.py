"""Log-probabilities over vocabulary shards, of the model's own distribution before sampling edits or filters it.

A shard sends its log-sum-exp, the target's logit if it owns the target, and its likeliest tokens. Once every shard
knows the target's logit, it counts its own rows that come before the target, and rank 0 puts the parts together. Ranks
and the likeliest tokens follow one order (logit descending, id ascending), so that a token of rank r ≤ k is the r-th of
the top k. Numbers travel as float64, which holds every id and every float32 exactly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from hetero_api.v1 import logprobs_pb2
from hetero_worker.sampling.decision import check_finite
from hetero_worker.sampling.shard import Float64Array, best_first, log_sum_exp, log_sum_exp_of, merged_order

_HEAD_FIELDS: Final = 2
_CHUNK_ROWS: Final = 16
"""Positions whose exponentials are held at a time."""


@dataclass(frozen=True, slots=True)
class TokenTarget:
    """A token whose log-probability is wanted, and how many of the likeliest tokens beside it."""

    token_id: int
    num_top: int

    def message_size(self, shard_rows: int) -> int:
        """Return the number of elements of a shard's message about it."""
        return _HEAD_FIELDS + 2 * min(self.num_top, shard_rows)


@dataclass(frozen=True, slots=True)
class ShardLogprobs:
    """One shard's message about one target."""

    log_sum_exp: float
    target: float
    """The target's logit; -inf where it is another shard's."""
    top: Float64Array
    """Largest logits of the shard, best first."""
    top_ids: Float64Array
    """Tokens of these logits."""

    @classmethod
    def unpack(cls, message: Float64Array) -> ShardLogprobs:
        """Read one target's part of `pack_shard`."""
        top, top_ids = message[_HEAD_FIELDS:].reshape(2, -1)
        return cls(float(message[0]), float(message[1]), top, top_ids)


def pack_shard(logits: torch.Tensor, targets: Sequence[TokenTarget], begin: int) -> Float64Array:
    """Return one shard's messages about all targets, joined: `logits` is float32 [targets, shard rows], not empty."""
    parts = []
    for row, target, total in zip(logits.numpy(), targets, _log_sum_exps(logits), strict=True):
        local = target.token_id - begin
        own = row[local] if 0 <= local < len(row) else -np.inf
        count = min(target.num_top, len(row))
        top = best_first(row, count) if count and not np.isnan(total) else np.arange(count)
        parts += [np.array([total, own]), row[top], (top + begin)]
    return np.concatenate(parts, dtype=np.float64)


def count_before(
    logits: torch.Tensor, targets: Sequence[TokenTarget], parts: Sequence[Sequence[ShardLogprobs]], begin: int
) -> Float64Array:
    """Count a shard's rows before each target: float64 [targets]; `parts` has all shards' messages by target."""
    counts = np.zeros(len(targets))
    for i, (row, target) in enumerate(zip(logits.numpy(), targets, strict=True)):
        logit = np.float32(max(shard.target for shard in parts[i]))
        lower_ids = row[: max(0, target.token_id - begin)]
        counts[i] = np.count_nonzero(row > logit) + np.count_nonzero(lower_ids == logit)
    return counts


def decide_logprobs(
    shards: Sequence[ShardLogprobs], target: TokenTarget, num_before: int
) -> logprobs_pb2.TokenLogprobs:
    """Put the shards' messages about one target together. Raises ModelError when logits are not finite."""
    totals = np.array([shard.log_sum_exp for shard in shards])
    check_finite(float(totals.max()))
    total = log_sum_exp_of(totals)
    top = np.concatenate([shard.top for shard in shards])
    top_ids = np.concatenate([shard.top_ids for shard in shards])
    best = merged_order(top, top_ids)[: target.num_top]
    return logprobs_pb2.TokenLogprobs(
        token_id=target.token_id,
        logprob=max(shard.target for shard in shards) - total,
        rank=1 + num_before,
        top_token_ids=top_ids[best].astype(np.int64).tolist(),
        top_logprobs=(top[best] - total).tolist(),
    )


def _log_sum_exps(logits: torch.Tensor) -> Iterator[float]:
    for chunk in torch.split(logits, _CHUNK_ROWS):
        yield from log_sum_exp(chunk).tolist()
