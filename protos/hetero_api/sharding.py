"""Who owns what of a model: the ShardPlan, read by the loader, the layers and the tests.

For every decoder layer and rank the plan holds an integer range of KV heads (each with its group of query
heads; in layers of the gated delta rule, the heads of that rule that are dealt with it) and of MLP columns or experts,
and for every rank a range of the embedding's vocabulary rows and one of the output head's. Ranges may be uneven and
empty; over the ranks they are disjoint, ascending, and their union is exact.
`ShardPlan.validate` proves it.

Which ranks work on a layer follows from what they own of it, and so does the pipeline: `ShardPlan.stages`. Ranks of a
stage that own KV heads *hold* the residual stream there; those that own MLP columns or experts only *help*: a leader
among the holders lends them each layer's hidden states and takes their partial sums.

Experts of a layer are dealt in an order of their own (`expert_orders`), so that any expert can be any rank's. The last
ones of the order may be dealt in *slices*: several ranks hold the same experts, each some columns of every one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final, NamedTuple

from hetero_api.errors import PlanError
from hetero_api.model_config import ModelConfig
from hetero_api.v1 import ranks_pb2


class UnitRange(NamedTuple):
    """Half-open range of units [begin, end)."""

    begin: int
    end: int

    @property
    def size(self) -> int:
        """Number of units."""
        return self.end - self.begin

    def scaled(self, factor: int) -> UnitRange:
        """Return the range in smaller units, `factor` of which make one of these."""
        return UnitRange(self.begin * factor, self.end * factor)


NO_UNITS: Final = UnitRange(0, 0)


@dataclass(frozen=True, slots=True)
class LayerShard:
    """Units that one rank owns of one layer: KV heads, MLP columns of a dense one or of shared experts, and experts.

    In a layer of the gated delta rule, KV heads stand for the heads of that rule that are dealt with them.

    `experts` are positions in the layer's expert order; `ShardPlan.experts_of` returns which experts these are.
    `expert_columns` are the columns that the rank owns of each of them; if they are empty, its experts are whole.
    """

    kv_heads: UnitRange
    mlp_columns: UnitRange
    experts: UnitRange = NO_UNITS
    expert_columns: UnitRange = NO_UNITS

    @property
    def is_empty(self) -> bool:
        """True if the rank owns nothing of the layer."""
        return not (self.kv_heads.size or self.mlp_columns.size or self.experts.size)


@dataclass(frozen=True, slots=True)
class RankShard:
    """Units that one rank owns."""

    layers: tuple[LayerShard, ...]
    embedding_rows: UnitRange
    head_rows: UnitRange

    @property
    def is_empty(self) -> bool:
        """Return whether it owns nothing at all."""
        has_rows = self.embedding_rows.size or self.head_rows.size
        return not has_rows and all(layer.is_empty for layer in self.layers)

    @property
    def kv_heads_total(self) -> int:
        """KV heads over all layers; 0 means that the rank needs no KV cache."""
        return sum(layer.kv_heads.size for layer in self.layers)


@dataclass(frozen=True, slots=True)
class Stage:
    """Consecutive decoder layers [begin, end) that the same ranks (ascending) work on, in the same roles."""

    ranks: tuple[int, ...]
    holders: tuple[int, ...]
    """Those that own KV heads: each has the residual stream. Ascending, at least one."""
    begin: int
    end: int

    @property
    def leader(self) -> int:
        """The holder that helpers, and other stages, exchange with."""
        return self.holders[0]

    @property
    def num_layers(self) -> int:
        """Number of its layers."""
        return self.end - self.begin

    @property
    def helpers(self) -> tuple[int, ...]:
        """Ranks that own MLP columns or experts only, ascending."""
        return tuple(rank for rank in self.ranks if rank not in self.holders)


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """Who owns what, in rank order."""

    ranks: tuple[RankShard, ...]
    expert_orders: tuple[tuple[int, ...], ...] = ()
    """A permutation of its experts for each layer, () for their own order; () for all layers' own."""

    @classmethod
    def whole(cls, config: ModelConfig) -> ShardPlan:
        """Return the plan of a model that one rank owns alone."""
        heads, rows = UnitRange(0, config.num_kv_heads), UnitRange(0, config.vocab_size)
        layers = tuple(
            LayerShard(
                heads,
                UnitRange(0, config.mlp_columns(layer)),
                UnitRange(0, config.num_experts if layer in config.expert_layers else 0),
            )
            for layer in range(config.num_layers)
        )
        return cls((RankShard(layers, rows, rows),))

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.ranks[0].layers)

    @property
    def owners(self) -> tuple[int, ...]:
        """Ranks that hold anything, ascending."""
        return tuple(r for r, shard in enumerate(self.ranks) if not shard.is_empty)

    def attention_owners(self, layer: int) -> tuple[int, ...]:
        """Ranks that hold KV heads of the layer, ascending."""
        return tuple(r for r, shard in enumerate(self.ranks) if shard.layers[layer].kv_heads.size)

    def mlp_owners(self, layer: int) -> tuple[int, ...]:
        """Ranks that hold MLP columns of the layer, ascending."""
        return tuple(r for r, shard in enumerate(self.ranks) if shard.layers[layer].mlp_columns.size)

    def expert_owners(self, layer: int) -> tuple[int, ...]:
        """Ranks that hold experts of the layer, or slices of some, ascending; none for a dense one."""
        return tuple(r for r, shard in enumerate(self.ranks) if shard.layers[layer].experts.size)

    def experts_of(self, rank: int, layer: int) -> tuple[int, ...]:
        """Numbers of the experts of a layer that a rank holds, whole or in part, in the order of their positions."""
        return self._experts_at(self.ranks[rank].layers[layer].experts, layer)

    def sliced_experts(self, layer: int) -> tuple[int, ...]:
        """Numbers of the experts of a layer that are dealt in slices, in the order of their positions."""
        slices = (shard.layers[layer] for shard in self.ranks if shard.layers[layer].expert_columns.size)
        return self._experts_at(next((part.experts for part in slices), NO_UNITS), layer)

    def _experts_at(self, positions: UnitRange, layer: int) -> tuple[int, ...]:
        order = self.expert_orders[layer] if self.expert_orders else ()
        return order[positions.begin : positions.end] if order else tuple(range(positions.begin, positions.end))

    def embedding_owners(self) -> tuple[int, ...]:
        """Ranks that hold vocabulary rows of the embedding, ascending."""
        return tuple(r for r, shard in enumerate(self.ranks) if shard.embedding_rows.size)

    def head_owners(self) -> tuple[int, ...]:
        """Ranks that hold vocabulary rows of the output head, ascending."""
        return tuple(r for r, shard in enumerate(self.ranks) if shard.head_rows.size)

    def layer_owners(self, layer: int) -> tuple[int, ...]:
        """Ranks that hold anything of the layer, ascending."""
        return tuple(r for r, shard in enumerate(self.ranks) if not shard.layers[layer].is_empty)

    def stages(self) -> tuple[Stage, ...]:
        """Return the pipeline: maximal runs of layers with the same owners in the same roles, in order.

        One rank may be in several. Raises PlanError when a layer's attention has no owner.
        """
        if not self.ranks or not self.num_layers:
            raise PlanError("a shard plan needs at least one rank and one layer")
        stages = []
        for (ranks, holders), run in groupby(range(self.num_layers), key=self._roles):
            layers = list(run)
            if not holders:
                raise PlanError(f"the KV heads of layer {layers[0]} are owned by no rank")
            stages.append(Stage(ranks, holders, layers[0], layers[-1] + 1))
        return tuple(stages)

    def deferring_layers(self, rank: int) -> tuple[int, ...]:
        """Layers whose experts' sums the rank can return a layer late: where it helps, and has experts of the stage's
        next layer, too."""
        helped = (range(stage.begin, stage.end - 1) for stage in self.stages() if rank in stage.helpers)
        own = self.ranks[rank].layers
        return tuple(i for layers in helped for i in layers if own[i].experts.size and own[i + 1].experts.size)

    def _roles(self, layer: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self.layer_owners(layer), self.attention_owners(layer)

    def validate(
        self,
        *,
        num_layers: int,
        num_kv_heads: int,
        mlp_columns: int,
        vocab_size: int,
        num_experts: int = 0,
        expert_columns: int = 0,
        shared_columns: int = 0,
        expert_layers: Collection[int] = (),
        wide_layers: Mapping[int, int] | None = None,
    ) -> None:
        """Raise PlanError unless every unit of the model is owned exactly once.

        `expert_layers` have `num_experts` experts of `expert_columns` columns and `shared_columns` MLP columns each,
        the others are dense and have `mlp_columns`, unless `wide_layers` states their number.
        """
        if not self.ranks:
            raise PlanError("a shard plan needs at least one rank")
        if any(len(shard.layers) != num_layers for shard in self.ranks):
            raise PlanError(f"every rank's shard must list all {num_layers} layers")
        for layer in range(num_layers):
            shards = [shard.layers[layer] for shard in self.ranks]
            dense = (wide_layers or {}).get(layer, mlp_columns)
            columns, experts = (shared_columns, num_experts) if layer in expert_layers else (dense, 0)
            _check_cover(f"layer {layer} KV heads", enumerate(s.kv_heads for s in shards), num_kv_heads)
            _check_cover(f"layer {layer} MLP columns", enumerate(s.mlp_columns for s in shards), columns)
            _check_experts(f"layer {layer} expert", shards, number=experts, columns=expert_columns)
        self._check_expert_orders(num_layers, num_experts, expert_layers)
        _check_cover("embedding rows", enumerate(shard.embedding_rows for shard in self.ranks), vocab_size)
        _check_cover("output head rows", enumerate(shard.head_rows for shard in self.ranks), vocab_size)

    def validate_for(self, config: ModelConfig) -> None:
        """`validate` with a model's numbers, and raise PlanError if a layer cannot read another's keys and values."""
        self.validate(
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            mlp_columns=config.intermediate_size,
            vocab_size=config.vocab_size,
            num_experts=config.num_experts,
            expert_columns=config.expert_columns,
            shared_columns=config.shared_columns,
            expert_layers=config.expert_layers,
            wide_layers=config.dense_columns,
        )
        self._check_readers(config)

    def _check_readers(self, config: ModelConfig) -> None:
        for layer, source in enumerate(config.kv_layers):
            if any(shard.layers[layer].kv_heads != shard.layers[source].kv_heads for shard in self.ranks):
                raise PlanError(
                    f"layer {layer} KV heads: it reads the keys and values of layer {source}, so each rank must own "
                    f"the same KV heads of both; use spec.placement.mode Tensor, or keep layers "
                    f"{config.first_inseparable} to {config.num_layers - 1} on one rank"
                )

    def _check_expert_orders(self, num_layers: int, num_experts: int, expert_layers: Collection[int]) -> None:
        if self.expert_orders and len(self.expert_orders) != num_layers:
            raise PlanError(f"expert_orders: there are {len(self.expert_orders)} for {num_layers} layers")
        for layer, order in enumerate(self.expert_orders):
            expected = num_experts if layer in expert_layers else 0
            if order and sorted(order) != list(range(expected)):
                raise PlanError(f"expert_orders: layer {layer}'s is no permutation of its {expected} experts")

    def to_proto(self) -> ranks_pb2.ShardPlan:
        """Return the plan as a message."""
        return ranks_pb2.ShardPlan(
            ranks=[_rank_to_proto(shard) for shard in self.ranks],
            expert_orders=[ranks_pb2.ExpertOrder(experts=order) for order in self.expert_orders],
        )

    @classmethod
    def from_proto(cls, message: ranks_pb2.ShardPlan) -> ShardPlan:
        """Read a plan from a message."""
        return cls(
            tuple(_rank_from_proto(rank) for rank in message.ranks),
            tuple(tuple(order.experts) for order in message.expert_orders),
        )


def deferral_problem(config: ModelConfig, number: int) -> str:
    """Return why sums of so many of a token's experts cannot come a layer late; empty if they can."""
    field, experts = f"spec.engine.expertDeferral: {number}", config.experts
    if experts is None:
        return f"{field}, but the model has no experts; leave it out"
    if config.norms.sums or experts.norms is not None:
        return f"{field}, but the model norms sums of experts, which must be whole for that; leave it out"
    if number >= experts.per_token:
        most = experts.per_token - 1
        return (
            f"{field} of the {experts.per_token} experts of a token, one of which must not be late; use {most} at most"
        )
    return ""


def ranges_of_counts(counts: Sequence[int]) -> tuple[UnitRange, ...]:
    """Consecutive ranges of the given sizes: (2, 1) → [0, 2), [2, 3)."""
    ranges, begin = [], 0
    for count in counts:
        ranges.append(UnitRange(begin, begin + count))
        begin += count
    return tuple(ranges)


def _check_experts(what: str, shards: Sequence[LayerShard], *, number: int, columns: int) -> None:
    """Raise PlanError unless each expert is one rank's, and those behind them are in slices that make them whole."""
    sliced = {rank: shard for rank, shard in enumerate(shards) if shard.expert_columns.size}
    positions = {shard.experts for shard in sliced.values()} or {UnitRange(number, number)}
    (begin, end), *others = positions
    if others or end != number or (sliced and begin == end):
        raise PlanError(
            f"{what} columns: of experts {sorted(map(tuple, positions))}, expected one range up to {number}"
        )
    whole = ((rank, shard.experts) for rank, shard in enumerate(shards) if rank not in sliced)
    _check_cover(f"{what}s", whole, begin)
    if sliced:
        _check_cover(f"{what} columns", ((rank, shard.expert_columns) for rank, shard in sliced.items()), columns)


def _check_cover(what: str, ranges: Iterable[tuple[int, UnitRange]], total: int) -> None:
    """Raise PlanError unless the ranges of these ranks follow one another and are `total` together."""
    expected = 0
    for rank, unit_range in ranges:
        if unit_range.begin != expected or unit_range.end < unit_range.begin:
            raise PlanError(f"{what}: rank {rank} owns {tuple(unit_range)}, expected it to begin at {expected}")
        expected = unit_range.end
    if expected != total:
        raise PlanError(f"{what}: {expected} of {total} are owned")


_LAYER_RANGES: Final = ("kv_heads", "mlp_columns", "experts", "expert_columns")
_ROW_RANGES: Final = ("embedding_rows", "head_rows")


def _to_protos(shard: LayerShard | RankShard, names: Iterable[str]) -> dict[str, ranks_pb2.UnitRange]:
    return {name: ranks_pb2.UnitRange(**getattr(shard, name)._asdict()) for name in names}


def _from_protos(message: ranks_pb2.LayerShard | ranks_pb2.RankShard, names: Iterable[str]) -> dict[str, UnitRange]:
    messages = ((name, getattr(message, name)) for name in names)
    return {name: UnitRange(units.begin, units.end) for name, units in messages}


def _rank_to_proto(shard: RankShard) -> ranks_pb2.RankShard:
    layers = [ranks_pb2.LayerShard(**_to_protos(layer, _LAYER_RANGES)) for layer in shard.layers]
    return ranks_pb2.RankShard(layers=layers, **_to_protos(shard, _ROW_RANGES))


def _rank_from_proto(message: ranks_pb2.RankShard) -> RankShard:
    layers = tuple(LayerShard(**_from_protos(layer, _LAYER_RANGES)) for layer in message.layers)
    return RankShard(layers, **_from_protos(message, _ROW_RANGES))
