"""Probes of a rank pod for the kubelet, and its metrics for Prometheus.

Started: every rank has met its group at some time; the load may take any time. Alive: the supervisor's loop turns, and
no rank is late with its work; a rank that waits (for a gateway, for peers, for its next start) is alive. Ready: every
rank serves, all in one epoch. Read from heartbeats, in the probe server's threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from hetero_api.host.heartbeat import Beat, RankState
from hetero_api.metrics import RankMetric
from hetero_api.probe_server import Probe
from hetero_api.supervision.service import Service

LOOP_LIMIT_S: Final = 15.0
"""A supervisor whose loop has not turned for this long is stuck."""

Readings = list[tuple[Service, Beat | None]]
_MET: Final = frozenset({RankState.FORMED, RankState.LOADED, RankState.SERVING})


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
        """Return which ranks have met no group; "" once all have, for good."""
        if not self._started:
            waiting = [
                f"rank {rank.name} is {_state_name(beat)}"
                for rank, beat in self._read()
                if beat is None or not (beat.loads or beat.state in _MET)
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
        beats = [([rank.name], rank, beat) for rank, beat in self._read()]
        samples: dict[RankMetric, list[tuple[list[str], float]]] = {
            RankMetric.RUNNING: [(label, beat is not None) for label, _, beat in beats],
            RankMetric.SERVING: [
                (label, beat is not None and beat.state is RankState.SERVING) for label, _, beat in beats
            ],
            RankMetric.EPOCH: [(label, 0 if beat is None else beat.epoch) for label, _, beat in beats],
            RankMetric.STEPS: [(label, 0 if beat is None else beat.steps) for label, _, beat in beats],
            RankMetric.RESTARTS: [(label, rank.restarts) for label, rank, _ in beats],
        }
        for metric, each in samples.items():
            yield metric.value.family(*each)
