"""Workers take keys from the queue, reconcile them, and decide when each is looked at again.

A key is at most once in the queue, and with at most one worker at a time. A key that is added while a worker has it is
looked at again afterwards. So nothing is missed, and any number of changes costs one look. The order is first come,
first served. A key that comes again goes to the end, so a key that never rests cannot keep others waiting. A key that
failed comes back after a growing pause. Changes meanwhile bring it forward, but not at once: a resource whose pods
change all the time and whose writes all fail must not make a hot loop.

Workers run only while this process leads. A look has a time limit. One that fails is logged, counted and tried again
after a growing pause, also for errors that nobody thought of.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable, Hashable
from typing import Final, Generic, TypeVar

from opentelemetry import trace

from hetero_operator.cluster.store import Key
from hetero_operator.errors import ApiError, NotLeading, OverBudget
from hetero_operator.monitoring import OperatorMetrics
from hetero_operator.reconcile.model import WriteFailure
from hetero_operator.reconciler import Verdict
from hetero_operator.timing import Backoff, unobserved

logger = logging.getLogger(__name__)

LOOK_TIMEOUT_S: Final = 180.0
FULL_LOOK_S: Final = 1800.0
"""Everything is looked at this often, though nothing was heard of it."""
TRANSIENT: Final = Backoff(first_s=0.2)
LASTING: Final = Backoff(first_s=1.0, cap_s=300.0)
"""After what trying again will hardly cure: an invalid object, a missing right, a stranger's object."""
K = TypeVar("K", bound=Hashable)
HURRIED_PAUSE_S: Final = 1.0
"""Least pause between two looks at a key that fails, however much changes."""


_TRACER: Final = trace.get_tracer("hetero_operator")
"""Makes no spans until `main` sets a provider."""


def _attributes(key: Key) -> dict[str, str]:
    namespace, name = key
    return {"k8s.namespace.name": namespace, "heteroinference.name": name}


class Workers:
    """Tasks that take keys from the queue. `run` runs `count` of them until cancelled."""

    def __init__(
        self,
        queue: WorkQueue[Key],
        reconcile: Callable[[Key], Awaitable[Verdict]],
        metrics: OperatorMetrics,
        *,
        count: int,
    ) -> None:
        self.reconciled: set[Key] = set()
        """Existing resources that were looked at since the process began."""
        self.last_done = time.monotonic()
        """When a look last ended, by the monotonic clock: a sign of life."""
        self._queue = queue
        self._reconcile = reconcile
        self._metrics = metrics
        self._count = count
        self._told: dict[Key, tuple[str, ...]] = {}

    async def run(self) -> None:
        """Run the workers until cancelled."""
        async with asyncio.TaskGroup() as group:
            for number in range(self._count):
                group.create_task(self._work(), name=f"worker {number}")

    async def _work(self) -> None:
        while True:
            key = await self._queue.take()
            try:
                await self._look(key)
            finally:
                self.last_done = time.monotonic()
                self._queue.done(key)

    async def _look(self, key: Key) -> None:
        begin = time.monotonic()
        try:
            with _TRACER.start_as_current_span("reconcile", attributes=_attributes(key)):
                async with asyncio.timeout(LOOK_TIMEOUT_S):
                    verdict = await self._reconcile(key)
        except NotLeading:
            # The workers are about to be stopped, and the next leader looks at everything.
            self._queue.add_after(key, 1.0)
            return
        except ApiError as error:
            self._failed(key, error.reason or type(error).__name__, str(error), error.retry_after_s)
        except OverBudget as error:
            self._failed(key, "OverBudget", str(error), backoff=LASTING)
        except TimeoutError:
            self._failed(key, "Timeout", f"not done within {LOOK_TIMEOUT_S:g} s")
        except Exception as error:
            logger.exception("reconcile of %s/%s failed", *key)
            self._failed(key, type(error).__name__, "")
        else:
            self._follow(key, verdict)
        self._metrics.reconcile_seconds.observe(time.monotonic() - begin)

    def _failed(
        self, key: Key, reason: str, message: str, retry_after_s: float = 0.0, backoff: Backoff = TRANSIENT
    ) -> None:
        self._metrics.reconciles.labels("error").inc()
        self._metrics.errors.labels(reason).inc()
        pause_s = self._queue.retry(key, backoff, at_least_s=retry_after_s)
        if message:
            logger.warning("%s/%s: %s; again in %.1f s", *key, message, pause_s)

    def _follow(self, key: Key, verdict: Verdict) -> None:
        if not verdict.exists:
            self._metrics.reconciles.labels("absent").inc()
            self._forget(key)
            return
        self.reconciled.add(key)
        failed = bool(verdict.reasons)
        self._metrics.reconciles.labels("error" if failed else "ok").inc()
        self._tell(key, verdict.failures)
        for reason in verdict.reasons:
            self._metrics.errors.labels(reason).inc()
        if failed:
            backoff = TRANSIENT if verdict.transient else LASTING
            self._queue.retry(key, backoff, at_least_s=verdict.retry_after_s)
        else:
            self._queue.succeeded(key)
        full_s = FULL_LOOK_S * random.uniform(0.75, 1.25)
        self._queue.add_after(key, full_s if verdict.look_again_s is None else min(full_s, verdict.look_again_s))

    def _tell(self, key: Key, failures: tuple[WriteFailure, ...]) -> None:
        """Log what failed, once."""
        problems = tuple(f"{one.ref.kind} {one.ref.name}: {one.kind}: {one.message}" for one in failures)
        if problems and problems != self._told.get(key):
            logger.warning("%s/%s: %s", *key, "; ".join(problems))
        if problems:
            self._told[key] = problems
        else:
            self._told.pop(key, None)

    def _forget(self, key: Key) -> None:
        self._queue.remove(key)
        self.reconciled.discard(key)
        self._told.pop(key, None)


class WorkQueue(Generic[K]):
    """Queue of one event loop. `take` and `done` frame a worker's look at a key."""

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        observe_wait: Callable[[float], None] = unobserved,
        count_retry: Callable[[], None] = unobserved,
    ) -> None:
        """`observe_wait` gets how long each key waited, in seconds."""
        self._clock = clock
        self._observe_wait = observe_wait
        self._count_retry = count_retry
        self._ready: deque[K] = deque()
        self._waiting_since: dict[K, float] = {}
        self._taken: set[K] = set()
        self._again: set[K] = set()
        self._failures: dict[K, int] = {}
        self._failed_at: dict[K, float] = {}
        self._not_before: dict[K, float] = {}
        self._timers: dict[K, tuple[float, asyncio.TimerHandle]] = {}
        self._arrival = asyncio.Event()

    def __len__(self) -> int:
        """Return the number of keys that could be taken now."""
        return len(self._ready)

    def oldest_wait_s(self) -> float:
        """Return how long the first key has waited, 0 when none waits."""
        return self._clock() - self._waiting_since[self._ready[0]] if self._ready else 0.0

    def add(self, key: K) -> None:
        """Queue a key, because something about it changed."""
        failed_at = self._failed_at.get(key)
        if failed_at is not None and key not in self._taken:
            self.add_after(key, failed_at + HURRIED_PAUSE_S - self._clock())
        else:
            self._put(key)

    def add_after(self, key: K, seconds: float) -> None:
        """Queue a key then, unless it is queued earlier. The earliest of several times counts, but none within the
        time that the server asked for."""
        seconds = max(seconds, self._not_before.get(key, 0.0) - self._clock())
        if seconds <= 0:
            self._put(key)
            return
        due = self._clock() + seconds
        timer = self._timers.get(key)
        if timer is not None:
            if timer[0] <= due:
                return
            timer[1].cancel()
        handle = asyncio.get_running_loop().call_later(seconds, self._put, key)
        self._timers[key] = (due, handle)

    def retry(self, key: K, backoff: Backoff, *, at_least_s: float = 0.0) -> float:
        """Queue a key that failed, after a pause that grows with each failure in a row. Return the pause in seconds.

        Not even a change makes it shorter than `at_least_s`, which the server asked for.
        """
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        self._failed_at[key] = self._clock()
        self._not_before[key] = self._failed_at[key] + at_least_s
        pause_s = max(at_least_s, backoff.pause_s(failures))
        self._count_retry()
        self.add_after(key, pause_s)
        return pause_s

    def succeeded(self, key: K) -> None:
        """Forget the failures of a key: the next one will be a first one."""
        self._failures.pop(key, None)
        self._failed_at.pop(key, None)
        self._not_before.pop(key, None)

    def remove(self, key: K) -> None:
        """Drop retries and timers of a key that is gone."""
        self.succeeded(key)
        self._cancel_timer(key)

    async def take(self) -> K:
        """Return the next key, once there is one. The worker must call `done`, whatever happens."""
        while not self._ready:
            self._arrival.clear()
            await self._arrival.wait()
        key = self._ready.popleft()
        self._observe_wait(self._clock() - self._waiting_since.pop(key))
        self._cancel_timer(key)
        self._taken.add(key)
        return key

    def done(self, key: K) -> None:
        """Give a key back after a look at it."""
        self._taken.discard(key)
        if key in self._again:
            self._again.discard(key)
            self.add(key)

    def _put(self, key: K) -> None:
        self._cancel_timer(key)
        if key in self._taken:
            self._again.add(key)
        elif key not in self._waiting_since:
            self._waiting_since[key] = self._clock()
            self._ready.append(key)
            self._arrival.set()

    def _cancel_timer(self, key: K) -> None:
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer[1].cancel()
