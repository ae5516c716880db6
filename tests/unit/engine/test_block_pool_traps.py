"""Traps that other engines' block pools fell into; each test names the trap.

Of nano-vllm's issues: a full hit with nothing left to compute (#144), a prompt of exactly one block that is cached
(#114, #117), preemption and a hit beyond the tokens (#211, #233), prefill again (#217), a hit on a block that the same
batch computes (#208), a sequence larger than the pool (#274, #277), a free list that is searched. Of vLLM's: hashes
that can be made to collide, within a tenant or across (GHSA-rm76-4mrf-v9r8, #17045, #44701), the last token of a full
hit (#53706), prefixes that are evicted head first.
"""

from __future__ import annotations

import hashlib
import sys
from types import FrameType
from typing import Any

import pytest

from hetero_gateway.engine.block_pool import BlockDigests, BlockPool
from hetero_gateway.engine.errors import InvalidRequest
from tests.unit.engine.engine_setup import VOCAB_SIZE, Bench, engine_config, entries, generation
from tests.unit.engine.fake_ranks import tokens_alone

pytestmark = pytest.mark.unit

BLOCK = 4


def expected(prompt: list[int] | range, count: int) -> list[int]:
    return tokens_alone(prompt, seed=0, count=count, vocab_size=VOCAB_SIZE)


def test_full_hit_still_computes_last_token() -> None:
    bench = Bench(engine_config(block_size=BLOCK), num_blocks=20)
    prompt = range(3 * BLOCK)
    bench.add(generation("first", prompt))
    bench.run()
    second = bench.add(generation("second", prompt))
    step = bench.step()
    assert step is not None
    assert second.num_cached_tokens == 2 * BLOCK
    assert [(entry.num_tokens, entry.sample) for entry in entries(step)] == [(BLOCK, True)]
    bench.run()
    assert bench.outputs["second"] == bench.outputs["first"] == expected(prompt, 4)


def test_prompt_of_exactly_one_block_fully_cached() -> None:
    bench = Bench(engine_config(block_size=BLOCK), num_blocks=20)
    for name in ("first", "second"):
        request = bench.add(generation(name, range(BLOCK)))
        bench.run()
        assert request.num_cached_tokens == 0
        assert bench.outputs[name] == expected(range(BLOCK), 4)


def test_hit_of_all_but_one_token_uses_every_cached_block() -> None:
    bench = Bench(engine_config(block_size=BLOCK), num_blocks=20)
    bench.add(generation("first", range(2 * BLOCK)))
    bench.run()
    request = bench.add(generation("second", range(2 * BLOCK + 1)))
    bench.run()
    assert request.num_cached_tokens == 2 * BLOCK
    assert bench.outputs["second"] == expected(range(2 * BLOCK + 1), 4)


def test_preempted_request_that_hits_its_own_prefix_stays_in_bounds() -> None:
    # 6 usable blocks; both grow to 4 blocks each, so the later one is preempted and comes back with hits.
    bench = Bench(engine_config(block_size=BLOCK), num_blocks=7)
    early = bench.add(generation("early", range(BLOCK + 1), max_tokens=11))
    late = bench.add(generation("late", range(20, 20 + BLOCK + 1), max_tokens=11))
    bench.run()
    assert bench.scheduler.stats().preemptions > 0
    assert bench.outputs["early"] == expected(range(BLOCK + 1), 11)
    assert bench.outputs["late"] == expected(range(20, 20 + BLOCK + 1), 11)
    assert early.num_cached_tokens == late.num_cached_tokens == 0


def test_preemption_at_an_exact_block_multiple_recomputes_last_token() -> None:
    bench = Bench(engine_config(block_size=BLOCK, max_num_seqs=2), num_blocks=5)
    bench.add(generation("early", range(2 * BLOCK - 1), max_tokens=BLOCK + 1))
    bench.add(generation("late", range(20, 20 + 2 * BLOCK - 1), max_tokens=BLOCK + 1))
    bench.run()
    assert bench.scheduler.stats().preemptions > 0
    assert bench.outputs["late"] == expected(range(20, 20 + 2 * BLOCK - 1), BLOCK + 1)


def test_prefill_again_after_preemption_in_chunks_gives_the_same_tokens() -> None:
    bench = Bench(engine_config(block_size=BLOCK, max_num_batched_tokens=3, max_num_seqs=2), num_blocks=6)
    for name, start in (("a", 0), ("b", 30)):
        bench.add(generation(name, range(start, start + 7), max_tokens=8))
    bench.run()
    assert bench.scheduler.stats().preemptions > 0
    assert bench.outputs["a"] == expected(range(7), 8)
    assert bench.outputs["b"] == expected(range(30, 37), 8)


def test_no_hit_on_blocks_that_the_same_batch_computes() -> None:
    bench = Bench(engine_config(block_size=BLOCK), num_blocks=20)
    twins = [bench.add(generation(name, range(9))) for name in ("one", "two")]
    step = bench.step()
    assert step is not None
    assert [entry.num_tokens for entry in entries(step)] == [9, 9]
    tables = [set(twin.completions[0].block_ids) for twin in twins]
    assert not tables[0] & tables[1]
    bench.run()
    assert bench.outputs["one"] == bench.outputs["two"] == expected(range(9), 4)


def test_no_hit_on_a_chunked_prefill_beyond_what_is_computed() -> None:
    bench = Bench(engine_config(block_size=BLOCK, max_num_batched_tokens=6), num_blocks=20)
    bench.add(generation("one", range(12)))
    bench.step()
    second = bench.add(generation("two", range(12)))
    bench.run()
    assert second.num_cached_tokens < 12
    assert bench.outputs["one"] == bench.outputs["two"] == expected(range(12), 4)


def test_blocks_of_equal_tokens_behind_other_prefixes_are_not_hit() -> None:
    bench = Bench(engine_config(block_size=2), num_blocks=20)
    prompts = ([1, 2, 3, 4, 5], [3, 4, 1, 2, 5], [3, 4, 3, 4, 5])
    for index, prompt in enumerate(prompts):
        bench.add(generation(f"r{index}", prompt))
        bench.run()
        assert bench.outputs[f"r{index}"] == expected(prompt, 4)


def test_order_of_blocks_is_part_of_a_digest() -> None:
    chain = BlockDigests(cache_salt="", block_size=1)
    other = BlockDigests(cache_salt="", block_size=1)
    assert chain.upto(2, [0, 1]) != other.upto(2, [1, 0])
    assert len(set(chain.upto(2, [0, 1]) + other.upto(2, [1, 0]))) == 4
    assert all(len(digest) == 32 for digest in chain.upto(2, [0, 1]))


def test_digests_are_the_same_in_every_process() -> None:
    digest = BlockDigests(cache_salt="tenant", block_size=2).upto(1, [7, 9])[0]
    root = hashlib.sha256(b"hetero-kv-root\0tenant").digest()
    assert digest == hashlib.sha256(root + (7).to_bytes(4, "little") + (9).to_bytes(4, "little")).digest()


def test_another_tenant_never_hits_however_its_salt_is_chosen() -> None:
    bench = Bench(engine_config(block_size=BLOCK), num_blocks=40)
    for index, salt in enumerate(("", "a", "a\0", "\0a", "hetero-kv-root")):
        request = bench.add(generation(f"r{index}", range(12), salt=salt, tenant=index))
        bench.run()
        assert request.num_cached_tokens == 0
        assert bench.outputs[f"r{index}"] == tokens_alone(
            range(12), seed=0, count=4, vocab_size=VOCAB_SIZE, tenant=index
        )


def test_ended_request_gives_up_the_tail_of_its_prefix_first() -> None:
    bench = Bench(engine_config(block_size=BLOCK, max_num_seqs=1), num_blocks=6)
    bench.add(generation("first", range(4 * BLOCK), max_tokens=1))
    bench.run()
    # Takes the free block, and two of the four that the first one left behind.
    bench.add(generation("other", [9] * (3 * BLOCK), max_tokens=1))
    bench.run()
    third = bench.add(generation("third", range(4 * BLOCK), max_tokens=1))
    bench.run()
    assert third.num_cached_tokens == 2 * BLOCK


def test_sequence_larger_than_the_pool_is_rejected_with_the_arithmetic() -> None:
    bench = Bench(engine_config(block_size=BLOCK), num_blocks=4)
    with pytest.raises(InvalidRequest, match=r"10 prompt .* max_tokens 4 .* 13 positions = 4 blocks of 4; .* 3"):
        bench.add(generation("large", range(10), max_tokens=4))
    assert bench.scheduler.stats().waiting_requests == 0


def test_sequence_that_just_fills_the_pool_is_served() -> None:
    bench = Bench(engine_config(block_size=BLOCK), num_blocks=4)
    bench.add(generation("full", range(10), max_tokens=3))
    bench.run()
    assert bench.outputs["full"] == expected(range(10), 3)


def _calls_of_allocate_and_release(num_blocks: int) -> int:
    pool = BlockPool(num_blocks=num_blocks)
    calls = 0

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        pool.release(pool.allocate(3))
    finally:
        sys.setprofile(None)
    return calls


def test_free_list_costs_the_same_in_a_large_pool() -> None:
    assert _calls_of_allocate_and_release(10) == _calls_of_allocate_and_release(100_000)
