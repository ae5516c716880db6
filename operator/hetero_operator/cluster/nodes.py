"""Nodes of pods that are in trouble: asked for by name, believed for a few seconds, a few at a time."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final
from urllib.parse import quote

from hetero_operator.cluster.transport import Transport
from hetero_operator.errors import ApiError, NotFound

logger = logging.getLogger(__name__)

BELIEVED_S: Final = 10.0
CONCURRENCY: Final = 8
KEPT: Final = 1000

Object = dict[str, Any]


class NodeBook:
    """What is known of single nodes."""

    def __init__(self, api: Transport, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._api = api
        self._clock = clock
        self._known: OrderedDict[str, tuple[float, Object | None]] = OrderedDict()
        self._at_once = asyncio.Semaphore(CONCURRENCY)

    async def named(self, names: Iterable[str]) -> Mapping[str, Object | None]:
        """Nodes by name; None: does not exist. One that cannot be asked for, or may not be, is left out."""
        wanted = sorted(set(names))
        known = await asyncio.gather(*(self._is_known(name) for name in wanted))
        answered = (name for name, it_is in zip(wanted, known, strict=True) if it_is and name in self._known)
        return {name: self._known[name][1] for name in answered}

    async def _is_known(self, name: str) -> bool:
        async with self._at_once:
            known = self._known.get(name)
            if known is not None and self._clock() - known[0] < BELIEVED_S:
                return True
            try:
                node: Object | None = await self._api.get(f"/api/v1/nodes/{quote(name, safe='')}")
            except NotFound:
                node = None
            except ApiError as error:
                logger.debug("node %s: %s", name, error)
                self._known.pop(name, None)
                return False
            self._remember(name, node)
            return True

    def _remember(self, name: str, node: Object | None) -> None:
        self._known[name] = (self._clock(), node and _needed(node))
        self._known.move_to_end(name)
        while len(self._known) > KEPT:
            self._known.popitem(last=False)


def _needed(node: Object) -> Object:
    """Return the name and the conditions of a node."""
    conditions = (node.get("status") or {}).get("conditions") or []
    return {"metadata": {"name": node["metadata"]["name"]}, "status": {"conditions": conditions}}
