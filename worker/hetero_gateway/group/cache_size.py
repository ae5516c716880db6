"""How many KV blocks a group has: what the rank with the least room for its heads can hold.

Ranks without heads have no cache and no say. More blocks than all sequences at full length could fill are not made.
"""

from __future__ import annotations

from collections.abc import Sequence

from hetero_api.v1 import ranks_pb2
from hetero_gateway.group.errors import CacheSizeError
from hetero_gateway.group.placement import ExpectedPlace
from hetero_gateway.group.settings import GroupSettings


def choose_num_blocks(settings: GroupSettings, loaded: Sequence[ranks_pb2.Loaded]) -> int:
    """Blocks, the null block included, from what the ranks reported, in rank order. Raises CacheSizeError."""
    blocks_a_sequence = -(-settings.max_model_len // settings.block_size)
    num_blocks = settings.max_num_seqs * blocks_a_sequence + 1
    for place, report in zip(settings.places, loaded, strict=True):
        if report.kv_bytes_per_token:
            num_blocks = min(num_blocks, _blocks_of(settings, place, report, needed=blocks_a_sequence + 1))
    return num_blocks


def _blocks_of(settings: GroupSettings, place: ExpectedPlace, report: ranks_pb2.Loaded, *, needed: int) -> int:
    budget, block_bytes = report.kv_budget_bytes, report.kv_bytes_per_token * settings.block_size
    memory = f"spec.pools[{place.pool_index}].cpu.memoryPerRank"
    field = memory
    if settings.kv_cache_bytes is not None:
        field = "spec.engine.kvCacheMemoryBytes"
        if settings.kv_cache_bytes > budget:
            raise CacheSizeError(
                f"{field}: {settings.kv_cache_bytes} bytes are asked for, {place} has {budget} bytes left for its KV "
                f"cache; lower it or raise {memory}"
            )
        budget = settings.kv_cache_bytes
    num_blocks = budget // block_bytes
    if num_blocks < needed:
        room = max(0, num_blocks - 1) * settings.block_size
        raise CacheSizeError(
            f"{field}: {place} can hold {num_blocks} KV blocks = {budget} bytes / ({report.kv_bytes_per_token} bytes a "
            f"token * spec.engine.blockSize {settings.block_size}); one sequence of spec.model.maxModelLen "
            f"{settings.max_model_len} tokens needs {needed} (one of them the null block) = {needed * block_bytes} "
            f"bytes; raise {field} or lower spec.model.maxModelLen to at most {room}"
        )
    return num_blocks
