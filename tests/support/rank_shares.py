"""Shard plans by counts of units, for tests."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from hetero_api.model_config import ModelConfig
from hetero_api.sharding import LayerShard, RankShard, ShardPlan, UnitRange, ranges_of_counts
from tests.support.tiny_checkpoints import NUM_EXPERTS, VOCAB_SIZE


@dataclass(frozen=True, slots=True)
class Shares:
    """Units of each thing a rank owns, in rank order; heads and columns may differ by layer."""

    kv_heads: tuple[tuple[int, ...], ...]
    """One tuple a layer; the last one serves all further layers."""
    mlp_columns: tuple[tuple[int, ...], ...]
    vocab_rows: tuple[int, ...]
    """Of the output head, and of the embedding unless that has rows of its own."""
    embedding_rows: tuple[int, ...] | None = None
    experts: tuple[tuple[int, ...], ...] = ()
    """In place of columns in layers that have experts."""
    expert_slices: tuple[int, ...] = ()
    """Weights by which the columns of the other experts are dealt."""

    def plan_for(self, config: ModelConfig) -> ShardPlan:
        """The plan of a model with as many units; layers that are wider are dealt in the same ratio."""
        wider = {layer: columns // config.intermediate_size for layer, columns in config.dense_columns.items()}
        return self.plan(
            config.num_layers, expert_layers=config.expert_layers, shared_columns=config.shared_columns, wider=wider,
            expert_columns=config.expert_columns,
        )  # fmt: skip

    def plan(
        self,
        num_layers: int,
        *,
        expert_layers: Collection[int] = (),
        shared_columns: int = 0,
        wider: Mapping[int, int] | None = None,
        expert_columns: int = 0,
    ) -> ShardPlan:
        """`shared_columns`: of experts of all tokens; ranks have about the same part of them as of dense columns.

        `wider`: factor of the columns of layers that have more.
        """
        layers = [
            self._sliced(self._layer(i, has_experts=True, shared_columns=shared_columns, times=1), expert_columns)
            if i in expert_layers
            else self._layer(i, has_experts=False, shared_columns=0, times=(wider or {}).get(i, 1))
            for i in range(num_layers)
        ]
        head = ranges_of_counts(self.vocab_rows)
        embedding = ranges_of_counts(self.embedding_rows or self.vocab_rows)
        return ShardPlan(
            tuple(
                RankShard(tuple(layer[rank] for layer in layers), *rows)
                for rank, rows in enumerate(zip(embedding, head, strict=True))
            )
        )

    def _layer(self, layer: int, *, has_experts: bool, shared_columns: int, times: int) -> list[LayerShard]:
        """In rank order."""
        nothing = (0,) * len(self.vocab_rows)
        columns = tuple(times * count for count in _of_layer(self.mlp_columns, layer))
        if has_experts:
            columns = _by_weights(shared_columns, columns)
        experts = _of_layer(self.experts, layer) if has_experts and self.experts else nothing
        counts = (_of_layer(self.kv_heads, layer), columns, experts)
        return list(map(LayerShard, *map(ranges_of_counts, counts)))

    def _sliced(self, shards: list[LayerShard], expert_columns: int) -> list[LayerShard]:
        """With slices of the experts that no rank has whole, if these are dealt so."""
        if not self.expert_slices:
            return shards
        positions = UnitRange(sum(shard.experts.size for shard in shards), NUM_EXPERTS)
        columns = ranges_of_counts(_by_weights(expert_columns, self.expert_slices))
        return [
            replace(shard, experts=positions, expert_columns=own) if own.size else shard
            for shard, own in zip(shards, columns, strict=True)
        ]


def layers_on(*owners: int, world_size: int, embedding: int | None = None, head: int | None = None) -> Shares:
    """Whole layers on one rank each; the embedding on the first layer's rank and the head on the last's by default."""

    def units(total: int, owner: int) -> tuple[int, ...]:
        return tuple(total if rank == owner else 0 for rank in range(world_size))

    return Shares(
        kv_heads=tuple(units(8, owner) for owner in owners),
        mlp_columns=tuple(units(50, owner) for owner in owners),
        experts=tuple(units(NUM_EXPERTS, owner) for owner in owners),
        vocab_rows=units(VOCAB_SIZE, owners[-1] if head is None else head),
        embedding_rows=units(VOCAB_SIZE, owners[0] if embedding is None else embedding),
    )


def _by_weights(total: int, weights: Sequence[int]) -> tuple[int, ...]:
    ends = [sum(weights[: rank + 1]) * total // sum(weights) for rank in range(len(weights))]
    return tuple(end - begin for begin, end in pairwise([0, *ends]))


def _of_layer(counts: Sequence[tuple[int, ...]], layer: int) -> tuple[int, ...]:
    return counts[min(layer, len(counts) - 1)]
