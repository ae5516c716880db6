"""One timer for the soonest of several times."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Alarm:
    """Rings once, at the soonest time that it was set to last. `clock` tells the time; of the running loop."""

    def __init__(self, ring: Callable[[], None], *, clock: Callable[[], float]) -> None:
        self._ring = ring
        self._clock = clock
        self._timer: asyncio.TimerHandle | None = None

    def set(self, *times: float | None) -> None:
        """To the soonest of these, in place of what it was set to; with none of them it does not ring."""
        self.stop()
        soonest = min((when for when in times if when is not None), default=None)
        if soonest is not None:
            delay_s = max(0.0, soonest - self._clock())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._on_timer)

    def stop(self) -> None:
        """It does not ring."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timer(self) -> None:
        self._timer = None
        self._ring()
