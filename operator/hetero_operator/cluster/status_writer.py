"""Writes the status of a resource if it differs, and not too often: a few at once, then one a second.

The write is a merge patch of the differences, bound to the version that was looked at: a resource that changed
meanwhile is looked at again. Conditions of unknown types, which others wrote, stay. Server-side apply does not work
here: when the last field of an object in a status is applied away, the API server of 1.20 makes the object null, and
refuses that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from hetero_operator.cluster.kinds import RESOURCE
from hetero_operator.cluster.store import Key, ObjectStore
from hetero_operator.cluster.transport import Transport
from hetero_operator.reconcile.model import Object
from hetero_operator.timing import unobserved

MIN_INTERVAL_S: Final = 1.0
BURST: Final = 5
"""Writes at once: a state of less than a second, like a pod that failed, is reported as well, if that is seldom."""


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
        left, since = self._allowances.get(key, (float(BURST), self._clock()))
        return min(float(BURST), left + (self._clock() - since) / MIN_INTERVAL_S)


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
