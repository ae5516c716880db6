"""Queue of keys to look at: each at most once in the queue, and with at most one worker at a time.

A key that is added while a worker has it is looked at again afterwards. So nothing is missed, and any number of changes
costs one look. The order is first come, first served. A key that comes again goes to the end, so a key that never rests
cannot keep others waiting. A key that failed comes back after a growing pause. Changes meanwhile bring it forward, but
not at once: a resource whose pods change all the time and whose writes all fail must not make a hot loop.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Hashable
from typing import Final, Generic, TypeVar

from hetero_operator.timing import Backoff, unobserved

K = TypeVar("K", bound=Hashable)

HURRIED_PAUSE_S: Final = 1.0
"""Least pause between two looks at a key that fails, however much changes."""


class WorkQueue(Generic[K]):
    """Queue of one event loop. `take` and `done` frame a worker's look at a key."""

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        observe_wait: Callable[[float], None] = unobserved,
        count_retry: Callable[[], None] = unobserved,
    ) -> None:
        """`observe_wait` gets how long each key waited, in seconds."""
        self._clock = clock
        self._observe_wait = observe_wait
        self._count_retry = count_retry
        self._ready: deque[K] = deque()
        self._waiting_since: dict[K, float] = {}
        self._taken: set[K] = set()
        self._again: set[K] = set()
        self._failures: dict[K, int] = {}
        self._failed_at: dict[K, float] = {}
        self._not_before: dict[K, float] = {}
        self._timers: dict[K, tuple[float, asyncio.TimerHandle]] = {}
        self._arrival = asyncio.Event()

    def __len__(self) -> int:
        """Return the number of keys that could be taken now."""
        return len(self._ready)

    @property
    def taken(self) -> int:
        """Keys that workers have."""
        return len(self._taken)

    def oldest_wait_s(self) -> float:
        """Return how long the first key has waited, 0 when none waits."""
        return self._clock() - self._waiting_since[self._ready[0]] if self._ready else 0.0

    def add(self, key: K) -> None:
        """Queue a key, because something about it changed."""
        failed_at = self._failed_at.get(key)
        if failed_at is not None and key not in self._taken:
            self.add_after(key, failed_at + HURRIED_PAUSE_S - self._clock())
        else:
            self._put(key)

    def add_after(self, key: K, seconds: float) -> None:
        """Queue a key then, unless it is queued earlier. The earliest of several times counts, but none within the
        time that the server asked for."""
        seconds = max(seconds, self._not_before.get(key, 0.0) - self._clock())
        if seconds <= 0:
            self._put(key)
            return
        due = self._clock() + seconds
        timer = self._timers.get(key)
        if timer is not None:
            if timer[0] <= due:
                return
            timer[1].cancel()
        handle = asyncio.get_running_loop().call_later(seconds, self._put, key)
        self._timers[key] = (due, handle)

    def retry(self, key: K, backoff: Backoff, *, at_least_s: float = 0.0) -> float:
        """Queue a key that failed, after a pause that grows with each failure in a row. Return the pause in seconds.

        Not even a change makes it shorter than `at_least_s`, which the server asked for.
        """
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        self._failed_at[key] = self._clock()
        self._not_before[key] = self._failed_at[key] + at_least_s
        pause_s = max(at_least_s, backoff.pause_s(failures))
        self._count_retry()
        self.add_after(key, pause_s)
        return pause_s

    def succeeded(self, key: K) -> None:
        """Forget the failures of a key: the next one will be a first one."""
        self._failures.pop(key, None)
        self._failed_at.pop(key, None)
        self._not_before.pop(key, None)

    def remove(self, key: K) -> None:
        """Drop retries and timers of a key that is gone."""
        self.succeeded(key)
        self._cancel_timer(key)

    async def take(self) -> K:
        """Return the next key, once there is one. The worker must call `done`, whatever happens."""
        while not self._ready:
            self._arrival.clear()
            await self._arrival.wait()
        key = self._ready.popleft()
        self._observe_wait(self._clock() - self._waiting_since.pop(key))
        self._cancel_timer(key)
        self._taken.add(key)
        return key

    def done(self, key: K) -> None:
        """Give a key back after a look at it."""
        self._taken.discard(key)
        if key in self._again:
            self._again.discard(key)
            self.add(key)

    def _put(self, key: K) -> None:
        self._cancel_timer(key)
        if key in self._taken:
            self._again.add(key)
        elif key not in self._waiting_since:
            self._waiting_since[key] = self._clock()
            self._ready.append(key)
            self._arrival.set()

    def _cancel_timer(self, key: K) -> None:
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer[1].cancel()
