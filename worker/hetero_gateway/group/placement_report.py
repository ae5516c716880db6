"""What is told of a placement: what was considered, why, what was predicted, and whether it came true."""

from __future__ import annotations

from hetero_api.v1 import admin_pb2, ranks_pb2
from hetero_gateway.engine.step_pace import DecodePace
from hetero_gateway.group.decision import Placement
from hetero_placement.decision import Option
from hetero_placement.hardware import ExchangeSpeeds


def step_time_ratio(placement: Placement, pace: DecodePace) -> float:
    """Of steps that only decoded, lately: measured seconds over predicted ones; 0 before any."""
    measured_s = predicted_s = 0.0
    for paced in pace.sizes():
        rows, context = paced.size
        step_s = placement.cost_model.decode_step_s(placement.plan, batch=rows, context=context)
        measured_s += paced.weight * paced.seconds
        predicted_s += paced.weight * step_s
    return measured_s / predicted_s if predicted_s else 0.0


def report_placement(placement: Placement, pace: DecodePace) -> admin_pb2.PlacementReport:
    """All of GetTopologyResponse.placement."""
    chosen = placement.decision.chosen
    predicted = chosen.prediction.decode_tokens_per_s if chosen.prediction is not None else 0.0
    ratio = step_time_ratio(placement, pace)
    return admin_pb2.PlacementReport(
        options=[_option(option, is_chosen=option is chosen) for option in placement.decision.options],
        reason=placement.reason,
        predicted_tokens_per_second=predicted,
        step_time_ratio=ratio,
        measured_tokens_per_second=predicted / ratio if ratio else 0.0,
        host_times=_times(placement.hardware.host_exchange),
        device_times=_times(placement.hardware.device_exchange),
    )


def _option(option: Option, *, is_chosen: bool) -> admin_pb2.PlacementOption:
    told = admin_pb2.PlacementOption(
        name=option.name,
        mode=str(option.mode) if option.mode is not None else "",
        chosen=is_chosen,
        why_not=option.why_not,
        weight_shares=option.weight_shares,
    )
    if option.prediction is not None:
        told.decode_tokens_per_second = option.prediction.decode_tokens_per_s
        told.prefill_tokens_per_second = option.prediction.prefill_tokens_per_s
        told.workload_s = option.prediction.workload_s
    return told


def _times(exchange: ExchangeSpeeds) -> list[ranks_pb2.ExchangeTime]:
    return [ranks_pb2.ExchangeTime(bytes=size, seconds=seconds) for size, seconds in exchange.points]
