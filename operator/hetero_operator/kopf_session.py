"""kopf in a thread and an event loop of its own, supervised.

Of its own, because when kopf ends it cancels every task of its loop that it did not find there at its beginning, and
because it takes over the signals of a main thread. kopf knows a kind only if it is there when it starts, and ends when
the kind goes. So it is started once HeteroInference is served, and again when the definition was deleted and made anew.
Any other end means that a watch has died, which kopf never mends: the process ends then, and is restarted.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Any, Final

import kopf
from kubernetes.aio.client import Configuration

from hetero_operator.backoff import Backoff
from hetero_operator.cluster.discovery import resource_served
from hetero_operator.cluster.transport import Transport
from hetero_operator.errors import ApiError, KopfStopped
from hetero_operator.handlers import Deliver, registry_of, settings_of
from hetero_operator.observers import unobserved

logger = logging.getLogger(__name__)

PROBE_S: Final = 3.0
STOP_S: Final = 5.0
IDENTITY: Final = "heteroinference-operator"
"""For peering, which is off. kopf would make one up of the user's name, and a container's user mostly has none."""


class KopfSession:
    """One run of kopf. `deliver` is called in the loop that called `start`."""

    def __init__(self, configuration: Configuration, *, namespaces: Sequence[str], deliver: Deliver) -> None:
        self._configuration = configuration
        self._namespaces = namespaces
        self._deliver = deliver
        self._inner: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None

    async def run(self) -> BaseException | None:
        """Until kopf ends: why it did. Cancelled, it stops kopf."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[BaseException | None] = loop.create_future()

        def deliver(change: str | None, item: dict[str, Any]) -> None:
            loop.call_soon_threadsafe(self._deliver, change, item)

        def end(error: BaseException | None) -> None:
            if not ended.done():
                ended.set_result(error)

        def main() -> None:
            error = self._live(deliver)
            if not loop.is_closed():
                loop.call_soon_threadsafe(end, error)

        thread = threading.Thread(target=main, name="kopf", daemon=True)
        thread.start()
        try:
            return await asyncio.shield(ended)
        finally:
            self._ask_to_stop()
            await asyncio.wait([ended], timeout=STOP_S)

    def _live(self, deliver: Deliver) -> BaseException | None:
        try:
            asyncio.run(self._operate(deliver))
        except BaseException as error:  # noqa: BLE001 the top of a thread
            return error
        return None

    async def _operate(self, deliver: Deliver) -> None:
        self._stop = asyncio.Event()
        self._inner = asyncio.get_running_loop()
        await kopf.operator(
            registry=registry_of(deliver, self._configuration),
            settings=settings_of(),
            clusterwide=not self._namespaces,
            namespaces=list(self._namespaces),
            standalone=True,
            identity=IDENTITY,  # type: ignore[arg-type]  # a str of a name that kopf keeps to itself
            stop_flag=self._stop,
        )

    def _ask_to_stop(self) -> None:
        if self._inner is not None and self._stop is not None and not self._inner.is_closed():
            self._inner.call_soon_threadsafe(self._stop.set)


class KopfSupervisor:
    """`run` keeps kopf running whenever HeteroInference is served."""

    def __init__(
        self,
        api: Transport,
        *,
        namespaces: Sequence[str],
        deliver: Deliver,
        on_start: Callable[[], None] = unobserved,
    ) -> None:
        """`on_start` is called when kopf begins anew, so what it does not tell must be looked up."""
        self.watching = False
        self._api = api
        self._namespaces = namespaces
        self._deliver = deliver
        self._on_start = on_start

    async def run(self) -> None:
        """Until cancelled. Raises KopfStopped when kopf ends for any reason but that the kind, or the point that it
        watched from, is gone: it knows the latter only as an event within the stream, not as an answer."""
        while True:
            await self._until_served()
            self.watching = True
            self._on_start()
            session = KopfSession(self._api.configuration, namespaces=self._namespaces, deliver=self._deliver)
            error = await session.run()
            self.watching = False
            self._on_start()
            if getattr(error, "status", None) not in (HTTPStatus.NOT_FOUND, HTTPStatus.GONE):
                raise KopfStopped(f"kopf has ended: {error!r}") from error
            logger.warning("kopf begins anew, once HeteroInference is served: %s", error)

    async def _until_served(self) -> None:
        backoff, failures = Backoff(), 0
        while True:
            try:
                if await resource_served(self._api, next(iter(self._namespaces), None)):
                    return
                failures = 0
            except ApiError as error:
                failures += 1
                logger.debug("not known whether HeteroInference is served: %s", error)
            await asyncio.sleep(backoff.pause_s(failures) if failures else PROBE_S)
