"""What the cluster says about pods that wait without saying why themselves: a volume that is not mounted, a quota.

Such words are only in Events. They are listed, the Warnings of a namespace at once, while something in it has waited
for long; and only when there is something new to say of it is its resource looked at again. So a thousand resources
that wait for something cost a call a namespace now and then, and nothing else. (A watch would bring every Warning of
the whole cluster, all the time, for the few that matter.)
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from hetero_operator.cluster.kinds import EVENT
from hetero_operator.cluster.store import Key
from hetero_operator.cluster.transport import Transport
from hetero_operator.errors import ApiError
from hetero_operator.reconcile.model import PodEvent

logger = logging.getLogger(__name__)

PATIENCE_S: Final = 20.0
"""What waits for so long is asked about."""
PERIOD_S: Final = 15.0
MAX_LISTED: Final = 2000
"""Warnings of a namespace that are read at once, at most."""
MAX_TOLD: Final = 5
"""Warnings kept about one object, the newest."""

Object = dict[str, Any]
Told = Mapping[str, Sequence[PodEvent]]


@dataclass(frozen=True, slots=True)
class _Doubt:
    """What of one resource waits: uids, and when each has waited for long, by the clock."""

    due: Mapping[str, float]
    told: dict[str, tuple[PodEvent, ...]] = field(default_factory=dict)


class WarningBook:
    """`run` lists; `about` says what is known."""

    def __init__(
        self, api: Transport, *, on_change: Callable[[Key], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._api = api
        self._on_change = on_change
        self._clock = clock
        self._doubts: dict[Key, _Doubt] = {}

    def about(self, owner: Key, ages_s: Mapping[str, float]) -> Told:
        """Warnings about what waits now, given its age by uid: newest first. What is new is told by `on_change`."""
        if not ages_s:
            self._doubts.pop(owner, None)
            return {}
        known = self._doubts.get(owner)
        told = known.told if known is not None else {}
        due = {uid: self._clock() + PATIENCE_S - age_s for uid, age_s in ages_s.items()}
        doubt = self._doubts[owner] = _Doubt(due, {uid: told[uid] for uid in due if uid in told})
        return dict(doubt.told)

    def forget(self, owner: Key) -> None:
        """The resource is no more."""
        self._doubts.pop(owner, None)

    async def run(self) -> None:
        """Ask about what waits, until cancelled."""
        while True:
            await self.ask()
            await asyncio.sleep(PERIOD_S)

    async def ask(self) -> None:
        """Once: list the Warnings of every namespace in which something has waited for long."""
        now = self._clock()
        overdue = {key.namespace for key, doubt in self._doubts.items() if min(doubt.due.values()) <= now}
        for namespace in sorted(overdue):
            try:
                warnings = await self._warnings(namespace)
            except ApiError as error:
                logger.debug("events of %s: %s", namespace, error)
                continue
            self._take(namespace, warnings)

    def _take(self, namespace: str, warnings: Told) -> None:
        for owner, doubt in list(self._doubts.items()):
            if owner.namespace != namespace:
                continue
            found = {uid: tuple(warnings[uid]) for uid in doubt.due if uid in warnings}
            if found != doubt.told:
                doubt.told.clear()
                doubt.told.update(found)
                self._on_change(owner)

    async def _warnings(self, namespace: str) -> Told:
        """By uid of what they are about. Raises ApiError."""
        waiting = {uid for owner, doubt in self._doubts.items() if owner.namespace == namespace for uid in doubt.due}
        found: dict[str, list[tuple[str, PodEvent]]] = {}
        async for page in self._api.pages(EVENT.path(namespace), at_most=MAX_LISTED, fieldSelector="type=Warning"):
            for event in page.get("items") or ():
                uid = (event.get("involvedObject") or {}).get("uid")
                if uid in waiting:
                    said = PodEvent(event.get("reason") or "", event.get("message") or "")
                    found.setdefault(uid, []).append((_moment(event), said))
        return {uid: _newest(events) for uid, events in found.items()}


def _newest(events: Sequence[tuple[str, PodEvent]]) -> list[PodEvent]:
    """Return the newest MAX_TOLD of them, the newest first; of equal moments the one that was listed first."""
    return [said for _, said in sorted(events, key=lambda event: event[0], reverse=True)[:MAX_TOLD]]


def _moment(event: Object) -> str:
    """When an event was last seen, as text that sorts."""
    series = event.get("series") or {}
    return str(
        event.get("lastTimestamp")
        or series.get("lastObservedTime")
        or event.get("eventTime")
        or event["metadata"].get("creationTimestamp")
        or ""
    )
