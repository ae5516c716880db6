"""Which requests may come in, which ones wait for a group of ranks, and when steps have to stop.

Parts of the engine core, each a small state of its own. One asyncio loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

W = TypeVar("W")


@dataclass(slots=True)
class Admission:
    """Decides whether requests are accepted: once a group has been there, unless somebody has closed it."""

    has_opened: bool = False
    is_draining: bool = False
    failed: str | None = None
    closed: str | None = None

    @property
    def refusal(self) -> str | None:
        """Reason to refuse a request, the most lasting one first; None: it is accepted."""
        if self.failed is not None:
            return self.failed
        if self.is_draining:
            return "the gateway is draining: it finishes what it has and accepts nothing new"
        if not self.has_opened:
            return "no group of ranks has formed yet"
        return self.closed


class PausedRequests(Generic[W]):
    """Requests that wait for a group of ranks to come back, in the order in which they began to wait."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._waiting: deque[tuple[float, W]] = deque()

    def pause(self, waiters: Iterable[W], *, now: float) -> None:
        """Let these wait from now on, for `limit_s` at most. `now` never falls from call to call."""
        self._waiting.extend((now + self._limit_s, waiter) for waiter in waiters)

    def resume_all(self) -> None:
        """Let nobody wait any more."""
        self._waiting.clear()

    def next_s(self) -> float | None:
        """Return when the first one will have waited too long."""
        return self._waiting[0][0] if self._waiting else None

    def pop_expired(self, now: float) -> Iterator[W]:
        """Yield those that have waited too long."""
        while self._waiting and self._waiting[0][0] <= now:
            yield self._waiting.popleft()[1]


class StepHolds:
    """Callers that keep steps from going out: `num_inside` do, `num_waiting` wait for the steps that are out.

    The core's loop sets `settled` when no step is out.
    """

    def __init__(self) -> None:
        self.num_waiting = 0
        self.num_inside = 0
        self.settled = asyncio.Event()

    @asynccontextmanager
    async def waiting(self) -> AsyncIterator[None]:
        """Surround a wait for `settled`, which counts from here on."""
        self.num_waiting += 1
        self.settled.clear()
        try:
            yield
        finally:
            self.num_waiting -= 1


class Alarm:
    """One timer for the soonest of several times, by `clock`. It rings once. Of the running loop."""

    def __init__(self, ring: Callable[[], None], *, clock: Callable[[], float]) -> None:
        self._ring = ring
        self._clock = clock
        self._timer: asyncio.TimerHandle | None = None

    def set(self, *times: float | None) -> None:
        """Ring at the soonest of these times, in place of the one set before; without any, do not ring."""
        self.stop()
        soonest = min((when for when in times if when is not None), default=None)
        if soonest is not None:
            delay_s = max(0.0, soonest - self._clock())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._on_timer)

    def stop(self) -> None:
        """Do not ring."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timer(self) -> None:
        self._timer = None
        self._ring()
