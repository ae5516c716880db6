"""HeartbeatWatch: which ranks of an epoch have fallen silent.

A rank beats from a thread of its own, whatever it computes, so a rank that has not been heard for some time is frozen,
or its machine is. Anything that a rank says counts as a beat.

What the watch measures is this process's patience, so the time in which its own loop did not turn does not count: a
gateway that was stopped or starved accuses nobody for what it could not hear. One asyncio loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from typing import Final

logger = logging.getLogger(__name__)

HEARTBEAT_INTERVAL_S: Final = 0.5
"""What ranks are told (FormGroup.heartbeat_interval_s)."""
SERVING_SILENCE_S: Final = 2.0
"""Longest silence of a rank that serves."""
FORMING_SILENCE_S: Final = 5.0
"""Of a rank that meets the others."""
BUSY_SILENCE_S: Final = 20.0
"""Of one that loads, warms up or does a command: it may hold Python's lock for long."""
CHECK_S: Final = 0.25
"""Between two looks."""
STALL_S: Final = 1.0
"""A look that comes so late shows that the loop was stopped ..."""
HEARING_S: Final = 0.5
"""... after which there is at least so much time to hear what was said meanwhile."""


class HeartbeatWatch:
    """Begins with everybody heard. `on_silent` is called once for each rank that falls silent, with the reason."""

    def __init__(
        self,
        ranks: Iterable[int],
        *,
        on_silent: Callable[[int, str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.silence_s = FORMING_SILENCE_S
        """Longest silence that is borne now."""
        self._on_silent = on_silent
        self._clock = clock
        self._looked_s = clock()
        self._heard_s = dict.fromkeys(ranks, self._looked_s)

    def hear(self, rank: int) -> None:
        """It said something."""
        if rank in self._heard_s:
            self._heard_s[rank] = self._clock()

    def bear(self, silence_s: float) -> None:
        """From now on this long a silence is borne; the time before does not count."""
        self.silence_s = silence_s
        self._heard_s = dict.fromkeys(self._heard_s, self._clock())

    async def run(self) -> None:
        """Look until cancelled."""
        self._looked_s = self._clock()
        while True:
            await asyncio.sleep(CHECK_S)
            self.look()

    def look(self) -> None:
        """Tell of ranks that are silent. To be called every CHECK_S."""
        now = self._clock()
        late_s = max(0.0, now - self._looked_s - CHECK_S)
        self._looked_s = now
        self._heard_s = {rank: min(now, heard_s + late_s) for rank, heard_s in self._heard_s.items()}
        if late_s > STALL_S:
            logger.warning("the event loop did not turn for %.1f s; no rank is accused for it", late_s)
            latest_s = now - self.silence_s + HEARING_S
            self._heard_s = {rank: max(heard_s, latest_s) for rank, heard_s in self._heard_s.items()}
        for rank, heard_s in list(self._heard_s.items()):
            if now - heard_s > self.silence_s:
                del self._heard_s[rank]
                self._on_silent(
                    rank,
                    f"said nothing for {now - heard_s:.1f} s, not even a heartbeat (one is due every "
                    f"{HEARTBEAT_INTERVAL_S:g} s): it is frozen, or its machine is",
                )
