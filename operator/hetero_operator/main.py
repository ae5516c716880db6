"""The operator's process: listen, watch, stand for election, and work while leading.

Everything that only reads runs from the beginning to the end, so that a new leader knows everything at once. Workers
run only while the Lease is held. The exit status is 0 after SIGTERM or SIGINT, EXIT_USAGE when a setting is wrong,
EXIT_FAILURE when a part ended that never should: a restart is the cure then.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, Final

from opentelemetry import trace

from hetero_api.contract import EXIT_FAILURE, EXIT_OK, EXIT_USAGE
from hetero_api.metrics import OperatorMetric
from hetero_api.tracing import start_tracing
from hetero_operator.cluster.cache import ClusterCache
from hetero_operator.cluster.executor import PlanExecution
from hetero_operator.cluster.fence import Fence
from hetero_operator.cluster.inquiries import NodeBook, SecretBook, WarningBook
from hetero_operator.cluster.kinds import EVENT
from hetero_operator.cluster.reporting import EventRecorder, StatusWriter
from hetero_operator.cluster.resources import Resources
from hetero_operator.cluster.store import Key
from hetero_operator.cluster.transport import Transport, load_configuration
from hetero_operator.config import PROGRAM, OperatorConfig
from hetero_operator.election import Election
from hetero_operator.errors import ConfigError, Unreachable
from hetero_operator.gateway_probe import GatewayProbe
from hetero_operator.kopf_watch import KopfWatch
from hetero_operator.monitoring import HttpServer, OperatorMetrics
from hetero_operator.reconcile.plan import plan
from hetero_operator.reconcile.report import report
from hetero_operator.reconciler import Collaborators, Reconciler
from hetero_operator.timing import Backoff
from hetero_operator.workers import Workers, WorkQueue

logger = logging.getLogger(__name__)

STUCK_S: Final = 240.0
"""Nothing was done for so long although something waits: more than the longest look takes."""


class Operator:
    """The parts of one process, joined."""

    def __init__(self, config: OperatorConfig, api: Transport, fence: Fence, metrics: OperatorMetrics) -> None:
        self._api = api
        self._config = config
        self._working = False
        self._working_since = 0.0
        self.queue: WorkQueue[Key] = WorkQueue(
            observe_wait=metrics.queue_seconds.observe, count_retry=metrics.retries.inc
        )
        self.cache = ClusterCache(
            api,
            namespaces=config.namespaces,
            on_change=self._enqueue,
            on_capabilities=self._enqueue_all,
            count_restart=metrics.count_restart,
        )
        self.resources = Resources(api, namespaces=config.namespaces, resync_s=config.resync_s, on_change=self._enqueue)
        self.election = Election(api, config.lease, fence)
        self.events = EventRecorder(api, identity=config.lease.identity)
        self.kopf = KopfWatch(
            api, namespaces=config.namespaces, deliver=self.resources.hear, on_gap=self.resources.list_soon
        )
        self._gateways = GatewayProbe()
        self.warnings = WarningBook(api, on_change=self._enqueue)
        secrets = SecretBook(api)
        parts = Collaborators(
            resources=self.resources,
            cache=self.cache,
            secrets=secrets,
            nodes=NodeBook(api),
            warnings=self.warnings,
            gateways=self._gateways,
            execution=partial(PlanExecution, api, self.cache, secrets),
            statuses=StatusWriter(api, self.resources.store, count=metrics.status_writes.inc),
            events=self.events,
        )
        reconciler = Reconciler(parts, config.render, config.policy, plan=plan, report=report)
        self.workers = Workers(self.queue, reconciler.reconcile, metrics, count=config.workers)
        metrics.read(self._gauges(), self.cache.sizes)

    async def run(self, stopping: asyncio.Event) -> None:
        """Run all parts until `stopping`. Raises the error of a part that ended."""
        parts = {
            "kopf": self.kopf.run(),
            "watches": self.cache.run(),
            "resources": self.resources.run(),
            "events": self.events.run(),
            "warnings": self.warnings.run(),
            "election": self._stand(),
            "leadership": self._lead(),
        }
        tasks = [asyncio.create_task(life, name=name) for name, life in parts.items()]
        waiting = asyncio.create_task(stopping.wait())
        try:
            done, _ = await asyncio.wait([*tasks, waiting], return_when=asyncio.FIRST_COMPLETED)
            for task in done - {waiting}:
                logger.critical("%s ended", task.get_name(), exc_info=task.exception())
                raise task.exception() or RuntimeError(f"{task.get_name()} ended")
        finally:
            # Workers first: when the Lease is given back, nothing of ours may be under way.
            for task in reversed(tasks):
                task.cancel()
                await asyncio.wait([task])
                if task.get_name() == "election":
                    await self.election.release()
            waiting.cancel()
            await self._gateways.close()

    def alive(self) -> list[str]:
        """Return problems that only a restart solves."""
        problems = [f"the watch of {kind} has ended" for kind in self.cache.ended()]
        quiet_s = time.monotonic() - max(self.workers.last_done, self._working_since)
        if self._working and self.queue.oldest_wait_s() > STUCK_S and quiet_s > STUCK_S:
            problems.append(f"no resource was looked at for {quiet_s:.0f} s although some wait")
        idle_s = time.monotonic() - self.election.last_attempt
        if idle_s > STUCK_S:
            problems.append(f"the election was not tried for {idle_s:.0f} s")
        return problems

    def ready(self) -> list[str]:
        """Return problems that keep the operator from being ready."""
        problems = self.cache.problems()
        if not self.resources.listed.is_set() or self.resources.problem:
            problems.append(self.resources.problem or "resources were not listed yet")
        if not self.kopf.watching:
            problems.append("kopf does not watch")
        return problems

    async def _stand(self) -> None:
        """Stand for election, once it is proven that without the Lease no write leaves this process."""
        backoff, failures = Backoff(), 0
        while True:
            try:
                await self._api.prove_fence(*_dry_write(self._config.lease.namespace))
                break
            except Unreachable as error:
                failures += 1
                logger.warning("%s", error)
                self.election.last_attempt = time.monotonic()
                await asyncio.sleep(backoff.pause_s(failures))
        await self.election.run()

    async def _lead(self) -> None:
        """Run the workers while leading."""
        await self.cache.ready.wait()
        await self.resources.listed.wait()
        while True:
            await self._until(leading=True)
            self._working, self._working_since = True, time.monotonic()
            self._enqueue_all()
            working = asyncio.create_task(self.workers.run(), name="workers")
            losing = asyncio.create_task(self._until(leading=False))
            try:
                await asyncio.wait([working, losing], return_when=asyncio.FIRST_COMPLETED)
                if working.done():
                    working.result()
            finally:
                self._working = False
                for task in (working, losing):
                    task.cancel()
                await asyncio.wait([working, losing])
                self.warnings.forget_all()

    async def _until(self, *, leading: bool) -> None:
        while self.election.leading is not leading:
            self.election.changed.clear()
            await self.election.changed.wait()

    def _enqueue(self, key: Key) -> None:
        """Queue a resource, only while leading: a new leader looks at everything anyway."""
        if self._working:
            self.queue.add(key)

    def _enqueue_all(self) -> None:
        for key in list(self.resources.store.keys()):
            self._enqueue(key)

    def _gauges(self) -> Mapping[OperatorMetric, Callable[[], float]]:
        return {
            OperatorMetric.LEADER: lambda: int(self.election.leading),
            OperatorMetric.QUEUE_DEPTH: lambda: len(self.queue),
            OperatorMetric.QUEUE_OLDEST: self.queue.oldest_wait_s,
            OperatorMetric.RESOURCES: lambda: len(self.resources.store),
            OperatorMetric.RECONCILED: lambda: len(self.workers.reconciled),
        }


def _dry_write(namespace: str) -> tuple[str, dict[str, Any]]:
    """Return a collection and a manifest for it that the API server would make an object of."""
    name = f"{PROGRAM.replace('_', '-')}-fence"
    about = {"involvedObject": {"namespace": namespace}, "reason": "DryWrite", "message": "never written"}
    return EVENT.path(namespace), EVENT.manifest(namespace, name, **about)


async def live(config: OperatorConfig) -> int:
    """Run one process. Return its exit status. Raises ConfigError."""
    provider = start_tracing("heteroinference-operator", os.environ)
    if provider is not None:
        trace.set_tracer_provider(provider)
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    fence, metrics = Fence(), OperatorMetrics()

    async def reload() -> Any:
        return await load_configuration(config.kubeconfig)

    async with aclosing(Transport(await reload(), fence, reload=reload, count=metrics.count_call)) as api:
        operator = Operator(config, api, fence, metrics)
        server = HttpServer(alive=operator.alive, ready=operator.ready, metrics=metrics.text)
        try:
            await server.listen(config.host, metrics_port=config.metrics_port, health_port=config.health_port)
            await operator.run(stopping)
            logger.info("stopped")
            return EXIT_OK
        except ConfigError:
            raise
        except Exception:
            logger.critical("the operator ends; it has to be restarted", exc_info=True)
            return EXIT_FAILURE
        finally:
            await server.close()


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run the whole process. Return its exit status."""
    try:
        config = OperatorConfig.from_command_line(arguments, environment)
        _configure_logging(config)
        return asyncio.run(live(config))
    except ConfigError as error:
        sys.stderr.write(f"{PROGRAM}: {error}\n")
        return EXIT_USAGE


def run() -> None:
    """Run `main` with this process's arguments and environment."""
    sys.exit(main(sys.argv[1:], os.environ))


def _configure_logging(config: OperatorConfig) -> None:
    logging.basicConfig(
        level=config.log_level, stream=sys.stderr, format="%(asctime)s %(levelname)s operator %(name)s: %(message)s"
    )
    if config.log_level != "DEBUG":
        # What kopf calls information is for kopf's own developers.
        logging.getLogger("kopf").setLevel(max(logging.WARNING, logging.getLevelNamesMapping()[config.log_level]))
