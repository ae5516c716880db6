"""Draws tokens from logits whose vocabulary rows lie on different ranks.

One round of gathering and one broadcast a step: every rank sends the best of its shard, or candidates for draws
with filters; rank 0 decides and tells all. Only when the candidates do not prove where a filter ends (a nucleus
of more than some hundred tokens) a second pair of rounds brings the whole rows of those draws. That it is
needed is part of the broadcast, so that all ranks take the same rounds. Log-probabilities take two more rounds of
gathering, in steps where a draw asks for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hetero_api.sharding import UnitRange
from hetero_api.v1 import logprobs_pb2
from hetero_worker.distributed.exchange import Exchange
from hetero_worker.sampling.draw_batch import UNDECIDED, DrawBatch, decide_whole
from hetero_worker.sampling.drawing import HOST_DRAWING, ShardDrawing
from hetero_worker.sampling.logprobs import ShardLogprobs, TokenTarget, count_before, decide_logprobs, pack_shard
from hetero_worker.sampling.request import SamplingRow
from hetero_worker.sampling.shard import Float64Array, scaled_logits


@dataclass(frozen=True, slots=True)
class SampledRows:
    """The outcome of a step's draws, in their order."""

    tokens: list[int]
    """The same on every rank."""
    logprobs: list[logprobs_pb2.TokenLogprobs | None]
    """On rank 0, for the draws that ask for them; elsewhere None throughout."""


def sample_tokens(
    logits: torch.Tensor,
    rows: Sequence[SamplingRow],
    *,
    head_ranges: Sequence[UnitRange],
    exchange: Exchange,
    drawing: ShardDrawing = HOST_DRAWING,
) -> SampledRows:
    """Draw a token for each row.

    `logits` is float32 where the rank computed it, [draws, this rank's vocabulary rows], and stays as it is;
    `drawing` suits the place; `head_ranges` has every rank's rows. Raises ModelError when logits are not finite,
    ProtocolError when a row's edits leave no token; the rank that decides raises, others are freed from their round by
    the group's abort.
    """
    if not rows:
        return SampledRows([], [])
    shards = _Shards(tuple(head_ranges), exchange)
    tokens = _draw(logits, rows, shards, drawing)
    return SampledRows(tokens, _sampled_logprobs(logits, rows, tokens, shards, drawing))


def prompt_logprobs(
    logits: torch.Tensor,
    token_ids: Sequence[int],
    num_top: int,
    *,
    head_ranges: Sequence[UnitRange],
    exchange: Exchange,
) -> list[logprobs_pb2.TokenLogprobs]:
    """Log-probabilities of given tokens, and of the `num_top` likeliest, a row of logits each.

    Row i of `logits`, float32 [tokens, this rank's vocabulary rows] on the host, is where token_ids[i] is predicted. On
    rank 0; elsewhere empty. Raises ModelError when logits are not finite.
    """
    targets = [TokenTarget(token_id, num_top) for token_id in token_ids]
    return _logprobs(logits, targets, _Shards(tuple(head_ranges), exchange))


def gather_logits(logits: torch.Tensor, head_ranges: Sequence[UnitRange], exchange: Exchange) -> torch.Tensor:
    """Whole rows from all shards' on the host, on every rank: float32 [draws, vocabulary]."""
    if exchange.world_size == 1:
        return logits
    draws = logits.shape[0]
    counts = [draws * rows.size for rows in head_ranges]
    shards = exchange.all_gather(logits.reshape(-1), counts)
    return torch.cat([shard.view(draws, -1) for shard in shards if len(shard)], dim=1)


@dataclass(frozen=True, slots=True)
class _Shards:
    """Which rank holds which vocabulary rows, and how messages about them get around."""

    head_ranges: tuple[UnitRange, ...]
    exchange: Exchange

    @property
    def own(self) -> UnitRange:
        return self.head_ranges[self.exchange.rank]

    @property
    def filled(self) -> list[UnitRange]:
        """Shards that have rows; the others send nothing."""
        return [rows for rows in self.head_ranges if rows.size]

    def gather(self, message: Float64Array | None, sizes: Sequence[int]) -> list[Float64Array]:
        """Messages of all filled shards, sizes[i] elements from the i-th; a rank without rows sends None."""
        if self.exchange.world_size == 1:
            return [] if message is None else [message]
        of_filled = iter(sizes)
        counts = [next(of_filled) if rows.size else 0 for rows in self.head_ranges]
        sent = torch.empty(0, dtype=torch.float64) if message is None else torch.from_numpy(message)
        gathered = self.exchange.all_gather(sent, counts)
        return [part.numpy() for part, rows in zip(gathered, self.head_ranges, strict=True) if rows.size]

    def broadcast(self, tokens: list[int] | None, draws: int) -> list[int]:
        """Rank 0's tokens of so many draws, on all ranks; others give None."""
        if self.exchange.world_size == 1:
            assert tokens is not None
            return tokens
        told = torch.empty(draws, dtype=torch.int64) if tokens is None else torch.tensor(tokens)
        self.exchange.broadcast(told, 0)
        return list(map(int, told.tolist()))


def _draw(logits: torch.Tensor, rows: Sequence[SamplingRow], shards: _Shards, drawing: ShardDrawing) -> list[int]:
    batch, own = DrawBatch(rows), shards.own
    sizes = [shard.size for shard in shards.filled]
    message = batch.pack(drawing.start(rows, logits, own.begin).read()) if own.size else None
    messages = shards.gather(message, [batch.message_size(size) for size in sizes])
    decided = batch.decide(messages, sizes) if shards.exchange.rank == 0 else None
    tokens = shards.broadcast(decided, len(rows))
    if UNDECIDED in tokens:
        undecided = [i for i, token in enumerate(tokens) if token == UNDECIDED]
        for i, token in zip(undecided, _draw_whole(logits, rows, undecided, shards, drawing), strict=True):
            tokens[i] = token
    return tokens


def _draw_whole(
    logits: torch.Tensor,
    rows: Sequence[SamplingRow],
    undecided: Sequence[int],
    shards: _Shards,
    drawing: ShardDrawing,
) -> list[int]:
    """Draws whose candidates did not suffice, from their whole rows."""
    chosen = [rows[i] for i in undecided]
    own = scaled_logits(drawing.to_host(logits, undecided), chosen, range(len(chosen)), shards.own.begin)
    whole = gather_logits(own, shards.head_ranges, shards.exchange)
    decided = decide_whole(whole, chosen) if shards.exchange.rank == 0 else None
    return shards.broadcast(decided, len(undecided))


def _sampled_logprobs(
    logits: torch.Tensor,
    rows: Sequence[SamplingRow],
    tokens: Sequence[int],
    shards: _Shards,
    drawing: ShardDrawing,
) -> list[logprobs_pb2.TokenLogprobs | None]:
    asking = {i: row.num_logprobs for i, row in enumerate(rows) if row.num_logprobs is not None}
    told: list[logprobs_pb2.TokenLogprobs | None] = [None] * len(rows)
    if asking:
        targets = [TokenTarget(tokens[i], num_top) for i, num_top in asking.items()]
        own = drawing.to_host(logits, list(asking))
        # None for all but rank 0.
        for i, logprobs in zip(asking, _logprobs(own, targets, shards), strict=False):
            told[i] = logprobs
    return told


def _logprobs(
    logits: torch.Tensor, targets: Sequence[TokenTarget], shards: _Shards
) -> list[logprobs_pb2.TokenLogprobs]:
    """Of the targets, a row of logits each; on rank 0, elsewhere empty."""
    if not targets:
        return []
    own = shards.own
    sizes = [[target.message_size(shard.size) for target in targets] for shard in shards.filled]
    message = pack_shard(logits, targets, own.begin) if own.size else None
    messages = shards.gather(message, [sum(fields) for fields in sizes])
    parts = (np.split(told, np.cumsum(fields)[:-1]) for told, fields in zip(messages, sizes, strict=True))
    by_target = [tuple(map(ShardLogprobs.unpack, of_target)) for of_target in zip(*parts, strict=True)]
    before = count_before(logits, targets, by_target, own.begin) if own.size else None
    counts = shards.gather(before, [len(targets)] * len(sizes))
    if shards.exchange.rank != 0:
        return []
    return [
        decide_logprobs(told, target, sum(int(count[i]) for count in counts))
        for i, (told, target) in enumerate(zip(by_target, targets, strict=True))
    ]
