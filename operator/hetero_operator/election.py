"""Election of the operator that writes: the one that holds a Lease of coordination.k8s.io.

kubernetes.aio.leaderelection does not serve: its renewals have no time limit of their own (a call that hangs for five
minutes keeps the leader from noticing that it no longer leads), connection errors end it silently, it writes local time
as UTC, and it does not give the Lease back.

Two writers are excluded as follows. A candidate takes the Lease only when it has *watched* it unchanged for
`duration_s` of its own clock, so the clocks of two machines are never compared. The leader counts from before it *sent*
its last successful renewal: writes end `renew_s` after it, and each has until `duration_s` to be answered (fence.py).
Every change of the Lease carries the version that was read, so of two candidates that take it one fails.

A leader that cannot renew, because the API server is away, stops writing, but lives on and tries to take the Lease
again: an outage needs no restart of the operator.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable

from hetero_operator.cluster.fence import Fence
from hetero_operator.cluster.kinds import LEASE
from hetero_operator.cluster.transport import Object, Transport
from hetero_operator.config import LeaseConfig
from hetero_operator.errors import ApiError, NotFound
from hetero_operator.timing import now_utc

logger = logging.getLogger(__name__)


class Election:
    """One candidate. `run` keeps trying to lead; `changed` is set whenever `leading` changes."""

    def __init__(
        self, api: Transport, config: LeaseConfig, fence: Fence, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.leading = False
        self.changed = asyncio.Event()
        self.last_attempt = clock()
        """When it last tried, by the clock: a sign of life."""
        self._api = api
        self._config = config
        self._fence = fence
        self._clock = clock
        self._path = LEASE.path(config.namespace, config.name)
        self._seen: tuple[str, float] | None = None
        self._free_at: float | None = None
        self._problem = ""

    async def run(self) -> None:
        """Try to lead, and to go on leading, until cancelled."""
        while True:
            await self.attempt()
            await asyncio.sleep(self._pause_s())

    async def attempt(self) -> None:
        """Renew or take the Lease once, or see that it cannot be taken."""
        self.last_attempt = begin = self._clock()
        try:
            # A call that hangs must end before the fence closes, so that the next one may still save the Lease.
            async with asyncio.timeout(self._config.renew_s / 2):
                held = await self._claim()
            self._problem = ""
        except (ApiError, TimeoutError) as error:
            held = None
            self._complain(str(error) or "no answer in time")
        if held:
            self._hold(begin)
        elif held is False or not self._fence.is_open:
            self._lose()

    async def release(self) -> None:
        """Give the Lease back, so that another need not wait. No write of ours may be under way."""
        was_leading = self.leading
        self._lose()
        if not was_leading:
            return
        try:
            lease = await self._api.get(self._path, timeout_s=self._config.retry_s)
            if _holder(lease) == self._config.identity:
                lease["spec"].update(holderIdentity="", leaseDurationSeconds=1, renewTime=_time())
                await self._api.claim("PUT", self._path, lease, timeout_s=self._config.retry_s)
                logger.info("gave the lease back")
        except ApiError as error:
            logger.warning("the lease was not given back: %s", error)

    def _pause_s(self) -> float:
        """Return seconds until the next attempt: not later than another's Lease may be taken."""
        if self.leading or self._free_at is None:
            return self._config.retry_s
        return min(self._config.retry_s, max(0.05, self._free_at - self._clock()))

    async def _claim(self) -> bool:
        """Return whether the Lease is ours now. Raises ApiError when that is not known."""
        try:
            lease = await self._api.get(self._path, timeout_s=self._config.renew_s / 2)
        except NotFound:
            await self._write("POST", LEASE.path(self._config.namespace), self._new_lease())
            return True
        if not self._may_take(lease):
            return False
        await self._write("PUT", self._path, self._ours(lease))
        return True

    async def _write(self, method: str, path: str, lease: Object) -> None:
        written = await self._api.claim(method, path, lease, timeout_s=self._config.renew_s / 2)
        self._seen = (written["metadata"]["resourceVersion"], self._clock())

    def _may_take(self, lease: Object) -> bool:
        """Return whether it is ours, nobody's, or its holder let it lapse while we watched."""
        holder = _holder(lease)
        version = lease["metadata"]["resourceVersion"]
        if self._seen is None or self._seen[0] != version:
            self._seen = (version, self._clock())
        if holder in ("", self._config.identity):
            self._free_at = None
            return True
        duration_s = float((lease.get("spec") or {}).get("leaseDurationSeconds") or self._config.duration_s)
        self._free_at = self._seen[1] + duration_s
        return self._clock() >= self._free_at

    def _ours(self, lease: Object) -> Object:
        spec = dict(lease.get("spec") or {})
        if _holder(lease) != self._config.identity:
            spec["leaseTransitions"] = int(spec.get("leaseTransitions") or 0) + 1
            spec["acquireTime"] = _time()
        spec.update(
            holderIdentity=self._config.identity,
            leaseDurationSeconds=math.ceil(self._config.duration_s),
            renewTime=_time(),
        )
        return {**lease, "spec": spec}

    def _new_lease(self) -> Object:
        return self._ours(LEASE.manifest(self._config.namespace, self._config.name))

    def _hold(self, begin: float) -> None:
        self._fence.open(writes_until=begin + self._config.renew_s, lease_until=begin + self._config.duration_s)
        if not self.leading:
            logger.info("leading identity=%s", self._config.identity)
            self._set(True)

    def _lose(self) -> None:
        self._fence.close()
        if self.leading:
            logger.warning("leading no more identity=%s", self._config.identity)
            self._set(False)

    def _set(self, leading: bool) -> None:
        self.leading = leading
        self.changed.set()

    def _complain(self, problem: str) -> None:
        if problem != self._problem:
            logger.warning("the lease cannot be had or renewed: %s", problem)
        self._problem = problem


def _time() -> str:
    return now_utc().strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _holder(lease: Object) -> str:
    return (lease.get("spec") or {}).get("holderIdentity") or ""
