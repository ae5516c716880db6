"""Traps that other engines' block pools fell into; each test names the trap."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest

from hetero_gateway.engine.block_pool import BlockPool
from hetero_gateway.engine.errors import InvalidRequest
from tests.unit.engine.engine_setup import VOCAB_SIZE, Bench, engine_config, generation
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
    assert [(entry.num_tokens, entry.sample) for entry in step.entries] == [(BLOCK, True)]
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
    assert [entry.num_tokens for entry in step.entries] == [9, 9]
    tables = [set(twin.block_ids) for twin in twins]
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
