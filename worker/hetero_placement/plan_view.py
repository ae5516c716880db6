"""What a plan's cost depends on, read from it once: stages, and how many layers of each have which units."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from hetero_api.sharding import ShardPlan, Stage


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Units of each rank, in rank order, and the layer's window."""

    heads: tuple[int, ...]
    columns: tuple[int, ...]
    experts: tuple[int, ...]
    window: int | None


@dataclass(frozen=True, slots=True)
class StageView:
    """A stage and its layers by kind."""

    holders: tuple[int, ...]
    helpers: tuple[int, ...]
    kinds: Mapping[LayerKind, int]

    @property
    def leader(self) -> int:
        return self.holders[0]

    @property
    def num_layers(self) -> int:
        return sum(self.kinds.values())


@dataclass(frozen=True, slots=True)
class PlanView:
    """See the module."""

    stages: tuple[StageView, ...]
    embedding_owners: tuple[int, ...]
    head_rows: tuple[int, ...]
    """Of each rank, in rank order."""

    @classmethod
    def of(cls, plan: ShardPlan, windows: tuple[int | None, ...]) -> PlanView:
        """Raises PlanError when nobody has a layer's attention."""
        return cls(
            tuple(_stage_view(plan, stage, windows) for stage in plan.stages()),
            plan.embedding_owners(),
            tuple(shard.head_rows.size for shard in plan.ranks),
        )

    @property
    def head_owners(self) -> tuple[int, ...]:
        return tuple(rank for rank, rows in enumerate(self.head_rows) if rows)


def _stage_view(plan: ShardPlan, stage: Stage, windows: tuple[int | None, ...]) -> StageView:
    kinds = Counter(_kind(plan, layer, windows[layer]) for layer in range(stage.begin, stage.end))
    return StageView(stage.holders, stage.helpers, kinds)


def _kind(plan: ShardPlan, layer: int, window: int | None) -> LayerKind:
    shards = [shard.layers[layer] for shard in plan.ranks]
    return LayerKind(
        tuple(shard.kv_heads.size for shard in shards),
        tuple(shard.mlp_columns.size for shard in shards),
        tuple(shard.experts.size for shard in shards),
        window,
    )
