"""KV blocks from what ranks report, for the first cache and for resets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hetero_api.model_parts import DeltaShape
from hetero_api.v1 import admin_pb2, ranks_pb2
from hetero_gateway.group.cache_size import asked_cache, first_cache, layout_of
from hetero_gateway.group.errors import CacheSizeError, InvalidCommand
from hetero_gateway.group.settings import GroupSettings
from tests.unit.group.group_setup import group_settings

pytestmark = pytest.mark.unit

SETTINGS = group_settings()  # 4 sequences of 64 tokens, blocks of 4


def loaded(budget: int, per_token: int) -> ranks_pb2.Loaded:
    return ranks_pb2.Loaded(kv_budget_bytes=budget, kv_bytes_per_token=per_token)


def num_blocks(settings: GroupSettings, reports: list[ranks_pb2.Loaded]) -> int:
    cache = first_cache(settings, reports)
    assert cache.block_size == settings.block_size
    return cache.num_blocks


def with_explicit(size: str) -> GroupSettings:
    engine = {"blockSize": 4, "maxNumSeqs": 4, "kvCacheMemoryBytes": size}
    return group_settings(engine=engine)


def test_the_rank_with_the_least_room_decides() -> None:
    assert num_blocks(SETTINGS, [loaded(10_000, 16), loaded(2_000, 8)]) == 2_000 // (8 * 4)


def test_a_rank_without_heads_has_no_say() -> None:
    assert num_blocks(SETTINGS, [loaded(2_000, 8), loaded(0, 0)]) == 62


def test_no_more_blocks_than_all_sequences_can_fill() -> None:
    assert num_blocks(SETTINGS, [loaded(10**9, 8), loaded(10**9, 8)]) == 4 * 16 + 1


def test_exactly_one_full_sequence_beside_the_null_block_is_enough() -> None:
    assert num_blocks(SETTINGS, [loaded(17 * 32, 8), loaded(0, 0)]) == 17


def test_one_block_less_fails_with_the_arithmetic_and_the_fields() -> None:
    with pytest.raises(CacheSizeError) as caught:
        num_blocks(SETTINGS, [loaded(10_000, 8), loaded(17 * 32 - 1, 8)])
    message = str(caught.value)
    assert message.startswith("spec.pools[0].cpu.memoryPerRank: rank 1 (cpu-1) can hold 16 KV blocks = 543 bytes")
    assert "spec.model.maxModelLen 64 tokens needs 17" in message
    assert "at most 60" in message


def test_a_gpu_without_room_is_told_of_the_field_that_gives_it_more() -> None:
    settings = group_settings(
        {"name": "gpu", "type": "GPU", "ranks": 1},
        {"name": "cpu", "ranks": 1},
        engine={"blockSize": 4, "maxNumSeqs": 4},
    )
    with pytest.raises(CacheSizeError, match=r"^spec\.engine\.gpuMemoryUtilization: rank 0 .* raise spec\.engine\.gpu"):
        num_blocks(settings, [loaded(17 * 32 - 1, 8), loaded(10_000, 8)])


def test_an_explicit_size_replaces_the_reported_one() -> None:
    assert num_blocks(with_explicit("2000"), [loaded(10**6, 8), loaded(10**6, 8)]) == 62


def test_an_explicit_size_above_what_a_rank_has_is_an_error() -> None:
    with pytest.raises(CacheSizeError, match=r"spec\.engine\.kvCacheMemoryBytes: 4096 bytes .* rank 1 .* has 4095"):
        num_blocks(with_explicit("4096"), [loaded(4096, 8), loaded(4095, 8)])


def test_an_explicit_size_that_is_too_small_is_named() -> None:
    with pytest.raises(CacheSizeError, match=r"^spec\.engine\.kvCacheMemoryBytes: rank 0 .* raise spec\.engine"):
        num_blocks(with_explicit("512"), [loaded(4096, 8), loaded(4096, 8)])


ROOMY = [loaded(10**6, 8), loaded(0, 0)]


def cache_of(block_size: int, num_blocks: int) -> ranks_pb2.AllocateCache:
    return ranks_pb2.AllocateCache(block_size=block_size, num_blocks=num_blocks)


def asked(
    reports: list[ranks_pb2.Loaded] = ROOMY, *, settings: GroupSettings = SETTINGS, **fields: Any
) -> ranks_pb2.AllocateCache:
    return asked_cache(admin_pb2.ResetCacheRequest(**fields), settings, reports)


def test_a_reset_that_leaves_everything_open_is_the_first_cache() -> None:
    assert asked() == first_cache(SETTINGS, ROOMY) == cache_of(4, 65)
    assert layout_of(asked(), SETTINGS) == admin_pb2.CACHE_LAYOUT_PAGED


def test_contiguous_is_a_block_for_each_sequence_as_long_as_the_longest() -> None:
    cache = asked(layout=admin_pb2.CACHE_LAYOUT_CONTIGUOUS)
    assert cache == cache_of(64, 5)
    assert layout_of(cache, SETTINGS) == admin_pb2.CACHE_LAYOUT_CONTIGUOUS


CONTIGUOUS = group_settings(engine={"blockSize": 4, "maxNumSeqs": 4, "cacheLayout": "Contiguous"})


def test_the_layout_of_the_resource_is_that_of_every_first_cache() -> None:
    cache = first_cache(CONTIGUOUS, ROOMY)
    assert cache == cache_of(64, 5)
    assert layout_of(cache, CONTIGUOUS) == admin_pb2.CACHE_LAYOUT_CONTIGUOUS


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, cache_of(64, 5)),
        ({"layout": admin_pb2.CACHE_LAYOUT_PAGED}, cache_of(4, 65)),
        ({"block_size": 8}, cache_of(8, 33)),
        ({"num_blocks": 7}, cache_of(64, 8)),
    ],
)
def test_a_reset_leaves_the_layout_of_the_resource_unless_it_asks_for_another(
    fields: dict[str, Any], expected: ranks_pb2.AllocateCache
) -> None:
    assert asked(settings=CONTIGUOUS, **fields) == expected


def test_a_block_size_that_does_not_divide_the_longest_sequence_is_fine() -> None:
    assert asked(block_size=7) == cache_of(7, 4 * 10 + 1)


def test_memory_bounds_a_reset_as_it_bounds_the_first_cache() -> None:
    reports = [loaded(3 * 64 * 8 + 5, 8), loaded(10**6, 8)]
    assert asked(reports, layout=admin_pb2.CACHE_LAYOUT_CONTIGUOUS) == cache_of(64, 3)
    assert asked(reports, block_size=8) == cache_of(8, 24)


def test_more_blocks_than_the_sequences_fill_may_be_asked_for() -> None:
    assert asked(num_blocks=500) == cache_of(4, 501)


@pytest.mark.parametrize(
    ("fields", "reports", "words"),
    [
        ({"num_blocks": 31_250}, ROOMY, r"num_blocks: 31250 .* need 1000032 bytes .* rank 0 .* has 1000000 bytes"),
        (
            {"layout": admin_pb2.CACHE_LAYOUT_CONTIGUOUS},
            [loaded(1023, 8), loaded(0, 0)],
            r"layout: asks for blocks of 64 tokens; .* can hold 1 KV blocks = 1023 bytes / \(8 bytes a token \* 64\)",
        ),
        ({"block_size": 63}, [loaded(1023, 8), loaded(0, 0)], "block_size: asks for blocks of 63 tokens"),
    ],
)
def test_what_memory_does_not_hold_is_refused_with_the_arithmetic(
    fields: dict[str, Any], reports: list[ranks_pb2.Loaded], words: str
) -> None:
    with pytest.raises(InvalidCommand, match=words):
        asked(reports, **fields)


def test_exactly_what_memory_holds_is_made() -> None:
    assert asked(num_blocks=31_249) == cache_of(4, 31_250)


def test_a_reset_is_bound_by_the_explicit_size_too() -> None:
    with pytest.raises(
        InvalidCommand, match=r"has 2000 bytes \(spec\.engine\.kvCacheMemoryBytes\), room for 61 blocks"
    ):
        asked(settings=with_explicit("2000"), num_blocks=62)


@pytest.mark.parametrize(("kind", "room", "fits"), [("NGram", 2, True), ("NGram", 1, False), ("Auto", 1, True)])
def test_proposals_to_a_model_with_states_want_snapshots(kind: str, room: int, fits: bool) -> None:
    settings = group_settings(engine={"blockSize": 4, "maxNumSeqs": 4, "speculative": {"kind": kind}})
    delta = DeltaShape(layers=(0,), key_heads=3, value_heads=3, key_dim=4, value_dim=4, taps=2)
    settings = replace(settings, config=replace(settings.config, delta=delta))
    report = ranks_pb2.Loaded(
        kv_budget_bytes=10_000, kv_bytes_per_token=8, snapshot_bytes=100, snapshot_budget_bytes=100 * room
    )
    if fits:
        assert first_cache(settings, [report, report]).num_snapshots == room
        return
    with pytest.raises(
        CacheSizeError, match=r"speculative\.kind: NGram needs room for 2 snapshots.* room for 1; lower"
    ):
        first_cache(settings, [report, report])
