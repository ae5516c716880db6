"""How long a rank that died waits for its next start, and when that is of no more use.

Pauses double from one second to a minute. A rank that ran well for some minutes begins with one second again. One
that dies once more after the longest pause is given up: the container ends, so that Kubernetes counts and shows it.
"""

from __future__ import annotations

from typing import Final

FIRST_PAUSE_S: Final = 1.0
LONGEST_PAUSE_S: Final = 60.0
RAN_WELL_S: Final = 300.0


class RestartPauses:
    """One rank's pauses; see the module."""

    def __init__(
        self,
        *,
        first_s: float = FIRST_PAUSE_S,
        longest_s: float = LONGEST_PAUSE_S,
        ran_well_s: float = RAN_WELL_S,
    ) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._ran_well_s = ran_well_s
        self._last_s = 0.0

    def next_pause_s(self, ran_s: float) -> float | None:
        """The rank died after so many seconds: how long to wait, None to give up."""
        if ran_s >= self._ran_well_s:
            self._last_s = 0.0
        if self._last_s >= self._longest_s:
            return None
        self._last_s = min(2 * self._last_s, self._longest_s) or self._first_s
        return self._last_s
