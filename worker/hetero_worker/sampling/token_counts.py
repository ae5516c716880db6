"""How often a sequence's output holds each token, kept as it grows: what penalties are computed from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

IdArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]


class TokenCounts:
    """Sparse counts: an entry a distinct token, in the order of first appearance once the table stands.

    Appending costs the same however long the sequence is. The arrays that are handed out are views, good until
    the next append.
    """

    def __init__(self, *, seen: Sequence[int], counted: Sequence[int]) -> None:
        """`counted` are the output's tokens; those of `seen` (the prompt's) have entries too, of their own count 0."""
        ids = np.unique(np.array([*seen, *counted], dtype=np.int64))
        counts = np.zeros(len(ids), dtype=np.float32)
        np.add.at(counts, np.searchsorted(ids, np.array(counted, dtype=np.int64)), 1)
        self._entries = {token_id: entry for entry, token_id in enumerate(ids.tolist())}
        self._ids, self._counts = ids, counts

    @property
    def ids(self) -> IdArray:
        return self._ids[: len(self._entries)]

    @property
    def counts(self) -> FloatArray:
        return self._counts[: len(self._entries)]

    def append(self, token_id: int) -> None:
        """One more output token."""
        entry = self._entries.setdefault(token_id, len(self._entries))
        if entry == len(self._ids):
            self._grow()
        self._ids[entry] = token_id
        self._counts[entry] += 1

    def _grow(self) -> None:
        room = max(64, len(self._ids))
        self._ids = np.concatenate([self._ids, np.zeros(room, dtype=np.int64)])
        self._counts = np.concatenate([self._counts, np.zeros(room, dtype=np.float32)])
