"""Objects that are read by name, or listed only while somebody waits: Nodes, Warnings and the groups' Secrets.

Nodes of pods in trouble are believed for a few seconds, and asked for a few at a time. Warnings about pods that wait
without saying why, of a volume that is not mounted or of a quota, are only in Events. They are listed, those of a
namespace at once, while something in it has waited for long; and only when there is news is the resource looked at
again. So a thousand resources that wait cost a call a namespace now and then, and nothing else. (A watch would bring
every Warning of the whole cluster, all the time, for the few that matter.)

Whoever may list Secrets may read all of them; the operator needs a few, whose names it knows. So nothing watches them:
an answer is believed for a while, and read again sooner when pods of the resource wait for something. Metadata are
kept, values are not; what the operator shows a gateway is kept apart: the admin's token and its certificate.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import quote

from hetero_api.contract import (
    LABEL_NAME,
    LABEL_REVISION,
    SECRET_ADMIN_TOKEN_KEY,
    SECRET_INSIDE_AUTHORITY,
    SECRET_OPERATOR_CERTIFICATE,
    SECRET_OPERATOR_KEY,
)
from hetero_operator.cluster.kinds import EVENT, SECRET
from hetero_operator.cluster.store import Key, ObjectStore
from hetero_operator.cluster.transport import Object, Transport
from hetero_operator.errors import ApiError, NotFound
from hetero_operator.reconcile.inventory import label_of, ordinal_of
from hetero_operator.reconcile.model import PodEvent
from hetero_operator.reconcile.names import Names

logger = logging.getLogger(__name__)
NODE_BELIEVED_S: Final = 10.0
SECRET_BELIEVED_S: Final = 300.0
SECRET_DOUBTED_S: Final = 20.0
CONCURRENCY: Final = 8
KEPT: Final = 1000
PATIENCE_S: Final = 20.0
"""Seconds that something waits before Warnings about it are asked for."""
PERIOD_S: Final = 15.0
MAX_LISTED: Final = 2000
"""Warnings of a namespace that are read at once, at most."""
MAX_TOLD: Final = 5
"""Warnings kept about one object, the newest."""
Told = Mapping[str, Sequence[PodEvent]]


class NodeBook:
    """Conditions of single nodes, read by name."""

    def __init__(self, api: Transport, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._api = api
        self._clock = clock
        self._known: OrderedDict[str, tuple[float, Object | None]] = OrderedDict()
        self._at_once = asyncio.Semaphore(CONCURRENCY)

    async def named(self, names: Iterable[str]) -> Mapping[str, Object | None]:
        """Return nodes by name, None for one that does not exist. One that cannot be read is left out."""
        wanted = sorted(set(names))
        known = await asyncio.gather(*(self._is_known(name) for name in wanted))
        answered = (name for name, it_is in zip(wanted, known, strict=True) if it_is and name in self._known)
        return {name: self._known[name][1] for name in answered}

    async def _is_known(self, name: str) -> bool:
        async with self._at_once:
            known = self._known.get(name)
            if known is not None and self._clock() - known[0] < NODE_BELIEVED_S:
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


@dataclass(frozen=True, slots=True)
class _Doubt:
    """Waiting objects of one resource: uids, and when each has waited for long, by the clock."""

    due: Mapping[str, float]
    events: dict[str, tuple[PodEvent, ...]] = field(default_factory=dict)


class WarningBook:
    """Warnings about objects that wait. `run` lists them; `about` returns those known."""

    def __init__(
        self, api: Transport, *, on_change: Callable[[Key], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._api = api
        self._on_change = on_change
        self._clock = clock
        self._doubts: dict[Key, _Doubt] = {}

    def about(self, owner: Key, ages_s: Mapping[str, float]) -> Told:
        """Return known Warnings about objects that wait now, newest first, given their ages by uid.

        `on_change` is called for a resource when there are new ones.
        """
        if not ages_s:
            self._doubts.pop(owner, None)
            return {}
        known = self._doubts.get(owner)
        events = known.events if known is not None else {}
        due = {uid: self._clock() + PATIENCE_S - age_s for uid, age_s in ages_s.items()}
        doubt = self._doubts[owner] = _Doubt(due, {uid: events[uid] for uid in due if uid in events})
        return dict(doubt.events)

    def forget_resource(self, owner: Key) -> None:
        """Drop everything about a resource that is gone."""
        self._doubts.pop(owner, None)

    def forget_all(self) -> None:
        """Drop everything: only who leads asks, and a new leader begins anew."""
        self._doubts.clear()

    async def run(self) -> None:
        """List Warnings again and again until cancelled."""
        while True:
            await self.ask()
            await asyncio.sleep(PERIOD_S)

    async def ask(self) -> None:
        """List the Warnings of every namespace in which something has waited for long, once."""
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
            if found != doubt.events:
                doubt.events.clear()
                doubt.events.update(found)
                self._on_change(owner)

    async def _warnings(self, namespace: str) -> Told:
        """Return Warnings by the uid of the object that they are about. Raises ApiError."""
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
    """Return when an event was last seen, as text that sorts."""
    series = event.get("series") or {}
    return str(
        event.get("lastTimestamp")
        or series.get("lastObservedTime")
        or event.get("eventTime")
        or event["metadata"].get("creationTimestamp")
        or ""
    )


class SecretBook:
    """Metadata of the groups' Secrets, and what the operator shows the gateway of each resource."""

    def __init__(self, api: Transport, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.store = ObjectStore(SECRET, secret_fields=("data", "stringData"))
        self.replaced: dict[Key, dict[str, Mapping[str, bytes]]] = {}
        """Data of Secrets that were deleted and whose successors are not there yet: their authorities go on."""
        self._api = api
        self._clock = clock
        self._asked: dict[Key, dict[str, float]] = {}
        self._values: dict[Key, dict[str, tuple[str, Mapping[str, bytes]]]] = {}

    async def secrets_of(self, owner: Key, objects: Iterable[Object], *, doubt: bool) -> list[Object]:
        """Return the Secrets of all revisions that the resource's objects and pods have. Raises ApiError."""
        names = {
            name
            for ordinal, revision in _revisions(objects)
            for own in [Names(owner.name, ordinal)]
            for name in (own.group_secret(revision), own.inside_secret(revision))
        }
        known = [item["metadata"]["name"] for item in self.store.owned_by(owner)]
        # What is kept and was never asked for is an answer to a write of ours.
        asked = dict.fromkeys(known, self._clock()) | self._asked.get(owner, {})
        names.update(known)
        for name in sorted(names):
            if self._clock() - asked.get(name, -math.inf) > (SECRET_DOUBTED_S if doubt else SECRET_BELIEVED_S):
                await self._refresh(Key(owner.namespace, name))
                asked[name] = self._clock()
        self._asked[owner] = {name: moment for name, moment in asked.items() if name in names}
        return self.store.owned_by(owner)

    async def admin_token(self, owner: Key, revision: str, *, ordinal: int = 0) -> str:
        """Return the token that a replica's gateway of that revision asks its administrator for, "" if there is none.

        Raises ApiError.
        """
        name = Names(owner.name, ordinal).group_secret(revision)
        values = await self._values_of(owner, name, [SECRET_ADMIN_TOKEN_KEY])
        return values[SECRET_ADMIN_TOKEN_KEY].decode() if values else ""

    async def operator_certificate(
        self, owner: Key, revision: str, *, ordinal: int = 0
    ) -> tuple[bytes, bytes, bytes] | None:
        """Return authority, certificate and key that a replica's gateway of that revision knows the operator by.

        All are in PEM; None: there are none. Raises ApiError.
        """
        keys = (SECRET_INSIDE_AUTHORITY, SECRET_OPERATOR_CERTIFICATE, SECRET_OPERATOR_KEY)
        values = await self._values_of(owner, Names(owner.name, ordinal).inside_secret(revision), keys)
        authority, certificate, key = (values.get(key, b"") for key in keys)
        return (authority, certificate, key) if authority and certificate and key else None

    async def _values_of(self, owner: Key, name: str, keys: Sequence[str]) -> Mapping[str, bytes]:
        """Return some values of a Secret as of its last known version, {} if there is none. Raises ApiError."""
        entry = self.store.entry(owner.namespace, name)
        known = self._values.setdefault(owner, {})
        if entry is not None and name in known and known[name][0] == entry.version:
            return known[name][1]
        try:
            found = await self._api.get(SECRET.path(owner.namespace, name))
        except NotFound:
            return {}
        data = found.get("data") or {}
        values = {key: base64.b64decode(data.get(key, "")) for key in keys}
        # Those of revisions that are gone are forgotten.
        kept = {each: known[each] for each in known if self.store.entry(owner.namespace, each) is not None}
        self._values[owner] = {**kept, name: (found["metadata"]["resourceVersion"], values)}
        return values

    def forget_resource(self, owner: Key) -> None:
        """Drop everything about a resource that is gone."""
        self._asked.pop(owner, None)
        self._values.pop(owner, None)
        self.replaced.pop(owner, None)
        for item in self.store.owned_by(owner):
            self.store.discard(owner.namespace, item["metadata"]["name"])

    async def _refresh(self, key: Key) -> None:
        try:
            found = await self._api.get(SECRET.path(*key))
        except NotFound:
            self.store.discard(*key)
            return
        if LABEL_NAME in (found["metadata"].get("labels") or {}):
            self.store.put(found)


def _revisions(objects: Iterable[Object]) -> set[tuple[int, str]]:
    """Return ordinals of replicas with their revisions."""
    labels = ((ordinal_of(item), label_of(item, LABEL_REVISION)) for item in objects)
    return {(ordinal, revision) for ordinal, revision in labels if revision}
