"""Latencies: times of the requests that one engine served, in buckets, for metrics.

One observation is a bisection and two additions, since every token makes one. The engine's loop writes; a scrape takes
copies on that loop.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence

from hetero_api.metrics import GatewayMetric
from hetero_gateway.engine.request import Completion, FinishReason


class Buckets:
    """Observations of one histogram. A value equal to a bound belongs to the bucket below it."""

    __slots__ = ("_bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        """Observations of each bucket alone, the infinite one last."""
        self.total = 0.0
        """Sum of all values."""

    def observe(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self._bounds, value)] += 1
        self.total += value

    def copy(self) -> Buckets:
        """Return a copy that no later observation changes."""
        copied = Buckets(self._bounds)
        copied.counts, copied.total = self.counts.copy(), self.total
        return copied


class Latencies:
    """Histograms of an engine's requests, and its completions by reason of their end."""

    def __init__(self) -> None:
        self.buckets = {
            metric: Buckets(metric.value.buckets)
            for metric in (
                GatewayMetric.FIRST_TOKEN,
                GatewayMetric.INTER_TOKEN,
                GatewayMetric.E2E,
                GatewayMetric.QUEUE_TIME,
                GatewayMetric.PREFILL_TIME,
                GatewayMetric.DECODE_TIME,
                GatewayMetric.REQUEST_PROMPT,
                GatewayMetric.REQUEST_GENERATION,
            )
        }
        self.inter_token = self.buckets[GatewayMetric.INTER_TOKEN]
        self.ended: Counter[FinishReason] = Counter()

    def copy(self) -> Latencies:
        """Return a copy that no later request changes."""
        copied = Latencies()
        copied.buckets = {metric: buckets.copy() for metric, buckets in self.buckets.items()}
        copied.ended = self.ended.copy()
        return copied

    def first_token(self, completion: Completion, *, now: float) -> None:
        """Observe the first token of a request, which is that of its first completion."""
        request = completion.request
        if completion.index == 0:
            self.buckets[GatewayMetric.FIRST_TOKEN].observe(now - request.arrival_s)

    def end(self, completion: Completion, reason: FinishReason, *, first_token_s: float | None, now: float) -> None:
        """Observe a completion that ends; of one without a token of this stream, only the reason counts."""
        self.ended[reason] += 1
        request = completion.request
        if first_token_s is None:
            return
        self.buckets[GatewayMetric.E2E].observe(now - request.arrival_s)
        self.buckets[GatewayMetric.DECODE_TIME].observe(now - first_token_s)
        self.buckets[GatewayMetric.REQUEST_PROMPT].observe(request.num_prompt_tokens)
        self.buckets[GatewayMetric.REQUEST_GENERATION].observe(completion.num_output_tokens)
        if request.first_scheduled_s is not None:
            self.buckets[GatewayMetric.QUEUE_TIME].observe(request.first_scheduled_s - request.arrival_s)
            self.buckets[GatewayMetric.PREFILL_TIME].observe(first_token_s - request.first_scheduled_s)
