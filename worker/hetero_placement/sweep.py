"""Predicted speeds beside those that a placement is chosen by: of other loads, and over the share of the weights.

The share is that of one side; a plot of placements shows it. A point is a real plan, with whole units, dealt by weights
and not searched for: so a curve shows what a share means and how flat or steep its best is, and the chosen plan, which
was searched for, may lie a little above it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from hetero_api.errors import PlanError
from hetero_api.model_config import ModelConfig
from hetero_api.sharding import ShardPlan
from hetero_api.spec import PlacementShares, WorkloadSpec
from hetero_api.spec_pools import PoolType
from hetero_placement.cost_model import CostModel
from hetero_placement.decision import Bounds, Option
from hetero_placement.draft import draft_token_s
from hetero_placement.hardware import Hardware
from hetero_placement.memory_model import MemoryModel
from hetero_placement.shard_plans import deal_layers, deal_within_layers
from hetero_placement.steps import LOADS, Load, decode_step
from hetero_placement.streaming import streamed_steps

POINTS: Final = 81
MOST_PROPOSED: Final = 16
"""Longest proposals, as spec.engine.speculative.maxTokens allows them."""


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """One plan."""

    share: float
    """Share of the weights' bytes on the side that is swept."""
    decode_tokens_per_s: float
    fits: bool
    """Whether every rank has memory for its part."""


@dataclass(frozen=True, slots=True)
class Curve:
    """One way to spread the model; points ascend in share."""

    name: str
    points: tuple[SweepPoint, ...]


@dataclass(frozen=True, slots=True)
class Sweep:
    """`side` says whose share it is: "GPU ranks", or "rank 0" where there are none."""

    side: str
    ranks: tuple[int, ...]
    curves: tuple[Curve, ...]

    def share(self, weight_shares: Sequence[float]) -> float:
        """Return the swept side's share in a plan with these shares of the ranks."""
        return sum(weight_shares[rank] for rank in self.ranks)


@dataclass(frozen=True, slots=True)
class LoadRates:
    """Predicted tokens/s of several loads, for each option that has a plan, each at its best for the workload."""

    loads: tuple[Load, ...]
    rates: tuple[tuple[Option, tuple[float, ...]], ...]
    """Options, and their rates in the order of `loads`."""
    gpus: tuple[int, ...]
    """GPU ranks."""

    def best(self, load: Load) -> Option:
        """Return the fastest option for a load; of options that are as fast, the first, which is the simplest."""
        number = self.loads.index(load)
        option, _ = max(self.rates, key=lambda each: float(f"{each[1][number]:.3g}"))
        return option

    @property
    def verdict(self) -> str:
        """Which ranks to use for which load, in a sentence; empty for a group of one kind of ranks."""
        if not self.loads or not 0 < len(self.gpus) < len(self.rates[0][0].weight_shares):
            return ""
        sides: dict[str, list[str]] = {}
        for load in self.loads:
            sides.setdefault(self._side(self.best(load)), []).append(load.name)
        if len(sides) == 1:
            return f"{next(iter(sides))} are fastest for each of these loads."
        told = [f"{side} for {', '.join(names)}" for side, names in sides.items()]
        return f"Fastest are {'; '.join(told)}."

    def _side(self, option: Option) -> str:
        used = {rank for rank, share in enumerate(option.weight_shares) if share}
        if used <= set(self.gpus):
            return "GPU ranks alone"
        return "GPU and CPU ranks together" if used & set(self.gpus) else "CPU ranks alone"


def rates_by_load(
    config: ModelConfig, hardware: Hardware, options: Sequence[Option], *, dtype: str, bounds: Bounds
) -> LoadRates:
    """Predict the loads that the engine's bounds allow for."""
    model = CostModel.within(bounds, config, hardware.levelled(), dtype=dtype)
    loads = tuple(load for load in LOADS if load.fits(bounds))
    planned = [option for option in options if option.plan is not None]

    def rates_of(option: Option) -> tuple[float, ...]:
        streamed = streamed_steps(model, option.made, option.streaming)
        return tuple(model.tokens_per_s(option.made, load, bounds, streamed=streamed) for load in loads)

    rates = tuple((option, rates_of(option)) for option in planned)
    return LoadRates(loads, rates, hardware.ranks_of(PoolType.GPU))


@dataclass(frozen=True, slots=True)
class ProposedRate:
    """Predicted tokens/s with proposals of the length that promises most, from one source."""

    source: str
    length: int
    """0: any would be slower than none."""
    tokens_per_s: float
    plain_tokens_per_s: float


def rates_with_proposals(
    config: ModelConfig,
    hardware: Hardware,
    plan: ShardPlan,
    *,
    dtype: str,
    workload: WorkloadSpec,
    bounds: Bounds,
    acceptance: float,
) -> tuple[ProposedRate, ...]:
    """Predict the workload's decoding where a proposed token is right with the chance `acceptance`, by source.

    A proposal of k tokens brings 1 + a + ... + a^k. Its step has k rows more a request, and the draft model, which lies
    where `bounds` say, takes k steps of its own.
    """
    hardware = hardware.levelled()
    model = CostModel.within(bounds, config, hardware, dtype=dtype)
    batch = min(workload.concurrency, bounds.max_num_seqs)
    sources = {"n-grams": 0.0}
    if bounds.draft is not None and (draft_plan := bounds.draft_plan_of(len(hardware.ranks))) is not None:
        name = "the prediction head" if bounds.draft.follows_states else "the draft model"
        sources[name] = draft_token_s(
            bounds.draft, hardware, draft_plan, dtype=dtype, bounds=bounds, batch=batch, context=workload.decode_context
        )

    def rate(length: int, draft_s: float) -> float:
        rows = decode_step(batch * (1 + length), workload.decode_context)
        tokens = batch * sum(acceptance**i for i in range(length + 1))
        return tokens / (model.step_s(plan, rows) + length * draft_s)

    most = min(MOST_PROPOSED, bounds.max_num_seqs // batch - 1)
    found = []
    for source, draft_s in sources.items():
        best = max(range(most + 1), key=lambda length: rate(length, draft_s))
        found.append(ProposedRate(source, best, rate(best, draft_s), rate(0, 0.0)))
    return tuple(found)


def sweep(
    config: ModelConfig, hardware: Hardware, *, dtype: str, workload: WorkloadSpec, bounds: Bounds, points: int = POINTS
) -> Sweep:
    """Draw a curve for each mode. A group of one rank, or of GPU ranks alone, has one side only, and no curves."""
    hardware = hardware.levelled()
    gpus = hardware.ranks_of(PoolType.GPU)
    side, name = (gpus, "GPU ranks") if gpus else ((0,), "rank 0")
    if len(side) == len(hardware.ranks):
        return Sweep(name, side, ())
    model = CostModel.within(bounds, config, hardware, dtype=dtype)
    memory = MemoryModel(config, hardware, bounds, dtype=dtype)

    def curve(title: str, plan_of: Callable[[float], ShardPlan]) -> Curve:
        found = {}
        for plan in dict.fromkeys(_plans(plan_of, points)):
            weights = model.weight_bytes(plan)
            share = sum(weights[rank] for rank in side) / sum(weights)
            prediction = model.predict(plan, workload, bounds)
            found[share] = SweepPoint(share, prediction.decode_tokens_per_s, not memory.problem(plan))
        return Curve(title, tuple(found[share] for share in sorted(found)))

    curves = (curve(title, plan_of) for title, plan_of in _ways(config, hardware, side, bool(gpus)))
    return Sweep(name, side, tuple(drawn for drawn in curves if drawn.points))


def _plans(plan_of: Callable[[float], ShardPlan], points: int) -> Iterator[ShardPlan]:
    """Yield the plans of evenly spaced shares, but for those that the model does not allow."""
    for i in range(points):
        with suppress(PlanError):
            yield plan_of(i / (points - 1))


def _ways(
    config: ModelConfig, hardware: Hardware, side: Sequence[int], has_gpus: bool
) -> Iterator[tuple[str, Callable[[float], ShardPlan]]]:
    world = len(hardware.ranks)

    def weights(share: float) -> list[float]:
        others = world - len(side)
        return [share / len(side) if rank in side else (1 - share) / others for rank in range(world)]

    def tensor(share: float) -> ShardPlan:
        parts = weights(share)
        shares = PlacementShares(attention=parts, mlp=parts, vocabulary=parts)
        return deal_within_layers(config, cores=[1] * world, shares=shares)

    def mlp_only(share: float) -> ShardPlan:
        shares = PlacementShares(attention=weights(1), mlp=weights(share), vocabulary=weights(1))
        return deal_within_layers(config, cores=[1] * world, shares=shares)

    def layers(share: float) -> ShardPlan:
        return deal_layers(config, cores=[1] * world, shares=PlacementShares(mlp=weights(share)))

    if has_gpus:
        yield "Tensor, CPU ranks on MLP only", mlp_only
        yield "Tensor, CPU ranks on all parts", tensor
    else:
        yield "Tensor", tensor
    yield "Layer split", layers
