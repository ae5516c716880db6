"""Draws tokens from logits whose vocabulary rows lie on different ranks.

One round of gathering and one broadcast a step: every rank sends the best of its shard, or candidates for draws
with filters; rank 0 decides and tells all. Only when the candidates do not prove where a filter ends (a nucleus
of more than some hundred tokens) a second pair of rounds brings the whole rows of those draws. That it is
needed is part of the broadcast, so that all ranks take the same rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from hetero_api.errors import ModelError
from hetero_api.sharding import UnitRange
from hetero_worker.distributed.exchange import HostExchange
from hetero_worker.sampling.decision import decide_best, decide_filtered
from hetero_worker.sampling.request import SamplingRow
from hetero_worker.sampling.shard import (
    BEST_FIELDS,
    ShardCandidates,
    best_of_shard,
    candidates_of_shard,
)

_UNDECIDED = -1


def sample_tokens(
    logits: torch.Tensor,
    rows: Sequence[SamplingRow],
    *,
    vocab_ranges: Sequence[UnitRange],
    exchange: HostExchange,
) -> list[int]:
    """Tokens of the draws, the same on every rank.

    `logits` is float32 [draws, this rank's vocabulary rows]; `vocab_ranges` has every rank's rows. Raises
    ModelError when logits are not finite.
    """
    draws = _Draws(tuple(rows), tuple(vocab_ranges), exchange)
    gathered = exchange.all_gather(draws.pack(logits), draws.counts)
    tokens = torch.full((len(rows),), _UNDECIDED, dtype=torch.int64)
    if exchange.rank == 0:
        draws.decide(gathered, tokens)
    if exchange.world_size > 1:
        exchange.broadcast(tokens, 0)
    pending = (tokens == _UNDECIDED).nonzero().view(-1).tolist()
    if pending:
        tokens[pending] = _sample_whole(logits[pending], [rows[i] for i in pending], draws)
    return list(map(int, tokens.tolist()))


def gather_logits(logits: torch.Tensor, vocab_ranges: Sequence[UnitRange], exchange: HostExchange) -> torch.Tensor:
    """Whole rows from all shards, on every rank: float32 [draws, vocabulary]."""
    if exchange.world_size == 1:
        return logits
    draws = logits.shape[0]
    counts = [draws * rows.size for rows in vocab_ranges]
    shards = exchange.all_gather(logits.reshape(-1), counts)
    return torch.cat([shard.view(draws, -1) for shard in shards if len(shard)], dim=1)


@dataclass(frozen=True, slots=True)
class _Draws:
    """One step's draws and how their messages are laid out: pairs of all plain draws, then filtered ones."""

    rows: tuple[SamplingRow, ...]
    vocab_ranges: tuple[UnitRange, ...]
    exchange: HostExchange

    @property
    def plain(self) -> list[int]:
        return [i for i, row in enumerate(self.rows) if not row.is_filtered]

    @property
    def filtered(self) -> list[int]:
        return [i for i, row in enumerate(self.rows) if row.is_filtered]

    @property
    def counts(self) -> list[int]:
        """Elements that each rank sends."""
        return [sum(self._sizes(rows.size)) for rows in self.vocab_ranges]

    def _sizes(self, shard_rows: int) -> list[int]:
        if not shard_rows:
            return [0]
        sizes = [BEST_FIELDS * len(self.plain)]
        for i in self.filtered:
            sizes.append(ShardCandidates.packed_size(self.rows[i].num_candidates(shard_rows)))
        return sizes

    def pack(self, logits: torch.Tensor) -> torch.Tensor:
        """This rank's message: float64 [counts[rank]]."""
        own = self.vocab_ranges[self.exchange.rank]
        if not own.size:
            return torch.empty(0, dtype=torch.float64)
        plain, filtered, parts = self.plain, self.filtered, []
        if plain:
            chosen = [self.rows[i] for i in plain]
            parts.append(best_of_shard(logits[plain] if filtered else logits, chosen, own.begin).view(-1))
        if filtered:
            chosen = [self.rows[i] for i in filtered]
            shards = candidates_of_shard(logits[filtered] if plain else logits, chosen, begin=own.begin)
            parts.extend(shard.pack() for shard in shards)
        return torch.cat(parts)

    def decide(self, gathered: Sequence[torch.Tensor], tokens: torch.Tensor) -> None:
        """Fill `tokens` from every rank's message; draws that stay undecided are left."""
        ranges = [rows for rows in self.vocab_ranges if rows.size]
        messages = [
            _fields(message, self._sizes(rows.size))
            for rows, message in zip(self.vocab_ranges, gathered, strict=True)
            if rows.size
        ]
        if self.plain:
            best = torch.stack([message[0] for message in messages]).view(len(messages), -1, BEST_FIELDS)
            _check_finite(best[:, :, 0])
            tokens[self.plain] = decide_best(best)
        for field, i in enumerate(self.filtered, start=1):
            row = self.rows[i]
            shards = [
                ShardCandidates.unpack(message[field], complete=row.num_candidates(rows.size) == rows.size)
                for rows, message in zip(ranges, messages, strict=True)
            ]
            _check_finite(torch.tensor([shard.log_sum_exp for shard in shards]))
            token = decide_filtered(shards, row)
            tokens[i] = _UNDECIDED if token is None else token


def _sample_whole(logits: torch.Tensor, rows: Sequence[SamplingRow], draws: _Draws) -> torch.Tensor:
    """Draws whose candidates did not suffice, from their whole rows: int64 [rows]."""
    exchange = draws.exchange
    whole = gather_logits(logits, draws.vocab_ranges, exchange)
    tokens = torch.full((len(rows),), _UNDECIDED, dtype=torch.int64)
    if exchange.rank == 0:
        for i, shard in enumerate(candidates_of_shard(whole, rows, begin=0, whole=True)):
            token = decide_filtered([shard], rows[i])
            tokens[i] = _UNDECIDED if token is None else token
    if exchange.world_size > 1:
        exchange.broadcast(tokens, 0)
    return tokens


def _fields(message: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    ends = list(accumulate(sizes))
    return [message[end - size : end] for size, end in zip(sizes, ends, strict=True)]


def _check_finite(scores: torch.Tensor) -> None:
    if not bool(scores.isfinite().all()):
        raise ModelError("the model's logits are not finite; the weights are damaged or overflow their dtype")
