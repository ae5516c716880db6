"""The scheduler: order, budget, slots, preemption, ends."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest

from hetero_api.v1 import ranks_pb2
from hetero_gateway.engine.block_pool import StateSnapshots
from hetero_gateway.engine.errors import DuplicateRequest, EngineFault, InvalidRequest, QueueFull, StepMismatch
from hetero_gateway.engine.request import FinishReason, derived_seed
from hetero_gateway.engine.scheduler import Scheduler
from tests.unit.engine.engine_setup import VOCAB_SIZE, Bench, engine_config, entries, generation, has_requests, name_of
from tests.unit.engine.fake_ranks import tokens_alone

pytestmark = pytest.mark.unit


def names(bench: Bench) -> list[str]:
    step = bench.step()
    assert step is not None
    return [name_of(entry.completion) for entry in entries(step)]


def test_requests_start_in_order_of_arrival() -> None:
    bench = Bench(engine_config(max_num_seqs=2), num_blocks=40)
    for name in "abc":
        bench.add(generation(name, range(3), max_tokens=2))
    assert names(bench) == ["a", "b"]
    assert names(bench) == ["a", "b"]
    assert names(bench) == ["c"]


def test_long_prompt_is_computed_in_chunks_of_the_budget() -> None:
    bench = Bench(engine_config(max_num_batched_tokens=8), num_blocks=40)
    bench.add(generation("long", range(20), max_tokens=1))
    taken = []
    while (step := bench.step()) is not None:
        taken.append([(entry.num_tokens, entry.sample) for entry in entries(step)])
    assert taken == [[(8, False)], [(8, False)], [(4, True)]]


def test_running_requests_come_before_waiting_ones_in_the_budget() -> None:
    bench = Bench(engine_config(max_num_batched_tokens=8), num_blocks=40)
    bench.add(generation("running", range(3), max_tokens=9))
    bench.step()
    bench.add(generation("new", range(20)))
    step = bench.step()
    assert step is not None
    assert [(name_of(e.completion), e.num_tokens) for e in entries(step)] == [("running", 1), ("new", 7)]


def test_decodes_are_slots_alone_and_name_new_blocks_only() -> None:
    bench = Bench(engine_config(block_size=4), num_blocks=40)
    bench.add(generation("r", range(4), max_tokens=7))
    first, *decodes = [bench.step() for _ in range(6)]
    assert first is not None
    # Room for the first drawn token comes with the prompt's.
    assert list(first.plan.block_slots) == [0, 0]
    grown = []
    for step in decodes:
        assert step is not None
        assert list(step.plan.decode_slots) == [0]
        assert not step.plan.new_sequences
        assert not step.plan.spans
        grown.append(list(step.plan.block_slots))
    assert grown == [[], [], [], [], [0]]


def test_step_ids_rise_by_one_from_one() -> None:
    bench = Bench(engine_config(), num_blocks=40)
    bench.add(generation("r", range(3), max_tokens=3))
    ids = []
    while (step := bench.step()) is not None:
        ids.append(step.plan.step_id)
    assert ids == [1, 2, 3]


def test_slot_is_bound_again_only_in_a_plan_that_released_it() -> None:
    bench = Bench(engine_config(max_num_seqs=1), num_blocks=40)
    bench.add(generation("a", range(3), max_tokens=1))
    bench.add(generation("b", range(3), max_tokens=1))
    first, second = bench.step(), bench.step()
    assert first is not None
    assert second is not None
    assert list(first.plan.released_slots) == []
    assert list(second.plan.released_slots) == [0]
    assert [new.slot for new in second.plan.new_sequences] == [0]


def test_sampling_travels_with_the_new_sequence() -> None:
    bench = Bench(engine_config(), num_blocks=40)
    bench.add(generation("r", range(3), seed=2**64 - 1))
    step = bench.schedule()
    assert step is not None
    sampling = step.plan.new_sequences[0].sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (1.0, 0, 1.0, 0.0)
    assert sampling.seed == 2**64 - 1


def test_latest_running_request_is_preempted_and_comes_back_before_the_queue() -> None:
    bench = Bench(engine_config(block_size=4, max_num_seqs=3), num_blocks=7)
    for index, name in enumerate("abcd"):
        bench.add(generation(name, range(10 * index, 10 * index + 7), max_tokens=6))
    started: list[str] = []
    while (step := bench.step()) is not None:
        bound = {new.slot for new in step.plan.new_sequences}
        started += [name_of(entry.completion) for entry in entries(step) if entry.slot in bound]
    assert bench.scheduler.stats().preemptions > 0
    assert started[:3] == ["a", "b", "c"]
    assert started.index("c", 3) < started.index("d")
    assert "a" not in started[1:]


def test_resumed_request_brings_its_generated_tokens() -> None:
    bench = Bench(engine_config(block_size=4, max_num_seqs=2), num_blocks=5)
    bench.add(generation("early", range(7), max_tokens=6))
    bench.add(generation("late", range(20, 27), max_tokens=6))
    resumed: list[ranks_pb2.NewSequence] = []
    while (step := bench.step()) is not None:
        resumed.extend(new for new in step.plan.new_sequences if len(new.token_ids) > 7)
    assert resumed
    alone = tokens_alone(range(20, 27), seed=0, count=6, vocab_size=VOCAB_SIZE)
    known = list(resumed[0].token_ids)
    assert known == [*range(20, 27), *alone[: len(known) - 7]]


def test_max_tokens_is_capped_at_the_models_length() -> None:
    bench = Bench(engine_config(max_model_len=10), num_blocks=40)
    bench.add(generation("r", range(7), max_tokens=100))
    bench.run()
    assert len(bench.outputs["r"]) == 3


def test_open_max_tokens_takes_what_the_pool_allows() -> None:
    bench = Bench(engine_config(block_size=4, max_model_len=64), num_blocks=4)
    bench.add(generation("r", range(5), max_tokens=None))
    bench.run()
    assert len(bench.outputs["r"]) == 12 - 5 + 1


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "problem"),
    [
        ([], 1, "prompt: has no tokens"),
        (range(64), 1, "prompt: has 64 tokens; .* allows 63"),
        ([1, VOCAB_SIZE], 1, "prompt: token id 64 is outside"),
        ([-1], 1, "prompt: token id -1 is outside"),
        ([1], 0, "sampling.max_tokens: must be at least 1"),
        (range(45), None, "prompt: 45 prompt tokens .* 12 blocks of 4; the KV cache has 10"),
    ],
)
def test_request_that_can_never_be_served_is_rejected(
    prompt: list[int] | range, max_tokens: int | None, problem: str
) -> None:
    scheduler = Scheduler(engine_config(), num_blocks=11)
    with pytest.raises(InvalidRequest, match=problem):
        scheduler.add(generation("r", prompt, max_tokens=max_tokens), now=0.0)
    assert not has_requests(scheduler)


def test_duplicate_id_in_flight_is_refused_and_free_again_afterwards() -> None:
    bench = Bench(engine_config(), num_blocks=40)
    bench.add(generation("r", range(3)))
    with pytest.raises(DuplicateRequest):
        bench.scheduler.add(generation("r", range(3)), now=0.0)
    bench.run()
    bench.add(generation("r", range(3)))


def test_queue_bounds_those_that_cannot_start() -> None:
    scheduler = Scheduler(engine_config(max_num_seqs=2, max_queued_requests=1), num_blocks=40)
    for index in range(3):
        scheduler.add(generation(f"r{index}", range(3)), now=0.0)
    with pytest.raises(QueueFull):
        scheduler.add(generation("r3", range(3)), now=0.0)


def test_queue_bounds_the_tokens_of_all_completions() -> None:
    bench = Bench(engine_config(max_queued_tokens=100), num_blocks=11)  # A cache of 40 tokens.
    bench.add(generation("a", range(10), n=10))
    bench.add(generation("b", range(10), n=4))
    with pytest.raises(QueueFull, match="hold 140 tokens; there is no room for another 1; try later"):
        bench.add(generation("c", range(1), max_tokens=1))
    bench.scheduler.abort("b")
    bench.add(generation("c", range(10), n=3, max_tokens=1))
    bench.add(generation("d", range(4), n=2, received=((1,), ()), max_tokens=2))
    with pytest.raises(QueueFull, match="hold 139 tokens"):
        bench.add(generation("e", range(2), max_tokens=1))
    bench.run()
    bench.add(generation("alone", range(24), n=16, max_tokens=1))


def finish_reasons(bench: Bench, name: str) -> tuple[FinishReason | None, int | None]:
    bench.run()
    last = bench.updates[name][-1]
    return last.reason, last.stop_token_id


def test_eos_ends_a_request_unless_ignored() -> None:
    eos = tokens_alone(range(3), seed=0, count=1, vocab_size=VOCAB_SIZE)[0]
    bench = Bench(engine_config(eos_token_ids=frozenset({eos})), num_blocks=40)
    bench.add(generation("stops", range(3), max_tokens=2))
    assert finish_reasons(bench, "stops") == (FinishReason.STOP, eos)
    bench.add(generation("goes on", range(3), max_tokens=2, ignore_eos=True))
    assert finish_reasons(bench, "goes on") == (FinishReason.LENGTH, None)


def test_stop_token_ends_a_request() -> None:
    second = tokens_alone(range(3), seed=0, count=2, vocab_size=VOCAB_SIZE)[1]
    bench = Bench(engine_config(), num_blocks=40)
    bench.add(generation("r", range(3), max_tokens=9, stop_token_ids=frozenset({second})))
    assert finish_reasons(bench, "r") == (FinishReason.STOP, second)
    assert bench.outputs["r"][-1] == second


def test_abort_frees_blocks_at_once_when_no_step_is_in_flight() -> None:
    bench = Bench(engine_config(), num_blocks=40)
    bench.add(generation("r", range(9)))
    bench.step()
    assert bench.scheduler.abort("r")
    assert bench.scheduler.stats().used_blocks == 0
    assert not bench.scheduler.abort("r")


def test_abort_in_flight_frees_blocks_at_once_and_drops_what_comes() -> None:
    bench = Bench(engine_config(), num_blocks=40)
    bench.add(generation("r", range(9)))
    bench.send()
    bench.scheduler.abort("r")
    assert bench.scheduler.stats().used_blocks == 0
    assert bench.scheduler.stats().running_requests == 0
    assert bench.receive().updates == []
    bench.scheduler.check_integrity()


def test_id_of_a_request_aborted_in_flight_can_be_used_again() -> None:
    bench = Bench(engine_config(), num_blocks=40)
    bench.add(generation("r", range(9)))
    bench.send()
    bench.scheduler.abort("r")
    bench.add(generation("r", range(20, 29)))
    bench.receive()
    bench.run()
    assert bench.outputs["r"] == tokens_alone(range(20, 29), seed=0, count=4, vocab_size=VOCAB_SIZE)


def test_expired_waiting_request_is_never_computed() -> None:
    bench = Bench(engine_config(max_num_seqs=1), num_blocks=40)
    bench.add(generation("running", range(3), max_tokens=2))
    bench.add(generation("late", range(3), deadline_s=5.0))
    bench.add(generation("patient", range(3), max_tokens=1, deadline_s=50.0))
    bench.step()
    assert bench.scheduler.next_deadline_s() == 5.0
    assert [request.request_id for request in bench.scheduler.expire(5.0)] == ["late"]
    bench.run()
    assert bench.outputs["late"] == []
    assert len(bench.outputs["patient"]) == 1
    assert bench.scheduler.next_deadline_s() is None


def test_expired_running_request_ends_and_frees_its_blocks() -> None:
    bench = Bench(engine_config(), num_blocks=40)
    bench.add(generation("r", range(9), deadline_s=5.0))
    bench.step()
    assert [request.request_id for request in bench.scheduler.expire(6.0)] == ["r"]
    assert bench.scheduler.stats().used_blocks == 0


def test_deadlines_of_ended_requests_do_not_pile_up() -> None:
    scheduler = Scheduler(engine_config(), num_blocks=40)
    for index in range(1000):
        scheduler.add(generation(f"r{index}", range(3), deadline_s=1e9), now=0.0)
        scheduler.abort(f"r{index}")
    assert len(scheduler._deadlines) <= 65


def test_without_a_group_nothing_fits() -> None:
    scheduler = Scheduler(engine_config())
    assert scheduler.stats().num_blocks == 0
    with pytest.raises(InvalidRequest):
        scheduler.add(generation("r", range(3)), now=0.0)


@pytest.mark.parametrize(
    ("result", "problem"),
    [
        (ranks_pb2.StepResult(step_id=2, slots=[0], token_ids=[1]), "step 1 is in flight, the result is of step 2"),
        (ranks_pb2.StepResult(step_id=1, slots=[3], token_ids=[1]), r"slots \[0\] had to sample, slots \[3\] did"),
        (ranks_pb2.StepResult(step_id=1), r"slots \[0\] had to sample, slots \[\] did"),
        (ranks_pb2.StepResult(step_id=1, slots=[0], token_ids=[1, 2]), "1 slots sampled, 2 tokens came"),
        (ranks_pb2.StepResult(step_id=1, slots=[0], token_ids=[VOCAB_SIZE]), "token 64 is outside"),
    ],
)
def test_result_that_does_not_fit_the_plan_is_refused(result: ranks_pb2.StepResult, problem: str) -> None:
    bench = Bench(engine_config(), num_blocks=20)
    bench.add(generation("r", range(3)))
    step = bench.send()
    assert step is not None
    with pytest.raises(StepMismatch, match=problem):
        bench.scheduler.apply(step, result)
    assert bench.scheduler.stats().steps == 0


@pytest.mark.parametrize("steps", [1, 2])
def test_so_many_steps_are_in_flight_at_most(steps: int) -> None:
    bench = Bench(engine_config(max_steps_in_flight=steps), num_blocks=20)
    with pytest.raises(EngineFault, match="no step is in flight"):
        bench.in_flight.answer(ranks_pb2.StepResult(step_id=1))
    bench.add(generation("r", range(3)))
    sent = [bench.send() is not None for _ in range(3)]
    assert sent == [index < steps for index in range(3)]
    assert len(bench.in_flight) == steps
    bench.receive()
    assert bench.send() is not None


def test_prefix_caching_can_be_disabled() -> None:
    bench = Bench(engine_config(enable_prefix_caching=False), num_blocks=40)
    for name in ("first", "second"):
        request = bench.add(generation(name, range(12)))
        bench.run()
        assert request.num_cached_tokens == 0
    assert bench.scheduler.stats().cached_blocks == 0


def test_sequences_that_keep_states_begin_with_their_first_token() -> None:
    bench = Bench(engine_config(keeps_states=True), num_blocks=40)
    for name in ("first", "second"):
        request = bench.add(generation(name, range(12), n=2))
        step = bench.step()
        assert step is not None
        assert [(entry.completion.index, entry.num_tokens) for entry in entries(step)] == [(0, 12), (1, 12)]
        bench.run()
        assert request.num_cached_tokens == 0
    assert bench.scheduler.stats().cached_blocks == 0


def test_a_prefix_hit_of_states_rounds_down_to_a_snapshot() -> None:
    bench = Bench(engine_config(keeps_states=True), num_blocks=41, num_snapshots=10)
    bench.add(generation("first", range(30)))
    step = bench.step()
    assert step is not None
    # Every fourth block of the cache's 40, and the prompt's last full one.
    assert [taken.num_tokens for span in step.spans for taken in span.snapshots] == [16, 28]
    bench.run()
    cached = []
    for length in (15, 17, 20, 27, 29, 30):
        request = bench.add(generation(f"of {length}", range(length)))
        bench.run()
        assert bench.outputs[f"of {length}"] == tokens_alone(range(length), seed=0, count=4, vocab_size=VOCAB_SIZE)
        cached.append(request.num_cached_tokens)
    assert cached == [0, 16, 16, 16, 28, 28]


def test_completions_of_one_prompt_begin_with_a_snapshot() -> None:
    bench = Bench(engine_config(keeps_states=True, enable_prefix_caching=False), num_blocks=40, num_snapshots=1)
    bench.add(generation("r", range(10), n=3))
    first, second = bench.step(), bench.step()
    assert first is not None
    assert second is not None
    assert [(entry.completion.index, entry.num_tokens) for entry in entries(first)] == [(0, 10)]
    assert [(entry.completion.index, entry.num_tokens) for entry in entries(second)] == [(0, 1), (1, 2), (2, 2)]
    bench.run()
    for index, name in enumerate(("r", "r/1", "r/2")):
        seed = derived_seed(0, index)
        assert bench.outputs[name] == tokens_alone(range(10), seed=seed, count=4, vocab_size=VOCAB_SIZE)


def test_the_least_recently_used_snapshot_is_replaced_and_none_that_the_plan_reads() -> None:
    snapshots = StateSnapshots(count=2, num_blocks=10)
    assert [snapshots.take(digest) for digest in (b"a", b"b", b"a")] == [1, 0, None]
    assert snapshots.take(b"c") is None  # both are being taken
    snapshots.taken([b"a", b"b"])
    assert (snapshots.longest([b"a", b"x"]), snapshots.longest([b"a", b"b"]), snapshots.longest([b"x"])) == (1, 2, 0)
    assert snapshots.read(b"a") == 1
    assert snapshots.take(b"c") == 0
    assert snapshots.take(b"d") is None
    snapshots.begin_plan()
    assert snapshots.take(b"d") == 1
    with pytest.raises(EngineFault, match="without a snapshot"):
        snapshots.read(b"a")


def test_completions_that_keep_states_are_counted_with_their_whole_prompts() -> None:
    prompt = generation("r", range(12), max_tokens=4, n=2)
    Bench(engine_config(), num_blocks=8).add(prompt)
    with pytest.raises(InvalidRequest, match="share 0 of them and need 8"):
        Bench(engine_config(keeps_states=True), num_blocks=8).add(prompt)


def test_other_salt_does_not_hit() -> None:
    bench = Bench(engine_config(), num_blocks=40)
    cached = []
    for name, salt in (("first", "a"), ("other", "b"), ("same", "a")):
        request = bench.add(generation(name, range(12), salt=salt))
        bench.run()
        cached.append(request.num_cached_tokens)
    assert cached == [0, 0, 8]


def test_counts_are_of_prompt_cached_and_generated_tokens() -> None:
    bench = Bench(engine_config(block_size=4, max_num_batched_tokens=5), num_blocks=40)
    for name in ("first", "second"):
        bench.add(generation(name, range(10), max_tokens=3))
        bench.run()
    stats = bench.scheduler.stats()
    assert (stats.prompt_tokens, stats.cached_tokens, stats.generated_tokens) == (12, 8, 6)
    assert (stats.finished_requests, stats.preemptions, stats.steps) == (2, 0, 7)


def _calls_of_a_step(*, num_waiting: int) -> int:
    bench = Bench(engine_config(max_num_seqs=2, max_queued_requests=10_000), num_blocks=40)
    for index in range(num_waiting):
        bench.add(generation(f"r{index}", range(3), max_tokens=9))
    bench.step()
    calls = 0

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        bench.schedule()
    finally:
        sys.setprofile(None)
    return calls


def test_step_costs_the_same_however_many_requests_wait() -> None:
    assert _calls_of_a_step(num_waiting=3) == _calls_of_a_step(num_waiting=3000)
