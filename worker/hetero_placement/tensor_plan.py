"""Deals a model within its layers: every layer is split over all ranks, all that are of one kind alike.

KV heads and experts are dealt one by one, MLP columns and vocabulary rows in units of 64 (the last unit is smaller
where 64 does not divide). What the spec gives no shares for is dealt by cores a rank; MLP columns, or experts, then
make up for what whole KV heads cannot: SmolLM2's three heads on two equal ranks are 2 and 1, its 1536 columns 704 and
832.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from hetero_api.model_config import ModelConfig
from hetero_api.sharding import LayerShard, RankShard, ShardPlan, ranges_of_counts
from hetero_placement.apportionment import Weight, largest_remainder, level_up
from hetero_placement.shares import Shares

UNIT: Final = 64
"""MLP columns, and vocabulary rows, that stay together."""


def deal_within_layers(config: ModelConfig, *, cores: Sequence[int], shares: Shares) -> ShardPlan:
    """By shares, one weight a rank, or by `cores`; a rank may get nothing."""
    heads = largest_remainder(config.num_kv_heads, shares.attention or cores)
    return plan_within_layers(
        config,
        heads=heads,
        columns=_mlp_columns(config, heads, cores=cores, shares=shares),
        experts=_experts(config, heads, cores=cores, shares=shares) if config.experts else [0] * len(cores),
        rows=_deal_in_units(config.vocab_size, shares.vocabulary or cores),
    )


def plan_within_layers(
    config: ModelConfig, *, heads: Sequence[int], columns: Sequence[int], experts: Sequence[int], rows: Sequence[int]
) -> ShardPlan:
    """Every layer split alike: how many KV heads, MLP columns of a dense layer, experts and vocabulary rows a rank."""
    nothing = [0] * len(heads)
    dense = _shards(heads, columns, nothing)
    sparse = _shards(heads, nothing, experts)
    expert_layers = set(config.expert_layers)
    layers = [sparse if layer in expert_layers else dense for layer in range(config.num_layers)]
    return ShardPlan(
        tuple(
            RankShard(tuple(layer[rank] for layer in layers), embedding_rows=part, head_rows=part)
            for rank, part in enumerate(ranges_of_counts(rows))
        )
    )


def most_ranks(config: ModelConfig) -> int:
    """How many ranks can each have a part of a layer."""
    return config.num_kv_heads + (config.num_experts or units_of(config.intermediate_size))


def too_many_ranks(number: int, units: str) -> str:
    """What is wrong where so many ranks are to have something of `units` each; for a person."""
    return f"spec.pools: {number} ranks are more than the model has something to give each ({units}); use fewer ranks"


def describe_units(config: ModelConfig) -> str:
    """What there is to deal, for a message."""
    wide = [f"{config.num_experts} experts"] if config.experts else []
    if len(config.expert_layers) < config.num_layers:
        wide.append(f"{config.intermediate_size} MLP columns")
    rows = f"{config.vocab_size} vocabulary rows in units of {UNIT}"
    return f"{config.num_kv_heads} KV heads, {' or '.join(wide)} and {rows}"


def _shards(*counts: Sequence[int]) -> list[LayerShard]:
    """A layer's shards in rank order from the numbers of heads, columns and experts of each."""
    return list(map(LayerShard, *map(ranges_of_counts, counts)))


def _mlp_columns(config: ModelConfig, heads: Sequence[int], *, cores: Sequence[int], shares: Shares) -> list[int]:
    """Columns of each rank: by shares, or such that all its weights of a layer come nearest to its cores' share."""
    if shares.mlp:
        return _deal_in_units(config.intermediate_size, shares.mlp)
    weights = config.intermediate_size * config.mlp_params_per_column
    return _deal_in_units(config.intermediate_size, _make_up_for(config, heads, weights, cores=cores))


def _experts(config: ModelConfig, heads: Sequence[int], *, cores: Sequence[int], shares: Shares) -> list[int]:
    """Experts of each rank, in the same way."""
    if shares.mlp:
        return largest_remainder(config.num_experts, shares.mlp)
    weights = config.num_experts * config.params_per_expert
    return largest_remainder(config.num_experts, _make_up_for(config, heads, weights, cores=cores))


def _make_up_for(config: ModelConfig, heads: Sequence[int], weights: int, *, cores: Sequence[int]) -> Sequence[Weight]:
    """Parts of a layer's MLP weights that, with the attention's of the heads, come nearest to the cores' share."""
    return level_up(weights, owned=[count * config.attention_params_per_kv_head for count in heads], weights=cores)


def units_of(total: int) -> int:
    """Units that `total` columns or rows make."""
    return -(-total // UNIT)


def in_units(total: int, counts: Sequence[int]) -> list[int]:
    """Columns or rows of consecutive pieces of so many units; the last unit may be smaller."""
    sizes, dealt = [], 0
    for count in counts:
        size = min(count * UNIT, total - dealt)
        sizes.append(size)
        dealt += size
    return sizes


def _deal_in_units(total: int, weights: Sequence[Weight]) -> list[int]:
    """`total` in consecutive pieces of whole units, by weights."""
    return in_units(total, largest_remainder(units_of(total), weights))
