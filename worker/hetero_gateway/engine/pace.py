"""How many events readers take in one turn of the event loop.

A step of many streams has news for all of them at once. Handing an event on costs far more than making it, so without
a bound one turn of the loop would last as long as all those writes, and the next plan, the results of ranks and new
requests would wait for it. With the bound they come in between; what a step adds meanwhile to a reader who still waits
for its turn is handed to it in one piece, so the more there is to do the cheaper a token gets. Readers take turns in
the order in which they asked. One asyncio loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

EVENTS_A_TURN: Final = 16


class Pace:
    """Shared by all readers of one loop."""

    def __init__(self, *, events_a_turn: int = EVENTS_A_TURN) -> None:
        self._events_a_turn = events_a_turn
        self._left = events_a_turn
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_turning = False

    async def wait(self) -> None:
        """Until this turn of the loop, or a later one, has room for an event."""
        loop = asyncio.get_running_loop()
        if not self._is_turning:
            self._is_turning = True
            loop.call_soon(self._turn, loop)
        if self._left and not self._waiting:
            self._left -= 1
            return
        waiter: asyncio.Future[None] = loop.create_future()
        self._waiting.append(waiter)
        await waiter

    def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        self._left = self._events_a_turn
        while self._left and self._waiting:
            waiter = self._waiting.popleft()
            # One whose reader went away takes no turn.
            if not waiter.done():
                waiter.set_result(None)
                self._left -= 1
        self._is_turning = self._left < self._events_a_turn
        if self._is_turning:
            loop.call_soon(self._turn, loop)
