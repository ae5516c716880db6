"""Changes that a request makes to the logits of one draw, before temperature and filters.

The order is: bias; penalties (repetition, then frequency and presence); banned tokens and tokens outside the mask,
which go to -inf. Every edit concerns single vocabulary rows. A rank therefore applies to its own rows what a whole
vocabulary would have got, and the result is bitwise the same on every layout.

`LogitEdits.apply` is the host's way. On a device `device_edits` applies the edits of all rows at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hetero_worker.errors import ProtocolError
from hetero_worker.sampling.noise import IdArray

FloatArray = npt.NDArray[np.float32]
TokenMask = npt.NDArray[np.uint8]
"""Token t is allowed where bit t % 8 (lowest first) of byte t / 8 is set."""


class TokenCounts:
    """Sparse table of how often a sequence's output holds each token: one entry a distinct token.

    Appending a token takes constant time however long the sequence is. Entries added by `append` follow in the order of
    first appearance. The arrays are views, valid until the next append.
    """

    def __init__(self, *, seen: Sequence[int], counted: Sequence[int]) -> None:
        """Count the output's tokens, `counted`; tokens of `seen` (the prompt) have entries too, with a count of 0."""
        ids = np.unique(np.array([*seen, *counted], dtype=np.int64))
        counts = np.zeros(len(ids), dtype=np.float32)
        np.add.at(counts, np.searchsorted(ids, np.array(counted, dtype=np.int64)), 1)
        self._entries = {token_id: entry for entry, token_id in enumerate(ids.tolist())}
        self._ids, self._counts = ids, counts

    @property
    def ids(self) -> IdArray:
        """Token of each entry: int64 [entries]."""
        return self._ids[: len(self._entries)]

    @property
    def counts(self) -> FloatArray:
        """Count of each entry: float32 [entries]."""
        return self._counts[: len(self._entries)]

    def append(self, token_id: int) -> None:
        """Count one more output token."""
        entry = self._entries.setdefault(token_id, len(self._entries))
        if entry == len(self._ids):
            self._grow()
        self._ids[entry] = token_id
        self._counts[entry] += 1

    def followed_by(self, token_ids: Sequence[int]) -> TokenCounts:
        """Return a copy that counts more output tokens."""
        counts = copy(self)
        counts._entries = self._entries.copy()
        counts._ids, counts._counts = self._ids.copy(), self._counts.copy()
        for token_id in token_ids:
            counts.append(token_id)
        return counts

    def _grow(self) -> None:
        room = max(64, len(self._ids))
        self._ids = np.concatenate([self._ids, np.zeros(room, dtype=np.int64)])
        self._counts = np.concatenate([self._counts, np.zeros(room, dtype=np.float32)])


@dataclass(frozen=True, slots=True, eq=False)
class Bias:
    """Numbers added to the logits of some tokens."""

    ids: IdArray
    values: FloatArray

    def apply(self, logits: FloatArray, begin: int) -> None:
        """Edit a shard's logits in place, as `LogitEdits.apply` does."""
        own = within(self.ids, begin, len(logits))
        np.add.at(logits, self.ids[own] - begin, self.values[own])


@dataclass(frozen=True, slots=True, eq=False)
class Penalties:
    """Penalties on tokens that were used: presence and frequency count the output, repetition the prompt too.

    With a repetition penalty `counts` has entries for the prompt's tokens.
    """

    presence: float
    frequency: float
    repetition: float
    counts: TokenCounts

    def apply(self, logits: FloatArray, begin: int) -> None:
        """Edit a shard's logits in place, as `LogitEdits.apply` does."""
        ids, counts = self.counts.ids, self.counts.counts
        own = within(ids, begin, len(logits))
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
        """Edit a shard's logits in place: float32 [shard rows], the first being vocabulary row `begin`.

        Raises ProtocolError when the mask is shorter than the vocabulary.
        """
        if self.bias is not None:
            self.bias.apply(logits, begin)
        if self.penalties is not None:
            self.penalties.apply(logits, begin)
        if self.banned_ids is not None:
            logits[self.banned_ids[within(self.banned_ids, begin, len(logits))] - begin] = -np.inf
        if self.mask is not None:
            np.copyto(logits, -np.inf, where=_masked_out(self.mask, begin, len(logits)))


def mask_without(mask: TokenMask, banned_ids: IdArray) -> TokenMask:
    """Return the mask without the banned tokens, or the mask itself if that would leave nothing.

    A constrained output that is complete allows only its end. If it may not end yet (min_tokens) one of the two
    has to yield, and an output that fits its constraint is what the constraint promises.
    """
    rest = mask.copy()
    np.bitwise_and.at(rest, banned_ids // 8, ~(1 << (banned_ids % 8)).astype(np.uint8))
    return rest if rest.any() else mask


def mask_bytes(mask: TokenMask, begin: int, count: int) -> TokenMask:
    """Return the bytes that hold vocabulary rows [begin, begin + count); the first row is bit begin % 8.

    Raises ProtocolError when the mask is shorter.
    """
    end = begin + count
    if end > 8 * len(mask):
        raise ProtocolError(f"a token mask of {len(mask)} bytes does not reach vocabulary row {end - 1}")
    return mask[begin // 8 : -(-end // 8)]


def within(ids: IdArray, begin: int, count: int) -> npt.NDArray[np.bool_]:
    """Return which ids are vocabulary rows [begin, begin + count): bool [ids]."""
    return (ids >= begin) & (ids < begin + count)


def _masked_out(mask: TokenMask, begin: int, count: int) -> npt.NDArray[np.bool_]:
    bits = np.unpackbits(mask_bytes(mask, begin, count), bitorder="little")[begin % 8 :]
    banned: npt.NDArray[np.bool_] = bits[:count] == 0
    return banned
