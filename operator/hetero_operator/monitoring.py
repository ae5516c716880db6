"""Prometheus metrics, and the servers of /healthz and /readyz on one port and /metrics on another.

They are served by the event loop that does all the work: a loop that is blocked does not answer, and is restarted.
Alive: every long-lived task runs, the election is tried, and the queue moves. Ready: everything was listed once and
nothing is wrong with the watches now; it has nothing to do with who leads.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Final

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from hetero_api.metrics import EXPOSITION_TYPE, OperatorMetric, exposition
from hetero_operator.errors import ConfigError

SHUTDOWN_S: Final = 1.0
Problems = Callable[[], Sequence[str]]


class OperatorMetrics:
    """Counters that are written where things happen, and gauges that are read from their owners at each scrape."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self.reconciles = OperatorMetric.RECONCILES.value.new_counter(registry)
        self.reconcile_seconds = OperatorMetric.RECONCILE_TIME.value.new_histogram(registry)
        self.errors = OperatorMetric.ERRORS.value.new_counter(registry)
        self.retries = OperatorMetric.RETRIES.value.new_counter(registry)
        self.queue_seconds = OperatorMetric.QUEUE_TIME.value.new_histogram(registry)
        self.calls = OperatorMetric.API_CALLS.value.new_counter(registry)
        self.restarts = OperatorMetric.WATCH_RESTARTS.value.new_counter(registry)
        self.status_writes = OperatorMetric.STATUS_WRITES.value.new_counter(registry)

    def count_call(self, verb: str, code: str) -> None:
        """Count a call of the Kubernetes API."""
        self.calls.labels(verb, code).inc()

    def count_restart(self, kind: str, reason: str) -> None:
        """Count a list or watch that starts again."""
        self.restarts.labels(kind, reason).inc()

    def read(
        self, gauges: Mapping[OperatorMetric, Callable[[], float]], objects: Callable[[], Mapping[str, int]]
    ) -> None:
        """Register gauges, each read at every scrape; `objects` returns the objects in memory, by kind."""
        for metric, read in gauges.items():
            metric.value.new_gauge(self.registry).set_function(read)
        self.registry.register(_CachedObjects(objects))

    def text(self) -> bytes:
        """Return the answer to a scrape."""
        return exposition(self.registry)


class _CachedObjects(Collector):
    def __init__(self, objects: Callable[[], Mapping[str, int]]) -> None:
        self._objects = objects

    def collect(self) -> Iterator[Metric]:
        """Yield the numbers of objects in memory."""
        yield OperatorMetric.CACHED.value.family(*(([kind], count) for kind, count in self._objects().items()))


class HttpServer:
    """Server of health and metrics, until it is closed."""

    def __init__(self, *, alive: Problems, ready: Problems, metrics: Callable[[], bytes]) -> None:
        """`alive` and `ready` return problems; none: all is well."""
        self._alive = alive
        self._ready = ready
        self._metrics = metrics
        self._runners: list[web.AppRunner] = []

    async def listen(self, host: str, *, metrics_port: int, health_port: int) -> None:
        """Listen at both ports. Raises ConfigError when a port is not free."""
        health = {"/healthz": _verdict(self._alive), "/readyz": _verdict(self._ready)}
        await self._serve(host, health_port, health)
        await self._serve(host, metrics_port, {"/metrics": self._scrape})

    async def close(self) -> None:
        """Close both ports."""
        for runner in self._runners:
            await runner.cleanup()

    async def _serve(
        self, host: str, port: int, routes: dict[str, Callable[[web.Request], Awaitable[web.Response]]]
    ) -> None:
        app = web.Application()
        for path, handler in routes.items():
            app.router.add_get(path, handler)
        runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=SHUTDOWN_S)
        await runner.setup()
        self._runners.append(runner)
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            raise ConfigError(f"{host}:{port} cannot be listened at: {error.strerror}") from error

    async def _scrape(self, request: web.Request) -> web.Response:  # noqa: ARG002
        return web.Response(body=self._metrics(), headers={"Content-Type": EXPOSITION_TYPE})


def _verdict(problems: Problems) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def answer(request: web.Request) -> web.Response:  # noqa: ARG001
        found = problems()
        return web.Response(status=500 if found else 200, text="".join(f"{line}\n" for line in found or ["ok"]))

    return answer
