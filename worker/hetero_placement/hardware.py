"""How fast the ranks of a group are, and what lies between them: what a placement is computed from.

Measured by the ranks (`Hello`, `Formed`) or assumed (assumed_hardware). Speeds are those that a rank reaches while all
the others work too, since it is measured that way; a plan that leaves ranks idle may therefore be faster than told.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from functools import cached_property
from statistics import median
from typing import Final

from hetero_api.spec_pools import PoolType
from hetero_api.v1 import ranks_pb2


class Part(Enum):
    """Parts of a model whose cost is known by measurement; units as in ranks.proto's ModelPart."""

    ATTENTION_DECODE = ranks_pb2.MODEL_PART_ATTENTION_DECODE
    ATTENTION_PREFILL = ranks_pb2.MODEL_PART_ATTENTION_PREFILL
    MLP = ranks_pb2.MODEL_PART_MLP
    EXPERTS = ranks_pb2.MODEL_PART_EXPERTS
    HEAD = ranks_pb2.MODEL_PART_HEAD
    STEP = ranks_pb2.MODEL_PART_STEP


@dataclass(frozen=True, slots=True)
class CostPoint:
    """A part with `units` units takes fixed_s + units · unit_s seconds, in a step of `rows` rows."""

    part: Part
    rows: int
    context: int
    """Tokens that each row attends to, for ATTENTION_DECODE; 0 elsewhere."""
    fixed_s: float
    unit_s: float


@dataclass(frozen=True)
class Speeds:
    """How fast a device is. Bandwidths in bytes a second."""

    memory_bandwidth: float
    flops: Mapping[str, float] = field(default_factory=dict)
    """FLOP a second of a large matrix product, by arithmetic type."""
    costs: tuple[CostPoint, ...] = ()
    costs_dtype: str = ""
    """Arithmetic type of `costs`."""
    to_device_bandwidth: float = 0.0
    """From host memory to the device's; 0 where they are the same."""
    from_device_bandwidth: float = 0.0
    device_latency_s: float = 0.0
    """Seconds of the smallest copy from the device and back."""
    lone_memory_bandwidth: float = 0.0
    """Bandwidth of a rank that reads while the others do not; 0 where that is not known."""
    lone_gain: float = 0.0
    """How many times as fast it decodes one row while the others are idle; 0 where that was not measured."""
    meeting_s: float = 0.0
    """Seconds of a round of one row on the host after half a layer, with the wait for others; 0: not measured."""
    turnaround_s: float = 0.0
    """From its word to the gateway to the answer, once a step; 0 where there is no gateway, or it was not measured."""
    expert_share: float = 1.0
    """Part of the bandwidth and of the FLOP rate that a layer of experts reaches, where `costs` does not say."""

    @cached_property
    def alone(self) -> Speeds:
        """While the other ranks of the group are idle: what memory sets the pace of is faster, arithmetic is not.

        The time that a part's arithmetic takes follows from its points of many rows, which are bound by nothing else.
        """
        gain = self.lone_gain or self.lone_memory_bandwidth / (self.memory_bandwidth or math.inf)
        if gain <= 1.0:
            return self
        row_s: dict[Part, float] = {}
        for point in self.costs:
            row_s[point.part] = min(point.unit_s / max(1, point.rows), row_s.get(point.part, math.inf))
        costs = tuple(
            replace(point, unit_s=min(point.unit_s, max(point.unit_s / gain, row_s[point.part] * point.rows)))
            for point in self.costs
        )
        bandwidth = max(self.memory_bandwidth, self.lone_memory_bandwidth)
        return replace(self, memory_bandwidth=bandwidth, costs=costs, lone_memory_bandwidth=0.0, lone_gain=0.0)

    @classmethod
    def from_proto(cls, message: ranks_pb2.DeviceSpeeds) -> Speeds:
        """Costs of parts that this version does not know are left out."""
        known = {part.value for part in Part}
        return cls(
            flops={rate.dtype: rate.flops for rate in message.matmul},
            costs=tuple(
                CostPoint(Part(cost.part), cost.rows, cost.context, cost.fixed_s, cost.unit_s)
                for cost in message.costs
                if cost.part in known
            ),
            costs_dtype=message.costs_dtype,
            **{name: getattr(message, name) for name in _NUMBERS if name != "expert_share"},
        )


_NUMBERS: Final = tuple(field.name for field in fields(Speeds) if field.type == "float")
"""Names of the numbers; a rank reports all but `expert_share`, in whose place it measures."""


@dataclass(frozen=True, slots=True)
class RankHardware:
    """One rank's. Ranks of one `pool`, kind and number of cores are taken as equally fast."""

    kind: PoolType
    host: str
    """Same for ranks that share a machine."""
    memory_bytes: int
    """Bytes it may use for weights, KV cache and workspace, its runtime included."""
    speeds: Speeds
    pool: str = ""
    cores: int = 1
    runtime_bytes: int = 0
    """Bytes of it that are taken however little the rank owns, measured with its group; 0: not known."""
    gather_bytes: int = 0
    """Most bytes that a step's attention gathers on a rank that holds KV heads."""
    weight_bits: frozenset[int] = frozenset()
    """Widths in which it keeps weights that are stored so; it widens others to the arithmetic type."""

    @property
    def is_gpu(self) -> bool:
        """True if it computes on a GPU."""
        return self.kind == PoolType.GPU

    @classmethod
    def from_report(
        cls,
        report: ranks_pb2.DeviceReport,
        *,
        host: str,
        pool: str,
        cores: int = 1,
        gpu_share: float = 1.0,
        formed: ranks_pb2.Formed | None = None,
    ) -> RankHardware:
        """Read a rank's Hello, and its report when the group formed; `gpu_share`: the part of a GPU's memory it may
        use.
        """
        kind = PoolType.GPU if report.kind == ranks_pb2.DEVICE_KIND_CUDA else PoolType.CPU
        memory = int(report.memory_bytes * gpu_share) if kind == PoolType.GPU else report.memory_bytes
        needs = formed or ranks_pb2.Formed()
        speeds = Speeds.from_proto(report.speeds)
        fixed = needs.runtime_bytes, needs.gather_bytes
        return cls(kind, host, memory, speeds, pool, cores, *fixed, weight_bits=frozenset(needs.weight_bits))


@dataclass(frozen=True, slots=True)
class ExchangeSpeeds:
    """Times of an all-reduce: (bytes, seconds), ascending in bytes; () where nothing is known or needed.

    A number for all sizes is one point.
    """

    points: tuple[tuple[int, float], ...] = ()

    @classmethod
    def from_protos(cls, times: Iterable[ranks_pb2.ExchangeTime]) -> ExchangeSpeeds:
        """Read measured times, in any order."""
        return cls(tuple(sorted((time.bytes, time.seconds) for time in times)))

    @classmethod
    def of_rates(cls, latency_s: float, bandwidth: float | None = None) -> ExchangeSpeeds:
        """`latency_s`, and bytes at `bandwidth` a second; None: bytes cost nothing."""
        if bandwidth is None:
            return cls(((1, latency_s),))
        size = 2**24
        return cls(((0, latency_s), (size, latency_s + size / bandwidth)))

    def seconds(self, num_bytes: float) -> float:
        """Between points by a line; below the first its value; beyond the last on along the last line."""
        if not self.points:
            return 0.0
        if len(self.points) == 1 or num_bytes <= self.points[0][0]:
            return self.points[0][1]
        index = min(bisect_right(self.points, num_bytes, key=lambda point: point[0]), len(self.points) - 1)
        (low, low_s), (high, high_s) = self.points[index - 1], self.points[index]
        slope = (high_s - low_s) / (high - low)
        # Noise may let a measured line fall; beyond the last point it must not.
        return low_s + slope * (num_bytes - low) if num_bytes <= high else high_s + max(0.0, slope) * (num_bytes - high)


@dataclass(frozen=True, slots=True)
class Hardware:
    """A group's, ranks in rank order, GPU ranks first."""

    ranks: tuple[RankHardware, ...]
    host_exchange: ExchangeSpeeds = ExchangeSpeeds()
    """All-reduce in host memory over all ranks."""
    device_exchange: ExchangeSpeeds = ExchangeSpeeds()
    """All-reduce among GPU ranks."""

    @property
    def num_gpu_ranks(self) -> int:
        """Number of GPU ranks."""
        return len(self.ranks_of(PoolType.GPU))

    def ranks_of(self, kind: PoolType) -> tuple[int, ...]:
        """Return the ranks that compute on devices of this kind, ascending."""
        return tuple(number for number, rank in enumerate(self.ranks) if rank.kind == kind)

    def classes(self) -> tuple[tuple[int, ...], ...]:
        """Ranks that are alike, in rank order."""
        alike: dict[tuple[object, ...], list[int]] = {}
        for number, rank in enumerate(self.ranks):
            alike.setdefault((rank.pool, rank.kind, rank.cores), []).append(number)
        return tuple(map(tuple, alike.values()))

    def levelled(self) -> Hardware:
        """Return the hardware with ranks that are alike made equal.

        Each gets the median of their speeds, the least of their memory, the most of their fixed needs, and the widths
        that all of them keep.
        """
        ranks = list(self.ranks)
        for alike in self.classes():
            members = [self.ranks[number] for number in alike]
            speeds = _median_speeds([member.speeds for member in members])
            memory = min(member.memory_bytes for member in members)
            runtime = max(member.runtime_bytes for member in members)
            gathered = max(member.gather_bytes for member in members)
            weight_bits = frozenset.intersection(*(member.weight_bits for member in members))
            for number in alike:
                ranks[number] = replace(
                    self.ranks[number],
                    speeds=speeds,
                    memory_bytes=memory,
                    runtime_bytes=runtime,
                    gather_bytes=gathered,
                    weight_bits=weight_bits,
                )
        return replace(self, ranks=tuple(ranks))


def _median_speeds(speeds: Sequence[Speeds]) -> Speeds:
    first = speeds[0]
    dtypes = [dtype for dtype in first.flops if all(dtype in each.flops for each in speeds)]
    return Speeds(
        flops={dtype: median(each.flops[dtype] for each in speeds) for dtype in dtypes},
        costs=_median_costs(speeds),
        costs_dtype=first.costs_dtype,
        **{name: median(getattr(each, name) for each in speeds) for name in _NUMBERS},
    )


def _median_costs(speeds: Sequence[Speeds]) -> tuple[CostPoint, ...]:
    """Return the medians of the points that all of them measured, in one type."""
    if len({each.costs_dtype for each in speeds}) > 1:
        return ()
    found: dict[tuple[Part, int, int], list[CostPoint]] = {}
    for each in speeds:
        for point in each.costs:
            found.setdefault((point.part, point.rows, point.context), []).append(point)
    return tuple(
        CostPoint(*key, median(p.fixed_s for p in points), median(p.unit_s for p in points))
        for key, points in found.items()
        if len(points) == len(speeds)
    )
