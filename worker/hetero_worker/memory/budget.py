"""How much of a rank's memory is left for the KV cache.

The sum is: memory given - runtime - weights - workspace of the largest step; and no more than what the device, after
the load, still has beside the workspace. The workspace computed here is a bound from shapes, good enough to refuse a
model before it is read; `runners.largest_step` measures it. Nothing here allocates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from hetero_api.model_config import ModelConfig
from hetero_api.sharding import RankShard
from hetero_worker.errors import MemoryBudgetError

RUNTIME_BYTES: Final = 384 * 1024**2
"""Interpreter, torch and its thread pools, gRPC: 240 MiB measured after import, plus what allocators keep."""

PROMPT_LOGIT_ROWS: Final = 64
"""Rows of a prompt whose logits are in memory together, when all of its log-probabilities are wanted."""
_CAPPED_SCORES_AT_ONCE: Final = 3
"""Of one KV head's queries: products, capped scores, and their softmax."""
EXPERT_ROWS: Final = 128
"""Tokens that go through an expert at a time, at most: it bounds memory however unevenly tokens are routed."""
LOGITS_AT_ONCE: Final = 3
"""Logits, scores made of them, and noise."""

_DECODE_SCRATCH_BYTES: Final = 12
"""Index, score and mask of one (query head, cached token) of a decode step; alive for one layer's heads, and for each
window that layers have."""


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
            scratch_bytes=most_heads * _DECODE_SCRATCH_BYTES * len(set(config.windows)),
        )


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """One rank's memory, bytes."""

    memory_bytes: int
    weight_bytes: int
    workspace_bytes: int
    runtime_bytes: int = RUNTIME_BYTES
    available_bytes: int | None = None
    """What the device still had when the weights were in memory; None: not known, or not there yet."""
    remedy: str = "give the rank more memory (memoryPerRank)"
    """What gives this rank more memory."""

    @property
    def left_bytes(self) -> int:
        """For the KV cache and its scratch."""
        left = self.memory_bytes - self.runtime_bytes - self.weight_bytes - self.workspace_bytes
        return left if self.available_bytes is None else min(left, self.available_bytes - self.workspace_bytes)

    def kv_budget_bytes(self, cost: KvCost) -> int:
        """What the KV cache may take; 0 for a rank without heads.

        Raises MemoryBudgetError, with the sum, when nothing is left.
        """
        left = self.left_bytes
        if left <= 0:
            raise MemoryBudgetError(
                f"no memory is left for the KV cache: {self}; {self.remedy}, give it a smaller share, or lower "
                "maxNumBatchedTokens or maxModelLen"
            )
        if not cost.cache_bytes:
            return 0
        return left * cost.cache_bytes // (cost.cache_bytes + cost.scratch_bytes)

    def __str__(self) -> str:
        left = self.memory_bytes - self.runtime_bytes - self.weight_bytes - self.workspace_bytes
        text = (
            f"{mib(self.memory_bytes)} given - {mib(self.runtime_bytes)} runtime - {mib(self.weight_bytes)} weights "
            f"- {mib(self.workspace_bytes)} workspace = {mib(left)}"
        )
        if self.left_bytes == left or self.available_bytes is None:
            return text
        return (
            f"{text}, but the device has {mib(self.available_bytes)} available - {mib(self.workspace_bytes)} "
            f"workspace = {mib(self.left_bytes)}"
        )


def workspace_bytes(config: ModelConfig, shard: RankShard, limits: StepLimits, *, element_bytes: int) -> int:
    """Upper bound of what lives at once within one step beside weights and cache."""
    tokens, length = limits.max_num_batched_tokens, limits.max_model_len
    kv_heads = max((layer.kv_heads.size for layer in shard.layers), default=0)
    columns = max((layer.mlp_columns.size for layer in shard.layers), default=0)
    attention_width = kv_heads * (config.group_size + 2) * config.head_dim
    residual = 3 * tokens * config.hidden_size
    dense_half = element_bytes * tokens * max(3 * attention_width, 4 * columns)
    widest_half = max(dense_half, _expert_bytes(config, shard, tokens, element_bytes))
    cached_prefix = 2 * length * kv_heads * config.head_dim
    # Spans that continue a sequence: together at most `tokens` rows of a mask as long as a sequence.
    # A mask for each window that layers have.
    masks = tokens * length * len(set(config.windows)) if kv_heads else 0
    computed = element_bytes * (residual + cached_prefix + masks) + widest_half
    if config.attention_soft_cap is not None and kv_heads:
        computed += 4 * _CAPPED_SCORES_AT_ONCE * config.group_size * tokens * length
    return computed + LOGITS_AT_ONCE * logits_bytes(shard, limits)


def _expert_bytes(config: ModelConfig, shard: RankShard, tokens: int, element_bytes: int) -> int:
    """Of an MLP of experts: its input and output, one expert at work, and the router's arithmetic in float64."""
    if config.experts is None or not any(layer.experts.size for layer in shard.layers):
        return 0
    one_expert = min(tokens, EXPERT_ROWS) * (3 * config.hidden_size + 4 * config.experts.intermediate_size)
    router = 8 * tokens * (2 * config.hidden_size + 4 * config.num_experts)
    return element_bytes * (2 * tokens * config.hidden_size + one_expert) + router


def logits_bytes(shard: RankShard, limits: StepLimits) -> int:
    """The most logits that a step has in memory, once."""
    return 4 * max(limits.max_num_seqs, PROMPT_LOGIT_ROWS) * shard.head_rows.size


def mib(size_bytes: int) -> str:
    return f"{size_bytes / 1024**2:,.0f} MiB"
