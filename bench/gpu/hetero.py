"""A model that a GPU with capped memory cannot hold, beside CPU ranks: every way that the solver knows, in one run.

The ranks measure the exchange and the model's parts as they do in the product, the solver predicts from that and
chooses; then each way that fits is loaded and measured, whether chosen or not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from bench.gpu.orders import Bounds as StepBounds
from bench.gpu.orders import Device, Load, MeasureDevice, MeasureParts, Seat
from bench.gpu.ranks import RankProcesses
from bench.gpu.recipes import decoding
from bench.gpu.serving import CapacityError, Replica, bounds_of
from hetero_api.model_config import ModelConfig
from hetero_api.spec import PlacementSpec, WorkloadSpec
from hetero_api.spec_pools import PoolType
from hetero_api.v1 import ranks_pb2
from hetero_placement.decision import Bounds, Decision, Option
from hetero_placement.hardware import ExchangeSpeeds, Hardware, RankHardware, Speeds
from hetero_placement.solver import ALL_PARTS, LAYER, MLP_ONLY, solve

PROMPT: Final = 64
OUTPUT: Final = 24
CHUNK: Final = 256
_HOST: Final = "this machine"
_LONGEST_NOTE: Final = 60
_MEASURED: Final = (MLP_ONLY, ALL_PARTS, LAYER)
TENSOR_GAIN: Final = 1.3
"""How much faster than Layer the issue wants Tensor, where the model says so."""
TENSOR_SHARE: Final = 0.85
"""Of what the model predicts for it."""


@dataclass(frozen=True, slots=True)
class Way:
    """Tokens a second of one stream that decodes."""

    name: str
    predicted: float
    measured: float
    chosen: bool = False
    note: str = ""
    """Why there is no measurement."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """All ways for one model under one cap."""

    model: str
    cap_bytes: int
    ways: tuple[Way, ...]
    reason: str
    """The solver's."""

    @property
    def solver_chose_best(self) -> bool | None:
        """Whether nothing that could have been chosen was measured to be faster; None: nothing was measured."""
        could = [way for way in self.ways if way.measured]
        chosen = next((way for way in could if way.chosen), None)
        return None if chosen is None else chosen.measured >= max(way.measured for way in could)

    @property
    def tensor_over_layer(self) -> tuple[float, float] | None:
        """How many times as fast the best Tensor is as Layer: predicted, measured."""
        layer = next((way for way in self.ways if way.name == LAYER and way.measured), None)
        tensor = [way for way in self.ways if way.name in (MLP_ONLY, ALL_PARTS) and way.measured]
        if layer is None or not tensor:
            return None
        best = max(tensor, key=lambda way: way.measured)
        return best.predicted / layer.predicted, best.measured / layer.measured


def compare(
    group: RankProcesses, name: str, config: ModelConfig, *, dtype: str, cap_bytes: int, limit_s: float
) -> Comparison:
    """Measure, solve, and measure what was solved; each way for at most `limit_s` of decoding. Collective."""
    memory = memory_of(group.seats, cap_bytes)
    hardware = measured_hardware(group, config, dtype, memory)
    recipe = decoding(config.vocab_size, sequences=1, prompt=PROMPT, output=OUTPUT)
    bounds = bounds_of(recipe, max_num_batched_tokens=CHUNK)
    decision = solve(
        config,
        hardware,
        dtype=dtype,
        placement=PlacementSpec(workload=WorkloadSpec(prompt_tokens=PROMPT, output_tokens=OUTPUT)),
        bounds=Bounds(max_model_len=bounds.max_model_len, max_num_batched_tokens=CHUNK, max_num_seqs=1),
    )
    trial = _Trial(group, config, dtype, memory, bounds, limit_s)
    return Comparison(name, cap_bytes, tuple(trial.ways(decision)), decision.reason)


class _Trial:
    """Of one decision's ways."""

    def __init__(
        self,
        group: RankProcesses,
        config: ModelConfig,
        dtype: str,
        memory: Sequence[int],
        bounds: StepBounds,
        limit_s: float,
    ) -> None:
        self._group = group
        self._config = config
        self._dtype = dtype
        self._memory = tuple(memory)
        self._bounds = bounds
        self._limit_s = limit_s

    def ways(self, decision: Decision) -> Iterator[Way]:
        for option in decision.options:
            chosen = option is decision.chosen
            predicted = option.prediction.decode_tokens_per_s if option.prediction is not None else 0.0
            if option.plan is not None and (chosen or option.name in _MEASURED):
                measured, note = self._decode(option)
                yield Way(option.name, predicted, measured, chosen, note)
            else:
                yield Way(option.name, predicted, 0.0, note=_shortened(option.why_not) or "not measured")

    def _decode(self, option: Option) -> tuple[float, str]:
        """Tokens a second; or 0, and why a rank cannot hold its part."""
        assert option.plan is not None, "the caller looked"
        load = Load(self._config, self._dtype, option.plan, self._bounds, self._memory)
        try:
            replica = Replica(self._group, load, most_tokens=self._bounds.max_model_len)
        except CapacityError as error:
            return 0.0, str(error)
        recipe = decoding(self._config.vocab_size, sequences=1, prompt=PROMPT, output=OUTPUT)
        replica.serve(recipe, limit_s=self._limit_s)
        return replica.serve(recipe, limit_s=self._limit_s).decode_tokens_per_s, ""


def measured_hardware(group: RankProcesses, config: ModelConfig, dtype: str, memory: Sequence[int]) -> Hardware:
    """Have the ranks measure what the solver is told. Collective."""
    formed = [ranks_pb2.Formed.FromString(told) for told in group.ask(MeasureParts(config, dtype))]
    devices = [ranks_pb2.DeviceSpeeds.FromString(told) for told in group.ask(MeasureDevice())]
    return hardware_of(group.seats, devices, formed, memory)


def memory_of(seats: Sequence[Seat], cap_bytes: int) -> tuple[int, ...]:
    """What the solver may give each rank: the cap on the GPU, what its seat says on host cores."""
    return tuple(cap_bytes if seat.rank < seat.num_gpu_ranks else seat.memory_bytes for seat in seats)


def hardware_of(
    seats: Sequence[Seat],
    devices: Sequence[ranks_pb2.DeviceSpeeds],
    formed: Sequence[ranks_pb2.Formed],
    memory: Sequence[int],
) -> Hardware:
    """What ranks measured, as the gateway would tell it to the solver."""
    ranks = []
    for seat, device, told, memory_bytes in zip(seats, devices, formed, memory, strict=True):
        speeds = ranks_pb2.DeviceSpeeds()
        speeds.CopyFrom(device)
        speeds.MergeFrom(told.costs)
        kind = PoolType.CPU if seat.device is Device.CPU else PoolType.GPU
        ranks.append(
            RankHardware(
                kind,
                _HOST,
                memory_bytes,
                Speeds.from_proto(speeds),
                pool=kind.value.lower(),
                cores=len(seat.cores),
                runtime_bytes=told.runtime_bytes,
                gather_bytes=told.gather_bytes,
            )
        )
    return Hardware(
        tuple(ranks),
        host_exchange=_typical([told.host_times for told in formed]),
        device_exchange=_typical([told.device_times for told in formed]),
    )


def _typical(told: Sequence[Sequence[ranks_pb2.ExchangeTime]]) -> ExchangeSpeeds:
    """The median over the ranks that measured a size: all waited for each other."""
    seconds: dict[int, list[float]] = {}
    for times in told:
        for time in times:
            seconds.setdefault(time.bytes, []).append(time.seconds)
    return ExchangeSpeeds(tuple((size, median(seconds[size])) for size in sorted(seconds)))


def _shortened(reason: str) -> str:
    return reason if len(reason) <= _LONGEST_NOTE else f"{reason[:_LONGEST_NOTE]}…"
