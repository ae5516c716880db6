"""How many calls are in flight, for whoever waits until there is none."""

from __future__ import annotations

import asyncio


class InFlight:
    """One loop's."""

    def __init__(self) -> None:
        self._count = 0
        self._none = asyncio.Event()
        self._none.set()

    def enter(self) -> None:
        """A call began."""
        self._count += 1
        self._none.clear()

    def leave(self) -> None:
        """A call that began is over."""
        self._count -= 1
        if not self._count:
            self._none.set()

    async def wait_idle(self) -> None:
        """Return once there is none."""
        await self._none.wait()
