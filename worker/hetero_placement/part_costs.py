"""Costs of the parts of a model on one rank, and of moving activations between ranks.

A part's cost comes from the rank's measurements, else from its bandwidth and FLOP rate. Costs are linear in units
(heads, 64 columns, experts, 64 vocabulary rows): a part that a rank owns nothing of is free. Measured points are joined
by lines over rows, and over context; below the first point its value holds, beyond the last the line goes on. Points of
another arithmetic type, or with another type of cached keys and values, are scaled by the ratio that the rates give for
the two.

By rates, a unit takes the longer of reading it (weights once, keys and values a row) and computing it. Where no FLOP
rate is known, computing takes no time.

Between CPU ranks, and between the leader of the GPU ranks and CPU ranks, tensors go through host memory at the times
measured for an all-reduce of all ranks; one way is half of it. Each round adds the wait of ranks for one another, since
none takes the same time twice. Among GPU ranks the device group's times count. A GPU rank's tensors are also copied to
the host and back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from statistics import NormalDist
from typing import Final, NamedTuple

from hetero_api.errors import PlanError
from hetero_api.kept_weights import KeptWeights
from hetero_api.model_config import ModelConfig
from hetero_placement.hardware import CostPoint, Hardware, Part, Speeds
from hetero_placement.shard_plans import UNIT
from hetero_placement.steps import Step

_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "int8": 1}
_ROUTER_BYTES: Final = 4
"""At most: routers are as wide as they are stored."""
_NORMAL: Final = NormalDist()
_SAME: Final = 1e-12
"""Part of two times by which their difference varies that counts as none."""


def element_bytes(dtype: str) -> int:
    """Return the bytes of an element. Raises PlanError for an unknown type."""
    try:
        return _BYTES[dtype]
    except KeyError:
        raise PlanError(f"dtype {dtype!r} is not known; known: {', '.join(_BYTES)}") from None


class PartTime(NamedTuple):
    """Seconds: some whatever the units, and some a unit."""

    fixed_s: float
    unit_s: float

    def of(self, units: float) -> float:
        """Return the seconds of so many units; 0 for none."""
        return self.fixed_s + self.unit_s * units if units else 0.0

    def plus(self, other: PartTime) -> PartTime:
        """Return the sum of both."""
        return PartTime(self.fixed_s + other.fixed_s, self.unit_s + other.unit_s)


_FREE: Final = PartTime(0.0, 0.0)


class PartCosts:
    """Costs of one rank. `dtype` is the arithmetic type in force, `weight_bits` the widths that it keeps weights in.

    `cache_dtype`: type of cached keys and values; "": `dtype`.
    """

    def __init__(
        self,
        config: ModelConfig,
        speeds: Speeds,
        *,
        dtype: str,
        cache_dtype: str = "",
        weight_bits: frozenset[int] = frozenset(),
    ) -> None:
        self._speeds = speeds
        self._dtype = dtype
        self._cache_dtype = cache_dtype or dtype
        self._measured = {part: [p for p in speeds.costs if p.part is part] for part in Part}
        self._rates = Rates(config, speeds, weight_bits)
        self.attention = cache(self._attention)
        self.mlp = cache(self._mlp)
        self.experts = cache(self._experts)
        self.head = cache(self._head)

    def _attention(self, step: Step, window: int | None) -> PartTime:
        """Return the time of a layer's attention half; unit: a KV head."""
        decode = self._decode(step.decode_rows, _seen(step.context, window)) if step.decode_rows else _FREE
        return decode.plus(self._prefill(step, window)) if step.spans else decode

    def _mlp(self, rows: float) -> PartTime:
        """Return the time of a dense layer's MLP half; unit: 64 columns."""
        return self._of(Part.MLP, rows, self._rates.mlp)

    def _experts(self, rows: float) -> PartTime:
        """Return the time of a layer's half of experts, rows routed evenly; unit: an expert."""
        return self._of(Part.EXPERTS, rows, self._rates.experts)

    def _head(self, rows: float) -> PartTime:
        """Return the time of the output head and the draw; unit: 64 vocabulary rows."""
        return self._of(Part.HEAD, rows, self._rates.head)

    def step_s(self, rows: float) -> float:
        """Return the seconds of a step beside layers and head; 0 unless measured."""
        points = self._measured[Part.STEP]
        return self._speeds.turnaround_s + (_over_rows(points, rows).fixed_s if points else 0.0)

    def _of(self, part: Part, rows: float, by_rates: Callable[[str, float], PartTime]) -> PartTime:
        points = self._measured[part]
        if not points:
            return by_rates(self._dtype, rows)
        return self._scaled(_over_rows(points, rows), lambda dtype, _: by_rates(dtype, rows), cache_dtype=self._dtype)

    def _decode(self, rows: float, context: float) -> PartTime:
        points = self._measured[Part.ATTENTION_DECODE]
        if not points:
            return self._rates.decode(self._dtype, rows, context, self._cache_dtype)
        contexts = sorted({point.context for point in points})
        lines = [(c, _over_rows([p for p in points if p.context == c], rows)) for c in contexts]
        return self._scaled(
            _on_line(lines, context), lambda dtype, cached: self._rates.decode(dtype, rows, context, cached),
            cache_dtype=self._cache_dtype,
        )  # fmt: skip

    def _prefill(self, step: Step, window: int | None) -> PartTime:
        rows = sum(span.rows for span in step.spans)
        pairs = sum(span.rows * _seen(span.context + span.rows / 2, window) for span in step.spans)
        points = self._measured[Part.ATTENTION_PREFILL]
        if not points:
            return self._rates.prefill(self._dtype, rows, pairs, self._cache_dtype)
        # Measured with one prompt of as many rows: pairs of row and token attended to are rows² / 2.
        measured, pair_s = _over_rows(points, rows), _pair_s(points)
        unit_s = max(measured.unit_s + pair_s * (pairs - rows * rows / 2), 0.1 * measured.unit_s)
        time = PartTime(measured.fixed_s, unit_s)
        return self._scaled(
            time, lambda dtype, cached: self._rates.prefill(dtype, rows, pairs, cached), cache_dtype=self._cache_dtype
        )

    def _scaled(self, time: PartTime, by_rates: Callable[[str, str], PartTime], *, cache_dtype: str) -> PartTime:
        """Return a measured time in the types in force. It was measured with a cache of the arithmetic type."""
        measured_in = self._speeds.costs_dtype
        if not measured_in or measured_in == self._dtype == cache_dtype:
            return time
        ratio = by_rates(self._dtype, cache_dtype).unit_s / by_rates(measured_in, measured_in).unit_s
        return PartTime(time.fixed_s, time.unit_s * ratio)


class Rates:
    """Costs from bandwidth and FLOP rate alone."""

    def __init__(self, config: ModelConfig, speeds: Speeds, weight_bits: frozenset[int] = frozenset()) -> None:
        self._config = config.of_layer(0)
        """Layers with other KV heads are taken to cost as much."""
        self._speeds = speeds
        self._weight_bits = weight_bits

    def decode(self, dtype: str, rows: float, context: float, cache_dtype: str = "") -> PartTime:
        """Return the time of rows that decode, each over `context` tokens; unit: a KV head."""
        pairs = rows * context
        return self._attention(dtype, rows, cache_dtype or dtype, tokens=pairs, flops=self._flops_of(pairs))

    def prefill(self, dtype: str, rows: float, pairs: float, cache_dtype: str = "") -> PartTime:
        """Return the time of rows of prompts with `pairs` pairs of query and key; unit: a KV head."""
        tokens, flops, latent = pairs / rows, self._flops_of(pairs), self._config.latent
        if latent is not None and self._speeds.to_device_bandwidth:
            # As `attention.base.LatentExpansion` chooses: the rows' own tokens take no more products than their queries
            # and results do otherwise.
            before = max(0.0, tokens - rows / 2)
            expanding = 2 * latent.by_head_elements * before
            flops = min(flops, 2 * (latent.query_dim + latent.value_dim) * pairs + expanding)
        return self._attention(dtype, rows, cache_dtype or dtype, tokens=tokens, flops=flops)

    def mlp(self, dtype: str, rows: float) -> PartTime:
        """Return the time of a dense MLP; unit: 64 columns."""
        params = UNIT * self._config.mlp_params_per_column
        read = UNIT * self._kept(dtype).column_bytes(hidden=self._config.hidden_size)
        return PartTime(0.0, self._seconds(dtype, read, 2 * params * rows))

    def experts(self, dtype: str, rows: float) -> PartTime:
        """Return the time of experts, each read if a row is routed to it; unit: an expert."""
        experts = self._config.experts
        if experts is None:
            return _FREE
        part = experts.per_token / experts.number
        params = self._config.params_per_expert
        weights = self._kept(dtype).expert_bytes(hidden=self._config.hidden_size, width=experts.intermediate_size)
        read = weights * active_share(part, rows)
        router = self._config.hidden_size * experts.number
        fixed = self._seconds(dtype, router * _ROUTER_BYTES, 2 * router * rows)
        return PartTime(fixed, self._seconds(dtype, read, 2 * params * rows * part) / self._speeds.expert_share)

    def head(self, dtype: str, rows: float) -> PartTime:
        """Return the time of the output head; unit: 64 vocabulary rows."""
        params = UNIT * self._config.hidden_size
        read = UNIT * self._kept(dtype).vocabulary.row_bytes(self._config.hidden_size)
        return PartTime(0.0, self._seconds(dtype, read, 2 * params * rows))

    def _flops_of(self, pairs: float) -> float:
        """Return what attention of a KV head takes for pairs of a row and a token that it attends to."""
        return 4 * self._config.group_size * self._config.head_dim * pairs

    def _attention(self, dtype: str, rows: float, cache_dtype: str, *, tokens: float, flops: float) -> PartTime:
        """`tokens` whose keys and values are read, `flops` beside projections."""
        config = self._config
        params = config.attention_params_per_kv_head
        heads = config.num_kv_heads
        cached = config.cached_elements(heads) / heads * element_bytes(cache_dtype)
        cached *= len(config.attention_layers) / config.num_layers
        read = self._kept(dtype).mean_head_bytes(config) + tokens * cached
        beside = config.attention_params_beside
        fixed = self._seconds(dtype, beside * element_bytes(dtype), 2 * beside * rows)
        return PartTime(fixed, self._seconds(dtype, read, 2 * params * rows + flops))

    def _kept(self, dtype: str) -> KeptWeights:
        return KeptWeights(self._config.weights, element_bytes(dtype), self._weight_bits)

    def _seconds(self, dtype: str, num_bytes: float, flops: float) -> float:
        rates = self._speeds.flops
        rate = rates.get(dtype) or rates.get("float32")
        return max(num_bytes / self._speeds.memory_bandwidth, flops / rate if rate else 0.0)


def active_share(chosen: float, rows: float) -> float:
    """Return the expected share of experts that at least one of `rows` rows chooses, each with probability `chosen`."""
    return float(1.0 - (1.0 - chosen) ** rows)


def expected_most(means: Sequence[float], covariances: Sequence[Sequence[float]]) -> float:
    """Return the expected largest of some times that vary together: two at a time, the larger taken as normal.

    Clark, The greatest of a finite set of random variables (1961).
    """
    mean, variance, row = means[0], covariances[0][0], list(covariances[0])
    for i, other in enumerate(means[1:], 1):
        apart = math.sqrt(max(0.0, variance + covariances[i][i] - 2 * row[i]))
        if apart <= _SAME * (mean + other):
            part, density = float(mean >= other), 0.0
        else:
            distance = (mean - other) / apart
            part, density = _NORMAL.cdf(distance), _NORMAL.pdf(distance)
        square = (mean**2 + variance) * part + (other**2 + covariances[i][i]) * (1 - part)
        square += (mean + other) * apart * density
        mean = mean * part + other * (1 - part) + apart * density
        variance = max(0.0, square - mean**2)
        row = [mine * part + theirs * (1 - part) for mine, theirs in zip(row, covariances[i], strict=True)]
    return mean


def _seen(context: float, window: int | None) -> float:
    return context if window is None else min(context, window)


def _over_rows(points: Sequence[CostPoint], rows: float) -> PartTime:
    line = sorted((point.rows, PartTime(point.fixed_s, point.unit_s)) for point in points)
    return _on_line(line, rows)


def _on_line(line: Sequence[tuple[int, PartTime]], at: float) -> PartTime:
    """Between points by a line, before the first its value, beyond the last on along a line that does not fall."""
    if at <= line[0][0]:
        return line[0][1]
    if len(line) == 1:
        at_known, time = line[0]
        return PartTime(time.fixed_s, time.unit_s * at / at_known) if at_known else time
    index = next((i for i in range(1, len(line)) if at <= line[i][0]), len(line) - 1)
    (low, before), (high, after) = line[index - 1], line[index]
    part = (at - low) / (high - low)
    return PartTime(*(_between(b, a, part) for b, a in zip(before, after, strict=True)))


def _between(before: float, after: float, part: float) -> float:
    return before + (after - before) * part if part <= 1 else after + max(0.0, after - before) * (part - 1)


def _pair_s(points: Sequence[CostPoint]) -> float:
    """Seconds of one head and one pair of row and token, from how measured times bend over the rows."""
    if len(points) < 2:
        return 0.0
    *_, low, high = sorted(points, key=lambda point: point.rows)
    bend = (high.unit_s / high.rows - low.unit_s / low.rows) / (high.rows - low.rows)
    return max(0.0, 2 * bend)


class ExchangeCosts:
    """Seconds by ranks and bytes."""

    def __init__(self, hardware: Hardware) -> None:
        self._ranks = hardware.ranks
        self._host = hardware.host_exchange
        self._device = hardware.device_exchange
        meetings = [rank.speeds.meeting_s for rank in hardware.ranks if not rank.is_gpu]
        # Who is fastest waits longest, and that is in what the slowest takes.
        self._wait_s = max(0.0, min(meetings, default=0.0) - self._host.seconds(0))
        """Seconds that ranks wait for one another before a round."""

    def among(self, ranks: Sequence[int], num_bytes: float) -> float:
        """Return the seconds of an all-reduce: GPU ranks sum among themselves, their first one exchanges with CPU
        ranks.
        """
        if len(ranks) < 2:
            return 0.0
        gpus = [rank for rank in ranks if self._is_gpu(rank)]
        seconds = self._device.seconds(num_bytes) if len(gpus) > 1 else 0.0
        if len(gpus) == len(ranks):
            return seconds
        staged = self.from_device_s(gpus[0], num_bytes) + self.to_device_s(gpus[0], num_bytes) if gpus else 0.0
        return seconds + staged + self._meeting_s(num_bytes)

    def there_s(self, source: int, receivers: Sequence[int], num_bytes: float) -> float:
        """One rank sends the same to some."""
        if self._is_gpu(source) and all(map(self._is_gpu, receivers)):
            return self._device.seconds(num_bytes) / 2
        slowest = max((self.to_device_s(rank, num_bytes) for rank in receivers), default=0.0)
        return self.from_device_s(source, num_bytes) + self._meeting_s(num_bytes) / 2 + slowest

    def small_s(self, num_bytes: float) -> float:
        """Return the seconds of a round of the whole group over a few bytes that are in host memory already."""
        return self._meeting_s(num_bytes) if len(self._ranks) > 1 else 0.0

    def from_device_s(self, rank: int, num_bytes: float) -> float:
        """To host memory; 0 where it is there."""
        speeds = self._ranks[rank].speeds
        if not self._is_gpu(rank):
            return 0.0
        return speeds.device_latency_s / 2 + _transfer(num_bytes, speeds.from_device_bandwidth)

    def to_device_s(self, rank: int, num_bytes: float) -> float:
        """From host memory; 0 where it stays there."""
        speeds = self._ranks[rank].speeds
        if not self._is_gpu(rank):
            return 0.0
        return speeds.device_latency_s / 2 + _transfer(num_bytes, speeds.to_device_bandwidth)

    def _meeting_s(self, num_bytes: float) -> float:
        """Return the seconds of a round on the host, with the wait of ranks for one another before it."""
        return self._host.seconds(num_bytes) + self._wait_s

    def _is_gpu(self, rank: int) -> bool:
        return self._ranks[rank].is_gpu


def _transfer(num_bytes: float, bandwidth: float) -> float:
    return num_bytes / bandwidth if bandwidth else 0.0
