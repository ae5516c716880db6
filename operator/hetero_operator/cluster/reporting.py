"""Writers of what the operator reports: the status of a resource, and Kubernetes Events about it.

A status is written if it differs, and not too often: a few at once, then one a second. The write is a merge patch of
the differences, bound to the version that was looked at: a resource that changed meanwhile is looked at again.
Conditions of unknown types, which others wrote, stay. Server-side apply does not work here: when the last field of an
object in a status is applied away, the API server of 1.20 makes the object null, and refuses that.

There is one Event for each thing reported, with a count of repetitions. Its name follows from its content, so a
repeated report, even by another leader, makes no second Event. Recording never delays or fails a reconcile: a task of
its own does it, and drops an Event after a few attempts. A resource that keeps reporting new things is cut off after
EVENT_STATUS_BURST of them.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from hetero_api.contract import FIELD_MANAGER
from hetero_operator.cluster.kinds import EVENT, RESOURCE
from hetero_operator.cluster.store import Key, ObjectStore
from hetero_operator.cluster.transport import Transport
from hetero_operator.errors import ApiError, Conflict, NotFound, NotLeading, Refused
from hetero_operator.reconcile.model import Object, Transition
from hetero_operator.timing import Backoff, unobserved

logger = logging.getLogger(__name__)

MIN_INTERVAL_S: Final = 1.0
STATUS_BURST: Final = 5
"""Writes at once: a state of less than a second, like a pod that failed, is reported as well, if that is seldom."""
MAX_PENDING: Final = 1000
ATTEMPTS: Final = 5
EVENT_BURST: Final = 25
REFILL_S: Final = 10.0
MAX_MESSAGE: Final = 1024
"""The API's own limit, in characters."""
KEPT: Final = 10_000

_Pending = tuple[Object, Transition, datetime]


class StatusWriter:
    """Writer of all resources' statuses, which updates the store with its writes."""

    def __init__(
        self,
        api: Transport,
        resources: ObjectStore,
        *,
        clock: Callable[[], float] = time.monotonic,
        count: Callable[[], None] = unobserved,
    ) -> None:
        """`count` is called for every write."""
        self._api = api
        self._resources = resources
        self._clock = clock
        self._count = count
        self._allowances: dict[Key, tuple[float, float]] = {}

    async def write(self, key: Key, resource: Object, status: Object) -> float:
        """Write a status if it differs. Return seconds to wait before trying again, 0 when it is written.

        Raises ApiError, NotLeading.
        """
        live = resource.get("status") or {}
        conditions = _with_others(live.get("conditions") or (), status.get("conditions") or ())
        changes = merge_patch(live, {**status, "conditions": conditions} if conditions else status)
        if not changes:
            return 0.0
        left = self._allowance(key)
        # The account of restarts cannot wait: a hold that the next look does not find there would not be one.
        if left < 1 and "restarts" not in changes:
            return (1 - left) * MIN_INTERVAL_S
        version = resource["metadata"]["resourceVersion"]
        body = {"metadata": {"resourceVersion": version}, "status": changes}
        answer = await self._api.merge(RESOURCE.path(*key, "status"), body)
        self._count()
        self._allowances[key] = (max(0.0, left - 1), self._clock())
        self._resources.put(answer)
        return 0.0

    def forget_resource(self, key: Key) -> None:
        """Drop everything about a resource that is gone."""
        self._allowances.pop(key, None)

    def _allowance(self, key: Key) -> float:
        """Return the number of writes that may be done now."""
        left, since = self._allowances.get(key, (float(STATUS_BURST), self._clock()))
        return min(float(STATUS_BURST), left + (self._clock() - since) / MIN_INTERVAL_S)


def merge_patch(live: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Return the merge patch (RFC 7386) from one to the other, {} when they are equal."""
    changes: dict[str, Any] = {name: None for name in live if name not in wanted}
    for name, value in wanted.items():
        known = live.get(name)
        if isinstance(value, Mapping) and isinstance(known, Mapping):
            inner = merge_patch(known, value)
            if inner:
                changes[name] = inner
        elif known != value:
            changes[name] = value
    return changes


def _with_others(live: Sequence[Object], ours: Sequence[Object]) -> list[Object]:
    """Return our conditions and those of others; as they are, if all of ours are among them."""
    types = {condition["type"] for condition in ours}
    if {one["type"]: one for one in live if one["type"] in types} == {one["type"]: one for one in ours}:
        return list(live)
    return [*ours, *(condition for condition in live if condition["type"] not in types)]


class EventRecorder:
    """Writer of Kubernetes Events: `record` queues one, `run` writes them."""

    def __init__(
        self,
        api: Transport,
        *,
        identity: str,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._api = api
        self._identity = identity
        self._clock = clock
        self._sleep = sleep
        self._pending: deque[_Pending] = deque(maxlen=MAX_PENDING)
        self._arrival = asyncio.Event()
        self._budgets: OrderedDict[str, tuple[float, float]] = OrderedDict()
        self._writing = False

    @property
    def pending(self) -> int:
        """Events that are not written yet."""
        return len(self._pending) + self._writing

    def record(self, resource: Object, transition: Transition, now: datetime) -> None:
        """Have it written soon."""
        if self._within_budget(resource["metadata"]["uid"]):
            self._pending.append((resource, transition, now))
            self._arrival.set()

    async def run(self) -> None:
        """Write until cancelled."""
        while True:
            while self._pending:
                self._writing = True
                await self._write(*self._pending.popleft())
                self._writing = False
            self._arrival.clear()
            await self._arrival.wait()

    async def _write(self, resource: Object, transition: Transition, now: datetime) -> None:
        backoff = Backoff(cap_s=5.0)
        for attempt in range(1, ATTEMPTS + 1):
            try:
                await self._say(resource, transition, now)
                return
            except NotLeading:
                return  # lost: the next leader finds the status written, and says nothing of what led to it
            except Refused as error:
                logger.debug("event refused: %s", error)
                if error.status == 403:
                    return  # the namespace is going, or the right is missing
            except ApiError as error:
                logger.debug("event not written: %s", error)
            await self._sleep(backoff.pause_s(attempt))
        logger.warning("dropped the event %s of %s", transition.reason, resource["metadata"]["name"])

    async def _say(self, resource: Object, transition: Transition, now: datetime) -> None:
        event = self._event(resource, transition, now)
        namespace, name = event["metadata"]["namespace"], event["metadata"]["name"]
        try:
            await self._api.create(EVENT.path(namespace), event)
        except Conflict:
            known = await self._api.get(EVENT.path(namespace, name))
            again = {"count": int(known.get("count") or 1) + 1, "lastTimestamp": event["lastTimestamp"]}
            # The version makes sure that two of these do not count as one.
            again["metadata"] = {"resourceVersion": known["metadata"]["resourceVersion"]}
            try:
                await self._api.merge(EVENT.path(namespace, name), again)
            except NotFound:
                await self._api.create(EVENT.path(namespace), event)

    def _event(self, resource: Object, transition: Transition, now: datetime) -> dict[str, Any]:
        metadata = resource["metadata"]
        namespace, name, moment = metadata["namespace"], metadata["name"], now.strftime("%Y-%m-%dT%H:%M:%SZ")
        return EVENT.manifest(
            namespace,
            event_name(resource, transition),
            involvedObject={
                "apiVersion": RESOURCE.api_version, "kind": RESOURCE.kind, "name": name, "namespace": namespace,
                "uid": metadata["uid"],
            },
            type=transition.type,
            reason=transition.reason,
            message=transition.message[:MAX_MESSAGE],
            source={"component": FIELD_MANAGER},
            reportingComponent=FIELD_MANAGER,
            reportingInstance=self._identity,
            firstTimestamp=moment,
            lastTimestamp=moment,
            count=1,
        )  # fmt: skip

    def _within_budget(self, uid: str) -> bool:
        """Return whether this resource may still report something: EVENT_BURST at once, one more every REFILL_S."""
        now = self._clock()
        left, since = self._budgets.get(uid, (float(EVENT_BURST), now))
        left = min(float(EVENT_BURST), left + (now - since) / REFILL_S)
        granted = left >= 1
        self._budgets[uid] = (left - 1 if granted else left, now)
        self._budgets.move_to_end(uid)
        while len(self._budgets) > KEPT:
            self._budgets.popitem(last=False)
        return granted


def event_name(resource: Object, transition: Transition) -> str:
    """Return the name of the Event for this transition of this resource."""
    said = "\0".join((resource["metadata"]["uid"], *transition))
    return f"{resource['metadata']['name']}.{hashlib.sha256(said.encode()).hexdigest()[:16]}"
