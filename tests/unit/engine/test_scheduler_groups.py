"""Groups come and go under the requests: tokens stay, blocks do not."""

from __future__ import annotations

import pytest

from hetero_gateway.engine.errors import EngineFault, InvalidRequest
from hetero_gateway.engine.request import FinishReason
from hetero_gateway.engine.scheduler import Scheduler
from tests.unit.engine.engine_setup import VOCAB_SIZE, Bench, engine_config, entries, generation
from tests.unit.engine.fake_ranks import tokens_alone

pytestmark = pytest.mark.unit


def alone(prompt: range, count: int) -> list[int]:
    return tokens_alone(prompt, seed=0, count=count, vocab_size=VOCAB_SIZE)


@pytest.mark.parametrize("steps_before", range(7))
def test_requests_go_on_in_another_group_without_a_lost_or_doubled_token(steps_before: int) -> None:
    bench = Bench(engine_config(max_num_batched_tokens=6, max_num_seqs=2), num_blocks=40)
    for name, start in (("a", 0), ("b", 10), ("c", 20)):
        bench.add(generation(name, range(start, start + 9), max_tokens=5))
    for _ in range(steps_before):
        if bench.send() is None:
            bench.receive()
    bench.lose_group()
    assert len(bench.in_flight) == 0
    stats = bench.scheduler.stats()
    assert (stats.running_requests, stats.num_blocks, stats.used_blocks) == (0, 0, 0)
    assert bench.schedule() is None
    bench.open_group()
    step = bench.send()
    assert step is not None
    assert (step.plan.step_id, list(step.plan.released_slots)) == (1, [])
    bench.run()
    for name, start in (("a", 0), ("b", 10), ("c", 20)):
        assert bench.outputs[name] == alone(range(start, start + 9), 5)


def test_results_of_a_lost_group_are_not_taken() -> None:
    bench = Bench(engine_config(), num_blocks=40)
    bench.add(generation("r", range(3)))
    bench.send()
    assert bench.in_flight.oldest is not None
    result = bench.in_flight.oldest.result
    assert result is not None
    bench.lose_group()
    with pytest.raises(EngineFault, match="no step is in flight"):
        bench.in_flight.answer(result)


def test_siblings_share_blocks_again_in_another_group() -> None:
    bench = Bench(engine_config(block_size=4, enable_prefix_caching=False), num_blocks=40)
    bench.add(generation("r", range(10), max_tokens=8, n=3))
    for _ in range(3):
        bench.step()
    bench.lose_group()
    bench.open_group()
    first, second = bench.step(), bench.step()
    assert first is not None
    assert second is not None
    assert [entry.completion.index for entry in entries(first)] == [0]
    # What each has generated is behind the shared blocks and its own.
    assert [(e.completion.index, e.num_tokens) for e in entries(second)] == [(0, 1), (1, 4), (2, 4)]
    bench.run()
    assert len(bench.outputs["r/2"]) == 8


def test_request_that_does_not_fit_another_cache_ends_with_the_arithmetic() -> None:
    bench = Bench(engine_config(block_size=4), num_blocks=40)
    large = bench.add(generation("large", range(20), max_tokens=20))
    bench.add(generation("small", range(9), max_tokens=4))
    bench.lose_group()
    refused = bench.scheduler.open_group(num_blocks=6, block_size=4)
    assert [request for request, _ in refused] == [large]
    assert "39 positions = 10 blocks of 4; the KV cache has 5" in str(refused[0][1])
    assert large.ended
    bench.num_blocks = 6
    bench.ranks = bench.new_ranks()
    bench.run()
    assert bench.outputs["small"] == alone(range(9), 4)


def test_request_with_open_max_tokens_takes_what_another_cache_allows() -> None:
    bench = Bench(engine_config(block_size=4, max_model_len=100), num_blocks=11)
    request = bench.add(generation("r", range(9), max_tokens=None))
    assert request.max_tokens == 40 - 9 + 1
    bench.step()
    assert bench.open_group(num_blocks=6) == []
    bench.run()
    assert bench.outputs["r"] == alone(range(9), 20 - 9 + 1)
    assert request.completions[0].reason is FinishReason.LENGTH


def test_request_with_open_max_tokens_that_has_more_than_another_cache_holds_ends() -> None:
    bench = Bench(engine_config(block_size=4, max_model_len=100), num_blocks=11)
    request = bench.add(generation("r", range(9), max_tokens=None))
    for _ in range(20):
        bench.step()
    assert bench.open_group(num_blocks=6) == [request]


def test_requests_that_come_while_the_group_is_away_have_to_fit_its_cache() -> None:
    bench = Bench(engine_config(block_size=4), num_blocks=6)
    bench.lose_group()
    with pytest.raises(InvalidRequest, match="the KV cache has 5"):
        bench.add(generation("large", range(20), max_tokens=20))
    bench.add(generation("small", range(9), max_tokens=4))
    bench.open_group()
    bench.run()
    assert bench.outputs["small"] == alone(range(9), 4)


@pytest.mark.parametrize(("before", "after"), [(4, 64), (64, 4), (4, 3)])
def test_layout_of_the_cache_can_change_under_requests(before: int, after: int) -> None:
    bench = Bench(engine_config(block_size=before, max_model_len=64), num_blocks=40)
    for name in ("one", "two"):
        bench.add(generation(name, range(9), max_tokens=6))
    bench.step()
    bench.step()
    bench.open_group(num_blocks=40, block_size=after)
    third = bench.add(generation("three", [*range(8), 60, 61, 62, 63], max_tokens=2))
    bench.run()
    assert bench.outputs["one"] == bench.outputs["two"] == alone(range(9), 6)
    expected = tokens_alone([*range(8), 60, 61, 62, 63], seed=0, count=2, vocab_size=VOCAB_SIZE)
    assert bench.outputs["three"] == expected
    assert third.num_cached_tokens % after == 0


def test_digests_of_another_block_size_are_forgotten() -> None:
    """Kept, both would name a block by their first two tokens, and the second would find the first one's third."""
    bench = Bench(engine_config(block_size=2, max_num_seqs=1, max_num_batched_tokens=2), num_blocks=40)
    prompts = ([1, 2, 3, 4, 5, 6, 7], [1, 2, 9, 9, 9, 9, 9])
    for name, prompt in zip(("one", "two"), prompts, strict=True):
        bench.add(generation(name, prompt, max_tokens=1))
    bench.step()
    for request in bench.scheduler._requests.values():
        completion = request.completions[0]
        completion.digests.upto(1, completion.token_ids)
    bench.open_group(num_blocks=40, block_size=3)
    bench.run()
    for name, prompt in zip(("one", "two"), prompts, strict=True):
        assert bench.outputs[name] == tokens_alone(prompt, seed=0, count=1, vocab_size=VOCAB_SIZE)


def test_prefix_cache_does_not_outlive_its_group() -> None:
    bench = Bench(engine_config(), num_blocks=40)
    bench.add(generation("first", range(12)))
    bench.run()
    assert bench.scheduler.stats().cached_blocks > 0
    bench.open_group()
    assert bench.scheduler.stats().cached_blocks == 0
    second = bench.add(generation("second", range(12)))
    bench.run()
    assert second.num_cached_tokens == 0


def test_clear_ends_all_and_leaves_ranks_to_be_told() -> None:
    bench = Bench(engine_config(max_num_seqs=1), num_blocks=20)
    requests = [bench.add(generation(name, range(9), n=2)) for name in ("running", "waiting")]
    bench.step()
    bench.send()
    assert bench.scheduler.clear() == requests
    assert all(request.ended for request in requests)
    stats = bench.scheduler.stats()
    assert (stats.running_requests, stats.waiting_requests, stats.used_blocks) == (0, 0, 0)
    assert stats.finished_requests == 2
    bench.run()
    assert bench.is_idle
    assert bench.ranks.num_bound_slots == 0


def test_scheduler_without_a_group_refuses_until_it_knew_one() -> None:
    scheduler = Scheduler(engine_config())
    assert scheduler.is_idle
    with pytest.raises(InvalidRequest, match="the KV cache has 0"):
        scheduler.add(generation("r", range(3)), now=0.0)
