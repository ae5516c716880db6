"""Where ranks are and who owns what, from the spec and the model's shape. Pure functions.

Ranks are numbered by pool, GPU pools first: rank = pool's base + ordinal * ranksPerPod + local rank. What they own is
dealt as spec.placement.mode says: within every layer (tensor_plan) or layer by layer (layer_plan).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hetero_api.errors import PlanError
from hetero_api.model_config import ModelConfig
from hetero_api.sharding import RankShard, ShardPlan
from hetero_api.spec import HeteroInferenceSpec, PlacementMode
from hetero_gateway.group.layer_plan import deal_layers, describe_layers
from hetero_gateway.group.tensor_plan import deal_within_layers, describe_units


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
        for index in range(pool.ranks):
            ordinal, local_rank = divmod(index, pool.ranks_per_pod)
            place = ExpectedPlace(
                rank=len(places),
                pool=pool.name,
                pool_index=spec.pools.index(pool),
                ordinal=ordinal,
                local_rank=local_rank,
                cores=pool.cpu_or_default.cores_per_rank,
            )
            places.append(place)
    return tuple(places)


def make_shard_plan(spec: HeteroInferenceSpec, config: ModelConfig) -> ShardPlan:
    """Who owns what; Auto is Tensor. Raises PlanError, naming the field, when a rank would own nothing."""
    places = expected_places(spec)
    cores = [place.cores for place in places]
    is_layered = spec.placement.mode == PlacementMode.LAYER
    deal = deal_layers if is_layered else deal_within_layers
    plan = deal(config, cores=cores, shares=spec.placement.shares)
    idle = [place for place in places if _owns_nothing(plan.ranks[place.rank])]
    if idle:
        units = describe_layers(config) if is_layered else describe_units(config)
        raise PlanError(_idle_message(spec, idle, units))
    plan.validate(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        mlp_columns=config.intermediate_size,
        vocab_size=config.vocab_size,
        num_experts=config.num_experts,
        expert_layers=config.expert_layers,
    )
    return plan


def _owns_nothing(shard: RankShard) -> bool:
    return not (shard.embedding_rows.size or shard.head_rows.size) and all(layer.is_empty for layer in shard.layers)


def _idle_message(spec: HeteroInferenceSpec, idle: Sequence[ExpectedPlace], units: str) -> str:
    names = ", ".join(map(str, idle))
    shares = spec.placement.shares
    given = [name for name in ("attention", "mlp", "vocabulary") if getattr(shares, name)]
    if given:
        fields = ", ".join(f"spec.placement.shares.{name}" for name in given)
        return f"{fields}: {names} would own nothing of the model ({units}); give it a share or fewer ranks"
    return (
        f"spec.pools: {spec.world_size} ranks are more than the model has something to give each ({units}): "
        f"{names} would own nothing; use fewer ranks"
    )
