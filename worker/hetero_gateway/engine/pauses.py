"""Who waits for a group of ranks to come back, and since when."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

W = TypeVar("W")


class Pauses(Generic[W]):
    """Waiters in the order in which they began to wait; each waits `limit_s` at most."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._waiting: deque[tuple[float, W]] = deque()

    def begin(self, waiters: Iterable[W], *, now: float) -> None:
        """These wait from now on. `now` never falls from call to call."""
        self._waiting.extend((now + self._limit_s, waiter) for waiter in waiters)

    def over(self) -> None:
        """Nobody waits any more."""
        self._waiting.clear()

    def next_s(self) -> float | None:
        """When the first has waited too long."""
        return self._waiting[0][0] if self._waiting else None

    def pop_expired(self, now: float) -> Iterator[W]:
        """Those that have waited too long."""
        while self._waiting and self._waiting[0][0] <= now:
            yield self._waiting.popleft()[1]
