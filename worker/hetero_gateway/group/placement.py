"""Where ranks are and who may own what, from the spec and the model's shape. Pure functions.

Ranks are numbered by pool, GPU pools first: rank = pool's base + ordinal * ranksPerPod + local rank. What each owns is
decided once they have all told how fast they are (decision.py); shares that the spec gives can be checked before.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

from hetero_api.errors import PlanError
from hetero_api.model_config import ModelConfig
from hetero_api.sharding import RankShard, ShardPlan
from hetero_api.spec import SHARE_KINDS, HeteroInferenceSpec, PlacementMode, PoolType
from hetero_placement.shard_plans import (
    deal_layers,
    deal_within_layers,
    describe_layers,
    describe_units,
    most_ranks,
    too_many_ranks,
)


@dataclass(frozen=True, slots=True)
class ExpectedPlace:
    """A rank of the group that may not have joined yet.

    `pool_index` is its pool's in spec.pools; `cores` is what it gets, its weight where no shares are given.
    """

    rank: int
    pool: str
    pool_index: int
    ordinal: int
    local_rank: int
    cores: int
    is_gpu: bool = False

    @property
    def pod_name(self) -> str:
        """Its pod's name as far as it is known before the rank says Hello."""
        return f"{self.pool}-{self.ordinal}"

    def __str__(self) -> str:
        local = f" local rank {self.local_rank}" if self.local_rank else ""
        return f"rank {self.rank} ({self.pod_name}{local})"


def expected_places(spec: HeteroInferenceSpec) -> tuple[ExpectedPlace, ...]:
    """All ranks of the group, in rank order."""
    places: list[ExpectedPlace] = []
    for pool in spec.pools_in_rank_order:
        is_gpu = pool.type == PoolType.GPU
        for index in range(pool.ranks):
            ordinal, local_rank = divmod(index, pool.ranks_per_pod)
            place = ExpectedPlace(
                rank=len(places),
                pool=pool.name,
                pool_index=spec.pools.index(pool),
                ordinal=ordinal,
                local_rank=local_rank,
                cores=pool.gpu_or_default.cores_per_rank if is_gpu else pool.cpu_or_default.cores_per_rank,
                is_gpu=is_gpu,
            )
            places.append(place)
    return tuple(places)


def check_shares(spec: HeteroInferenceSpec, config: ModelConfig) -> None:
    """Raise PlanError, naming the field, when the spec's shares do not fit, or a rank would be left with nothing.

    Without shares that can only be in modes that want all ranks to compute. What the spec gives no shares for counts as
    dealt by cores: the solver may find better, but has as much to give.
    """
    shares, places = spec.placement.shares, expected_places(spec)
    given = [name for name in SHARE_KINDS if getattr(shares, name)]
    if not given:
        _check_number(spec, config)
        return
    is_layered = spec.placement.mode == PlacementMode.LAYER
    deal = deal_layers if is_layered else deal_within_layers
    plan = deal(config, cores=[place.cores for place in places], shares=shares)
    if idle := [place for place in places if _owns_nothing(plan.ranks[place.rank])]:
        names, fields = ", ".join(map(str, idle)), ", ".join(f"spec.placement.shares.{name}" for name in given)
        units = describe_layers(config) if is_layered else describe_units(config)
        raise PlanError(f"{fields}: {names} would own nothing of the model ({units}); give it a share or fewer ranks")


def _check_number(spec: HeteroInferenceSpec, config: ModelConfig) -> None:
    """The solver would say so too, but only once all ranks are there."""
    limits = {
        PlacementMode.TENSOR: (most_ranks(config), describe_units(config)),
        PlacementMode.LAYER: (config.num_layers, describe_layers(config)),
    }
    limit, units = limits.get(spec.placement.mode, (spec.world_size, ""))
    if spec.world_size > limit:
        raise PlanError(too_many_ranks(spec.world_size, units))


def check_plan(plan: ShardPlan, config: ModelConfig, *, world_size: int) -> None:
    """Raise PlanError unless so many ranks own all of this model, every unit once."""
    if plan.world_size != world_size:
        raise PlanError(f"the plan is for {plan.world_size} ranks, the group has {world_size}")
    plan.validate_for(config)
    plan.stages()


def make_plan_key(spec: HeteroInferenceSpec, *, dtype: str, model_fingerprint: str, version: str) -> str:
    """sha256, hex, of what plans are made from. What is decided anew while the group lives is no part of it."""
    made_from = {
        "placement": spec.placement.model_dump(mode="json", exclude={"rebalance_experts"}),
        "pools": [pool.model_dump(mode="json") for pool in spec.pools_in_rank_order],
        "dtype": dtype,
        "quantization": [spec.model.quantization, spec.model.quantization_group_size],
        "model": model_fingerprint,
        "version": version,
    }
    return hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()


def _owns_nothing(shard: RankShard) -> bool:
    return not (shard.embedding_rows.size or shard.head_rows.size) and all(layer.is_empty for layer in shard.layers)
