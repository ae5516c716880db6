"""Who owns what of a model: the ShardPlan, read by the loader, the layers and the tests.

For every decoder layer and rank the plan holds an integer range of KV heads (each with its group of query
heads) and of MLP columns, and for every rank a range of vocabulary rows. Ranges may be uneven and empty; over
the ranks they are disjoint, ascending, and their union is exact. `ShardPlan.validate` proves it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hetero_api.errors import PlanError
from hetero_api.v1 import ranks_pb2


class UnitRange(NamedTuple):
    """Half-open range of units [begin, end)."""

    begin: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.begin

    def scaled(self, factor: int) -> UnitRange:
        """The range in smaller units, `factor` of which make one of these."""
        return UnitRange(self.begin * factor, self.end * factor)


@dataclass(frozen=True, slots=True)
class LayerShard:
    """What one rank owns of one layer."""

    kv_heads: UnitRange
    mlp_columns: UnitRange


@dataclass(frozen=True, slots=True)
class RankShard:
    """What one rank owns."""

    layers: tuple[LayerShard, ...]
    vocab_rows: UnitRange

    @property
    def kv_heads_total(self) -> int:
        """KV heads over all layers; 0 means that the rank needs no KV cache."""
        return sum(layer.kv_heads.size for layer in self.layers)


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """Who owns what, in rank order."""

    ranks: tuple[RankShard, ...]

    @property
    def world_size(self) -> int:
        return len(self.ranks)

    @property
    def num_layers(self) -> int:
        return len(self.ranks[0].layers)

    def attention_owners(self, layer: int) -> tuple[int, ...]:
        """Ranks that hold KV heads of the layer, ascending."""
        return tuple(r for r, shard in enumerate(self.ranks) if shard.layers[layer].kv_heads.size)

    def mlp_owners(self, layer: int) -> tuple[int, ...]:
        """Ranks that hold MLP columns of the layer, ascending."""
        return tuple(r for r, shard in enumerate(self.ranks) if shard.layers[layer].mlp_columns.size)

    def vocab_owners(self) -> tuple[int, ...]:
        """Ranks that hold vocabulary rows, ascending."""
        return tuple(r for r, shard in enumerate(self.ranks) if shard.vocab_rows.size)

    def validate(self, *, num_layers: int, num_kv_heads: int, mlp_columns: int, vocab_rows: int) -> None:
        """Raise PlanError unless every unit of the model is owned exactly once."""
        if not self.ranks:
            raise PlanError("a shard plan needs at least one rank")
        if any(len(shard.layers) != num_layers for shard in self.ranks):
            raise PlanError(f"every rank's shard must list all {num_layers} layers")
        for layer in range(num_layers):
            shards = [shard.layers[layer] for shard in self.ranks]
            _check_cover(f"layer {layer} KV heads", (s.kv_heads for s in shards), num_kv_heads)
            _check_cover(f"layer {layer} MLP columns", (s.mlp_columns for s in shards), mlp_columns)
        _check_cover("vocabulary rows", (shard.vocab_rows for shard in self.ranks), vocab_rows)

    def to_proto(self) -> ranks_pb2.ShardPlan:
        return ranks_pb2.ShardPlan(ranks=[_rank_to_proto(shard) for shard in self.ranks])

    @classmethod
    def from_proto(cls, message: ranks_pb2.ShardPlan) -> ShardPlan:
        return cls(tuple(_rank_from_proto(rank) for rank in message.ranks))


def ranges_of_counts(counts: Sequence[int]) -> tuple[UnitRange, ...]:
    """Consecutive ranges of the given sizes: (2, 1) → [0, 2), [2, 3)."""
    ranges, begin = [], 0
    for count in counts:
        ranges.append(UnitRange(begin, begin + count))
        begin += count
    return tuple(ranges)


def _check_cover(what: str, ranges: Iterable[UnitRange], total: int) -> None:
    expected = 0
    for rank, unit_range in enumerate(ranges):
        if unit_range.begin != expected or unit_range.end < unit_range.begin:
            raise PlanError(f"{what}: rank {rank} owns {tuple(unit_range)}, expected it to begin at {expected}")
        expected = unit_range.end
    if expected != total:
        raise PlanError(f"{what}: {expected} of {total} are owned")


def _range_to_proto(unit_range: UnitRange) -> ranks_pb2.UnitRange:
    return ranks_pb2.UnitRange(begin=unit_range.begin, end=unit_range.end)


def _range_from_proto(message: ranks_pb2.UnitRange) -> UnitRange:
    return UnitRange(message.begin, message.end)


def _rank_to_proto(shard: RankShard) -> ranks_pb2.RankShard:
    layers = [
        ranks_pb2.LayerShard(kv_heads=_range_to_proto(layer.kv_heads), mlp_columns=_range_to_proto(layer.mlp_columns))
        for layer in shard.layers
    ]
    return ranks_pb2.RankShard(layers=layers, vocab_rows=_range_to_proto(shard.vocab_rows))


def _rank_from_proto(message: ranks_pb2.RankShard) -> RankShard:
    layers = tuple(
        LayerShard(_range_from_proto(layer.kv_heads), _range_from_proto(layer.mlp_columns)) for layer in message.layers
    )
    return RankShard(layers, _range_from_proto(message.vocab_rows))
