"""Prometheus metrics of one gateway, in a registry of their own.

Counters are written where calls end; what engine and ranks count themselves is read from them at each scrape. A scrape
runs in a thread, of the probe server's or of the HTTP door's, and the engine belongs to the event loop, so only the
reading is done there. Names, labels and texts are in `hetero_api.metrics`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from hetero_api.metrics import GatewayMetric, exposition
from hetero_api.v1 import admin_pb2, ranks_pb2
from hetero_gateway.engine.telemetry.latencies import Latencies
from hetero_gateway.group.experts import ExpertSwap
from hetero_gateway.server.health import LoopReader

_SCRAPE_TIMEOUT_S: Final = 5.0
_ENGINE: Final = "0"
Sample = tuple[Sequence[str], float]


class EngineReading(NamedTuple):
    """State of the gateway at one scrape, read on the event loop."""

    stats: admin_pb2.GetStatsResponse
    topology: admin_pb2.GetTopologyResponse
    latencies: Latencies
    ready: bool
    recoveries: int


class GatewayMetrics:
    """Metrics of one gateway."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self.requests = GatewayMetric.REQUESTS.value.new_counter(registry)
        self.http_calls = GatewayMetric.HTTP_CALLS.value.new_counter(registry)
        self.step = GatewayMetric.STEP_TIME.value.new_histogram(registry)
        self._expert_swaps = GatewayMetric.EXPERT_SWAPS.value.new_counter(registry)
        self._expert_bytes = GatewayMetric.EXPERT_BYTES.value.new_counter(registry)
        self._expert_pause = GatewayMetric.EXPERT_PAUSE.value.new_gauge(registry)
        self._longest_pause_s = 0.0
        self._scraping = asyncio.Lock()

    def observe_swap(self, swap: ExpertSwap) -> None:
        """Count two experts that changed places."""
        self._expert_swaps.inc()
        self._expert_bytes.inc(swap.read_bytes)
        self._longest_pause_s = max(self._longest_pause_s, swap.pause_s)
        self._expert_pause.set(self._longest_pause_s)

    async def scrape(self) -> bytes:
        """Return a scrape; one is made at a time."""
        async with self._scraping:
            # In a thread, which asks this loop: its answer would wait for itself here.
            return await asyncio.to_thread(exposition, self.registry)


class EngineCollector(Collector):
    """Collector that has every scrape read the engine, on its loop.

    `model` names the model, and `cache_dtype` the type of its KV cache.
    """

    def __init__(self, read: Callable[[], EngineReading], reader: LoopReader, *, model: str, cache_dtype: str) -> None:
        self._read = read
        self._reader = reader
        self._vllm = (model, _ENGINE)
        self._cache_dtype = cache_dtype

    def collect(self) -> Iterator[Metric]:
        """Yield what the engine and the group report now."""
        reading = self._reader.read(self._read, timeout_s=_SCRAPE_TIMEOUT_S)
        yield from self._engine(reading)
        yield from self._cache(reading)
        yield from _group(reading)
        yield from _placement(reading.topology)
        yield from rank_metrics(reading.topology.ranks)

    def _engine(self, reading: EngineReading) -> Iterator[Metric]:
        """Yield the metrics that vLLM has as well."""
        stats, latencies = reading.stats, reading.latencies
        asked = stats.prompt_tokens + stats.cached_tokens
        for metric, value in (
            (GatewayMetric.RUNNING, stats.running_requests),
            (GatewayMetric.WAITING, stats.waiting_requests),
            (GatewayMetric.CACHE_USAGE, stats.used_blocks / stats.num_blocks if stats.num_blocks else 0.0),
            (GatewayMetric.PROMPT_TOKENS, asked),
            (GatewayMetric.GENERATION_TOKENS, stats.generated_tokens),
            (GatewayMetric.PREFIX_QUERIES, asked),
            (GatewayMetric.PREFIX_HITS, stats.cached_tokens),
            (GatewayMetric.PREEMPTIONS, stats.preemptions),
            (GatewayMetric.DRAFTS, stats.proposals),
            (GatewayMetric.DRAFT_TOKENS, stats.proposed_tokens),
            (GatewayMetric.ACCEPTED_TOKENS, stats.accepted_tokens),
        ):
            yield metric.value.family((self._vllm, value))
        ended = [((*self._vllm, reason.name.lower()), number) for reason, number in latencies.ended.items()]
        yield GatewayMetric.SUCCESS.value.family(*ended)
        for metric, buckets in latencies.buckets.items():
            yield metric.value.histogram_family(self._vllm, counts=buckets.counts, total=buckets.total)

    def _cache(self, reading: EngineReading) -> Iterator[Metric]:
        topology, stats = reading.topology, reading.stats
        shape = (str(topology.block_size), str(topology.num_blocks), self._cache_dtype, _ENGINE)
        yield GatewayMetric.CACHE_CONFIG.value.family((shape, 1))
        yield GatewayMetric.LORA.value.family((("0", "", ""), 0))
        yield GatewayMetric.BLOCKS.value.family(((), stats.num_blocks))
        yield GatewayMetric.FREE_BLOCKS.value.family(((), stats.free_blocks))
        yield GatewayMetric.CACHED_BLOCKS.value.family(((), stats.cached_blocks))


def _group(reading: EngineReading) -> Iterator[Metric]:
    """Yield how the group stands."""
    topology = reading.topology
    for metric, value in (
        (GatewayMetric.STEPS, reading.stats.steps),
        (GatewayMetric.SPECULATION_GAIN, topology.speculation_gain),
        (GatewayMetric.READY, reading.ready),
        (GatewayMetric.EPOCH, topology.epoch),
        (GatewayMetric.RECOVERIES, reading.recoveries),
        (GatewayMetric.PAUSED, topology.paused_requests),
        (GatewayMetric.RESTS, topology.idle.rests),
        (GatewayMetric.SLEEPS, topology.idle.sleeps),
        (GatewayMetric.SLEEP_TIME, topology.idle.sleep_s),
        (GatewayMetric.WAKE_TIME, topology.idle.wake_s),
    ):
        yield metric.value.family(((), value))
    if topology.exchange:
        kind = ranks_pb2.ExchangeKind.Name(topology.exchange).removeprefix("EXCHANGE_KIND_")
        yield GatewayMetric.EXCHANGE.value.family(((kind,), 1))


def _placement(topology: admin_pb2.GetTopologyResponse) -> Iterator[Metric]:
    """Yield what was predicted of the placement, and what was measured; nothing before there is one."""
    if not topology.HasField("placement"):
        return
    placement = topology.placement
    yield GatewayMetric.PREDICTED.value.family(((), placement.predicted_tokens_per_second))
    if placement.step_time_ratio:
        yield GatewayMetric.MEASURED.value.family(((), placement.measured_tokens_per_second))
        yield GatewayMetric.STEP_RATIO.value.family(((), placement.step_time_ratio))
    rounds = [
        ((among, str(time.bytes)), time.seconds)
        for among, times in (("host", placement.host_times), ("device", placement.device_times))
        for time in times
    ]
    yield GatewayMetric.ROUND_TIME.value.family(*rounds)


def rank_metrics(ranks: Sequence[admin_pb2.RankStatus]) -> Iterator[Metric]:
    """Yield the metrics of each rank: where it is, what it holds, and what its steps take."""
    named = [(str(rank.place.rank), rank) for rank in ranks]
    yield GatewayMetric.RANK.value.family(*((_place(rank), rank.joined) for rank in ranks))
    yield GatewayMetric.RANK_MEMORY.value.family(*(sample for rank in ranks for sample in _memory(rank)))
    local = [
        ((name,), rank.local_memory_percent / 100) for name, rank in named if rank.HasField("local_memory_percent")
    ]
    yield GatewayMetric.RANK_LOCAL.value.family(*local)
    measured = [((name,), rank.memory_bandwidth) for name, rank in named if rank.memory_bandwidth]
    yield GatewayMetric.RANK_BANDWIDTH.value.family(*measured)
    yield GatewayMetric.RANK_READ.value.family(*(((name,), rank.decode_read_bytes) for name, rank in named))
    phases = [
        (name, phase, times)
        for name, rank in named
        for phase, times in (("decode", rank.decode), ("prefill", rank.prefill))
    ]
    yield GatewayMetric.RANK_STEPS.value.family(*(((name, phase), times.steps) for name, phase, times in phases))
    yield GatewayMetric.RANK_TIME.value.family(*(sample for each in phases for sample in _parts(*each)))


def _place(rank: admin_pb2.RankStatus) -> Sequence[str]:
    place = rank.place
    kind = place.device.kind
    device = ranks_pb2.DeviceKind.Name(kind).removeprefix("DEVICE_KIND_") if kind else ""
    return str(place.rank), place.pool, place.pod_name, device, ",".join(map(str, place.device.numa_nodes))


def _memory(rank: admin_pb2.RankStatus) -> Iterator[Sample]:
    name = str(rank.place.rank)
    for kind, held in (
        ("weights", rank.weight_bytes),
        ("kv", rank.kv_bytes),
        ("graphs", rank.graph_bytes),
        ("graphs_reserved", rank.graph_reserve_bytes),
    ):
        yield (name, kind), held


def _parts(name: str, phase: str, times: ranks_pb2.StepTimes) -> Iterator[Sample]:
    yield (name, phase, "compute"), times.seconds - times.exchange_s
    yield (name, phase, "exchange"), times.exchange_s
