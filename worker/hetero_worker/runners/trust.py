"""Trust: whether guesses of a step's tokens are good enough to begin the next step with.

A wrong guess costs a second pass. Guesses are nearly always right, but there are requests whose are not: filters that
reach further down the vocabulary than the candidates the device has at hand. So after a wrong guess some steps are not
chained, twice as many each time that guesses are wrong again, and half as many when they were right: of steps that are
always guessed wrong one in so many is made twice, and a single mistake costs next to nothing.
"""

from __future__ import annotations

from typing import Final

MOST_STEPS: Final = 63
"""That are not chained after a wrong guess."""


class Trust:
    """Of one rank's guesses."""

    def __init__(self) -> None:
        self._pause = 0
        """Steps that the last wrong guess cost."""
        self._left = 0

    @property
    def is_given(self) -> bool:
        """Whether steps may be chained now."""
        return self._left == 0

    def count_step(self) -> None:
        """A step that drew was finished."""
        self._left = max(0, self._left - 1)

    def right(self) -> None:
        """What was guessed came true."""
        self._pause //= 2

    def wrong(self) -> None:
        """It did not."""
        self._pause = self._left = min(2 * self._pause + 1, MOST_STEPS)
