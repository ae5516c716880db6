"""Workers take keys from the queue, reconcile them, and decide when each is looked at again.

They run only while this process leads. A look has a time limit. One that fails is logged, counted and tried again after
a growing pause, also for errors that nobody thought of.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from typing import Final

from hetero_operator.cluster.store import Key
from hetero_operator.errors import ApiError, NotLeading, OverBudget
from hetero_operator.metrics import OperatorMetrics
from hetero_operator.reconcile.model import WriteFailure
from hetero_operator.reconciler import Verdict
from hetero_operator.timing import Backoff
from hetero_operator.work_queue import WorkQueue

logger = logging.getLogger(__name__)

LOOK_TIMEOUT_S: Final = 180.0
FULL_LOOK_S: Final = 1800.0
"""Everything is looked at this often, though nothing was heard of it."""
TRANSIENT: Final = Backoff(first_s=0.2)
LASTING: Final = Backoff(first_s=1.0, cap_s=300.0)
"""After what trying again will hardly cure: an invalid object, a missing right, a stranger's object."""


class Workers:
    """Tasks that take keys from the queue. `run` runs `count` of them until cancelled."""

    def __init__(
        self,
        queue: WorkQueue[Key],
        reconcile: Callable[[Key], Awaitable[Verdict]],
        metrics: OperatorMetrics,
        *,
        count: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.reconciled: set[Key] = set()
        """Existing resources that were looked at since the process began."""
        self.last_done = clock()
        """When a look last ended, by the clock: a sign of life."""
        self._queue = queue
        self._reconcile = reconcile
        self._metrics = metrics
        self._count = count
        self._clock = clock
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
                self.last_done = self._clock()
                self._queue.done(key)

    async def _look(self, key: Key) -> None:
        begin = self._clock()
        try:
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
        self._metrics.reconcile_seconds.observe(self._clock() - begin)

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
