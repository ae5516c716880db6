"""Draws tokens from logits whose vocabulary rows lie on different ranks.

A step takes one gathering round and one broadcast: every rank sends the best of its shard, rank 0 decides and sends the
tokens to all. Draws with filters are of whole rows: where ranks share the vocabulary, rank 0 makes them of rows that
are gathered for it. Where it has the whole vocabulary nothing is gathered. Log-probabilities take two more gathering
rounds, in steps where a draw wants them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from hetero_api.rank_memory import WHOLE_LOGITS
from hetero_api.sharding import UnitRange
from hetero_api.v1 import logprobs_pb2
from hetero_worker.distributed.exchange import Exchange
from hetero_worker.sampling.base import HOST_SAMPLER, ShardSampler, StartedDraws, UnknownTokens
from hetero_worker.sampling.decision import decide, merge_best
from hetero_worker.sampling.logprobs import ShardLogprobs, TokenTarget, count_before, decide_logprobs, pack_shard
from hetero_worker.sampling.request import SamplingRow
from hetero_worker.sampling.shard import BEST_FIELDS, Float64Array, chunks_of


@dataclass(frozen=True, slots=True)
class SampledRows:
    """Outcome of a step's draws, in their order."""

    tokens: list[int]
    """One token a draw; all ranks have the same."""
    logprobs: list[logprobs_pb2.TokenLogprobs | None]
    """On rank 0, for the draws that ask for them; elsewhere None throughout."""


class SampleTokens(Protocol):
    """Signature of `sample_tokens`."""

    def __call__(
        self,
        logits: torch.Tensor,
        rows: Sequence[SamplingRow],
        *,
        head_ranges: Sequence[UnitRange],
        exchange: Exchange,
        sampler: ShardSampler,
        started: StartedDraws | None,
    ) -> SampledRows:
        """Draw a token for each row."""
        ...


def sample_tokens(
    logits: torch.Tensor,
    rows: Sequence[SamplingRow],
    *,
    head_ranges: Sequence[UnitRange],
    exchange: Exchange,
    sampler: ShardSampler = HOST_SAMPLER,
    started: StartedDraws | None = None,
) -> SampledRows:
    """Draw a token for each row.

    `logits` is float32 where the rank computed it, [draws, this rank's vocabulary rows], and stays unchanged; `sampler`
    suits the place; `head_ranges` has every rank's rows. `started`: what `start_draws` returned for these draws, if
    they have been started. Raises ModelError when logits are not finite, ProtocolError when a row's edits leave no
    token. Only the rank that decides raises; the group's abort frees the others from their round.
    """
    if not rows:
        return SampledRows([], [])
    shards = _Shards(tuple(head_ranges), exchange)
    if started is None:
        started = start_draws(logits, rows, head_ranges=head_ranges, exchange=exchange, sampler=sampler)
    tokens = _draw(logits, rows, shards, sampler, started)
    return SampledRows(tokens, _sampled_logprobs(logits, rows, tokens, shards, sampler))


def start_draws(
    logits: torch.Tensor,
    rows: Sequence[SamplingRow],
    *,
    head_ranges: Sequence[UnitRange],
    exchange: Exchange,
    sampler: ShardSampler,
    unknown: UnknownTokens | None = None,
) -> StartedDraws | None:
    """Start the draws of `sample_tokens`; None on a rank without vocabulary rows.

    `unknown` is for a rank with the whole vocabulary. Raises as ShardSampler.start does.
    """
    shards = _Shards(tuple(head_ranges), exchange)
    if not shards.own.size:
        return None
    return sampler.start(rows, logits, shards.own.begin, is_whole=not is_shared(head_ranges), unknown=unknown)


def prompt_logprobs(
    logits: torch.Tensor,
    token_ids: Sequence[int],
    num_top: int,
    *,
    head_ranges: Sequence[UnitRange],
    exchange: Exchange,
) -> list[logprobs_pb2.TokenLogprobs]:
    """Return log-probabilities of given tokens, and of the `num_top` likeliest, a row of logits each.

    Row i of `logits`, float32 [tokens, this rank's vocabulary rows] on the host, predicts token_ids[i]. The list is
    empty on all ranks but rank 0. Raises ModelError when logits are not finite.
    """
    targets = [TokenTarget(token_id, num_top) for token_id in token_ids]
    return _logprobs(logits, targets, _Shards(tuple(head_ranges), exchange))


def is_shared(head_ranges: Sequence[UnitRange]) -> bool:
    """Return whether several ranks have a part of the vocabulary."""
    return sum(rows.size > 0 for rows in head_ranges) > 1


def gather_logits(logits: torch.Tensor, head_ranges: Sequence[UnitRange], exchange: Exchange) -> torch.Tensor:
    """Return whole rows of all shards' logits on the host, on every rank: float32 [draws, vocabulary]."""
    if exchange.world_size == 1:
        return logits
    draws = logits.shape[0]
    counts = [draws * rows.size for rows in head_ranges]
    shards = exchange.all_gather(logits.reshape(-1), counts)
    return torch.cat([shard.view(draws, -1) for shard in shards if len(shard)], dim=1)


@dataclass(frozen=True, slots=True)
class _Shards:
    """The ranks' vocabulary rows, and the rounds that carry messages about them."""

    head_ranges: tuple[UnitRange, ...]
    exchange: Exchange

    @property
    def own(self) -> UnitRange:
        return self.head_ranges[self.exchange.rank]

    @property
    def are_one(self) -> bool:
        """True if rank 0 has the whole vocabulary."""
        return all(not rows.size for rows in self.head_ranges[1:])

    @property
    def filled(self) -> list[UnitRange]:
        """Shards that have rows; ranks without rows send nothing."""
        return [rows for rows in self.head_ranges if rows.size]

    def gather(self, message: Float64Array | None, sizes: Sequence[int]) -> list[Float64Array]:
        """Return the messages of all filled shards, sizes[i] elements from the i-th; a rank without rows sends None.

        Where rank 0 has all rows there is its own, which only it has.
        """
        if self.are_one:
            return [] if message is None else [message]
        of_filled = iter(sizes)
        counts = [next(of_filled) if rows.size else 0 for rows in self.head_ranges]
        sent = torch.empty(0, dtype=torch.float64) if message is None else torch.from_numpy(message)
        gathered = self.exchange.all_gather(sent, counts)
        return [part.numpy() for part, rows in zip(gathered, self.head_ranges, strict=True) if rows.size]

    def broadcast(self, tokens: list[int] | None, draws: int) -> list[int]:
        """Return rank 0's tokens of so many draws on all ranks; others pass None."""
        if self.exchange.world_size == 1:
            assert tokens is not None
            return tokens
        sent = torch.empty(draws, dtype=torch.int64) if tokens is None else torch.tensor(tokens)
        self.exchange.broadcast(sent, 0)
        return list(map(int, sent.tolist()))


def _draw(
    logits: torch.Tensor,
    rows: Sequence[SamplingRow],
    shards: _Shards,
    sampler: ShardSampler,
    started: StartedDraws | None,
) -> list[int]:
    own = None if started is None else started.read()
    messages = shards.gather(None if own is None else own.reshape(-1), [BEST_FIELDS * len(rows)] * len(shards.filled))
    is_leader = shards.exchange.rank == 0
    best = merge_best([message.reshape(-1, BEST_FIELDS) for message in messages]) if is_leader else None
    if is_shared(shards.head_ranges):
        for chunk in _whole_rows(rows, shards):
            whole = gather_logits(sampler.to_host(logits, chunk), shards.head_ranges, shards.exchange)
            if best is not None:
                best[chunk] = sampler.start([rows[i] for i in chunk], whole, 0, is_whole=True).read()
    return shards.broadcast(None if best is None else decide(best, rows), len(rows))


def _whole_rows(rows: Sequence[SamplingRow], shards: _Shards) -> Iterator[list[int]]:
    """Yield the draws with filters, which rank 0 makes of their whole rows, some at a time."""
    filtered = [i for i, row in enumerate(rows) if row.is_filtered]
    vocabulary = max(own.end for own in shards.head_ranges)
    return chunks_of(filtered, vocabulary, chunk_elements=WHOLE_LOGITS)


def _sampled_logprobs(
    logits: torch.Tensor, rows: Sequence[SamplingRow], tokens: Sequence[int], shards: _Shards, sampler: ShardSampler
) -> list[logprobs_pb2.TokenLogprobs | None]:
    asking = {i: row.num_logprobs for i, row in enumerate(rows) if row.num_logprobs is not None}
    found: list[logprobs_pb2.TokenLogprobs | None] = [None] * len(rows)
    if asking:
        targets = [TokenTarget(tokens[i], num_top) for i, num_top in asking.items()]
        own = sampler.to_host(logits, list(asking))
        # Only rank 0 has log-probabilities.
        for i, logprobs in zip(asking, _logprobs(own, targets, shards), strict=False):
            found[i] = logprobs
    return found


def _logprobs(
    logits: torch.Tensor, targets: Sequence[TokenTarget], shards: _Shards
) -> list[logprobs_pb2.TokenLogprobs]:
    """Return the targets' log-probabilities, from a row of logits each; empty on all ranks but rank 0."""
    if not targets or (shards.are_one and shards.exchange.rank != 0):
        return []  # where rank 0 has all rows, the others neither send nor receive
    own = shards.own
    sizes = [[target.message_size(shard.size) for target in targets] for shard in shards.filled]
    message = pack_shard(logits, targets, own.begin) if own.size else None
    messages = shards.gather(message, [sum(fields) for fields in sizes])
    parts = (np.split(message, np.cumsum(fields)[:-1]) for message, fields in zip(messages, sizes, strict=True))
    by_target = [tuple(map(ShardLogprobs.unpack, of_target)) for of_target in zip(*parts, strict=True)]
    before = count_before(logits, targets, by_target, own.begin) if own.size else None
    counts = shards.gather(before, [len(targets)] * len(sizes))
    if shards.exchange.rank != 0:
        return []
    return [
        decide_logprobs(parts_of_target, target, sum(int(count[i]) for count in counts))
        for i, (parts_of_target, target) in enumerate(zip(by_target, targets, strict=True))
    ]
