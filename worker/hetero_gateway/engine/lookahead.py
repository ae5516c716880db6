"""How many steps go out ahead of their results.

One beside the one that ranks are at keeps them busy. Where steps are short that costs a message out and one back for
every few milliseconds, and both ends share their machine with ranks. So more go out as long as they only decode and
take little time together: they and their results then travel together. A step with prefills is long, and nothing goes
out behind it but the next one.
"""

from __future__ import annotations

from typing import Final

LOOKAHEAD_S: Final = 0.04
"""What a gateway lets steps take together: with what ranks hold answers back (plan_work.py), text still flows."""
MOST: Final = 10
"""Steps out, however short they are."""
_MEMORY: Final = 8
"""Steps after which one that was unlike the others hardly counts."""


class Lookahead:
    """`seconds` is what the steps ahead may take together; 0: there is one at most."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._step_s = 0.0
        """Of a step that only decodes, of late."""

    def add_step(self, seconds: float) -> None:
        """A step that only decoded took the ranks so long."""
        self._step_s += (seconds - self._step_s) / (_MEMORY if self._step_s else 1)

    def steps_out(self) -> int:
        """How many may be out that only decode."""
        if not self._seconds or not self._step_s:
            return 2
        return max(2, min(MOST, 1 + int(self._seconds / self._step_s)))

    def forget(self) -> None:
        """Another group is another speed."""
        self._step_s = 0.0
