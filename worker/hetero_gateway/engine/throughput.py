"""How fast the ranks generate, measured while they work.

Idle time does not count: a replica that nobody asks is not slow. Older steps count less and less, so that the figure
follows a change of load within about a minute of stepping.
"""

from __future__ import annotations

import math
from typing import Final

MEMORY_S: Final = 30.0
"""Stepping time after which a step's weight has fallen to 1/e."""


class Throughput:
    """Tokens generated per second of stepping, exponentially weighted over stepping time."""

    def __init__(self, *, memory_s: float = MEMORY_S) -> None:
        self._memory_s = memory_s
        self._tokens = 0.0
        self._busy_s = 0.0

    @property
    def tokens_per_second(self) -> float:
        """0 before the first step that took time."""
        return self._tokens / self._busy_s if self._busy_s else 0.0

    def add_step(self, seconds: float, *, tokens: int) -> None:
        """A step took this long and generated so many tokens."""
        kept = math.exp(-seconds / self._memory_s)
        self._tokens = self._tokens * kept + tokens
        self._busy_s = self._busy_s * kept + seconds

    def forget(self) -> None:
        """Begin anew: another group of ranks is another speed."""
        self._tokens = self._busy_s = 0.0
