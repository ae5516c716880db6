"""Which requests may come in, and when steps have to stop.

Parts of the engine core, each a small state of its own. One asyncio loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass


@dataclass(slots=True)
class Admission:
    """Decides whether requests are accepted: once a group has been there, unless somebody has closed it."""

    has_opened: bool = False
    is_leaving: bool = False
    """Whether it is about to drain: it accepts requests of clients that have not heard so, and is not called ready."""
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


class StepHolds:
    """Callers that keep steps from going out: `num_inside` do, `num_waiting` wait for the steps that are out.

    The core's loop sets `settled` when no step is out. Steps also stay while the ranks rest; `roused` is set unless
    they do.
    """

    def __init__(self) -> None:
        self.num_waiting = 0
        self.num_inside = 0
        self.settled = asyncio.Event()
        self.roused = asyncio.Event()
        self.roused.set()

    @property
    def is_resting(self) -> bool:
        """Whether the ranks rest."""
        return not self.roused.is_set()

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
