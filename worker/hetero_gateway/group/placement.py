"""The placement of one group: which rank owns which parts of the model, why, and how that turned out.

The placement is decided when every rank of the first epoch has its place and has reported how fast it is. From then on
it holds, so that weights stay where they are. What ranks already hold comes before anything else:

- Ranks that hold weights under this group's key and agree on the plan are right, even against what this gateway
  remembers. A gateway that comes back takes over a group as it finds it, and a rank that was restarted takes its place
  in the others' plan.
- Where they disagree, or hold nothing, this gateway's earlier decision counts.
- Where there is none, the solver decides from what the ranks measured.

The key names what a plan was made from. Two gateways with one key would be free to choose different plans, and may take
over each other's; a plan of another key is worth nothing. One asyncio loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median

from hetero_api.errors import PlanError
from hetero_api.sharding import ShardPlan
from hetero_api.spec import PlacementMode
from hetero_api.v1 import admin_pb2, ranks_pb2
from hetero_gateway.engine.step_pace import DecodePace
from hetero_gateway.group.settings import GroupSettings, check_deferral, check_plan, check_streaming
from hetero_placement.cost_model import CostModel
from hetero_placement.decision import Bounds, Decision, Option, Streaming, bounds_of
from hetero_placement.draft import draft_places
from hetero_placement.hardware import ExchangeSpeeds, Hardware, RankHardware
from hetero_placement.solver import ADOPTED, predict, solve

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PlacedRanks:
    """Reports of all ranks of an epoch, in rank order."""

    hellos: Sequence[ranks_pb2.Hello]
    formed: Sequence[ranks_pb2.Formed]


@dataclass(frozen=True)
class Placement:
    """A plan, and what led to it.

    `mode` is written as in spec.placement.mode and never Auto. `decision.chosen` is the option in force, which
    `decision.options` may lack. `hardware` is as the ranks reported it.
    """

    plan: ShardPlan
    mode: str
    decision: Decision
    hardware: Hardware
    settings: GroupSettings

    @property
    def draft_plan(self) -> ShardPlan | None:
        """Who owns what of the draft model or prediction head; None: there is none."""
        return None if self.decision.draft is None else self.decision.draft.plan

    @property
    def streaming(self) -> Streaming | None:
        """Streaming of experts in force; None: there is none."""
        return self.decision.chosen.streaming

    @cached_property
    def cost_model(self) -> CostModel:
        """Model that predicts steps under this plan, or another, on this hardware."""
        settings = self.settings
        bounds = bounds_of(settings.spec, settings.config, settings.draft)
        return CostModel.within(bounds, settings.config, self.hardware.levelled(), dtype=settings.dtype)


DecidePlacement = Callable[[GroupSettings, PlacedRanks, ShardPlan | None], Placement]
"""Decides a placement, or judges the plan that ranks hold. Raises PlanError. Called on a thread of its own."""


class GroupPlacement:
    """The placement of one group, decided once and then kept; see the module."""

    def __init__(self, settings: GroupSettings, *, decide: DecidePlacement | None = None) -> None:
        self._settings = settings
        self._decide = decide or decide_placement
        self.current: Placement | None = None
        """The placement that holds; None until it was decided."""

    @property
    def plan(self) -> ShardPlan | None:
        """The plan that holds; None until it was decided."""
        return self.current.plan if self.current is not None else None

    @property
    def needs_times(self) -> bool:
        """Whether the exchange has to be measured for the next `settle`."""
        return self.current is None

    async def settle(self, ranks: PlacedRanks) -> Placement:
        """Return the placement of an epoch whose ranks have all formed. Raises PlanError."""
        held = held_plan(self._settings, ranks.hellos)
        if self.current is None:
            self.current = await asyncio.to_thread(self._decide, self._settings, ranks, held)
            logger.info("placement: %s", self.current.decision.reason)
        elif held is not None and held != self.current.plan:
            logger.info("placement: the ranks hold another plan than this gateway's; theirs counts")
            self.current = replace(self.current, plan=held)
        return self.current

    def note_resident(self, problem: str) -> None:
        """Add to the reason that ranks could not share experts to be streamed, and why; the next epoch tries again."""
        told = f"; no experts are streamed: {problem}"
        if self.current is not None and told not in self.current.decision.reason:
            decision = replace(self.current.decision, reason=self.current.decision.reason + told)
            self.current = replace(self.current, decision=decision)

    def replace_plan(self, plan: ShardPlan) -> None:
        """Adopt another plan of the same key, which the ranks have changed to. Raises PlanError before any decision."""
        if self.current is None:
            raise PlanError("no plan was decided that could be replaced")
        self.current = replace(self.current, plan=plan)


def held_plan(settings: GroupSettings, hellos: Sequence[ranks_pb2.Hello]) -> ShardPlan | None:
    """Return the plan that all ranks with weights of this group agree on, if it fits its model and their places."""
    held = [(rank, hello.held) for rank, hello in enumerate(hellos) if hello.HasField("held")]
    ours = [(rank, shard) for rank, shard in held if shard.plan_key == settings.plan_key]
    plans = {shard.shard_plan.SerializeToString(deterministic=True) for _, shard in ours}
    if len(plans) != 1 or any(shard.rank != rank for rank, shard in ours):
        return None
    plan = ShardPlan.from_proto(ours[0][1].shard_plan)
    try:
        check_plan(plan, settings.config, world_size=len(hellos))
    except PlanError as error:
        logger.warning("the plan that the ranks hold does not fit this model: %s", error)
        return None
    return plan


# --- the decision -------------------------------------------------------------------------------------------


def decide_placement(settings: GroupSettings, ranks: PlacedRanks, held: ShardPlan | None) -> Placement:
    """Decide who owns what; a `held` plan, which ranks hold weights of, is kept. Raises PlanError.

    Measurements go to the solver as they were reported; the solver levels ranks of one kind.
    """
    hardware, bounds = hardware_of(settings, ranks), _bounds(settings, ranks)
    decision = _adopt(settings, hardware, held, bounds) if held is not None else _solve(settings, hardware, bounds)
    check_deferral(settings.spec, decision.plan)
    check_streaming(settings.spec, decision)
    mode = _mode_of(decision, hardware)
    return Placement(decision.plan, mode=mode, decision=decision, hardware=hardware, settings=settings)


def hardware_of(settings: GroupSettings, ranks: PlacedRanks) -> Hardware:
    """Return the hardware as the ranks measured it. Raises PlanError, naming the rank that measured nothing."""
    devices = [_device(hello, formed) for hello, formed in zip(ranks.hellos, ranks.formed, strict=True)]
    for place, device in zip(settings.places, devices, strict=True):
        if not device.speeds.memory_bandwidth > 0:
            raise PlanError(f"{place} reported no memory bandwidth at Hello; the placement is computed from it")
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
    """Return what ranks that share a machine's memory have in common: its boot id. Its pods differ in /dev/shm only."""
    boot_id, _, _ = host_id.partition(":")
    return host_id if boot_id == "unshared" else boot_id


def _device(hello: ranks_pb2.Hello, formed: ranks_pb2.Formed) -> ranks_pb2.DeviceReport:
    """Return a rank's device, with the costs of the model's parts on it, if they were measured."""
    device = ranks_pb2.DeviceReport()
    device.CopyFrom(hello.device)
    device.speeds.MergeFrom(formed.costs)
    return device


def _typical(reports: Sequence[Sequence[ranks_pb2.ExchangeTime]]) -> list[ranks_pb2.ExchangeTime]:
    """Return the median over the ranks that measured a size: all waited for each other."""
    seconds: dict[int, list[float]] = {}
    for times in reports:
        for time in times:
            seconds.setdefault(time.bytes, []).append(time.seconds)
    return [ranks_pb2.ExchangeTime(bytes=size, seconds=median(seconds[size])) for size in sorted(seconds)]


def _bounds(settings: GroupSettings, ranks: PlacedRanks) -> Bounds:
    """Return the engine's bounds; without shared memory among the ranks, no experts are streamed."""
    bounds = bounds_of(settings.spec, settings.config, settings.draft)
    if bounds.expert_streaming == 0 or all(each.exchange == ranks_pb2.EXCHANGE_KIND_SHM for each in ranks.formed):
        return bounds
    return replace(bounds, expert_streaming=0, no_streaming="the ranks share no memory (spec.exchange)")


def _solve(settings: GroupSettings, hardware: Hardware, bounds: Bounds) -> Decision:
    return solve(settings.config, hardware, dtype=settings.dtype, placement=settings.spec.placement, bounds=bounds)


def _adopt(settings: GroupSettings, hardware: Hardware, held: ShardPlan, bounds: Bounds) -> Decision:
    """Keep the plan that stands, and compare it with the one that the solver would choose now."""
    try:
        fresh = _solve(settings, hardware, bounds)
    except PlanError as error:
        logger.warning("the ranks hold a plan that would not be chosen now: %s", error)
        fresh = None
    if fresh is not None and fresh.plan == replace(held, expert_orders=()):
        return replace(fresh, plan=held)  # experts were moved since, which the solver does not know
    workload, draft = settings.spec.placement.workload, fresh.draft if fresh is not None else None
    if draft is None and bounds.draft is not None:
        draft, *_ = draft_places(
            bounds.draft, hardware.levelled(), dtype=settings.dtype, bounds=bounds, workload=workload
        )
    bounds = bounds.drafting_at(draft)
    prediction, streaming, no_streaming = predict(
        settings.config, hardware, held, dtype=settings.dtype, workload=workload, bounds=bounds
    )
    weights = CostModel(settings.config, hardware, dtype=settings.dtype).weight_bytes(held)
    shares = tuple(part / sum(weights) for part in weights)
    chosen = Option(
        ADOPTED, None, held, prediction, weight_shares=shares, streaming=streaming, no_streaming=no_streaming
    )
    options = (chosen, *(fresh.options if fresh is not None else ()))
    reason = f"{ADOPTED}: {prediction.decode_tokens_per_s:.3g} tokens/s decode; weights stay where they are"
    told = f"{reason}; anew: {fresh.reason}" if fresh is not None else reason
    return Decision(held, options, chosen, told, draft=draft)


def _mode_of(decision: Decision, hardware: Hardware) -> str:
    """Return the mode that the plan is an instance of, even if Auto found it or it was taken over."""
    mode = decision.chosen.mode
    if mode is not None and mode != PlacementMode.AUTO:
        return str(mode)
    plan = decision.plan
    owners = {rank for layer in range(plan.num_layers) for rank in plan.layer_owners(layer)}
    if hardware.num_gpu_ranks and all(rank < hardware.num_gpu_ranks for rank in owners):
        return str(PlacementMode.GPU_ONLY)
    return str(PlacementMode.LAYER if len(plan.stages()) > 1 else PlacementMode.TENSOR)


# --- the report ---------------------------------------------------------------------------------------------


def step_time_ratio(placement: Placement, pace: DecodePace) -> float:
    """Return measured over predicted seconds of recent steps that only decoded; 0 before any."""
    measured_s = predicted_s = 0.0
    view = placement.cost_model.view(placement.plan)
    for paced in pace.sizes():
        step_s = placement.cost_model.decode_step_s(view, batch=paced.size.rows, context=paced.size.context)
        measured_s += paced.weight * paced.seconds
        predicted_s += paced.weight * step_s
    return measured_s / predicted_s if predicted_s else 0.0


def report_placement(placement: Placement, pace: DecodePace) -> admin_pb2.PlacementReport:
    """Return all of GetTopologyResponse.placement: options, reason, prediction, and how it turned out."""
    chosen = placement.decision.chosen
    predicted = chosen.prediction.decode_tokens_per_s if chosen.prediction is not None else 0.0
    ratio = step_time_ratio(placement, pace)
    return admin_pb2.PlacementReport(
        options=[_option(option, is_chosen=option is chosen) for option in placement.decision.options],
        reason=placement.decision.reason,
        predicted_tokens_per_second=predicted,
        step_time_ratio=ratio,
        measured_tokens_per_second=predicted / ratio if ratio else 0.0,
        host_times=_times(placement.hardware.host_exchange),
        device_times=_times(placement.hardware.device_exchange),
    )


def _option(option: Option, *, is_chosen: bool) -> admin_pb2.PlacementOption:
    report = admin_pb2.PlacementOption(
        name=option.name,
        mode=str(option.mode) if option.mode is not None else "",
        chosen=is_chosen,
        why_not=option.why_not,
        weight_shares=option.weight_shares,
    )
    if option.prediction is not None:
        report.decode_tokens_per_second = option.prediction.decode_tokens_per_s
        report.prefill_tokens_per_second = option.prediction.prefill_tokens_per_s
        report.workload_s = option.prediction.workload_s
    return report


def _times(exchange: ExchangeSpeeds) -> list[ranks_pb2.ExchangeTime]:
    return [ranks_pb2.ExchangeTime(bytes=size, seconds=seconds) for size, seconds in exchange.points]
