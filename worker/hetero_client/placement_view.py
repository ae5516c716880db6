"""How a group's model is spread, why, and how fast that is: GetTopology's placement as plain values."""

from __future__ import annotations

from dataclasses import dataclass

from hetero_api.v1 import admin_pb2


@dataclass(frozen=True, slots=True)
class PlacementOptionView:
    """One way that was considered; `why_not` tells why it cannot be had, or was not allowed."""

    name: str
    mode: str
    chosen: bool
    why_not: str
    decode_tokens_per_second: float
    prefill_tokens_per_second: float
    workload_s: float
    weight_shares: tuple[float, ...]
    """Each rank's part of the weights, 0 to 1; empty if it cannot be had."""


@dataclass(frozen=True, slots=True)
class ExchangeTimeView:
    """What an all-reduce of a size takes."""

    num_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class PlacementView:
    """What was considered, what is in force, and whether the prediction came true.

    `step_time_ratio` is measured over predicted seconds of steps that only decoded, lately; with
    `measured_tokens_per_second` it is 0 before any.
    """

    options: tuple[PlacementOptionView, ...]
    reason: str
    predicted_tokens_per_second: float
    measured_tokens_per_second: float
    step_time_ratio: float
    host_times: tuple[ExchangeTimeView, ...]
    device_times: tuple[ExchangeTimeView, ...]


def placement_from(message: admin_pb2.PlacementReport) -> PlacementView:
    """The dataclass of a report."""
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
