"""Where ranks are and who owns what, from the spec and the model's shape. Pure functions.

Ranks are numbered by pool, GPU pools first: rank = pool's base + ordinal * ranksPerPod + local rank. Every layer is
split alike: KV heads one by one, MLP columns and vocabulary rows in units of 64 (the last unit is smaller where 64
does not divide). What the spec gives no shares for is dealt by cores a rank; MLP columns then make up for what whole
KV heads cannot: SmolLM2's three heads on two equal ranks are 2 and 1, its 1536 columns 704 and 832.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from hetero_api.errors import PlanError
from hetero_api.model_config import ModelConfig
from hetero_api.sharding import LayerShard, RankShard, ShardPlan, ranges_of_counts
from hetero_api.spec import HeteroInferenceSpec, PlacementShares
from hetero_gateway.group.apportionment import Weight, largest_remainder, level_up

UNIT: Final = 64
"""MLP columns, and vocabulary rows, that stay together."""


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
    """Who owns what. Raises PlanError, naming the field, when a rank would own nothing."""
    cores = [place.cores for place in expected_places(spec)]
    shares = spec.placement.shares
    heads = largest_remainder(config.num_kv_heads, shares.attention or cores)
    columns = _mlp_columns(config, heads=heads, cores=cores, shares=shares)
    rows = _deal_in_units(config.vocab_size, shares.vocabulary or cores)
    _check_nobody_idle(spec, config, owned=[sum(parts) for parts in zip(heads, columns, rows, strict=True)])
    plan = _plan_of_counts(config.num_layers, heads=heads, columns=columns, rows=rows)
    plan.validate(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        mlp_columns=config.intermediate_size,
        vocab_rows=config.vocab_size,
    )
    return plan


def _mlp_columns(
    config: ModelConfig, *, heads: Sequence[int], cores: Sequence[int], shares: PlacementShares
) -> list[int]:
    """Columns of each rank: by shares, or such that all its weights of a layer come nearest to its cores' share."""
    if shares.mlp:
        return _deal_in_units(config.intermediate_size, shares.mlp)
    parts = level_up(
        config.intermediate_size * config.mlp_params_per_column,
        owned=[count * config.attention_params_per_kv_head for count in heads],
        weights=cores,
    )
    return _deal_in_units(config.intermediate_size, parts)


def _deal_in_units(total: int, weights: Sequence[Weight]) -> list[int]:
    """`total` in consecutive pieces of whole units; the last unit may be smaller."""
    counts = largest_remainder(-(-total // UNIT), weights)
    sizes, dealt = [], 0
    for count in counts:
        size = min(count * UNIT, total - dealt)
        sizes.append(size)
        dealt += size
    return sizes


def _check_nobody_idle(spec: HeteroInferenceSpec, config: ModelConfig, *, owned: Sequence[int]) -> None:
    idle = [place for place in expected_places(spec) if not owned[place.rank]]
    if not idle:
        return
    names = ", ".join(map(str, idle))
    shares = spec.placement.shares
    given = [name for name in ("attention", "mlp", "vocabulary") if getattr(shares, name)]
    units = (
        f"{config.num_kv_heads} KV heads, {config.intermediate_size} MLP columns and {config.vocab_size} vocabulary "
        f"rows in units of {UNIT}"
    )
    if given:
        fields = ", ".join(f"spec.placement.shares.{name}" for name in given)
        raise PlanError(f"{fields}: {names} would own nothing of the model ({units}); give it a share or fewer ranks")
    raise PlanError(
        f"spec.pools: {spec.world_size} ranks are more than the model has something to give each ({units}): "
        f"{names} would own nothing; use fewer ranks"
    )


def _plan_of_counts(num_layers: int, *, heads: Sequence[int], columns: Sequence[int], rows: Sequence[int]) -> ShardPlan:
    layer_shards = map(LayerShard, ranges_of_counts(heads), ranges_of_counts(columns))
    return ShardPlan(
        tuple(
            RankShard((layer,) * num_layers, vocab_rows)
            for layer, vocab_rows in zip(layer_shards, ranges_of_counts(rows), strict=True)
        )
    )
