"""Predicted speed over the share of the weights that one side holds: what a plot of placements shows.

A point is a real plan, with whole units, dealt by weights and not searched for: so a curve shows what a share means and
how flat or steep its best is, and the chosen plan, which was searched for, may lie a little above it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from hetero_api.model_config import ModelConfig
from hetero_api.sharding import ShardPlan
from hetero_api.spec import PlacementShares, WorkloadSpec
from hetero_api.spec_pools import PoolType
from hetero_placement.cost_model import CostModel
from hetero_placement.decision import Bounds
from hetero_placement.hardware import Hardware
from hetero_placement.memory_model import MemoryModel
from hetero_placement.shard_plans import deal_layers, deal_within_layers

POINTS: Final = 81


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


def sweep(
    config: ModelConfig, hardware: Hardware, *, dtype: str, workload: WorkloadSpec, bounds: Bounds, points: int = POINTS
) -> Sweep:
    """Draw a curve for each mode. A group of one rank, or of GPU ranks alone, has one side only, and no curves."""
    hardware = hardware.levelled()
    gpus = hardware.ranks_of(PoolType.GPU)
    side, name = (gpus, "GPU ranks") if gpus else ((0,), "rank 0")
    if len(side) == len(hardware.ranks):
        return Sweep(name, side, ())
    model = CostModel(config, hardware, dtype=dtype)
    memory = MemoryModel(config, hardware, bounds, dtype=dtype)

    def curve(title: str, plan_of: Callable[[float], ShardPlan]) -> Curve:
        found = {}
        for plan in dict.fromkeys(plan_of(i / (points - 1)) for i in range(points)):
            weights = model.weight_bytes(plan)
            share = sum(weights[rank] for rank in side) / sum(weights)
            prediction = model.predict(plan, workload, bounds)
            found[share] = SweepPoint(share, prediction.decode_tokens_per_s, not memory.problem(plan))
        return Curve(title, tuple(found[share] for share in sorted(found)))

    return Sweep(
        name, side, tuple(curve(title, plan_of) for title, plan_of in _ways(config, hardware, side, bool(gpus)))
    )


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
