"""The HeteroInference resources: events from kopf's watch, checked against a list now and then.

kopf does not report deletions while its watch was broken. So everything is listed again every `resync_s`, which costs
little. And a resource without recent news is read by name before anything is written for it: an object for a resource
that is gone would be collected, and created again, for ever.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from hetero_operator.cluster.kinds import RESOURCE
from hetero_operator.cluster.reflector import fill_store
from hetero_operator.cluster.store import Key, ObjectStore, key_of
from hetero_operator.cluster.transport import Transport
from hetero_operator.errors import ApiError, NotFound, Refused
from hetero_operator.reconcile.model import Object
from hetero_operator.timing import Backoff

logger = logging.getLogger(__name__)

FRESH_S: Final = 3.0
"""A resource that was heard of within so long is there."""


class Resources:
    """Store of all resources. `run` lists now and then; `hear` takes in the events in between."""

    def __init__(
        self,
        api: Transport,
        *,
        namespaces: Sequence[str],
        resync_s: float,
        on_change: Callable[[Key], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.store = ObjectStore(RESOURCE, owner_label=None)
        self.listed = asyncio.Event()
        """Set once all resources were listed."""
        self.problem = ""
        """Why they cannot be listed now, for a person."""
        self._api = api
        self._namespaces: Sequence[str | None] = tuple(namespaces) or (None,)
        self._resync_s = resync_s
        self._on_change = on_change
        self._clock = clock
        self._heard: dict[Key, float] = {}
        self._wanted = asyncio.Event()

    def get(self, key: Key) -> Object | None:
        """Return a resource, None if it is not known."""
        return self.store.get(*key)

    def hear(self, change: str | None, item: Mapping[str, Any]) -> None:
        """Take in an event of a watch; its type is None for one from a list."""
        key = self.store.drop(item) if change == "DELETED" else self.store.put(item)
        if change == "DELETED":
            self._heard.pop(key_of(item), None)
        else:
            self._heard[key_of(item)] = self._clock()
        if key is not None:
            self._on_change(key)

    def list_soon(self) -> None:
        """List without waiting for the next time."""
        self._wanted.set()

    async def run(self) -> None:
        """List every `resync_s` until cancelled, sooner when asked to or when it failed."""
        backoff, failures = Backoff(), 0
        while True:
            self._wanted.clear()
            try:
                await self._list()
                failures = 0
            except ApiError as error:
                failures += 1
                self._complain(error)
            pause_s = backoff.pause_s(failures) if failures else self._resync_s * random.uniform(0.9, 1.0)
            await self._pause(min(pause_s, self._resync_s))

    async def confirm(self, key: Key) -> Object | None:
        """Return the resource as it was a moment ago, None if it is gone. Raises ApiError."""
        if self._clock() - self._heard.get(key, -FRESH_S) < FRESH_S:
            return self.get(key)
        return await self.refresh(key)

    async def refresh(self, key: Key) -> Object | None:
        """Read the resource. Return it, None if it is gone. Raises ApiError."""
        try:
            self.hear(None, await self._api.get(RESOURCE.path(*key)))
        except NotFound:
            self.store.discard(*key)
        return self.get(key)

    def forget_resource(self, key: Key) -> None:
        """Drop everything about a resource that is gone."""
        self._heard.pop(key, None)

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._wanted.wait()
        except TimeoutError:
            return

    async def _list(self) -> None:
        """List in all namespaces; one of several that refuses, as one that is gone does, has no resources meanwhile."""
        refusals: list[ApiError] = []
        for namespace in self._namespaces:
            begin = self._clock()
            try:
                _, listed = await fill_store(self.store, self._api, namespace=namespace, on_change=self._on_change)
            except Refused as error:
                refusals.append(error)
                if len(refusals) == len(self._namespaces):
                    raise
                self._clear(namespace)
            else:
                self._heard.update((key, begin) for key in listed)
        self.listed.set()
        if refusals:
            self._complain(refusals[0])
        else:
            self.problem = ""

    def _clear(self, namespace: str | None = None) -> None:
        for key in sorted(self.store.clear(namespace=namespace)):
            self._on_change(key)

    def _complain(self, error: ApiError) -> None:
        problem = f"{RESOURCE.kind} cannot be listed: {error}"
        if problem != self.problem:
            logger.warning(problem)
        self.problem = problem
        if isinstance(error, NotFound):
            # The definition is gone, and with it every resource.
            self._clear()
