"""What the ranks of a group told, and the placement that follows from it.

What was measured goes to the solver as it was told; that ranks of one kind are levelled is the solver's doing. A plan
that the ranks hold already is kept, and only judged, and the reason says so.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median

from hetero_api.errors import PlanError
from hetero_api.sharding import ShardPlan
from hetero_api.spec import PlacementMode
from hetero_api.v1 import ranks_pb2
from hetero_gateway.group.settings import GroupSettings
from hetero_placement.cost_model import CostModel
from hetero_placement.decision import Decision, Option, bounds_of, request_of
from hetero_placement.hardware import ExchangeSpeeds, Hardware, RankHardware
from hetero_placement.solver import ADOPTED, predict, solve
from hetero_placement.steps import Workload

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PlacedRanks:
    """What all ranks of an epoch said, in rank order."""

    hellos: Sequence[ranks_pb2.Hello]
    formed: Sequence[ranks_pb2.Formed]


@dataclass(frozen=True)
class Placement:
    """A plan, and what there is to tell of it."""

    plan: ShardPlan
    mode: str
    """As spec.placement.mode writes it; never Auto."""
    decision: Decision
    """`decision.chosen` is the option in force, `decision.options` may be without it."""
    hardware: Hardware
    """As the ranks told it."""
    settings: GroupSettings

    @property
    def reason(self) -> str:
        """Why this plan; for a person."""
        return self.decision.reason

    @cached_property
    def cost_model(self) -> CostModel:
        """What predicts steps under this plan, or another, on this hardware."""
        return CostModel(self.settings.config, self.hardware.levelled(), dtype=self.settings.dtype)

    def with_plan(self, plan: ShardPlan) -> Placement:
        """The same for another plan of the same key."""
        return replace(self, plan=plan)


def decide_placement(settings: GroupSettings, ranks: PlacedRanks, held: ShardPlan | None) -> Placement:
    """Who owns what; `held` is the plan that ranks hold weights of, which is kept. Raises PlanError."""
    hardware = hardware_of(settings, ranks)
    decision = _adopt(settings, hardware, held) if held is not None else _solve(settings, hardware)
    mode = _mode_of(decision, hardware)
    return Placement(decision.plan, mode=mode, decision=decision, hardware=hardware, settings=settings)


def hardware_of(settings: GroupSettings, ranks: PlacedRanks) -> Hardware:
    """As it was measured. Raises PlanError, naming the rank, where it was not."""
    devices = [_device(hello, formed) for hello, formed in zip(ranks.hellos, ranks.formed, strict=True)]
    for place, device in zip(settings.places, devices, strict=True):
        if not device.speeds.memory_bandwidth > 0:
            raise PlanError(f"{place} told no memory bandwidth at Hello, which the placement is computed from")
    return Hardware(
        ranks=tuple(
            RankHardware.from_report(
                device,
                host=machine_of(hello.host_id),
                pool=place.pool,
                cores=place.cores,
                gpu_share=settings.spec.engine.gpu_memory_utilization,
                formed=formed,
            )
            for place, hello, device, formed in zip(settings.places, ranks.hellos, devices, ranks.formed, strict=True)
        ),
        host_exchange=ExchangeSpeeds.from_protos(_typical([formed.host_times for formed in ranks.formed])),
        device_exchange=ExchangeSpeeds.from_protos(_typical([formed.device_times for formed in ranks.formed])),
    )


def machine_of(host_id: str) -> str:
    """Of ranks that share a machine's memory: its boot id. Its pods differ in their /dev/shm only."""
    boot_id, _, _ = host_id.partition(":")
    return host_id if boot_id == "unshared" else boot_id


def _device(hello: ranks_pb2.Hello, formed: ranks_pb2.Formed) -> ranks_pb2.DeviceReport:
    """With what the model's parts cost on it, if that was measured."""
    device = ranks_pb2.DeviceReport()
    device.CopyFrom(hello.device)
    device.speeds.MergeFrom(formed.costs)
    return device


def _typical(told: Sequence[Sequence[ranks_pb2.ExchangeTime]]) -> list[ranks_pb2.ExchangeTime]:
    """The median over the ranks that measured a size: all waited for each other."""
    seconds: dict[int, list[float]] = {}
    for times in told:
        for time in times:
            seconds.setdefault(time.bytes, []).append(time.seconds)
    return [ranks_pb2.ExchangeTime(bytes=size, seconds=median(seconds[size])) for size in sorted(seconds)]


def _solve(settings: GroupSettings, hardware: Hardware) -> Decision:
    return solve(
        settings.config,
        hardware,
        dtype=settings.dtype,
        workload=Workload.from_spec(settings.spec.placement.workload),
        request=request_of(settings.spec),
        bounds=bounds_of(settings.spec, settings.config),
    )


def _adopt(settings: GroupSettings, hardware: Hardware, held: ShardPlan) -> Decision:
    """The plan that stands, beside what would be chosen anew."""
    try:
        fresh = _solve(settings, hardware)
    except PlanError as error:
        logger.warning("the ranks hold a plan that would not be chosen anew: %s", error)
        fresh = None
    if fresh is not None and fresh.plan == replace(held, expert_orders=()):
        return replace(fresh, plan=held)  # experts were moved since, which the solver knows nothing of
    prediction = predict(
        settings.config,
        hardware,
        held,
        dtype=settings.dtype,
        workload=Workload.from_spec(settings.spec.placement.workload),
        bounds=bounds_of(settings.spec, settings.config),
    )
    chosen = Option(ADOPTED, None, held, prediction, weight_shares=_weight_shares(settings, hardware, held))
    options = (chosen, *(fresh.options if fresh is not None else ()))
    reason = f"{ADOPTED}: {prediction.decode_tokens_per_s:.3g} tokens/s decode; weights stay where they are"
    return Decision(held, options, chosen, f"{reason}; anew: {fresh.reason}" if fresh is not None else reason)


def _weight_shares(settings: GroupSettings, hardware: Hardware, plan: ShardPlan) -> tuple[float, ...]:
    weights = CostModel(settings.config, hardware, dtype=settings.dtype).weight_bytes(plan)
    return tuple(part / sum(weights) for part in weights)


def _mode_of(decision: Decision, hardware: Hardware) -> str:
    """What the plan is an instance of, also where Auto found it, or it was taken over."""
    mode = decision.chosen.mode
    if mode is not None and mode != PlacementMode.AUTO:
        return str(mode)
    plan = decision.plan
    owners = {rank for layer in range(plan.num_layers) for rank in plan.layer_owners(layer)}
    if hardware.num_gpu_ranks and all(rank < hardware.num_gpu_ranks for rank in owners):
        return str(PlacementMode.GPU_ONLY)
    return str(PlacementMode.LAYER if len(plan.stages()) > 1 else PlacementMode.TENSOR)
