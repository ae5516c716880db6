"""How a gateway stops: drained by the first signal, at once by the second.

Draining refuses new requests and lets those in flight finish, their last message written, for as long as the drain
timeout says; what is left then ends with UNAVAILABLE. A supervisor that wants it quick gives a timeout of 0, or sends
a second signal.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Awaitable
from typing import Any, Final

from hetero_api.contract import EXIT_FAILURE, EXIT_OK
from hetero_gateway.server.gateway import Gateway

logger = logging.getLogger(__name__)

SHUTTING_DOWN: Final = "the gateway is shutting down"


class StopSignals:
    """`asked` is set by the first signal, `urged` by the second."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.asked = asyncio.Event()
        self.urged = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        (self.urged if self.asked.is_set() else self.asked).set()


async def serve_until(stop: StopSignals, gateway: Gateway, *, drain_timeout_s: float) -> int:
    """Serve until asked to stop, then drain; the process's exit status. The gateway is to be closed after it."""
    serving = asyncio.create_task(gateway.serve())
    await _first_of(serving, stop.asked.wait())
    if not serving.done():
        gateway.drain()
        logger.info("asked to stop; requests in flight have %g s", drain_timeout_s)
        await _first_of(serving, stop.urged.wait(), gateway.wait_idle(), timeout_s=drain_timeout_s)
    if serving.done():
        logger.critical("the gateway broke", exc_info=serving.exception())
        return EXIT_FAILURE
    # Before the loops end: so that the engine's readers are told this reason.
    gateway.core.fail(SHUTTING_DOWN)
    serving.cancel()
    await asyncio.wait((serving,))
    return EXIT_OK


async def _first_of(serving: asyncio.Task[None], *events: Awaitable[Any], timeout_s: float | None = None) -> None:
    """Return when serving has ended, one of the events came, or the time is over."""
    waiting = [asyncio.ensure_future(event) for event in events]
    await asyncio.wait((serving, *waiting), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    for task in waiting:
        task.cancel()
