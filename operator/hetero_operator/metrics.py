"""Prometheus metrics of the operator, in a registry of their own; all names begin with hetero_operator_."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_RECONCILE_BUCKETS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_WAIT_BUCKETS: Final = (0.001, 0.01, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


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
        self.registry.register(_Gauges(gauges, objects))

    def text(self) -> bytes:
        """Return the answer to a scrape."""
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str, labels: list[str] | None = None) -> Counter:
        return Counter(f"hetero_operator_{name}", text, labels or [], registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"hetero_operator_{name}", text, buckets=buckets, registry=self.registry)


class _Gauges(Collector):
    def __init__(
        self, gauges: Mapping[str, tuple[str, Callable[[], float]]], objects: Callable[[], Mapping[str, int]]
    ) -> None:
        self._gauges = gauges
        self._objects = objects

    def collect(self) -> Iterator[Metric]:
        """Yield the gauges' values."""
        for name, (text, read) in self._gauges.items():
            yield GaugeMetricFamily(f"hetero_operator_{name}", text, value=read())
        family = GaugeMetricFamily("hetero_operator_cached_objects", "Objects in memory, by kind.", labels=["kind"])
        for kind, count in self._objects().items():
            family.add_metric([kind], count)
        yield family
