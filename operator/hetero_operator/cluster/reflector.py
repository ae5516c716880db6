"""Keeps a store equal to the server's objects of one kind: a list, then a watch from that list on, for ever.

A watch that ends goes on where it ended. When the server no longer knows that point (410, as an answer or within the
stream), everything is listed again, and objects that the list lacks leave the store: so missed deletions are found.
Only cancellation ends this; errors are tried again after growing pauses.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final

from hetero_api.contract import LABEL_NAME
from hetero_operator.cluster.kinds import ResourceKind
from hetero_operator.cluster.store import Key, ObjectStore, key_of
from hetero_operator.cluster.transport import PAGE_SIZE, Transport
from hetero_operator.errors import ApiError, Gone, NotFound, Refused
from hetero_operator.timing import Backoff, unobserved

logger = logging.getLogger(__name__)

STEADY_S: Final = 5.0
"""A watch that lasted so long, or brought news, was a good one: the next failure is a first one."""

Sleep = Callable[[float], Awaitable[None]]


class Reflector:
    """Keeps the store of a kind equal to the server's, in one namespace or (None) in all, while `run` runs."""

    def __init__(
        self,
        api: Transport,
        store: ObjectStore,
        *,
        namespace: str | None,
        on_change: Callable[[Key], None],
        on_restart: Callable[[str], None] = unobserved,
        backoff: Backoff | None = None,
        sleep: Sleep = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
        page_size: int = PAGE_SIZE,
    ) -> None:
        """`on_change` gets the owners of changed objects, `on_restart` the reason for which a list or watch starts
        again."""
        self.store = store
        self.synced = asyncio.Event()
        """Set once the store was filled for the first time."""
        self.answered = asyncio.Event()
        """Set once it was filled, or its namespace refused to list, as one that is gone does."""
        self.problem = ""
        """The present problem, for a person; "" while listing and watching work."""
        self._api = api
        self._path = store.kind.path(namespace)
        self.namespace = namespace
        self._on_change = on_change
        self._on_restart = on_restart
        self._backoff = backoff or Backoff()
        self._sleep = sleep
        self._page_size = page_size
        self._clock = clock
        self._selector = LABEL_NAME
        self._version: str | None = None
        self._failures = 0

    @property
    def kind(self) -> ResourceKind:
        """The kind that is watched."""
        return self.store.kind

    async def run(self) -> None:
        """List and watch until cancelled."""
        while True:
            try:
                if self._version is None:
                    self._version = await self._list()
                await self._watch(self._version)
            except Gone:
                self._version = None
                await self._pause("gone")
            except ApiError as error:
                if not _may_go_on(error):
                    self._version = None
                await self._failed(error)

    async def _list(self) -> str:
        """Fill the store. Return the list's version."""
        version, _ = await fill_store(
            self.store,
            self._api,
            namespace=self.namespace,
            on_change=self._on_change,
            size=self._page_size,
            labelSelector=self._selector,
        )
        self.synced.set()
        self.answered.set()
        self.problem = ""
        return version

    async def _watch(self, version: str) -> None:
        """Follow changes until the server ends the stream."""
        begin, news = self._clock(), False
        try:
            async for event in self._api.watch(self._path, labelSelector=self._selector, resourceVersion=version):
                news = True
                self.problem = ""
                self._take(event["type"], event["object"])
                self._version = event["object"]["metadata"]["resourceVersion"]
        finally:
            if news or self._clock() - begin > STEADY_S:
                self._failures = 0
        if not news and self._clock() - begin < STEADY_S:
            await self._pause("ended")

    async def _failed(self, error: ApiError) -> None:
        problem = f"{self.kind.kind}: {error}"
        if problem != self.problem:
            logger.warning("cannot list or watch %s", problem)
        self.problem = problem
        if isinstance(error, Refused) and self.namespace is not None:
            self.answered.set()
        if isinstance(error, NotFound):
            # The kind itself is gone, and its objects with it.
            _tell(self._on_change, self.store.clear(namespace=self.namespace))
        await self._pause("error", error.retry_after_s)

    async def _pause(self, reason: str, at_least_s: float = 0.0) -> None:
        self._on_restart(reason)
        self._failures += 1
        await self._sleep(max(at_least_s, self._backoff.pause_s(self._failures)))

    def _take(self, change: str, item: dict[str, Any]) -> None:
        if change == "BOOKMARK":
            return
        owner = self.store.drop(item) if change == "DELETED" else self.store.put(item)
        if owner is not None:
            self._on_change(owner)


async def fill_store(
    store: ObjectStore, api: Transport, *, namespace: str | None, on_change: Callable[[Key], None], **options: Any
) -> tuple[str, set[Key]]:
    """Make a store equal to a list of its kind, page by page. Return the list's version and the objects in it.

    `on_change` gets the owners of objects that changed or are gone, `options` are those of Transport.pages. Raises
    ApiError.
    """
    listed, version = set[Key](), ""
    async for page in api.pages(store.kind.path(namespace), **options):
        items = page.get("items") or ()
        listed.update(map(key_of, items))
        _tell(on_change, {owner for item in items if (owner := store.put(item)) is not None})
        version = page["metadata"]["resourceVersion"]
    _tell(on_change, store.retain(listed, version, namespace=namespace))
    return version, listed


def _tell(on_change: Callable[[Key], None], owners: Iterable[Key]) -> None:
    for owner in sorted(owners):
        on_change(owner)


def _may_go_on(error: ApiError) -> bool:
    """Return whether the watch can go on from where it was: the server was away, or had too much to do."""
    return error.status == 0 or error.status >= 500 or error.status == 429
