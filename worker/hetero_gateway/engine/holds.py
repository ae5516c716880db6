"""Who keeps steps from going out, or waits for those that are out to land."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Holds:
    """`num_inside` hold, `num_waiting` are about to. The engine's loop sets `settled` when no step is out."""

    def __init__(self) -> None:
        self.num_waiting = 0
        self.num_inside = 0
        self.settled = asyncio.Event()

    @asynccontextmanager
    async def waiting(self) -> AsyncIterator[None]:
        """Around the wait for `settled`, which counts from here on."""
        self.num_waiting += 1
        self.settled.clear()
        try:
            yield
        finally:
            self.num_waiting -= 1
