"""IdleSleeper: a group without requests gives its memory up, and wakes with the next request (spec.idle).

What always holds:

- Requests are accepted all the time. One that comes while ranks fall asleep, sleep or wake waits in the engine's queue,
  where steps stay: no step goes to a rank that sleeps. So readiness stays, too.
- A group that an administrator put to sleep is left alone, and one that an administrator woke goes on.
- A rank that is lost meanwhile ends the epoch. The next one is awake, and rests again after as long a time.
- A group that cannot fall asleep serves on. One that cannot wake begins another epoch, within the budget of restarts.

One asyncio loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import NoReturn

from hetero_gateway.engine.core import EngineCore
from hetero_gateway.engine.errors import GroupLost
from hetero_gateway.group.admin_rpcs import AdminRpcs
from hetero_gateway.group.errors import CommandFailed, WrongState

logger = logging.getLogger(__name__)


class IdleSleeper:
    """Puts a group to rest that was READY for `after_s` seconds without a request, and wakes it."""

    def __init__(self, rpcs: AdminRpcs, *, core: EngineCore, after_s: float, level: int) -> None:
        self._rpcs = rpcs
        self._core = core
        self._after_s = after_s
        self._level = level

    async def run(self) -> NoReturn:
        """Watch until cancelled."""
        while True:
            await self._core.wait_idle()
            if await self._stays_idle():
                await self._rest()

    async def _stays_idle(self) -> bool:
        """Wait for as long as it takes; return False at once when a request comes."""
        idle_since_s = time.monotonic()
        while (left_s := self._after_s - min(time.monotonic() - idle_since_s, self._rpcs.ready_for_s)) > 0:
            with contextlib.suppress(TimeoutError):  # the group may have become READY meanwhile
                async with asyncio.timeout(left_s):
                    await self._core.wait_busy()
                return False
        return True

    async def _rest(self) -> None:
        """Rest until a request comes, if the group can."""
        try:
            await self._rpcs.rest(self._level)
            await self._until_roused()
            await self._rpcs.rouse()
        except (CommandFailed, GroupLost) as error:
            logger.warning("the group does not rest: %s", error)
        except WrongState as error:
            logger.debug("the group does something else: %s", error)

    async def _until_roused(self) -> None:
        """Return once there is a request, or the group no longer rests."""
        waits = [asyncio.ensure_future(wait) for wait in (self._core.wait_busy(), self._core.wait_roused())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
