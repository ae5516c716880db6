"""GetTopology's placement as plain values: how the model is spread, why, and how fast that is."""

from __future__ import annotations

from dataclasses import dataclass

from hetero_api.v1 import admin_pb2


@dataclass(frozen=True, slots=True)
class PlacementOptionView:
    """A placement that was considered; `why_not` says why it is impossible or not allowed."""

    name: str
    mode: str
    chosen: bool
    why_not: str
    decode_tokens_per_second: float
    prefill_tokens_per_second: float
    workload_s: float
    weight_shares: tuple[float, ...]
    """Share of the weights by rank, 0 to 1; empty for an impossible placement."""


@dataclass(frozen=True, slots=True)
class ExchangeTimeView:
    """Time of an all-reduce of one size."""

    num_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class PlacementView:
    """The placements that were considered, the one in force, and its predicted and measured speed.

    `step_time_ratio` is measured over predicted seconds of recent steps that only decoded. It and
    `measured_tokens_per_second` are 0 before the first such step.
    """

    options: tuple[PlacementOptionView, ...]
    reason: str
    predicted_tokens_per_second: float
    measured_tokens_per_second: float
    step_time_ratio: float
    host_times: tuple[ExchangeTimeView, ...]
    device_times: tuple[ExchangeTimeView, ...]


def placement_from(message: admin_pb2.PlacementReport) -> PlacementView:
    """Return a report as a dataclass."""
    return PlacementView(
        options=tuple(_option(option) for option in message.options),
        reason=message.reason,
        predicted_tokens_per_second=message.predicted_tokens_per_second,
        measured_tokens_per_second=message.measured_tokens_per_second,
        step_time_ratio=message.step_time_ratio,
        host_times=tuple(ExchangeTimeView(time.bytes, time.seconds) for time in message.host_times),
        device_times=tuple(ExchangeTimeView(time.bytes, time.seconds) for time in message.device_times),
    )


def _option(message: admin_pb2.PlacementOption) -> PlacementOptionView:
    return PlacementOptionView(
        name=message.name,
        mode=message.mode,
        chosen=message.chosen,
        why_not=message.why_not,
        decode_tokens_per_second=message.decode_tokens_per_second,
        prefill_tokens_per_second=message.prefill_tokens_per_second,
        workload_s=message.workload_s,
        weight_shares=tuple(message.weight_shares),
    )
