"""Reads what belongs to the event loop, from another thread. That the loop answers shows that it turns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class LoopReader:
    """`loop` is the one that the readings run on."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def read(self, function: Callable[[], T], *, timeout_s: float) -> T:
        """Call `function` on the loop; what it returns or raises. Raises TimeoutError when the loop is too busy."""

        async def call() -> T:
            return function()

        return asyncio.run_coroutine_threadsafe(call(), self._loop).result(timeout_s)
