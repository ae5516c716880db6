"""The block pool alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hetero_gateway.engine.block_pool import NULL_BLOCK, BlockDigests, BlockPool
from hetero_gateway.engine.errors import EngineFault

pytestmark = pytest.mark.unit


def digests(tokens: range | list[int], *, salt: str = "", block_size: int = 2) -> list[bytes]:
    known = list(tokens)
    return BlockDigests(cache_salt=salt, block_size=block_size).upto(len(known) // block_size, known)


def cached(pool: BlockPool, chain: list[bytes]) -> list[int]:
    """Blocks that hold `chain`, computed and released."""
    blocks = pool.allocate(len(chain))
    for block, digest in zip(blocks, chain, strict=True):
        pool.register(block, digest)
    pool.release(blocks)
    return blocks


def test_null_block_is_never_handed_out() -> None:
    pool = BlockPool(num_blocks=5)
    assert NULL_BLOCK not in pool.allocate(4)
    assert not pool.can_allocate(1)


def test_free_and_used_are_all() -> None:
    pool = BlockPool(num_blocks=9)
    blocks = pool.allocate(3)
    assert (pool.capacity, pool.free_blocks, pool.used_blocks) == (8, 5, 3)
    pool.release(blocks[:1])
    assert (pool.free_blocks, pool.used_blocks) == (6, 2)
    pool.check_integrity()


def test_cached_blocks_are_found_and_counted_until_acquired() -> None:
    pool = BlockPool(num_blocks=9)
    blocks = cached(pool, digests(range(6)))
    assert pool.cached_blocks == 3
    assert pool.lookup(digests(range(6))) == blocks
    pool.acquire(blocks)
    assert (pool.cached_blocks, pool.used_blocks, pool.free_blocks) == (0, 3, 5)
    pool.check_integrity()


def test_lookup_stops_at_the_first_block_that_differs() -> None:
    pool = BlockPool(num_blocks=9)
    blocks = cached(pool, digests([1, 2, 3, 4, 5, 6]))
    assert pool.lookup(digests([1, 2, 9, 4, 5, 6])) == blocks[:1]


def test_equal_tokens_after_different_prefixes_are_different_blocks() -> None:
    assert digests([1, 2, 3, 4])[1] != digests([5, 6, 3, 4])[1]


def test_salt_separates_tenants() -> None:
    pool = BlockPool(num_blocks=9)
    cached(pool, digests(range(4), salt="a"))
    assert pool.lookup(digests(range(4), salt="b")) == []
    assert len(pool.lookup(digests(range(4), salt="a"))) == 2


def test_digests_grow_with_the_tokens() -> None:
    chain = BlockDigests(cache_salt="", block_size=2)
    tokens = [1, 2, 3]
    first = chain.upto(1, tokens)
    tokens += [4, 5]
    assert chain.upto(2, tokens) == digests([1, 2, 3, 4])
    assert chain.upto(1, tokens) == first


def test_tail_of_a_prefix_is_evicted_before_its_head() -> None:
    pool = BlockPool(num_blocks=4)
    head, middle, tail = cached(pool, digests(range(6)))
    assert [pool.allocate(1), pool.allocate(1), pool.allocate(1)] == [[tail], [middle], [head]]


def test_least_recently_used_prefix_is_evicted_first() -> None:
    pool = BlockPool(num_blocks=3)
    old = cached(pool, digests([1, 2]))
    young = cached(pool, digests([3, 4]))
    pool.acquire(old)
    pool.release(old)
    assert pool.allocate(1) == young


def test_blocks_without_content_go_before_cached_ones() -> None:
    pool = BlockPool(num_blocks=4)
    kept = cached(pool, digests([1, 2]))
    plain = pool.allocate(2)
    pool.release(plain)
    assert set(pool.allocate(2)) == set(plain)
    assert pool.lookup(digests([1, 2])) == kept


def test_evicted_block_is_not_found_any_more() -> None:
    pool = BlockPool(num_blocks=2)
    cached(pool, digests([1, 2]))
    pool.allocate(1)
    assert pool.lookup(digests([1, 2])) == []
    pool.check_integrity()


def test_shared_block_is_used_until_the_last_reference_goes() -> None:
    pool = BlockPool(num_blocks=3)
    blocks = cached(pool, digests([1, 2]))
    pool.acquire(blocks)
    pool.acquire(blocks)
    pool.release(blocks)
    assert pool.used_blocks == 1
    pool.release(blocks)
    assert pool.used_blocks == 0


def test_second_block_with_equal_content_stays_unregistered() -> None:
    pool = BlockPool(num_blocks=3)
    first, second = pool.allocate(2)
    pool.register(first, digests([1, 2])[0])
    pool.register(second, digests([1, 2])[0])
    pool.release([first, second])
    assert pool.lookup(digests([1, 2])) == [first]
    assert pool.cached_blocks == 1
    pool.check_integrity()


def test_blocks_that_a_hit_keeps_do_not_count_as_free() -> None:
    pool = BlockPool(num_blocks=4)
    hits = cached(pool, digests(range(4)))
    assert pool.can_allocate(1, keeping=hits)
    assert not pool.can_allocate(2, keeping=hits)


@pytest.mark.parametrize(
    "misuse",
    [
        lambda pool: pool.allocate(2),
        lambda pool: pool.release([1]),
        lambda pool: pool.register(1, b"digest"),
        lambda pool: pool.acquire([1]),
    ],
    ids=["allocate", "release", "register", "acquire"],
)
def test_misuse_is_refused(misuse: Callable[[BlockPool], object]) -> None:
    pool = BlockPool(num_blocks=2)
    with pytest.raises(EngineFault):
        misuse(pool)


def test_integrity_check_sees_a_lost_block() -> None:
    pool = BlockPool(num_blocks=4)
    pool._free.popitem()
    with pytest.raises(EngineFault, match="free \\+ used is not all"):
        pool.check_integrity()


def test_pool_without_null_block_is_refused() -> None:
    with pytest.raises(ValueError, match="num_blocks"):
        BlockPool(num_blocks=0)
