"""Probes of a rank pod for the kubelet, and its metrics for Prometheus.

Started: every rank has had its weights at some time. Alive: the supervisor's loop turns, and no rank is late with its
work; a rank that waits (for a gateway, for peers, for its next start) is alive. Ready: every rank serves, all in one
epoch. Read from heartbeats, in the probe server's threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from hetero_api.host.heartbeat import Beat, RankState
from hetero_api.probe_server import Probe
from hetero_api.supervision.service import Service

LOOP_LIMIT_S: Final = 15.0
"""A supervisor whose loop has not turned for this long is stuck."""

Readings = list[tuple[Service, Beat | None]]


class PodHealth:
    """Probes of a pod's ranks. `turned_s` returns the monotonic time of the supervisor's last turn."""

    def __init__(
        self, ranks: Sequence[Service], *, turned_s: Callable[[], float], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._ranks = tuple(ranks)
        self._turned_s = turned_s
        self._clock = clock
        self._started = False
        self.registry = CollectorRegistry()
        self.registry.register(_RankCollector(self._read))

    @property
    def probes(self) -> dict[str, Probe]:
        """Probes by path."""
        return {"/startupz": self.startup, "/livez": self.live, "/readyz": self.ready}

    def startup(self) -> str:
        """Return which ranks have not loaded; "" once all have, for good."""
        if not self._started:
            waiting = [
                f"rank {rank.name} is {_state_name(beat)}"
                for rank, beat in self._read()
                if beat is None or not beat.loads
            ]
            if waiting:
                return "; ".join(waiting)
            self._started = True
        return ""

    def live(self) -> str:
        """Return what hangs; "" if nothing does."""
        now_s = self._clock()
        if now_s - self._turned_s() > LOOP_LIMIT_S:
            return f"the supervisor has not looked for {now_s - self._turned_s():.0f} s"
        late = [(rank, beat.overdue_s(now_s)) for rank, beat in self._read() if beat is not None]
        return "; ".join(f"rank {rank.name} is {late_s:.0f} s late" for rank, late_s in late if late_s)

    def ready(self) -> str:
        """Return which ranks do not serve; "" if all do, in one epoch."""
        readings = self._read()
        idle = [
            f"rank {rank.name} is {_state_name(beat)}"
            for rank, beat in readings
            if beat is None or beat.state is not RankState.SERVING
        ]
        epochs = sorted({beat.epoch for _, beat in readings if beat is not None})
        if not idle and len(epochs) > 1:
            return f"ranks serve in epochs {', '.join(map(str, epochs))}"
        return "; ".join(idle)

    def _read(self) -> Readings:
        return [(rank, rank.beat()) for rank in self._ranks]


def _state_name(beat: Beat | None) -> str:
    return "not running" if beat is None else beat.state.name


class _RankCollector(Collector):
    def __init__(self, read: Callable[[], Readings]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        running = GaugeMetricFamily("hetero_rank_running", "1 while the rank's process runs.", labels=["local_rank"])
        serving = GaugeMetricFamily("hetero_rank_serving", "1 while the rank serves.", labels=["local_rank"])
        epoch = GaugeMetricFamily("hetero_rank_epoch", "The rank's epoch.", labels=["local_rank"])
        steps = CounterMetricFamily("hetero_rank_steps", "Steps done by the rank's process.", labels=["local_rank"])
        restarts = CounterMetricFamily(
            "hetero_rank_restarts", "Restarts of the rank in its pod.", labels=["local_rank"]
        )
        for rank, beat in self._read():
            label = [rank.name]
            running.add_metric(label, float(beat is not None))
            serving.add_metric(label, float(beat is not None and beat.state is RankState.SERVING))
            epoch.add_metric(label, beat.epoch if beat is not None else 0)
            steps.add_metric(label, beat.steps if beat is not None else 0)
            restarts.add_metric(label, rank.restarts)
        yield from (running, serving, epoch, steps, restarts)
