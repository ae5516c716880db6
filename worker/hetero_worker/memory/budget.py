"""How much of a rank's memory is left for the KV cache.

The sum is: memory given - runtime - weights - workspace of the largest step. The workspace is an upper bound
computed from shapes, not measured: a step of the largest size would cost seconds on slow cores, and the bound
holds for every later step. Nothing here allocates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from hetero_api.model_config import ModelConfig
from hetero_api.sharding import RankShard
from hetero_worker.errors import MemoryBudgetError

RUNTIME_BYTES: Final = 384 * 1024**2
"""Interpreter, torch and its thread pools, gRPC: 240 MiB measured after import, plus what allocators keep."""

_DECODE_SCRATCH_BYTES: Final = 12
"""Index, score and mask of one (query head, cached token) of a decode step; alive for one layer's heads."""


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The largest step."""

    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int


@dataclass(frozen=True, slots=True)
class KvCost:
    """What one token position of the KV cache costs a rank, bytes."""

    cache_bytes: int
    scratch_bytes: int

    @classmethod
    def of(cls, config: ModelConfig, shard: RankShard, *, element_bytes: int) -> KvCost:
        most_heads = max((layer.kv_heads.size for layer in shard.layers), default=0) * config.group_size
        return cls(
            cache_bytes=2 * shard.kv_heads_total * config.head_dim * element_bytes,
            scratch_bytes=most_heads * _DECODE_SCRATCH_BYTES,
        )


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """One rank's memory, bytes."""

    memory_bytes: int
    weight_bytes: int
    workspace_bytes: int
    runtime_bytes: int = RUNTIME_BYTES

    def kv_budget_bytes(self, cost: KvCost) -> int:
        """What the KV cache may take; 0 for a rank without heads.

        Raises MemoryBudgetError, with the sum, when nothing is left.
        """
        left = self.memory_bytes - self.runtime_bytes - self.weight_bytes - self.workspace_bytes
        if left <= 0:
            raise MemoryBudgetError(
                f"no memory is left for the KV cache: {self}; give the rank more memory (memoryPerRank), a "
                "smaller share, or lower maxNumBatchedTokens or maxModelLen"
            )
        if not cost.cache_bytes:
            return 0
        return left * cost.cache_bytes // (cost.cache_bytes + cost.scratch_bytes)

    def __str__(self) -> str:
        left = self.memory_bytes - self.runtime_bytes - self.weight_bytes - self.workspace_bytes
        return (
            f"{mib(self.memory_bytes)} given - {mib(self.runtime_bytes)} runtime - {mib(self.weight_bytes)} weights "
            f"- {mib(self.workspace_bytes)} workspace = {mib(left)}"
        )


def workspace_bytes(config: ModelConfig, shard: RankShard, limits: StepLimits, *, element_bytes: int) -> int:
    """Upper bound of what lives at once within one step beside weights and cache."""
    tokens, length = limits.max_num_batched_tokens, limits.max_model_len
    kv_heads = max((layer.kv_heads.size for layer in shard.layers), default=0)
    columns = max((layer.mlp_columns.size for layer in shard.layers), default=0)
    attention_width = kv_heads * (config.group_size + 2) * config.head_dim
    residual = 3 * tokens * config.hidden_size
    widest_half = tokens * max(3 * attention_width, 4 * columns)
    cached_prefix = 2 * length * kv_heads * config.head_dim
    # Spans that continue a sequence: together at most `tokens` rows of a mask as long as a sequence.
    masks = tokens * length if kv_heads else 0
    logits_bytes = 4 * limits.max_num_seqs * shard.vocab_rows.size
    return element_bytes * (residual + widest_half + cached_prefix + masks) + 3 * logits_bytes


def mib(size_bytes: int) -> str:
    return f"{size_bytes / 1024**2:,.0f} MiB"
