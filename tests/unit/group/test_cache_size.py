"""KV blocks from what ranks report."""

from __future__ import annotations

import pytest

from hetero_api.v1 import ranks_pb2
from hetero_gateway.group.cache_size import choose_num_blocks
from hetero_gateway.group.errors import CacheSizeError
from hetero_gateway.group.settings import GroupSettings
from tests.unit.group.group_setup import group_settings

pytestmark = pytest.mark.unit

SETTINGS = group_settings()  # 4 sequences of 64 tokens, blocks of 4


def loaded(budget: int, per_token: int) -> ranks_pb2.Loaded:
    return ranks_pb2.Loaded(kv_budget_bytes=budget, kv_bytes_per_token=per_token)


def with_explicit(size: str) -> GroupSettings:
    engine = {"blockSize": 4, "maxNumSeqs": 4, "kvCacheMemoryBytes": size}
    return group_settings(engine=engine)


def test_the_rank_with_the_least_room_decides() -> None:
    assert choose_num_blocks(SETTINGS, [loaded(10_000, 16), loaded(2_000, 8)]) == 2_000 // (8 * 4)


def test_a_rank_without_heads_has_no_say() -> None:
    assert choose_num_blocks(SETTINGS, [loaded(2_000, 8), loaded(0, 0)]) == 62


def test_no_more_blocks_than_all_sequences_can_fill() -> None:
    assert choose_num_blocks(SETTINGS, [loaded(10**9, 8), loaded(10**9, 8)]) == 4 * 16 + 1


def test_exactly_one_full_sequence_beside_the_null_block_is_enough() -> None:
    assert choose_num_blocks(SETTINGS, [loaded(17 * 32, 8), loaded(0, 0)]) == 17


def test_one_block_less_fails_with_the_arithmetic_and_the_fields() -> None:
    with pytest.raises(CacheSizeError) as caught:
        choose_num_blocks(SETTINGS, [loaded(10_000, 8), loaded(17 * 32 - 1, 8)])
    message = str(caught.value)
    assert message.startswith("spec.pools[0].cpu.memoryPerRank: rank 1 (cpu-1) can hold 16 KV blocks = 543 bytes")
    assert "spec.model.maxModelLen 64 tokens needs 17" in message
    assert "at most 60" in message


def test_an_explicit_size_replaces_the_reported_one() -> None:
    assert choose_num_blocks(with_explicit("2000"), [loaded(10**6, 8), loaded(10**6, 8)]) == 62


def test_an_explicit_size_above_what_a_rank_has_is_an_error() -> None:
    with pytest.raises(CacheSizeError, match=r"spec\.engine\.kvCacheMemoryBytes: 4096 bytes .* rank 1 .* has 4095"):
        choose_num_blocks(with_explicit("4096"), [loaded(4096, 8), loaded(4095, 8)])


def test_an_explicit_size_that_is_too_small_is_named() -> None:
    with pytest.raises(CacheSizeError, match=r"^spec\.engine\.kvCacheMemoryBytes: rank 0 .* raise spec\.engine"):
        choose_num_blocks(with_explicit("512"), [loaded(4096, 8), loaded(4096, 8)])
