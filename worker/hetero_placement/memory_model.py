"""Bytes that a rank's part takes in its memory, and the test whether it fits.

It counts with the arithmetic that a rank itself uses (`hetero_api.rank_memory`, `graph_memory`), and never less. So no
rank refuses a plan that fits here, and its KV cache has at least as many blocks as this says. That holds as long as a
rank has the memory that it reported, its runtime grows by no more than RUNTIME_GROWTH_BYTES, and its largest step takes
no more than its bound from shapes. Counted beyond what a rank counts: both halves of a layer, though one is computed
after the other; the margin of a measured step before it is measured; graphs, though a rank may make none;
biases of sums, which one rank has.

Needs are linear in what a rank owns, so a solver knows at once what one unit more costs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from hetero_api.graph_memory import MAX_MIXED_ROWS, GraphMemory, graph_sizes
from hetero_api.model_config import ModelConfig
from hetero_api.rank_memory import (
    ASSUMED_GPU_RUNTIME_BYTES,
    RUNTIME_BYTES,
    RUNTIME_GROWTH_BYTES,
    SNAPSHOT_PART,
    KvCost,
    ModelMemory,
    StepLimits,
    WeightParts,
    with_margin,
)
from hetero_api.sharding import RankShard, ShardPlan
from hetero_placement.decision import Bounds
from hetero_placement.hardware import Hardware
from hetero_placement.part_costs import element_bytes
from hetero_placement.shard_plans import UNIT, plan_within_layers


@dataclass(frozen=True, slots=True)
class Need:
    """One rank's, bytes."""

    weights: int
    cache: int
    states: int
    """Bytes of sequences' states in layers of the gated delta rule, and of snapshots of these."""
    workspace: int
    graphs: int
    runtime: int

    @property
    def total(self) -> int:
        """All of it, in bytes."""
        return self.cache + self.without_cache

    @property
    def without_cache(self) -> int:
        """All but the KV cache, in bytes."""
        return self.weights + self.states + self.workspace + self.graphs + self.runtime


_NOTHING: Final = Need(0, 0, 0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class UnitBytes:
    """Bytes of one more unit where every layer is split alike: in all layers, with cache, workspace and graphs."""

    head: float
    column: float
    expert: float
    expert_column: float
    """A column of each expert, where all are dealt in slices."""
    row: float
    """A vocabulary row, of embedding and head."""


class MemoryModel:
    """Memory needs of one model under the engine's bounds."""

    def __init__(self, config: ModelConfig, hardware: Hardware, bounds: Bounds, *, dtype: str) -> None:
        self._config = config
        self.hardware = hardware
        """Hardware whose memory is to suffice."""
        self._bounds = bounds
        limits = StepLimits(bounds.max_num_batched_tokens, bounds.max_num_seqs, bounds.max_model_len)
        self._memory = ModelMemory(
            config, limits, element_bytes(dtype), cache_element_bytes=element_bytes(bounds.kv_cache_dtype or dtype)
        )
        """But for weights, which ranks may keep in other widths."""
        # One block that is never used, and one sequence in whole blocks.
        self._tokens = (self._blocks_of_longest + 1) * bounds.block_size
        self._sizes = (
            () if bounds.enforce_eager else graph_sizes(min(bounds.max_num_seqs, limits.max_num_batched_tokens))
        )
        self._num_hosts = len(hardware.ranks) - hardware.num_gpu_ranks
        self._draft = None if bounds.draft is None else replace(self._memory, config=bounds.draft)
        self._draft_plan = bounds.draft_plan_of(len(hardware.ranks))
        self._units: dict[tuple[int, frozenset[int]], UnitBytes] = {}
        self._beside: dict[tuple[int, ...], float] = {}

    def units(self, rank: int) -> UnitBytes:
        """Return the bytes of a unit on this rank."""
        key = self._threads(rank), self.hardware.ranks[rank].weight_bits
        if key not in self._units:
            self._units[key] = self._units_of(rank)
        return self._units[key]

    def fixed_bytes(self, rank: int, *, holds_heads: bool) -> float:
        """Return the bytes a rank needs beside its units, where every layer is split alike; heads are a unit, too."""
        return self._beside_units(rank, heads=int(holds_heads))

    def first_bytes(self, rank: int, kind: str, *, holds_heads: bool) -> float:
        """Return the bytes that a rank needs once it owns units of a kind, beside these.

        `kind`: "columns" of dense layers, whole "experts", or "expert_columns".
        """
        with_units = self._beside_units(rank, heads=int(holds_heads), **{kind: 1})
        return with_units - self._beside_units(rank, heads=int(holds_heads))

    def cache_bytes(self, num_heads: int) -> int:
        """Return the KV bytes of one longest sequence in all layers; 0 where kvCacheMemoryBytes states the cache's
        size.
        """
        if self._bounds.kv_cache_bytes is not None:
            return 0
        return self._cache(self._memory.kv_cost(self._shard(num_heads, 0, 0, 0)))

    @property
    def all_experts_beside(self) -> int:
        """Most bytes that a rank takes to compute all experts of a step, beside their weights: routers, and rows."""
        return self._memory.expert_step + len(self._config.expert_layers) * self._memory.router_weights

    def room(self, plan: ShardPlan, rank: int) -> int:
        """Return the bytes that a plan which fits leaves on a rank."""
        return self.hardware.ranks[rank].memory_bytes - self.need(rank, plan.ranks[rank]).total

    def need(self, rank: int, shard: RankShard) -> Need:
        """Return the need of a part on a rank; zeros for an empty part."""
        return _NOTHING if shard.is_empty and self._drafted(rank) is None else self._taken(rank, shard)

    def weight_parts(self, rank: int, shard: RankShard) -> WeightParts:
        """Return the weights of a rank's part by part of the model, as `need` counts them."""
        memory = replace(self._memory, weight_bits=self.hardware.ranks[rank].weight_bits)
        return memory.weight_parts(shard, packs_head=not self._is_gpu(rank))

    def _taken(self, rank: int, shard: RankShard) -> Need:
        own, draft, is_gpu = self._taken_by_shard(rank, shard), self._draft, self._is_gpu(rank)
        if draft is None or (part := self._drafted(rank)) is None:
            return own
        memory = replace(draft, weight_bits=self.hardware.ranks[rank].weight_bits, threads=self._threads(rank))
        weights = memory.weight_parts(part, packs_head=not is_gpu)
        rows = self._config.vocab_size
        borrows = draft.config.follows_states and shard.embedding_rows.size == shard.head_rows.size == rows
        cached = self._tokens if self._bounds.kv_cache_bytes is None else 0  # else a part of these bytes
        return replace(
            own,
            weights=own.weights + weights.total - (weights.vocabulary if borrows else 0),
            cache=own.cache + cached * draft.kv_cost(part).cache_bytes,
            workspace=own.workspace + memory.workspace_bytes(part),
            graphs=own.graphs + (self._graphs(draft, part) if is_gpu else 0),
        )

    def _drafted(self, rank: int) -> RankShard | None:
        """Return the rank's part of the draft model; None if it has none."""
        part = None if self._draft_plan is None else self._draft_plan.ranks[rank]
        return None if part is None or part.is_empty else part

    def _taken_by_shard(self, rank: int, shard: RankShard) -> Need:
        is_gpu, hardware = self._is_gpu(rank), self.hardware.ranks[rank]
        memory = replace(self._memory, threads=self._threads(rank))
        assumed = ASSUMED_GPU_RUNTIME_BYTES if is_gpu else RUNTIME_BYTES
        measured = hardware.runtime_bytes + RUNTIME_GROWTH_BYTES if is_gpu else hardware.runtime_bytes
        gathered = hardware.gather_bytes if shard.kv_heads_total else 0
        cache = self._cache(memory.kv_cost(shard))
        return Need(
            weights=self.weight_parts(rank, shard).total,
            cache=cache,
            states=memory.state_bytes(shard) + (cache // (SNAPSHOT_PART - 1) if memory.snapshot_bytes(shard) else 0),
            workspace=with_margin(memory.summed_workspace_bytes(shard)) + gathered + memory.arriving_expert(shard),
            graphs=self._graphs(self._memory, shard) if is_gpu else 0,
            runtime=measured if hardware.runtime_bytes else assumed,
        )

    def kv_blocks(self, plan: ShardPlan) -> int:
        """Blocks that the KV cache of a plan that fits has at least, the null block included, as many as sequences can
        fill at most. 0 where a rank has no room for one."""
        most = self._bounds.max_num_seqs * self._blocks_of_longest + 1
        holders = [(rank, shard) for rank, shard in enumerate(plan.ranks) if self._kv_cost(rank, shard).cache_bytes]
        return min([most, *(self._blocks_on(rank, shard) for rank, shard in holders)])

    def problem(self, plan: ShardPlan) -> str:
        """Which rank a plan does not fit, with the arithmetic; empty if it fits all."""
        for rank, shard in enumerate(plan.ranks):
            need, has = self.need(rank, shard), self.hardware.ranks[rank].memory_bytes
            if need.total > has:
                graphs = f"{_gb(need.graphs)} graphs + " if need.graphs else ""
                states = f"{_gb(need.states)} states of maxNumSeqs sequences + " if need.states else ""
                return (
                    f"{self._name(rank)} would need {_gb(need.total)} = {_gb(need.weights)} weights + "
                    f"{_gb(need.cache)} KV cache ({self._cache_field}) + {states}{_gb(need.workspace)} workspace + "
                    f"{graphs}{_gb(need.runtime)} runtime, and has {_gb(has)} ({self._field(rank)})"
                )
        return ""

    def shortage(self, needs: int, ranks: tuple[int, ...]) -> str:
        """Say that `ranks` together have too little for `needs` bytes of weights and cache; empty if they have not."""
        has = sum(self.hardware.ranks[rank].memory_bytes for rank in ranks)
        fields = " and ".join(dict.fromkeys(self._field(rank) for rank in ranks))
        other = max(self.fixed_bytes(rank, holds_heads=False) for rank in ranks)
        if needs + len(ranks) * other <= has:
            return ""
        return (
            f"weights and KV cache of one sequence ({self._cache_field}) need {_gb(needs)}; these {len(ranks)} ranks "
            f"have {_gb(has)} ({fields}), {_gb(other)} of each for its runtime and workspace at least"
        )

    @property
    def _blocks_of_longest(self) -> int:
        return -(-self._bounds.max_model_len // self._bounds.block_size)

    def _blocks_on(self, rank: int, shard: RankShard) -> int:
        """Return the blocks that the rank has room for."""
        cost = self._kv_cost(rank, shard)
        need = self.need(rank, shard)
        taken = need.without_cache - need.states + self._memory.state_bytes(shard)
        left = self.hardware.ranks[rank].memory_bytes - taken
        asked = self._bounds.kv_cache_bytes
        left = max(0, left) - (max(0, left) // SNAPSHOT_PART if self._memory.snapshot_bytes(shard) else 0)
        room = cost.cache_of(left) if asked is None else asked
        return room // (cost.cache_bytes * self._bounds.block_size)

    def _kv_cost(self, rank: int, shard: RankShard) -> KvCost:
        """Return the cost of a token position, in the draft model's cache too."""
        cost, drafted = self._memory.kv_cost(shard), self._drafted(rank)
        if self._draft is None or drafted is None:
            return cost
        return replace(cost, cache_bytes=cost.cache_bytes + self._draft.kv_cost(drafted).cache_bytes)

    def _cache(self, cost: KvCost) -> int:
        """With what decoding takes for each cached token."""
        asked = self._bounds.kv_cache_bytes
        return cost.total_of(asked) if asked is not None else self._tokens * cost.bytes if cost.cache_bytes else 0

    def _graphs(self, memory: ModelMemory, shard: RankShard) -> int:
        """Return the largest need a plan may have: with ranks on host cores, if there are any, or without."""
        alone = GraphMemory.of(memory, shard, self._sizes, num_host_ranks=0)
        if not self._num_hosts:
            return alone.total
        sizes = tuple(size for size in self._sizes if size <= MAX_MIXED_ROWS)
        mixed = GraphMemory.of(memory, shard, sizes, num_host_ranks=self._num_hosts)
        # Graphs of fewer sizes compute with no more; and what does not grow with units may be either's.
        return alone.computing + max(alone.total - alone.computing, mixed.total - mixed.computing)

    def _beside_units(
        self, rank: int, *, heads: int = 0, columns: int = 0, experts: int = 0, expert_columns: int = 0
    ) -> float:
        """Return the bytes of such a part that are not its units'."""
        key = rank, heads, columns, experts, expert_columns
        if key not in self._beside:
            unit, shard = self.units(rank), self._shard(heads, columns, experts, 0, expert_columns)
            counted = heads * unit.head + columns * unit.column + experts * unit.expert
            counted += expert_columns * unit.expert_column
            self._beside[key] = self._taken(rank, shard).total - counted
        return self._beside[key]

    def _units_of(self, rank: int) -> UnitBytes:
        """By what a second takes more than the first."""

        def second(heads: int = 0, columns: int = 0, experts: int = 0, rows: int = 0, expert_columns: int = 0) -> float:
            counts = heads, columns, experts, rows, expert_columns
            one, two = (self._shard(*(times * count for count in counts)) for times in (1, 2))
            return self._taken(rank, two).total - self._taken(rank, one).total

        has_dense = len(self._config.expert_layers) < self._config.num_layers
        has_experts = self._config.experts is not None
        many = 16 * UNIT  # Of what is small, so that rounding is next to nothing.
        return UnitBytes(
            head=second(heads=1),
            column=second(columns=many) / many if has_dense else 0.0,
            expert=second(experts=1) if has_experts else 0.0,
            expert_column=second(expert_columns=many) / many if has_experts else 0.0,
            row=second(rows=many) / many,
        )

    def _shard(self, heads: int, columns: int, experts: int, rows: int, expert_columns: int = 0) -> RankShard:
        """Make the shard of a rank that owns these numbers in every layer; the model need not have as many.

        Of shared experts it has as many columns as the heads can bring, rounded to units.
        """
        shared = -(-heads * self._config.shared_columns // self._config.num_kv_heads)
        shared += (UNIT - 1) * bool(shared)
        plan = plan_within_layers(
            self._config, heads=[heads], columns=[columns], experts=[experts], rows=[rows], shared=[shared],
            expert_columns=[expert_columns],
        )  # fmt: skip
        return plan.ranks[0]

    @property
    def _cache_field(self) -> str:
        if self._bounds.kv_cache_bytes is not None:
            return "spec.engine.kvCacheMemoryBytes"
        return f"spec.model.maxModelLen {self._bounds.max_model_len}"

    def _field(self, rank: int) -> str:
        """Return the field that sets how much memory a rank has."""
        pool = self.hardware.ranks[rank].pool
        if self._is_gpu(rank):
            return "spec.engine.gpuMemoryUtilization"
        return f"memoryPerRank of pool {pool}" if pool else "memoryPerRank"

    def _name(self, rank: int) -> str:
        hardware = self.hardware.ranks[rank]
        return f"rank {rank} ({hardware.pool or hardware.kind.value})"

    def _is_gpu(self, rank: int) -> bool:
        return self.hardware.ranks[rank].is_gpu

    def _threads(self, rank: int) -> int:
        """Return the threads of a rank on host cores; 0 for a GPU's."""
        return 0 if self._is_gpu(rank) else self.hardware.ranks[rank].cores


def _gb(size_bytes: float) -> str:
    return f"{size_bytes / 1e9:.2f} GB"
