"""A step's draws, and what is said about them: what a rank sends, and what rank 0 makes of it.

A shard's message holds the bests of all plain draws, then the candidates of each filtered one. Its layout follows
from the draws and the shard's size, which every rank knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch

from hetero_worker.sampling.decision import decide_best, decide_filtered
from hetero_worker.sampling.request import SamplingRow
from hetero_worker.sampling.shard import (
    BEST_FIELDS,
    Float64Array,
    ShardCandidates,
    ShardDraws,
    candidates_of_shard,
)

UNDECIDED: Final = -1
"""Stands for the token of a draw whose candidates did not suffice."""
_MORE_CANDIDATES: Final = 8


class DrawBatch:
    """The draws of one step."""

    def __init__(self, rows: Sequence[SamplingRow]) -> None:
        self._rows = rows
        self._filtered = [i for i, row in enumerate(rows) if row.is_filtered]
        self._plain = [i for i, row in enumerate(rows) if not row.is_filtered] if self._filtered else range(len(rows))

    def message_size(self, shard_rows: int) -> int:
        """Elements of a shard's message; the shard has at least one row."""
        return sum(self._field_sizes(shard_rows))

    def pack(self, draws: ShardDraws) -> Float64Array:
        """A shard's message: float64, 1-d."""
        if not self._filtered:
            return draws.best.reshape(-1)
        best = draws.best[self._plain].reshape(-1)
        return np.concatenate([best, *(draws.candidates[i].pack() for i in self._filtered)])

    def decide(self, messages: Sequence[Float64Array], shard_rows: Sequence[int]) -> list[int]:
        """Tokens of the draws, some UNDECIDED. From one message a shard, in the shards' order.

        Raises as `decision.check_drawable` does.
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
        """The bests of plain draws, then the candidates of each filtered one."""
        return np.split(message, np.cumsum(self._field_sizes(shard_rows))[:-1])

    def _field_sizes(self, shard_rows: int) -> list[int]:
        candidates = [self._rows[i].num_candidates(shard_rows) for i in self._filtered]
        return [BEST_FIELDS * len(self._plain), *map(ShardCandidates.packed_size, candidates)]


def decide_whole(scaled: torch.Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    """Tokens of filtered draws from whole rows of scaled logits: `scaled` is [draws, vocabulary]."""
    return [_decide_whole(scaled[i : i + 1], row) for i, row in enumerate(rows)]


def _decide_whole(scaled: torch.Tensor, row: SamplingRow) -> int:
    """Among more and more candidates; once they are all rows the draw is decided."""
    vocabulary = scaled.shape[1]
    count = row.num_candidates(vocabulary)
    while True:
        count = min(vocabulary, _MORE_CANDIDATES * count)
        token = decide_filtered(candidates_of_shard(scaled, [row], 0, counts=[count]), row)
        if token is not None:
            return token
