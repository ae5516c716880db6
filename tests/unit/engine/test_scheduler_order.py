"""Who is served before whom: priorities, ageing, preemption, and prefills beside decodes."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from hetero_gateway.engine.request import Request
from hetero_gateway.engine.scheduler import Scheduler
from tests.unit.engine.engine_setup import VOCAB_SIZE, Bench, engine_config, entries, generation, name_of
from tests.unit.engine.fake_ranks import tokens_alone

pytestmark = pytest.mark.unit

AGEING_S = 2.0


def order_of_starts(bench: Bench) -> list[str]:
    started: list[str] = []
    while (step := bench.step()) is not None:
        bound = {new.slot for new in step.plan.new_sequences}
        started += [name_of(entry.completion) for entry in entries(step) if entry.slot in bound]
    return started


def test_lower_numbers_go_first_and_arrival_decides_within_one() -> None:
    bench = Bench(engine_config(max_num_seqs=1), num_blocks=40)
    for name, priority in (("a", 0), ("b", 5), ("c", -5), ("d", 0), ("e", -5)):
        bench.add(generation(name, range(3), max_tokens=1, priority=priority))
    assert order_of_starts(bench) == ["c", "e", "a", "d", "b"]


def test_waiting_makes_up_for_priority() -> None:
    bench = Bench(engine_config(max_num_seqs=1, ageing_s=AGEING_S), num_blocks=40)
    bench.add(generation("old", range(3), max_tokens=1, priority=3), now=0.0)
    bench.add(generation("too late", range(3), max_tokens=1, priority=0), now=3 * AGEING_S + 0.1)
    bench.add(generation("in time", range(3), max_tokens=1, priority=0), now=3 * AGEING_S - 0.1)
    assert order_of_starts(bench) == ["in time", "old", "too late"]


@given(
    priority=st.integers(-5, 5),
    others=st.lists(st.tuples(st.floats(0.0, 3.0), st.integers(-5, 5), st.integers(1, 4)), min_size=1, max_size=60),
    slots=st.integers(1, 3),
    position=st.integers(0, 60),
)
def test_nobody_is_passed_by_those_that_arrive_after_the_bound(
    priority: int, others: list[tuple[float, int, int]], slots: int, position: int
) -> None:
    """The bound of the module's docstring, under a stream of requests that never lets the queue run dry."""
    bench = Bench(engine_config(max_num_seqs=slots, ageing_s=AGEING_S), num_blocks=40)
    now = 0.0
    victim: Request | None = None
    later: dict[str, Request] = {}
    for index, (gap_s, other_priority, max_tokens) in enumerate(others):
        if index == min(position, len(others) - 1):
            victim = bench.add(generation("victim", range(3), max_tokens=2, priority=priority), now=now)
        request = bench.add(generation(f"r{index}", range(3), max_tokens=max_tokens, priority=other_priority), now=now)
        if victim is not None:
            later[request.request_id] = request
        step = bench.step(now)
        if victim is not None and victim.first_scheduled_s is None and step is not None:
            for entry in entries(step):
                passing = later.get(name_of(entry.completion))
                if passing is not None:
                    ahead_s = (priority - passing.asked.priority) * AGEING_S
                    assert passing.arrival_s <= victim.arrival_s + ahead_s
        now += gap_s


def test_least_urgent_is_preempted_though_it_came_first() -> None:
    bench = Bench(engine_config(block_size=4, max_num_seqs=2), num_blocks=5)
    bench.add(generation("idle hour", range(7), max_tokens=6, priority=1))
    bench.add(generation("urgent", range(20, 27), max_tokens=6))
    resumed = set()
    while (step := bench.step()) is not None:
        bound = {new.slot for new in step.plan.new_sequences if len(new.token_ids) > 7}
        resumed |= {name_of(entry.completion) for entry in entries(step) if entry.slot in bound}
    assert resumed == {"idle hour"}


def test_long_prompts_stop_no_decode_and_advance_beside_it() -> None:
    bench = Bench(engine_config(max_num_batched_tokens=6), num_blocks=60)
    bench.add(generation("decode", range(3), max_tokens=20))
    bench.step()
    bench.add(generation("long", range(10, 45), max_tokens=1))
    bench.add(generation("behind", range(20), max_tokens=1))
    for _ in range(7):
        step = bench.step()
        assert step is not None
        assert [(name_of(e.completion), e.num_tokens) for e in entries(step)] == [("decode", 1), ("long", 5)]
    step = bench.step()
    assert step is not None
    assert [name_of(entry.completion) for entry in entries(step)] == ["decode", "behind"]


def test_prefill_advances_when_decodes_could_take_the_whole_budget() -> None:
    bench = Bench(engine_config(max_num_seqs=8, max_num_batched_tokens=3), num_blocks=60)
    for index in range(5):
        bench.add(generation(f"r{index}", range(index, index + 6), max_tokens=12))
    bench.run()
    for index in range(5):
        expected = tokens_alone(range(index, index + 6), seed=0, count=12, vocab_size=VOCAB_SIZE)
        assert bench.outputs[f"r{index}"] == expected


def test_nobody_starts_past_the_first_in_line_that_does_not_fit_yet() -> None:
    bench = Bench(engine_config(block_size=4, max_num_seqs=3), num_blocks=7)
    bench.add(generation("running", range(12), max_tokens=4))
    bench.step()
    bench.add(generation("large", range(20, 36), max_tokens=1))
    bench.add(generation("small", range(3), max_tokens=1))
    assert order_of_starts(bench) == ["large", "small"]


def test_first_in_line_is_not_looked_up_again_while_no_more_blocks_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(engine_config(block_size=4, max_num_seqs=3, max_model_len=100), num_blocks=24)
    bench.add(generation("running", range(40), max_tokens=30))
    bench.step()
    bench.add(generation("large", [1] * 60, max_tokens=20))
    lookups = 0
    find_prefix = bench.scheduler._batch.find_prefix

    def counted(*arguments: object) -> list[int]:
        nonlocal lookups
        lookups += 1
        return find_prefix(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(bench.scheduler._batch, "find_prefix", counted)
    for _ in range(10):
        bench.step()
    assert lookups == 1
    bench.run()
    assert len(bench.outputs["large"]) == 20


def test_queue_is_bounded_while_the_group_is_away() -> None:
    scheduler = Scheduler(engine_config(max_num_seqs=2, max_queued_requests=1), num_blocks=40)
    scheduler.lose_group()
    for index in range(3):
        scheduler.add(generation(f"r{index}", range(3)), now=0.0)
    with pytest.raises(Exception, match="3 requests wait"):
        scheduler.add(generation("r3", range(3)), now=0.0)
