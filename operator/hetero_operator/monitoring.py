"""Prometheus metrics, and the servers of /healthz and /readyz on one port and /metrics on another.

They are served by the event loop that does all the work: a loop that is blocked does not answer, and is restarted.
Alive: every long-lived task runs, the election is tried, and the queue moves. Ready: everything was listed once and
nothing is wrong with the watches now; it has nothing to do with who leads.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Final

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from hetero_operator.errors import ConfigError

_RECONCILE_BUCKETS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_WAIT_BUCKETS: Final = (0.001, 0.01, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
SHUTDOWN_S: Final = 1.0
Problems = Callable[[], Sequence[str]]


class OperatorMetrics:
    """Counters that are written where things happen, and gauges that are read from their owners at each scrape."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.reconciles = self._counter("reconciles", "Looks at a resource: ok, error or absent.", ["result"])
        self.reconcile_seconds = self._histogram("reconcile_seconds", "A look at a resource.", _RECONCILE_BUCKETS)
        self.errors = self._counter("reconcile_errors", "Looks that did not do all they wanted, by reason.", ["reason"])
        self.retries = self._counter("queue_retries", "Resources put back into the queue because something failed.")
        self.queue_seconds = self._histogram("queue_seconds", "A resource's wait in the queue.", _WAIT_BUCKETS)
        self.calls = self._counter("api_requests", "Calls of the Kubernetes API, by verb and code.", ["verb", "code"])
        self.restarts = self._counter(
            "watch_restarts", "Watches started again, by kind and reason.", ["kind", "reason"]
        )
        self.status_writes = self._counter("status_writes", "Statuses written.")

    def count_call(self, verb: str, code: str) -> None:
        """Count a call of the Kubernetes API."""
        self.calls.labels(verb, code).inc()

    def count_restart(self, kind: str, reason: str) -> None:
        """Count a list or watch that starts again."""
        self.restarts.labels(kind, reason).inc()

    def read(
        self, gauges: Mapping[str, tuple[str, Callable[[], float]]], objects: Callable[[], Mapping[str, int]]
    ) -> None:
        """Register gauges by name, each with its help; `objects` returns the objects in memory, by kind."""
        for name, (text, read) in gauges.items():
            Gauge(f"hetero_operator_{name}", text, registry=self.registry).set_function(read)
        self.registry.register(_CachedObjects(objects))

    def text(self) -> bytes:
        """Return the answer to a scrape."""
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str, labels: list[str] | None = None) -> Counter:
        return Counter(f"hetero_operator_{name}", text, labels or [], registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"hetero_operator_{name}", text, buckets=buckets, registry=self.registry)


class _CachedObjects(Collector):
    def __init__(self, objects: Callable[[], Mapping[str, int]]) -> None:
        self._objects = objects

    def collect(self) -> Iterator[Metric]:
        """Yield the numbers of objects in memory."""
        family = GaugeMetricFamily("hetero_operator_cached_objects", "Objects in memory, by kind.", labels=["kind"])
        for kind, count in self._objects().items():
            family.add_metric([kind], count)
        yield family


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
        return web.Response(body=self._metrics(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})


def _verdict(problems: Problems) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def answer(request: web.Request) -> web.Response:  # noqa: ARG001
        found = problems()
        return web.Response(status=500 if found else 200, text="".join(f"{line}\n" for line in found or ["ok"]))

    return answer
