"""Shard plans dealt by weights: within layers, or layer by layer.

*Within layers* every layer is split over all ranks, all that are of one kind alike. KV heads and experts are dealt one
by one, MLP columns and vocabulary rows in units of 64 (the last unit is smaller where 64 does not divide). Experts may
be dealt in slices instead: every one of them like an MLP, by columns, or only those that no rank has whole. Parts that
the spec gives no shares for are dealt by cores a rank; MLP columns, or experts, then make up for what whole KV heads
cannot: SmolLM2's three heads on two equal ranks are 2 and 1, its 1536 columns 704 and 832. Experts that all tokens
share go with the KV heads.

*Layer by layer* a rank holds whole layers, in a row, and is a stage of a pipeline. Layers are dealt by largest
remainder, in rank order. A layer's halves stay together, so shares.attention and shares.mlp mean the same here; where
both are given they must be equal. The embedding lies with the first layer and the output head with the last, and
shares.vocabulary does not apply. The head is not weighed against layers: where stages compute at the same time, in long
prompts, it is computed for a few rows only; while they decode they take turns, and it does not matter who has more.

Weights are floats and quotas are fractions, so the same weights give the same counts on every machine. Ties go to the
lower rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Final

from hetero_api.errors import PlanError
from hetero_api.model_config import ModelConfig
from hetero_api.sharding import NO_UNITS, LayerShard, RankShard, ShardPlan, Stage, UnitRange, ranges_of_counts

if TYPE_CHECKING:  # the ranks of the GPU bench import this module where there is no pydantic
    from hetero_api.spec import PlacementShares

Weight = int | float | Fraction


def largest_remainder(units: int, weights: Sequence[Weight]) -> list[int]:
    """Deal `units` by weights: each count is its quota rounded down or up; a weight of 0 gets 0.

    Hamilton's method: quotas rounded down, then one more to those with the largest fractions. The sum of the weights
    must not be 0.
    """
    exact = [Fraction(weight) for weight in weights]
    total = sum(exact)
    quotas = [units * weight / total for weight in exact]
    counts = [int(quota) for quota in quotas]
    by_fraction = sorted(range(len(quotas)), key=lambda rank: (counts[rank] - quotas[rank], rank))
    for rank in by_fraction[: units - sum(counts)]:
        counts[rank] += 1
    return counts


def level_up(amount: int, *, owned: Sequence[int], weights: Sequence[Weight]) -> list[Fraction]:
    """Parts of `amount`, one a rank, that bring what each owns as near to its weight as adding can.

    Those that own more than their share get nothing; the others end at one level, i.e. the same ratio of owned plus
    given to weight. `amount` and `owned` are of one unit; weights must be more than 0.
    """
    exact = [Fraction(weight) for weight in weights]
    below = list(range(len(exact)))
    while True:
        level = Fraction(amount + sum(owned[rank] for rank in below)) / sum(exact[rank] for rank in below)
        still_below = [rank for rank in below if exact[rank] * level >= owned[rank]]
        if still_below == below:
            break
        below = still_below
    return [exact[rank] * level - owned[rank] if rank in below else Fraction(0) for rank in range(len(exact))]


UNIT: Final = 64
"""MLP columns, and vocabulary rows, that stay together."""


def deal_within_layers(
    config: ModelConfig, *, cores: Sequence[int], shares: PlacementShares, in_slices: bool = False
) -> ShardPlan:
    """By shares, one weight a rank, or by `cores`; a rank may get nothing. `in_slices`: experts go by columns."""
    heads = largest_remainder(config.num_kv_heads, shares.attention or cores)
    columns, experts = config.intermediate_size, config.num_experts
    by_columns = _wide_weights(config, heads, columns * config.mlp_params_per_column, cores=cores, shares=shares)
    by_experts = _wide_weights(config, heads, experts * config.params_per_expert, cores=cores, shares=shares)
    return plan_within_layers(
        config,
        heads=heads,
        columns=_deal_in_units(columns, by_columns),
        experts=largest_remainder(experts, by_experts) if experts and not in_slices else [0] * len(cores),
        expert_columns=_deal_in_units(config.expert_columns, by_experts, config.expert_unit) if in_slices else (),
        rows=_deal_in_units(config.vocab_size, shares.vocabulary or cores),
    )


def plan_within_layers(
    config: ModelConfig,
    *,
    heads: Sequence[int],
    columns: Sequence[int],
    experts: Sequence[int],
    rows: Sequence[int],
    shared: Sequence[int] | None = None,
    expert_columns: Sequence[int] = (),
) -> ShardPlan:
    """Every layer split alike: how many KV heads, MLP columns of a dense layer, experts and vocabulary rows a rank.

    Layers with several times as many columns are split in the same ratio. `shared`: MLP columns of shared experts;
    None: they go with the KV heads. `expert_columns`: columns of each of the experts that no rank has whole; a rank has
    either kind.
    """
    nothing = [0] * len(heads)
    times_wider = {layer: number // config.intermediate_size for layer, number in config.dense_columns.items()}
    dense = {
        times: _shards(heads, [times * count for count in columns], nothing) for times in set(times_wider.values())
    }
    sparse = _shards(heads, shared_columns_of(config, heads) if shared is None else shared, experts)
    if any(expert_columns):
        slices = UnitRange(sum(experts), config.num_experts), ranges_of_counts(expert_columns)
        sparse = [
            replace(shard, experts=slices[0], expert_columns=own) if own.size else shard
            for shard, own in zip(sparse, slices[1], strict=True)
        ]
    expert_layers = set(config.expert_layers)
    layers = [sparse if layer in expert_layers else dense[times_wider[layer]] for layer in range(config.num_layers)]
    return ShardPlan(
        tuple(
            RankShard(tuple(layer[rank] for layer in layers), embedding_rows=part, head_rows=part)
            for rank, part in enumerate(ranges_of_counts(rows))
        )
    )


def shared_columns_of(config: ModelConfig, heads: Sequence[int]) -> list[int]:
    """Deal shared experts' columns, in units, in proportion to KV heads: all tokens need both, at the same ranks."""
    total, ends = config.shared_columns, [0]
    for end in accumulate(heads):
        is_last = end == sum(heads)
        ends.append(total if is_last else end * total // (sum(heads) * UNIT) * UNIT)
    return [end - begin for begin, end in pairwise(ends)]


def most_ranks(config: ModelConfig) -> int:
    """How many ranks can each have a part of a layer."""
    return config.num_kv_heads + (config.num_experts or units_of(config.intermediate_size))


def most_layer_ranks(config: ModelConfig) -> int:
    """Return how many ranks can each have whole layers."""
    return config.first_inseparable + 1


def too_many_ranks(number: int, units: str) -> str:
    """Return the message for a group with more ranks than the model has `units` to give."""
    return f"spec.pools: {number} ranks are more than the model has something to give each ({units}); use fewer ranks"


def describe_units(config: ModelConfig) -> str:
    """Return the units that can be dealt, for a message."""
    wide = [f"{config.num_experts} experts"] if config.experts else []
    if len(config.expert_layers) < config.num_layers:
        wide.append(f"{config.intermediate_size} MLP columns")
    rows = f"{config.vocab_size} vocabulary rows in units of {UNIT}"
    return f"{config.num_kv_heads} KV heads, {' or '.join(wide)} and {rows}"


def _shards(*counts: Sequence[int]) -> list[LayerShard]:
    """Return a layer's shards in rank order from the numbers of heads, columns and experts of each."""
    return list(map(LayerShard, *map(ranges_of_counts, counts)))


def _wide_weights(
    config: ModelConfig, heads: Sequence[int], weights: int, *, cores: Sequence[int], shares: PlacementShares
) -> Sequence[Weight]:
    """Return what a layer's columns or experts, of so many weights, are dealt by.

    That is the shares, or parts that, with the attention's weights of the heads, come nearest to the cores' share.
    """
    owned = [count * config.attention_params_per_kv_head for count in heads]
    return shares.mlp or level_up(weights, owned=owned, weights=cores)


def units_of(total: int, unit: int = UNIT) -> int:
    """Units that `total` columns or rows make."""
    return -(-total // unit)


def in_units(total: int, counts: Sequence[int], unit: int = UNIT) -> list[int]:
    """Columns or rows of consecutive pieces of so many units; the last unit may be smaller."""
    sizes, dealt = [], 0
    for count in counts:
        size = min(count * unit, total - dealt)
        sizes.append(size)
        dealt += size
    return sizes


def _deal_in_units(total: int, weights: Sequence[Weight], unit: int = UNIT) -> list[int]:
    """`total` in consecutive pieces of whole units, by weights."""
    return in_units(total, largest_remainder(units_of(total, unit), weights), unit)


def deal_layers(config: ModelConfig, *, cores: Sequence[int], shares: PlacementShares) -> ShardPlan:
    """By shares, one weight a rank, or by `cores`; a rank may get nothing. Raises PlanError when shares do not fit."""
    counts = largest_remainder(config.num_layers, shares_of_layers(shares) or cores)
    first, last = config.first_inseparable, config.num_layers - 1
    if num_apart(counts, first_inseparable=first):
        raise PlanError(
            f"spec.placement.shares: layers {first} to {last} read one another's keys and values, so one rank must "
            f"hold them; give the last rank that holds layers a share of {last - first + 1} of {last + 1} at least"
        )
    return plan_of_layers(config, counts)


def num_apart(counts: Sequence[int], *, first_inseparable: int) -> int:
    """Return how many of the layers that must be on one rank are not, with so many layers a rank, in rank order."""
    of_last = next(count for count in reversed(counts) if count)
    return max(0, sum(counts) - of_last - first_inseparable)


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


def whole_on(config: ModelConfig, rank: int, world_size: int) -> ShardPlan:
    """Return the plan in which one rank of several has all of the model."""
    return plan_of_layers(config, [config.num_layers if each == rank else 0 for each in range(world_size)])


def shard_of_layers(config: ModelConfig, begin: int, end: int) -> RankShard:
    """Return the shard of a rank that holds layers [begin, end) and nothing of the others."""
    held = {layer: _layer_on(0, config, layer, 1)[0] for layer in range(begin, end)}
    layers = tuple(held.get(layer, LayerShard(NO_UNITS, NO_UNITS)) for layer in range(config.num_layers))
    vocabulary = UnitRange(0, config.vocab_size)
    return RankShard(
        layers,
        embedding_rows=vocabulary if begin == 0 else NO_UNITS,
        head_rows=vocabulary if end == config.num_layers else NO_UNITS,
    )


def describe_layers(config: ModelConfig) -> str:
    """Return the layers that can be dealt, for a message."""
    together = config.num_layers - config.first_inseparable
    kept = f", the last {together} together, since they read one another's keys and values" if together > 1 else ""
    return f"{config.num_layers} layers, each whole on one rank{kept}"


def shares_of_layers(shares: PlacementShares) -> Sequence[float] | None:
    """Weights for layers, one a rank; None where none are given. Raises PlanError when shares do not fit."""
    if shares.layer_problem:
        raise PlanError(shares.layer_problem)
    return shares.mlp or shares.attention


def _layer_on(owner: int, config: ModelConfig, layer: int, world_size: int) -> list[LayerShard]:
    """Return a layer's shards in rank order, all of it on one."""
    experts = config.num_experts if layer in config.expert_layers else 0
    units = (config.num_kv_heads, config.mlp_columns(layer), experts)
    return list(map(LayerShard, *(_all_on(owner, total, world_size) for total in units)))


def _all_on(owner: int, total: int, world_size: int) -> tuple[UnitRange, ...]:
    return ranges_of_counts([total if rank == owner else 0 for rank in range(world_size)])


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Units of each rank, in rank order, and the layer's window."""

    heads: tuple[int, ...]
    columns: tuple[int, ...]
    experts: tuple[int, ...]
    expert_columns: tuple[int, ...]
    """Of each of its experts, where they are slices; 0: they are whole."""
    window: int | None


@dataclass(frozen=True, slots=True)
class PlanView:
    """Parts of a plan that its cost depends on."""

    stages: tuple[Stage, ...]
    kinds: tuple[Mapping[LayerKind, int], ...]
    """Number of layers of each kind, by stage."""
    embedding_owners: tuple[int, ...]
    head_rows: tuple[int, ...]
    """Rows of the output head, in rank order."""

    @classmethod
    def of(cls, plan: ShardPlan, windows: tuple[int | None, ...]) -> PlanView:
        """Read a plan. Raises PlanError when nobody has a layer's attention."""
        stages = plan.stages()
        kinds = tuple(Counter(_kind(plan, i, windows[i]) for i in range(stage.begin, stage.end)) for stage in stages)
        return cls(stages, kinds, plan.embedding_owners(), tuple(shard.head_rows.size for shard in plan.ranks))

    @property
    def head_owners(self) -> tuple[int, ...]:
        """Ranks with rows of the output head."""
        return tuple(rank for rank, rows in enumerate(self.head_rows) if rows)


def _kind(plan: ShardPlan, layer: int, window: int | None) -> LayerKind:
    shards = [shard.layers[layer] for shard in plan.ranks]
    sizes = ((s.kv_heads.size, s.mlp_columns.size, s.experts.size, s.expert_columns.size) for s in shards)
    heads, columns, experts, expert_columns = zip(*sizes, strict=True)
    return LayerKind(heads, columns, experts, expert_columns, window)
