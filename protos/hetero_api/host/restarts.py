"""How long a process that died waits for its next start, and how many starts there may be.

Pauses are for a process that cannot get up: none before the first new start, then a first pause that doubles up to a
longest. One that did well in between begins again without a pause. The budget is for what gets up and falls, over and
over: so many starts within a window, whichever process they were for.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable


class RestartPauses:
    """One process's pauses; see the module."""

    def __init__(self, *, first_s: float, longest_s: float) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._last_s: float | None = None

    @property
    def is_exhausted(self) -> bool:
        """True if the last pause was the longest."""
        return self._last_s is not None and self._last_s >= self._longest_s

    def next_pause_s(self, *, did_well: bool) -> float:
        """Return the seconds to wait before a process that died is started again."""
        if self._last_s is None or did_well:
            self._last_s = 0.0
        else:
            self._last_s = min(2 * self._last_s, self._longest_s) or self._first_s
        return self._last_s


class RestartBudget:
    """At most `max_restarts` restarts within any `window_s` seconds."""

    def __init__(self, *, max_restarts: int, window_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_restarts = max_restarts
        self._window_s = window_s
        self._clock = clock
        self._deaths: deque[float] = deque()

    def spend(self) -> bool:
        """Count a death, and return True if the process may be started again."""
        self._deaths.append(self._clock())
        return not self.is_exceeded

    @property
    def is_exceeded(self) -> bool:
        """True if more processes died within the window than may be started again."""
        since_s = self._clock() - self._window_s
        while self._deaths and self._deaths[0] < since_s:
            self._deaths.popleft()
        return len(self._deaths) > self._max_restarts
