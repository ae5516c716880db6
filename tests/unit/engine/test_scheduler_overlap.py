"""Steps in flight: what is scheduled before the last result came, and what becomes of it."""

from __future__ import annotations

import pytest

from hetero_api.v1 import ranks_pb2
from hetero_gateway.engine.errors import StepMismatch
from hetero_gateway.engine.request import Constraint, ConstraintKind, FinishReason
from tests.unit.engine.engine_setup import VOCAB_SIZE, Bench, engine_config, entries, generation, has_requests, name_of
from tests.unit.engine.fake_ranks import logprobs_alone, tokens_alone

pytestmark = pytest.mark.unit

ANY_TEXT = Constraint(ConstraintKind.REGEX, ".*")


def alone(prompt: range, count: int) -> list[int]:
    return tokens_alone(prompt, seed=0, count=count, vocab_size=VOCAB_SIZE)


def test_decode_goes_out_before_the_token_that_it_computes_is_known() -> None:
    bench = Bench(engine_config(), num_blocks=40)
    request = bench.add(generation("r", range(3), max_tokens=5))
    bench.send()
    step = bench.send()
    assert step is not None
    assert list(step.plan.decode_slots) == [0]
    assert request.completions[0].num_tokens == 3
    bench.run()
    assert bench.outputs["r"] == alone(range(3), 5)


def test_chunks_of_one_prompt_go_out_one_behind_the_other() -> None:
    bench = Bench(engine_config(max_num_batched_tokens=8), num_blocks=40)
    bench.add(generation("long", range(20), max_tokens=1))
    steps = [bench.send(), bench.send()]
    assert [[entry.num_tokens for entry in entries(step)] for step in steps if step] == [[8], [8]]


@pytest.mark.parametrize("steps", [1, 2])
def test_no_draw_is_scheduled_past_max_tokens(steps: int) -> None:
    bench = Bench(engine_config(max_steps_in_flight=steps), num_blocks=40)
    bench.add(generation("r", range(3), max_tokens=4))
    bench.run()
    assert bench.outputs["r"] == alone(range(3), 4)
    assert bench.scheduler.stats().steps == 4


def test_no_draw_is_scheduled_past_the_models_length() -> None:
    bench = Bench(engine_config(max_model_len=10), num_blocks=40)
    bench.add(generation("r", range(7), max_tokens=None))
    bench.run()
    assert (len(bench.outputs["r"]), bench.scheduler.stats().steps) == (3, 3)


def test_sample_behind_a_stop_token_is_dropped() -> None:
    tokens = alone(range(3), 3)
    bench = Bench(engine_config(), num_blocks=40)
    request = bench.add(generation("r", range(3), max_tokens=9, stop_token_ids=frozenset({tokens[1]})))
    bench.run()
    assert bench.outputs["r"] == tokens[:2]
    assert request.completions[0].output_token_ids == tokens[:2]
    assert request.completions[0].reason is FinishReason.STOP
    # One step too many was out.
    assert bench.scheduler.stats().steps == 3


def test_sample_behind_finish_is_dropped() -> None:
    bench = Bench(engine_config(), num_blocks=40)
    request = bench.add(generation("r", range(3), max_tokens=9))
    bench.send()
    bench.send()
    bench.receive()
    bench.scheduler.finish(request.completions[0])
    assert bench.receive().updates == []
    assert len(bench.outputs["r"]) == 1
    assert request.ended
    assert not has_requests(bench.scheduler)


def test_blocks_of_an_ended_completion_serve_the_next_plan_while_its_step_is_out() -> None:
    bench = Bench(engine_config(max_num_seqs=1), num_blocks=4)
    first = bench.add(generation("first", range(6), max_tokens=6))
    bench.add(generation("second", range(30, 39), max_tokens=2))
    bench.send()
    bench.send()
    bench.receive()
    bench.scheduler.finish(first.completions[0])
    step = bench.send()
    assert step is not None
    assert list(step.plan.released_slots) == [0]
    assert [new.slot for new in step.plan.new_sequences] == [0]
    bench.run()
    assert bench.outputs["second"] == alone(range(30, 39), 2)


def test_preempted_completion_gets_the_tokens_that_were_out_and_returns_after_them() -> None:
    bench = Bench(engine_config(block_size=4, max_num_seqs=2), num_blocks=5)
    bench.add(generation("early", range(7), max_tokens=6))
    late = bench.add(generation("late", range(20, 27), max_tokens=6))
    returned_with: list[int] = []
    while has_requests(bench.scheduler):
        preemptions = bench.scheduler.stats().preemptions
        step = bench.send()
        if bench.scheduler.stats().preemptions > preemptions:
            assert bench.in_flight.oldest is not None
            assert bench.in_flight.oldest.step is not step
            assert late.completions[0].slot < 0
        if step is not None:
            returned_with += [len(new.token_ids) for new in step.plan.new_sequences if len(new.token_ids) > 7]
        if len(bench.in_flight) == 2 or step is None:
            bench.receive()
    assert bench.scheduler.stats().preemptions > 0
    assert returned_with
    assert bench.outputs["late"] == alone(range(20, 27), 6)


def test_prompt_logprobs_that_were_out_when_their_request_was_preempted_are_told() -> None:
    bench = Bench(engine_config(block_size=4, max_num_seqs=2), num_blocks=6)
    bench.add(generation("early", range(8), max_tokens=9))
    for _ in range(4):
        bench.step()
    # Takes the last two blocks, one of which the next step needs.
    late = bench.add(generation("late", range(20, 28), max_tokens=1, prompt_logprobs=1))
    steps = [bench.send(), bench.send()]
    assert all(steps)
    assert late.completions[0].slot < 0
    bench.receive()
    assert bench.outputs["late"] == alone(range(20, 28), 1)
    assert bench.prompt_logprobs["late"] == logprobs_alone(range(20, 28), begin=1)
    assert late.ended


def test_every_draw_of_a_constrained_completion_is_masked() -> None:
    bench = Bench(engine_config(max_num_batched_tokens=5), num_blocks=40)
    bench.add(generation("free", range(4), max_tokens=6))
    bench.add(generation("bound", range(20, 27), max_tokens=3, constraint=ANY_TEXT))
    masked = []
    while (step := bench.step()) is not None:
        drawn = [entry for entry in entries(step) if entry.sample and name_of(entry.completion) == "bound"]
        assert [name_of(completion) for completion in step.masked] == ["bound"] * len(drawn)
        assert list(step.plan.masked_slots) == [entry.slot for entry in drawn]
        masked += drawn
    assert len(masked) == 3


def test_step_that_computes_nothing_tells_ranks_what_ended() -> None:
    bench = Bench(engine_config(), num_blocks=40)
    bench.add(generation("r", range(3), max_tokens=1))
    bench.send()
    bench.receive()
    assert not has_requests(bench.scheduler)
    assert not bench.is_idle
    step = bench.send()
    assert step is not None
    assert (list(step.plan.released_slots), step.computes, entries(step)) == ([0], False, [])
    assert bench.receive().updates == []
    assert bench.is_idle
    assert bench.scheduler.stats().steps == 1
    assert bench.send() is None


def test_refused_result_appends_no_token() -> None:
    bench = Bench(engine_config(), num_blocks=20)
    request = bench.add(generation("r", range(3), logprobs=1, prompt_logprobs=1))
    step = bench.send()
    assert step is not None
    for wrong in (
        ranks_pb2.StepResult(step_id=1, slots=[0], token_ids=[1]),
        ranks_pb2.StepResult(
            step_id=1, slots=[0], token_ids=[1], prompt_logprobs=[ranks_pb2.PromptSpanLogprobs(slot=3, begin=1)]
        ),
    ):
        with pytest.raises(StepMismatch, match="log-prob"):
            bench.scheduler.apply(step, wrong)
    assert request.completions[0].num_tokens == 3
    # The group is lost over it; nothing is missing then.
    bench.lose_group()
    bench.open_group()
    bench.run()
    assert bench.outputs["r"] == alone(range(3), 4)
    assert len(bench.prompt_logprobs["r"]) == 2
