"""Prometheus metrics of one gateway, in a registry of their own.

Counters and histograms are written where things happen; what the engine counts itself is read from it at each scrape.
A scrape runs in a thread of the probe server's and the engine belongs to the event loop, so the reading is done there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from hetero_api.v1 import admin_pb2, ranks_pb2
from hetero_gateway.server.health import LoopReader

_SCRAPE_TIMEOUT_S: Final = 5.0
_STEP_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_FIRST_TOKEN_BUCKETS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_GAUGES: Final = {
    "running_requests": "Requests that a step works on.",
    "waiting_requests": "Requests that wait.",
    "num_blocks": "KV blocks, null block excluded.",
    "free_blocks": "KV blocks that no request refers to.",
    "cached_blocks": "Free KV blocks whose content can be found by a prefix lookup.",
}
_COUNTERS: Final = {
    "prompt_tokens": "Prompt tokens computed.",
    "cached_tokens": "Prompt tokens found in the prefix cache.",
    "generated_tokens": "Tokens generated.",
    "preemptions": "Requests preempted for want of KV blocks.",
    "steps": "Steps done.",
}


class EngineReading(NamedTuple):
    """State of the gateway at one scrape, read on the event loop."""

    stats: admin_pb2.GetStatsResponse
    topology: admin_pb2.GetTopologyResponse
    ready: bool
    recoveries: int


class GatewayMetrics:
    """Metrics of one gateway."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "hetero_requests",
            "Generate calls that ended, by outcome: a finish reason or a gRPC status code.",
            ["outcome"],
            registry=self.registry,
        )
        self.http_calls = Counter(
            "hetero_http_calls",
            "Calls of the OpenAI endpoint for completions that ended, by HTTP status; 499: the client went away.",
            ["outcome"],
            registry=self.registry,
        )
        self.step = Histogram(
            "hetero_step_seconds",
            "A step, from the plan's sending to its result.",
            buckets=_STEP_BUCKETS,
            registry=self.registry,
        )
        self.first_token = Histogram(
            "hetero_time_to_first_token_seconds",
            "A request's arrival to its first token.",
            buckets=_FIRST_TOKEN_BUCKETS,
            registry=self.registry,
        )
        self._rebalances = Counter(
            "hetero_expert_rebalances",
            "Times that experts were moved to other ranks, by how often they were chosen.",
            registry=self.registry,
        )
        self._moved_experts = Counter("hetero_moved_experts", "Experts that changed ranks.", registry=self.registry)

    def count_moved_experts(self, number: int) -> None:
        """Count one move of `number` experts."""
        self._rebalances.inc()
        self._moved_experts.inc(number)


class EngineCollector(Collector):
    """Collector that has every scrape read the engine, on its loop."""

    def __init__(self, read: Callable[[], EngineReading], reader: LoopReader) -> None:
        self._read = read
        self._reader = reader

    def collect(self) -> Iterator[Metric]:
        """Yield what the engine and the group report now."""
        reading = self._reader.read(self._read, timeout_s=_SCRAPE_TIMEOUT_S)
        topology = reading.topology
        for name, text in _GAUGES.items():
            yield GaugeMetricFamily(f"hetero_{name}", text, value=getattr(reading.stats, name))
        for name, text in _COUNTERS.items():
            yield CounterMetricFamily(f"hetero_{name}", text, value=getattr(reading.stats, name))
        yield GaugeMetricFamily("hetero_epoch", "The group's epoch.", value=topology.epoch)
        paused = "Requests that wait for a new epoch to go on where the last one left them."
        yield GaugeMetricFamily("hetero_paused_requests", paused, value=topology.paused_requests)
        survived = "Epochs that were lost and followed by another on which requests went on."
        yield CounterMetricFamily("hetero_recoveries", survived, value=reading.recoveries)
        yield GaugeMetricFamily("hetero_ready", "1 while requests are served.", value=float(reading.ready))
        if topology.exchange:
            kind = InfoMetricFamily("hetero_exchange", "How ranks exchange tensors in host memory.")
            kind.add_metric([], {"kind": ranks_pb2.ExchangeKind.Name(topology.exchange).removeprefix("EXCHANGE_KIND_")})
            yield kind
        if topology.HasField("placement"):
            yield from _placement_metrics(topology.placement)
        if any(rank.graph_reserve_bytes for rank in topology.ranks):
            yield graph_memory(topology.ranks)


def graph_memory(ranks: Sequence[admin_pb2.RankStatus]) -> Metric:
    """Return the memory for graphs of steps, by rank."""
    text = "Memory of a rank's GPU for graphs of steps, by rank: what they took, and what is kept for them."
    graphs = GaugeMetricFamily("hetero_graph_memory_bytes", text, labels=["rank", "kind"])
    for rank in ranks:
        if rank.graph_reserve_bytes:
            graphs.add_metric([str(rank.place.rank), "taken"], rank.graph_bytes)
            graphs.add_metric([str(rank.place.rank), "reserved"], rank.graph_reserve_bytes)
    return graphs


def _placement_metrics(placement: admin_pb2.PlacementReport) -> Iterator[Metric]:
    """Yield what was predicted of the placement, and what was measured."""
    predicted = "Tokens a second that the placement was predicted to decode, for the workload's streams."
    yield GaugeMetricFamily(
        "hetero_placement_predicted_tokens_per_second", predicted, value=placement.predicted_tokens_per_second
    )
    if placement.step_time_ratio:
        measured = "The same by what steps that only decoded took lately."
        yield GaugeMetricFamily(
            "hetero_placement_measured_tokens_per_second", measured, value=placement.measured_tokens_per_second
        )
        ratio = "Of steps that only decoded, lately: measured seconds over predicted ones."
        yield GaugeMetricFamily("hetero_placement_step_time_ratio", ratio, value=placement.step_time_ratio)
    exchange = GaugeMetricFamily(
        "hetero_exchange_seconds",
        "What an all-reduce was measured to take when the group formed, by where and by bytes.",
        labels=["among", "bytes"],
    )
    for among, times in (("host", placement.host_times), ("device", placement.device_times)):
        for time in times:
            exchange.add_metric([among, str(time.bytes)], time.seconds)
    yield exchange
