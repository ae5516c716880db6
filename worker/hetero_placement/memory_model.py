"""What a rank's part takes in its memory, and whether it fits.

Linear in what a rank owns, so that a solver can tell at once what one unit more costs: weights, keys and values of at
least one longest sequence (or what spec.engine.kvCacheMemoryBytes asks for), and the largest step. It is an estimate,
good enough to leave out what cannot be had; a rank that loads its part does the sum again, exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from hetero_api.model_config import ModelConfig
from hetero_api.sharding import RankShard, ShardPlan
from hetero_placement.decision import Bounds
from hetero_placement.hardware import DeviceKind, Hardware
from hetero_placement.part_costs import element_bytes
from hetero_placement.tensor_plan import UNIT

RUNTIME_BYTES: Final = 384 * 1024**2
"""Interpreter, torch, gRPC; on a GPU what its context takes."""
_LOGIT_BYTES: Final = 12
"""float32 logits, scores and noise of a row and a vocabulary row."""
_PROMPT_LOGIT_ROWS: Final = 64


@dataclass(frozen=True, slots=True)
class UnitBytes:
    """Of one layer's weights, and of the cache and the workspace that go with them. Vocabulary: a unit is 64 rows."""

    head: int
    """Weights, in one layer."""
    head_cache: int
    """Cache of one longest sequence, in one layer."""
    head_work: int
    column: int
    column_work: int
    expert: int
    embedding_row: int
    head_row: int
    head_row_work: int


@dataclass(frozen=True, slots=True)
class Need:
    """One rank's, bytes."""

    weights: int
    cache: int
    workspace: int

    @property
    def total(self) -> int:
        """0 for a rank that owns nothing."""
        return self.weights + self.cache + self.workspace + RUNTIME_BYTES if self.weights else 0


class MemoryModel:
    """Of one model under the engine's bounds."""

    def __init__(self, config: ModelConfig, hardware: Hardware, bounds: Bounds, *, dtype: str) -> None:
        self._config = config
        self._hardware = hardware
        self._bounds = bounds
        self._size = element_bytes(dtype)
        # One block that is never used, and one sequence in whole blocks.
        self._tokens = (-(-bounds.max_model_len // bounds.block_size) + 1) * bounds.block_size
        self._residual = 3 * bounds.max_num_batched_tokens * config.hidden_size * self._size

    @property
    def hardware(self) -> Hardware:
        return self._hardware

    def units(self, rank: int) -> UnitBytes:
        """What a unit takes on this rank."""
        config, size, steps = self._config, self._size, self._bounds.max_num_batched_tokens
        row = config.hidden_size * size
        draws = max(self._bounds.max_num_seqs, _PROMPT_LOGIT_ROWS)
        return UnitBytes(
            head=config.attention_params_per_kv_head * size,
            head_cache=0 if self._bounds.kv_cache_bytes is not None else 2 * config.head_dim * size * self._tokens,
            head_work=3 * steps * (config.group_size + 2) * config.head_dim * size,
            column=config.mlp_params_per_column * size,
            column_work=4 * steps * size,
            expert=config.params_per_expert * size,
            embedding_row=row,
            # Kernels of CPUs pack a tied head's rows for themselves; a GPU multiplies with the embedding's own.
            head_row=0 if config.tie_word_embeddings and self._is_gpu(rank) else row,
            head_row_work=_LOGIT_BYTES * draws,
        )

    def fixed_bytes(self, *, holds_heads: bool) -> int:
        """What a rank that owns anything needs beside its units."""
        cache = self._bounds.kv_cache_bytes or 0 if holds_heads else 0
        return RUNTIME_BYTES + self._residual + cache

    def need(self, rank: int, shard: RankShard) -> Need:
        """What a part takes on a rank."""
        unit, layers = self.units(rank), shard.layers
        heads, most_heads = shard.kv_heads_total, max(layer.kv_heads.size for layer in layers)
        columns, most_columns = _sum_and_most([layer.mlp_columns.size for layer in layers])
        experts = sum(layer.experts.size for layer in layers)
        weights = heads * unit.head + columns * unit.column + experts * unit.expert
        weights += shard.embedding_rows.size * unit.embedding_row + shard.head_rows.size * unit.head_row
        work = most_heads * unit.head_work + most_columns * unit.column_work
        work += shard.head_rows.size * unit.head_row_work
        cache = heads * unit.head_cache + (self._bounds.kv_cache_bytes or 0 if heads else 0)
        return Need(weights, cache, work + self._residual)

    def problem(self, plan: ShardPlan) -> str:
        """Which rank a plan does not fit, with the arithmetic; empty if it fits all."""
        for rank, shard in enumerate(plan.ranks):
            need, has = self.need(rank, shard), self._hardware.ranks[rank].memory_bytes
            if need.total > has:
                return (
                    f"{self._name(rank)} would need {_gb(need.total)} = {_gb(need.weights)} weights + "
                    f"{_gb(need.cache)} KV cache ({self._cache_field}) + {_gb(need.workspace + RUNTIME_BYTES)} "
                    f"workspace, and has {_gb(has)} ({self._field(rank)})"
                )
        return ""

    def shortage(self, needs: int, ranks: tuple[int, ...]) -> str:
        """That `ranks` together have too little for `needs` bytes of weights and cache."""
        has = sum(self._hardware.ranks[rank].memory_bytes for rank in ranks)
        fields = " and ".join(dict.fromkeys(self._field(rank) for rank in ranks))
        return (
            f"weights and KV cache of one sequence ({self._cache_field}) need {_gb(needs)}; these {len(ranks)} ranks "
            f"have {_gb(has)} ({fields}), {_gb(self.fixed_bytes(holds_heads=False))} of each for workspace"
        )

    @property
    def _cache_field(self) -> str:
        if self._bounds.kv_cache_bytes is not None:
            return "spec.engine.kvCacheMemoryBytes"
        return f"spec.model.maxModelLen {self._bounds.max_model_len}"

    def _field(self, rank: int) -> str:
        """What says how much memory a rank has."""
        pool = self._hardware.ranks[rank].pool
        if self._is_gpu(rank):
            return "spec.engine.gpuMemoryUtilization"
        return f"memoryPerRank of pool {pool}" if pool else "memoryPerRank"

    def _name(self, rank: int) -> str:
        hardware = self._hardware.ranks[rank]
        return f"rank {rank} ({hardware.pool or hardware.kind.value})"

    def _is_gpu(self, rank: int) -> bool:
        return self._hardware.ranks[rank].kind is DeviceKind.GPU


def vocabulary_unit_bytes(unit: UnitBytes) -> int:
    """Of 64 rows of embedding and head."""
    return UNIT * (unit.embedding_row + unit.head_row + unit.head_row_work)


def _sum_and_most(counts: list[int]) -> tuple[int, int]:
    return sum(counts), max(counts)


def _gb(size_bytes: float) -> str:
    return f"{size_bytes / 1e9:.2f} GB"
