"""How the next token of one sequence is chosen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

GREEDY_TEMPERATURE: Final = 1e-5
"""Temperatures below are greedy: dividing by them overflows."""


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """One token to draw. Filters apply in the order top_k, top_p, min_p, after the temperature."""

    temperature: float
    top_k: int
    """0 means all."""
    top_p: float
    """1 means all."""
    min_p: float
    """0 means all."""
    seed: int
    position: int
    """Index of the drawn token in its sequence; with the seed the key of the noise."""

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def is_filtered(self) -> bool:
        """Whether a part of the vocabulary may be cut off before the draw."""
        return not self.is_greedy and (self.top_k > 0 or 0.0 < self.top_p < 1.0 or self.min_p > 0.0)

    def num_candidates(self, rows: int) -> int:
        """How many of a shard's `rows` vocabulary rows are sent for a filtered draw."""
        return min(rows, max(MIN_CANDIDATES, self.top_k))


MIN_CANDIDATES: Final = 256
"""Nearly every nucleus is smaller; a larger one costs a second round, not exactness."""
