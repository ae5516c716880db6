"""What a request changes in the logits of one draw, before temperature and filters.

In this order: bias; penalties (repetition, then frequency and presence); tokens that are banned, and those that
the mask leaves out, go to -inf. Every edit concerns single vocabulary rows, so that a rank applies to its own rows
what a whole vocabulary would have got: the result is bitwise the same on every layout.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hetero_worker.errors import ProtocolError
from hetero_worker.sampling.token_counts import FloatArray, IdArray, TokenCounts

TokenMask = npt.NDArray[np.uint8]
"""Bit t % 8 (lowest first) of byte t / 8 says whether token t is allowed."""


@dataclass(frozen=True, slots=True, eq=False)
class Bias:
    """Added to the logits of some tokens."""

    ids: IdArray
    values: FloatArray

    def apply(self, logits: FloatArray, begin: int) -> None:
        own = _within(self.ids, begin, len(logits))
        np.add.at(logits, self.ids[own] - begin, self.values[own])


@dataclass(frozen=True, slots=True, eq=False)
class Penalties:
    """Presence and frequency look at the output; repetition at the prompt too, whose tokens `counts` then has."""

    presence: float
    frequency: float
    repetition: float
    counts: TokenCounts

    def apply(self, logits: FloatArray, begin: int) -> None:
        ids, counts = self.counts.ids, self.counts.counts
        own = _within(ids, begin, len(logits))
        rows, times = ids[own] - begin, counts[own]
        values = logits[rows]
        if self.repetition != 1.0:
            values = np.where(values > 0, values / self.repetition, values * self.repetition)
        values -= self.frequency * times
        values -= np.where(times > 0, np.float32(self.presence), np.float32(0))
        logits[rows] = values


@dataclass(frozen=True, slots=True, eq=False)
class LogitEdits:
    """All edits of one draw."""

    bias: Bias | None = None
    penalties: Penalties | None = None
    banned_ids: IdArray | None = None
    mask: TokenMask | None = None

    def apply(self, logits: FloatArray, begin: int) -> None:
        """Edit a shard's logits in place: float32 [shard rows], the first being vocabulary row `begin`."""
        if self.bias is not None:
            self.bias.apply(logits, begin)
        if self.penalties is not None:
            self.penalties.apply(logits, begin)
        if self.banned_ids is not None:
            logits[self.banned_ids[_within(self.banned_ids, begin, len(logits))] - begin] = -np.inf
        if self.mask is not None:
            np.copyto(logits, -np.inf, where=_masked_out(self.mask, begin, len(logits)))


def mask_without(mask: TokenMask, banned_ids: IdArray) -> TokenMask:
    """The mask less the banned tokens; the mask itself if that would leave nothing.

    A constrained output that is complete allows only its end. If it may not end yet (min_tokens) one of the two
    has to yield, and an output that fits its constraint is what the constraint promises.
    """
    rest = mask.copy()
    np.bitwise_and.at(rest, banned_ids // 8, ~(1 << (banned_ids % 8)).astype(np.uint8))
    return rest if rest.any() else mask


def _within(ids: IdArray, begin: int, count: int) -> npt.NDArray[np.bool_]:
    return (ids >= begin) & (ids < begin + count)


def _masked_out(mask: TokenMask, begin: int, count: int) -> npt.NDArray[np.bool_]:
    end = begin + count
    if end > 8 * len(mask):
        raise ProtocolError(f"a token mask of {len(mask)} bytes does not reach vocabulary row {end - 1}")
    bits = np.unpackbits(mask[begin // 8 : -(-end // 8)], bitorder="little")[begin % 8 :]
    banned: npt.NDArray[np.bool_] = bits[:count] == 0
    return banned
