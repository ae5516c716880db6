"""Deals a model layer by layer: a rank holds whole layers, in a row, and is a stage of a pipeline.

Layers are dealt by largest remainder, in rank order, by cores a rank or by shares. A layer's halves stay together, so
spec.placement.shares.attention and .mlp mean the same here: weights for layers; where both are given they must be
equal. The embedding lies with the first layer and the output head with the last, and shares.vocabulary does not apply.

The head is not weighed against layers. Where stages compute at the same time, in long prompts, it is computed for a
few rows only; while they decode they take turns, and it does not matter who has more.
"""

from __future__ import annotations

from collections.abc import Sequence

from hetero_api.errors import PlanError
from hetero_api.model_config import ModelConfig
from hetero_api.sharding import NO_UNITS, LayerShard, RankShard, ShardPlan, UnitRange, ranges_of_counts
from hetero_placement.apportionment import largest_remainder
from hetero_placement.shares import Shares


def deal_layers(config: ModelConfig, *, cores: Sequence[int], shares: Shares) -> ShardPlan:
    """By shares, one weight a rank, or by `cores`; a rank may get nothing. Raises PlanError when shares do not fit."""
    return plan_of_layers(config, largest_remainder(config.num_layers, shares_of_layers(shares) or cores))


def plan_of_layers(config: ModelConfig, counts: Sequence[int]) -> ShardPlan:
    """So many whole layers a rank, in rank order."""
    owners = [rank for rank, count in enumerate(counts) for _ in range(count)]
    layers = [_layer_on(owner, config, layer, len(counts)) for layer, owner in enumerate(owners)]
    embedding = _all_on(owners[0], config.vocab_size, len(counts))
    head = _all_on(owners[-1], config.vocab_size, len(counts))
    return ShardPlan(
        tuple(
            RankShard(tuple(layer[rank] for layer in layers), embedding_rows=embedding[rank], head_rows=head[rank])
            for rank in range(len(counts))
        )
    )


def shard_of_layers(config: ModelConfig, begin: int, end: int) -> RankShard:
    """What layers [begin, end) are to the rank that holds them, the others left out."""
    layers = tuple(_layer_on(0, config, layer, 1)[0] for layer in range(begin, end))
    vocabulary = UnitRange(0, config.vocab_size)
    return RankShard(
        layers,
        embedding_rows=vocabulary if begin == 0 else NO_UNITS,
        head_rows=vocabulary if end == config.num_layers else NO_UNITS,
    )


def describe_layers(config: ModelConfig) -> str:
    """What there is to deal, for a message."""
    return f"{config.num_layers} layers, each whole on one rank"


def shares_of_layers(shares: Shares) -> Sequence[float] | None:
    """Weights for layers, one a rank; None where none are given. Raises PlanError when shares do not fit."""
    if shares.vocabulary:
        raise PlanError(
            "spec.placement.shares.vocabulary does not apply in mode Layer, where the embedding lies with the first "
            "layer and the output head with the last; leave it out"
        )
    if shares.attention and shares.mlp and shares.attention != shares.mlp:
        raise PlanError(
            "spec.placement.shares: attention and mlp differ, but in mode Layer both are weights for whole layers; "
            "give one of them"
        )
    return shares.mlp or shares.attention


def _layer_on(owner: int, config: ModelConfig, layer: int, world_size: int) -> list[LayerShard]:
    """A layer's shards in rank order, all of it on one."""
    wide = (0, config.num_experts) if layer in config.expert_layers else (config.intermediate_size, 0)
    units = (config.num_kv_heads, *wide)
    return list(map(LayerShard, *(_all_on(owner, total, world_size) for total in units)))


def _all_on(owner: int, total: int, world_size: int) -> tuple[UnitRange, ...]:
    return ranges_of_counts([total if rank == owner else 0 for rank in range(world_size)])
