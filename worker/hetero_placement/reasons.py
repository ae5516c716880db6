"""Why a placement was chosen, in words for a person."""

from __future__ import annotations

from collections.abc import Sequence

from hetero_api.placement_mode import PlacementMode
from hetero_placement.cost_model import CostModel
from hetero_placement.decision import Option, PlacementRequest
from hetero_placement.steps import Step


def explain(
    chosen: Option, options: Sequence[Option], model: CostModel, decode: Step, request: PlacementRequest
) -> str:
    """The chosen one's speed, what exchanges take of it, what the others would give, and what cannot be had."""
    parts = [f"{chosen.name}: {_speed(chosen)}", *_exchanges(chosen, model, decode)]
    if request.mode != PlacementMode.AUTO:
        parts.append(f"spec.placement.mode asks for {request.mode}")
    others = [option for option in options if option is not chosen and option.prediction is not None and option.plan]
    parts += [_comparison(option, chosen) for option in sorted(others, key=_time)]
    parts += [f"{option.name} cannot be had: {option.why_not}" for option in options if option.mode and not option.plan]
    return "; ".join(parts)


def _time(option: Option) -> float:
    return option.prediction.workload_s if option.prediction is not None else 0.0


def _speed(option: Option) -> str:
    prediction = option.prediction
    if prediction is None:
        return "no prediction"
    return (
        f"{prediction.decode_tokens_per_s:.3g} tokens/s decode, {prediction.prefill_tokens_per_s:.3g} prefill, "
        f"{_seconds(prediction.workload_s)} for the workload"
    )


def _comparison(option: Option, chosen: Option) -> str:
    """In what counts for the choice, the workload's time; and in tokens/s."""
    prediction = option.prediction
    if prediction is None or chosen.prediction is None:
        return ""
    ratio = prediction.workload_s / chosen.prediction.workload_s
    slower = f"{ratio:.2f} times as long" if abs(ratio - 1) > 5e-3 else "as long"
    return f"{option.name} would give {prediction.decode_tokens_per_s:.3g} tokens/s, and take {slower}"


def _exchanges(chosen: Option, model: CostModel, decode: Step) -> list[str]:
    """How much of a decode step exchanges are."""
    if chosen.plan is None or chosen.prediction is None:
        return []
    seconds, step_s = model.exchange_s(chosen.plan, decode), chosen.prediction.decode_step_s
    if not seconds:
        return []
    has_helpers = any(stage.helpers for stage in chosen.plan.stages())
    hidden = ", hidden behind computation as far as possible" if has_helpers else ""
    return [f"exchanges of a decode step of {_seconds(step_s)} take {_seconds(seconds)}{hidden}"]


def _seconds(seconds: float) -> str:
    """3 digits, in the unit that reads best."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"
