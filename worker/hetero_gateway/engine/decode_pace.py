"""How long steps take that only decode, by their size: to be held against what was predicted for such steps.

The pace is kept as it is, not as a ratio, so that nobody predicts anything while requests are served; whoever asks goes
through a few sizes. Older steps count less and less, as in throughput.py. A step that prefills, or that waited for
masks, is none of these.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final, NamedTuple

from hetero_gateway.engine.throughput import MEMORY_S

CONTEXT_TOKENS: Final = 64
"""Steps whose rows attend to about as many tokens, to this many, count as one size."""
_LARGEST_WEIGHT: Final = 1e9
_SMALLEST_SHARE: Final = 1e-6


class DecodeSize(NamedTuple):
    """Of a step that only decodes."""

    rows: int
    context: int
    """Tokens that a row attends to, the mean over the rows, in the middle of what counts as one size."""


class PacedSize(NamedTuple):
    """Steps of one size: what they took, and how much they count. Weights mean something beside each other only."""

    size: DecodeSize
    seconds: float
    weight: float


class _Sum:
    __slots__ = ("seconds", "weight")

    def __init__(self) -> None:
        self.seconds = 0.0
        self.weight = 0.0


class DecodePace:
    """See the module."""

    def __init__(self, *, memory_s: float = MEMORY_S) -> None:
        self._memory_s = memory_s
        self._weight = 1.0
        """Of the next step: new steps grow instead of old ones fading."""
        self._sums: dict[tuple[int, int], _Sum] = {}

    def add_step(self, seconds: float, *, rows: int, tokens: int) -> None:
        """A step of so many rows took this long; `tokens` is what they attend to, all together."""
        size = rows, tokens // rows // CONTEXT_TOKENS
        found = self._sums.get(size)
        if found is None:
            found = self._sums[size] = _Sum()
        self._weight *= math.exp(min(seconds, self._memory_s) / self._memory_s)
        found.seconds += seconds * self._weight
        found.weight += self._weight
        if self._weight > _LARGEST_WEIGHT:
            self._shrink()

    def sizes(self) -> Iterator[PacedSize]:
        """All sizes that count still."""
        for (rows, context), found in self._sums.items():
            size = DecodeSize(rows, context * CONTEXT_TOKENS + CONTEXT_TOKENS // 2)
            yield PacedSize(size, found.seconds / found.weight, found.weight / self._weight)

    def forget(self) -> None:
        """Begin anew: another group of ranks is another speed."""
        self._sums.clear()
        self._weight = 1.0

    def _shrink(self) -> None:
        self._sums = {
            size: found for size, found in self._sums.items() if found.weight > _SMALLEST_SHARE * self._weight
        }
        for found in self._sums.values():
            found.seconds /= self._weight
            found.weight /= self._weight
        self._weight = 1.0
