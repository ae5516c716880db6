"""Metrics of every program: the one place for their names, labels and texts.

Programs make their metrics from these entries, docs/metrics.md is generated from them, and dashboards and alerts are
tested against them. What vLLM has as well has its name and its labels (`vllm:...`), so that dashboards and routers that
know vLLM's metrics work unchanged; what only this system has begins with `hetero_`.

Labels are bounded: ranks, pools, phases, outcomes and the like. None holds what a caller sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

VLLM: Final = ("model_name", "engine")
"""Labels of vLLM's metrics. A gateway has one model, and one engine, "0"."""
BY_RANK: Final = ("rank",)

_STEP_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_TOKEN_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0)
_FIRST_S: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_REQUEST_S: Final = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_TOKENS: Final = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5)
_RECONCILE_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_WAIT_S: Final = (0.001, 0.01, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


EXPOSITION_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


def exposition(registry: CollectorRegistry) -> bytes:
    """Return a scrape of the registry in the text format, of type EXPOSITION_TYPE.

    Always in this format: in others prometheus_client writes the colon of `vllm:` as an underscore for scrapers that
    do not ask for UTF-8 names, as Prometheus 2 does not.
    """
    return generate_latest(registry)


class MetricType(Enum):
    """Types of metrics, as Prometheus names them."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """A metric. A counter's `name` lacks the suffix `_total`, which its samples have."""

    name: str
    type: MetricType
    text: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets, without the infinite one."""

    @property
    def exposed(self) -> str:
        """Name as queries write it."""
        return f"{self.name}_total" if self.type is MetricType.COUNTER else self.name

    def family(self, *samples: tuple[Sequence[str], float]) -> Metric:
        """Return a family of samples, each its labels' values and its value; of a gauge or counter."""
        kind = CounterMetricFamily if self.type is MetricType.COUNTER else GaugeMetricFamily
        family = kind(self.name, self.text, labels=self.labels)
        for values, value in samples:
            family.add_metric(values, value)
        return family

    def histogram_family(self, values: Sequence[str], *, counts: Iterable[int], total: float) -> Metric:
        """Return a histogram of one set of labels; `counts` a bucket, the infinite one last, and the sum."""
        family = HistogramMetricFamily(self.name, self.text, labels=self.labels)
        buckets, below = [], 0
        for bound, count in zip((*map(str, self.buckets), "+Inf"), counts, strict=True):
            below += count
            buckets.append((bound, float(below)))
        family.add_metric(values, buckets=buckets, sum_value=total)
        return family

    def new_counter(self, registry: CollectorRegistry) -> Counter:
        """Return a counter that is written where things happen."""
        return Counter(self.name, self.text, self.labels, registry=registry)

    def new_gauge(self, registry: CollectorRegistry) -> Gauge:
        """Return a gauge that is written, or that reads a function."""
        return Gauge(self.name, self.text, self.labels, registry=registry)

    def new_histogram(self, registry: CollectorRegistry) -> Histogram:
        """Return a histogram that is written where things happen."""
        return Histogram(self.name, self.text, self.labels, buckets=self.buckets, registry=registry)


def _gauge(name: str, text: str, labels: tuple[str, ...] = ()) -> MetricSpec:
    return MetricSpec(name, MetricType.GAUGE, text, labels)


def _counter(name: str, text: str, labels: tuple[str, ...] = ()) -> MetricSpec:
    return MetricSpec(name, MetricType.COUNTER, text, labels)


def _histogram(name: str, text: str, buckets: tuple[float, ...], labels: tuple[str, ...] = ()) -> MetricSpec:
    return MetricSpec(name, MetricType.HISTOGRAM, text, labels, buckets)


class GatewayMetric(Enum):
    """Metrics of a gateway, on its HTTP port and on the port of its probes."""

    RUNNING = _gauge("vllm:num_requests_running", "Requests that a step works on.", VLLM)
    WAITING = _gauge("vllm:num_requests_waiting", "Requests that wait, for the first time or preempted.", VLLM)
    CACHE_USAGE = _gauge("vllm:kv_cache_usage_perc", "Share of KV blocks that requests refer to, 0 to 1.", VLLM)
    CACHE_CONFIG = _gauge(
        "vllm:cache_config_info", "Always 1; the KV cache is in the labels.",
        ("block_size", "num_gpu_blocks", "cache_dtype", "engine"),
    )  # fmt: skip
    LORA = _gauge(
        "vllm:lora_requests_info", "Always 0: Admin.ListAdapters says which adapters are loaded.",
        ("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
    )  # fmt: skip
    PROMPT_TOKENS = _counter("vllm:prompt_tokens", "Prompt tokens, computed or found in the prefix cache.", VLLM)
    GENERATION_TOKENS = _counter("vllm:generation_tokens", "Tokens generated.", VLLM)
    PREFIX_QUERIES = _counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", VLLM)
    PREFIX_HITS = _counter("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", VLLM)
    PREEMPTIONS = _counter("vllm:num_preemptions", "Requests preempted for want of KV blocks.", VLLM)
    DRAFTS = _counter("vllm:spec_decode_num_drafts", "Proposals: one of a request in one step.", VLLM)
    DRAFT_TOKENS = _counter("vllm:spec_decode_num_draft_tokens", "Tokens that were proposed to ranks.", VLLM)
    ACCEPTED_TOKENS = _counter(
        "vllm:spec_decode_num_accepted_tokens", "Proposed tokens that were drawn in their place.", VLLM
    )
    SUCCESS = _counter(
        "vllm:request_success", "Completions that ended, by reason: stop, length or abort.", (*VLLM, "finished_reason")
    )
    FIRST_TOKEN = _histogram(
        "vllm:time_to_first_token_seconds", "A request's admission to its first token.", _FIRST_S, VLLM
    )
    INTER_TOKEN = _histogram(
        "vllm:inter_token_latency_seconds", "One token of a completion to the next one.", _TOKEN_S, VLLM
    )
    E2E = _histogram(
        "vllm:e2e_request_latency_seconds", "A request's admission to the end of its completion.", _REQUEST_S, VLLM
    )
    QUEUE_TIME = _histogram(
        "vllm:request_queue_time_seconds", "A request's admission to its first step.", _REQUEST_S, VLLM
    )
    PREFILL_TIME = _histogram(
        "vllm:request_prefill_time_seconds", "A request's first step to its first token.", _REQUEST_S, VLLM
    )
    DECODE_TIME = _histogram(
        "vllm:request_decode_time_seconds", "A completion's first token to its end.", _REQUEST_S, VLLM
    )
    REQUEST_PROMPT = _histogram("vllm:request_prompt_tokens", "Prompt tokens of a request.", _TOKENS, VLLM)
    REQUEST_GENERATION = _histogram("vllm:request_generation_tokens", "Tokens of a completion.", _TOKENS, VLLM)

    REQUESTS = _counter(
        "hetero_requests", "Generate calls that ended, by outcome: a finish reason or a gRPC status code.", ("outcome",)
    )
    HTTP_CALLS = _counter(
        "hetero_http_calls",
        "Calls of the OpenAI endpoint for completions that ended, by HTTP status; 499: the client went away.",
        ("outcome",),
    )
    BLOCKS = _gauge("hetero_num_blocks", "KV blocks, null block excluded.")
    FREE_BLOCKS = _gauge("hetero_free_blocks", "KV blocks that no request refers to.")
    CACHED_BLOCKS = _gauge("hetero_cached_blocks", "Free KV blocks whose content can be found by a prefix lookup.")
    STEPS = _counter("hetero_steps", "Steps done.")
    SPECULATION_GAIN = _gauge(
        "hetero_speculation_gain",
        "Tokens per second of late steps with proposals, times those of steps without; 0 before it was measured.",
    )
    STEP_TIME = _histogram("hetero_step_seconds", "A step, from the plan's sending to its result.", _STEP_S)
    READY = _gauge("hetero_ready", "1 while requests are served.")
    EPOCH = _gauge("hetero_epoch", "The group's epoch.")
    RECOVERIES = _counter(
        "hetero_recoveries", "Epochs that were lost and followed by another on which requests went on."
    )
    PAUSED = _gauge("hetero_paused_requests", "Requests that wait for the next epoch, to go on in it.")
    RESTS = _gauge("hetero_resting", "1 while the group has given memory up for want of requests; the next wakes it.")
    SLEEPS = _counter("hetero_idle_sleeps", "Times that the group gave memory up for want of requests.")
    SLEEP_TIME = _gauge("hetero_idle_sleep_seconds", "Seconds that it took the last time to give memory up.")
    WAKE_TIME = _gauge("hetero_idle_wake_seconds", "Seconds that it took the last time to wake.")
    EXCHANGE = _gauge("hetero_exchange_info", "Always 1; how ranks exchange tensors in host memory.", ("kind",))
    ROUND_TIME = _gauge(
        "hetero_exchange_seconds", "An all-reduce, as measured when the group formed: among host or device ranks.",
        ("among", "bytes"),
    )  # fmt: skip
    PREDICTED = _gauge(
        "hetero_placement_predicted_tokens_per_second",
        "Tokens a second that the placement was predicted to decode, for the workload's streams.",
    )
    MEASURED = _gauge(
        "hetero_placement_measured_tokens_per_second",
        "Tokens a second for the same streams, by the time of recent steps that only decoded.",
    )
    STEP_RATIO = _gauge(
        "hetero_placement_step_time_ratio", "Measured over predicted seconds of recent steps that only decoded."
    )
    EXPERT_SWAPS = _counter(
        "hetero_expert_swaps", "Pairs of experts that changed places, by how often they were chosen."
    )
    EXPERT_BYTES = _counter("hetero_expert_swap_read_bytes", "Bytes of experts that ranks read to change places.")
    EXPERT_PAUSE = _gauge(
        "hetero_expert_swap_longest_pause_seconds",
        "Longest time that a command to read experts, or to go over to them, took between two steps.",
    )
    RANK = _gauge(
        "hetero_rank_info", "1 while the rank has joined; where it is.", ("rank", "pool", "pod", "device", "numa")
    )
    RANK_MEMORY = _gauge(
        "hetero_rank_memory_bytes",
        "Memory of a rank: its weights, its KV cache, what graphs of steps took, and what is kept for them.",
        (*BY_RANK, "kind"),
    )
    RANK_LOCAL = _gauge(
        "hetero_rank_local_memory_ratio", "Share of a bound rank's memory on its own NUMA nodes, 0 to 1.", BY_RANK
    )
    RANK_STEPS = _counter(
        "hetero_rank_phase_steps", "Steps of a rank in this epoch: decode (nothing else in them) or prefill.",
        (*BY_RANK, "phase"),
    )  # fmt: skip
    RANK_TIME = _counter(
        "hetero_rank_step_seconds",
        "Seconds of these steps: compute, or exchange (bytes moved, sums, and waits for other ranks).",
        (*BY_RANK, "phase", "part"),
    )
    RANK_READ = _counter(
        "hetero_rank_read_bytes",
        "Bytes of weights that a rank's decode steps read in this epoch, by the placement's arithmetic.",
        BY_RANK,
    )
    RANK_BANDWIDTH = _gauge(
        "hetero_rank_memory_bandwidth_bytes_per_second",
        "Memory bandwidth of a rank, as measured while all ranks read at once.",
        BY_RANK,
    )


class RankMetric(Enum):
    """Metrics of a rank pod, on the port of its probes."""

    RUNNING = _gauge("hetero_rank_running", "1 while the rank's process runs.", ("local_rank",))
    SERVING = _gauge("hetero_rank_serving", "1 while the rank serves.", ("local_rank",))
    EPOCH = _gauge("hetero_rank_epoch", "The rank's epoch.", ("local_rank",))
    STEPS = _counter("hetero_rank_steps", "Steps done by the rank's process.", ("local_rank",))
    RESTARTS = _counter("hetero_rank_restarts", "Restarts of the rank in its pod.", ("local_rank",))


class OperatorMetric(Enum):
    """Metrics of the operator, on its metrics port."""

    RECONCILES = _counter("hetero_operator_reconciles", "Looks at a resource: ok, error or absent.", ("result",))
    RECONCILE_TIME = _histogram("hetero_operator_reconcile_seconds", "A look at a resource.", _RECONCILE_S)
    ERRORS = _counter(
        "hetero_operator_reconcile_errors", "Looks that did not do all they wanted, by reason.", ("reason",)
    )
    RETRIES = _counter("hetero_operator_queue_retries", "Resources put back into the queue because something failed.")
    QUEUE_TIME = _histogram("hetero_operator_queue_seconds", "A resource's wait in the queue.", _WAIT_S)
    API_CALLS = _counter(
        "hetero_operator_api_requests", "Calls of the Kubernetes API, by verb and code.", ("verb", "code")
    )
    WATCH_RESTARTS = _counter(
        "hetero_operator_watch_restarts", "Watches started again, by kind and reason.", ("kind", "reason")
    )
    STATUS_WRITES = _counter("hetero_operator_status_writes", "Statuses written.")
    LEADER = _gauge("hetero_operator_leader", "1 while this process holds the Lease.")
    QUEUE_DEPTH = _gauge("hetero_operator_queue_depth", "Resources that wait to be looked at.")
    QUEUE_OLDEST = _gauge("hetero_operator_queue_oldest_seconds", "How long the first of them has waited.")
    RESOURCES = _gauge("hetero_operator_resources", "HeteroInference resources that are known.")
    RECONCILED = _gauge("hetero_operator_resources_reconciled", "Of them, those looked at since the process began.")
    CACHED = _gauge("hetero_operator_cached_objects", "Objects in memory, by kind.", ("kind",))
