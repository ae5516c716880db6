"""How often a group may fall and rise again before it is left lying."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable


class RestartBudget:
    """At most `max_restarts` ends of epochs within any `window_s` seconds are followed by another epoch."""

    def __init__(self, *, max_restarts: int, window_s: float, clock: Callable[[], float]) -> None:
        self._max_restarts = max_restarts
        self._window_s = window_s
        self._clock = clock
        self._ends: deque[float] = deque()

    def spend(self) -> bool:
        """An epoch ended; whether another may follow."""
        now = self._clock()
        self._ends.append(now)
        while self._ends[0] < now - self._window_s:
            self._ends.popleft()
        return len(self._ends) <= self._max_restarts
