"""How fast the ranks step, measured while they work: for status, for lookahead, and to check predictions.

Idle time does not count: a replica that nobody asks is not slow. Older steps count less and less, so the figures follow
a change of load within about a minute of stepping. Another group of ranks has another speed, hence another `StepPace`.
"""

from __future__ import annotations

import heapq
import math
from typing import Final, NamedTuple

from hetero_gateway.engine.step import ScheduledStep

MEMORY_S: Final = 30.0
"""Stepping time after which a step's weight has fallen to 1/e."""
LOOKAHEAD_S: Final = 0.04
"""Time that steps ahead may take together in a gateway: text still flows, though ranks hold answers back as well."""
MOST_STEPS_OUT: Final = 10
"""Steps out, however short they are."""
CONTEXT_TOKENS: Final = 64
"""Steps whose rows attend to about as many tokens, to this many, count as one size."""
_LOOKAHEAD_MEMORY: Final = 8
"""Steps after which one that was unlike the others hardly counts."""
MOST_SIZES: Final = 32
"""Sizes that are told: whoever asks computes a prediction for each."""
_LARGEST_WEIGHT: Final = 10.0
"""What has faded is let go about every minute of stepping."""
_SMALLEST_SHARE: Final = 0.01
"""A size that weighs less, of what a step weighs now, counts for nothing."""


class Throughput:
    """Tokens generated per second of stepping, exponentially weighted over stepping time."""

    def __init__(self, *, memory_s: float = MEMORY_S) -> None:
        self._memory_s = memory_s
        self._tokens = 0.0
        self._busy_s = 0.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second; 0 before the first step that took time."""
        return self._tokens / self._busy_s if self._busy_s else 0.0

    def add_step(self, seconds: float, *, tokens: int) -> None:
        """Count a step that took `seconds` and generated `tokens`."""
        kept = math.exp(-seconds / self._memory_s)
        self._tokens = self._tokens * kept + tokens
        self._busy_s = self._busy_s * kept + seconds


class Lookahead:
    """How many steps go out ahead of their results. Steps ahead may take `seconds` together; 0: one goes at most.

    One step beside the one that ranks compute keeps them busy. Where steps are short, that costs a message out and one
    back every few milliseconds, and both ends share their machine with ranks. So more steps go out as long as they only
    decode and take little time together: they and their results then travel together. A step with prefills is long, and
    only the next step goes out behind it.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._step_s = 0.0
        """Seconds of a recent step that only decodes."""

    def add_step(self, seconds: float) -> None:
        """Count a step that only decoded and took the ranks `seconds`."""
        self._step_s += (seconds - self._step_s) / (_LOOKAHEAD_MEMORY if self._step_s else 1)

    def steps_out(self) -> int:
        """Return how many steps may be out if all of them only decode."""
        if not self._seconds or not self._step_s:
            return 2
        return max(2, min(MOST_STEPS_OUT, 1 + int(self._seconds / self._step_s)))


class DecodeSize(NamedTuple):
    """Size of a step that only decodes. `context` is the mean number of tokens that a row attends to.

    It is taken in the middle of the range that counts as one size.
    """

    rows: int
    context: int


class PacedSize(NamedTuple):
    """Seconds of steps of one size. Weights only compare sizes with one another."""

    size: DecodeSize
    seconds: float
    weight: float


class _Sum:
    __slots__ = ("seconds", "weight")

    def __init__(self) -> None:
        self.seconds = 0.0
        self.weight = 0.0


class DecodePace:
    """Seconds of steps that only decode, by their size, to compare with what was predicted for such steps.

    It keeps seconds, not a ratio, so that nothing is predicted while requests are served; whoever asks goes through a
    few sizes. Steps that prefill or that waited for masks do not count.
    """

    def __init__(self, *, memory_s: float = MEMORY_S) -> None:
        self._memory_s = memory_s
        self._weight = 1.0
        """Weight of the next step: new steps grow instead of old ones fading."""
        self._sums: dict[DecodeSize, _Sum] = {}

    def add_step(self, seconds: float, *, rows: int, tokens: int) -> None:
        """Count a step of so many rows, which attend to `tokens` all together."""
        size = DecodeSize(rows, tokens // rows // CONTEXT_TOKENS * CONTEXT_TOKENS + CONTEXT_TOKENS // 2)
        found = self._sums.get(size)
        if found is None:
            found = self._sums[size] = _Sum()
        self._weight *= math.exp(min(seconds, self._memory_s) / self._memory_s)
        found.seconds += seconds * self._weight
        found.weight += self._weight
        if self._weight > _LARGEST_WEIGHT:
            self._shrink()

    def sizes(self) -> list[PacedSize]:
        """Return the sizes that count most, the heaviest first."""
        heaviest = heapq.nlargest(MOST_SIZES, self._sums.items(), key=lambda each: each[1].weight)
        return [PacedSize(size, found.seconds / found.weight, found.weight / self._weight) for size, found in heaviest]

    def _shrink(self) -> None:
        self._sums = {
            size: found for size, found in self._sums.items() if found.weight > _SMALLEST_SHARE * self._weight
        }
        for found in self._sums.values():
            found.seconds /= self._weight
            found.weight /= self._weight
        self._weight = 1.0


class StepPace:
    """All that the core measures of one group's steps."""

    def __init__(self, *, lookahead_s: float) -> None:
        self.throughput = Throughput()
        self.lookahead = Lookahead(lookahead_s)
        self.decodes = DecodePace()

    def add_step(self, step: ScheduledStep, *, seconds: float, on_ranks_s: float, num_tokens: int) -> None:
        """Count a step: seconds as seen from here and on the ranks, and how many tokens it generated."""
        self.throughput.add_step(seconds, tokens=num_tokens)
        rows = len(step.decodes.slots)
        if rows and not step.spans and not step.masked and not step.proposals:
            self.lookahead.add_step(on_ranks_s)
            self.decodes.add_step(seconds, rows=rows, tokens=sum(map(len, step.decodes.token_ids)))
