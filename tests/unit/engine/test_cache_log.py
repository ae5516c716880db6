"""The record of what the prefix cache holds: batches in order, bounded, and silent until it begins."""

from __future__ import annotations

import pytest

from hetero_gateway.engine.block_pool import BlockDigests, BlockPool, CacheLog, ClearedCache, RemovedBlock, StoredBlock
from hetero_gateway.engine.errors import EngineFault
from tests.unit.engine.engine_setup import Bench, engine_config, generation

pytestmark = pytest.mark.unit

TOKENS = list(range(64))


def digests(count: int, *, first: int = 0) -> list[bytes]:
    return BlockDigests(cache_salt="", block_size=4).upto(count, [first, *TOKENS])


def store(log: CacheLog, count: int, *, first: int = 0) -> None:
    chain = digests(count, first=first)
    for index, digest in enumerate(chain):
        log.stored(digest, chain[index - 1] if index else None, TOKENS[index * 4 : index * 4 + 4])


def begun(**options: int) -> CacheLog:
    log = CacheLog(**options)
    log.begin(lambda: None)
    return log


def test_events_that_come_together_are_one_batch() -> None:
    calls: list[int] = []
    log = CacheLog()
    log.begin(lambda: calls.append(log.last_number))
    store(log, 3)
    assert log.since(2) == []
    log.seal()
    log.seal()
    (batch,) = log.since(2) or []
    blocks = [event for event in batch.events if isinstance(event, StoredBlock)]
    assert (batch.number, len(blocks), calls) == (2, 3, [0, 1])
    assert [each.parent for each in blocks] == [None, blocks[0].key, blocks[1].key]
    assert list(blocks[1].token_ids) == TOKENS[4:8]


def test_a_place_in_the_order_is_found_until_its_batches_are_gone() -> None:
    log = begun(max_events=4)
    for first in range(4):
        store(log, 2, first=first)
        log.seal()
    assert log.last_number == 5
    assert [batch.number for batch in log.since(4) or []] == [4, 5]
    assert log.since(6) == []
    assert (log.since(3), log.since(7), log.since(0)) == (None, None, None)
    assert len(log.stored_blocks) == 8


def test_blocks_that_were_not_told_are_not_told_to_be_gone() -> None:
    log = begun()
    known, unknown = digests(2)
    log.stored(known, None, TOKENS[:4])
    log.removed(unknown)
    log.removed(known)
    log.cleared()
    log.seal()
    (batch,) = log.since(2) or []
    assert [type(event) for event in batch.events] == [StoredBlock, RemovedBlock, ClearedCache]
    assert not log.stored_blocks


def test_a_log_that_has_not_begun_notes_nothing() -> None:
    log = CacheLog()
    log.removed(digests(1)[0])
    log.cleared()
    log.seal()
    assert (log.last_number, log.since(1)) == (0, [])


def test_a_pool_that_forgets_finds_nothing_and_keeps_its_blocks() -> None:
    log = begun()
    pool = BlockPool(num_blocks=6, log=log)
    chain = digests(3)
    used = pool.allocate(3)
    for block, digest in zip(used, chain, strict=True):
        assert pool.register(block, digest)
    pool.release(used[2:])
    assert (pool.cached_blocks, pool.lookup(chain)) == (1, used)
    pool.forget()
    pool.check_integrity()
    assert (pool.lookup(chain), pool.cached_blocks, pool.used_blocks) == ([], 0, 2)
    with pytest.raises(EngineFault):
        pool.acquire(used[2:])
    assert pool.register(used[0], chain[0])
    pool.release(used[:2])
    pool.check_integrity()
    assert pool.lookup(chain) == used[:1]


def test_what_runs_when_all_is_forgotten_is_not_found_behind_it() -> None:
    """Its later blocks were computed behind those that are forgotten, with weights that may have changed since."""
    bench = Bench(
        engine_config(max_num_seqs=2, max_num_batched_tokens=64, block_size=4, max_model_len=64), num_blocks=40
    )
    log = bench.scheduler.cache_log
    log.begin(lambda: None)
    bench.add(generation("before", range(1, 10), max_tokens=20))
    for _ in range(3):
        bench.step()
    bench.scheduler.forget_prefixes()
    for _ in range(9):
        bench.step()
    log.seal()
    assert not log.stored_blocks
    bench.add(generation("after", range(1, 10), max_tokens=2))
    for _ in range(3):
        bench.step()
    log.seal()
    assert [block.parent for block in log.stored_blocks.values()][:1] == [None]
    assert all(block.parent is None or block.parent in log.stored_blocks for block in log.stored_blocks.values())
