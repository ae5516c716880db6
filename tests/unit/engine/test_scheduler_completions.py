"""Several completions of a prompt, tokens that the client has already, and log-probabilities."""

from __future__ import annotations

import pytest

from hetero_gateway.engine.errors import InvalidRequest
from hetero_gateway.engine.request import Constraint, ConstraintKind, FinishReason, GenerationRequest, derived_seed
from hetero_gateway.engine.scheduler import Scheduler
from tests.unit.engine.engine_setup import VOCAB_SIZE, Bench, engine_config, entries, generation, has_requests
from tests.unit.engine.fake_ranks import logprobs_alone, tokens_alone

pytestmark = pytest.mark.unit

BLOCK = 4
PROMPT = range(10)


def alone(index: int, count: int, prompt: range = PROMPT) -> list[int]:
    return tokens_alone(prompt, seed=derived_seed(0, index), count=count, vocab_size=VOCAB_SIZE)


def test_derived_seeds_differ_and_the_first_is_the_requests() -> None:
    seeds = [derived_seed(7, index) for index in range(16)]
    assert seeds[0] == 7
    assert len(set(seeds)) == 16
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert derived_seed(2**64 - 1, 3) == derived_seed(2**64 - 1, 3) != derived_seed(7, 3)


@pytest.mark.parametrize("caching", [True, False])
def test_completions_share_the_full_blocks_of_the_prompt(caching: bool) -> None:
    bench = Bench(engine_config(block_size=BLOCK, enable_prefix_caching=caching), num_blocks=40)
    request = bench.add(generation("r", PROMPT, max_tokens=5, n=3))
    first, second = bench.step(), bench.step()
    assert first is not None
    assert [entry.completion.index for entry in entries(first)] == [0]
    assert second is not None
    # The first decodes; the others compute what is behind the shared blocks.
    assert [(entry.completion.index, entry.num_tokens) for entry in entries(second)] == [(0, 1), (1, 2), (2, 2)]
    tables = [completion.block_ids for completion in request.completions]
    assert tables[0][:2] == tables[1][:2] == tables[2][:2]
    assert len({table[2] for table in tables}) == 3
    bench.run()
    assert [bench.outputs[name] for name in ("r", "r/1", "r/2")] == [alone(index, 5) for index in range(3)]
    assert request.num_cached_tokens == 0
    assert bench.scheduler.stats().finished_requests == 1


def test_completions_wait_for_a_prompt_that_is_computed_in_chunks() -> None:
    bench = Bench(engine_config(block_size=BLOCK, max_num_batched_tokens=4), num_blocks=40)
    bench.add(generation("r", PROMPT, max_tokens=2, n=2))
    taken = []
    while (step := bench.step()) is not None:
        taken.append([(entry.completion.index, entry.num_tokens) for entry in entries(step)])
    # With its second block the prompt's full ones are there.
    assert taken == [[(0, 4)], [(0, 4)], [(0, 2), (1, 2)], [(0, 1), (1, 1)]]
    assert bench.outputs["r/1"] == alone(1, 2)


def test_contiguous_cache_shares_nothing_and_lets_nobody_wait() -> None:
    bench = Bench(engine_config(block_size=64, max_model_len=64), num_blocks=5)
    bench.add(generation("r", PROMPT, max_tokens=3, n=2))
    step = bench.step()
    assert step is not None
    assert [(entry.completion.index, entry.num_tokens) for entry in entries(step)] == [(0, 10), (1, 10)]
    bench.run()
    assert [bench.outputs[name] for name in ("r", "r/1")] == [alone(0, 3), alone(1, 3)]


def test_more_completions_than_slots_run_one_after_another() -> None:
    bench = Bench(engine_config(block_size=BLOCK, max_num_seqs=1), num_blocks=6)
    bench.add(generation("r", PROMPT, max_tokens=3, n=4))
    bench.run()
    assert [bench.outputs[name] for name in ("r", "r/1", "r/2", "r/3")] == [alone(index, 3) for index in range(4)]


def test_finishing_one_completion_leaves_the_others() -> None:
    bench = Bench(engine_config(block_size=BLOCK), num_blocks=40)
    request = bench.add(generation("r", PROMPT, max_tokens=5, n=2))
    bench.step()
    bench.scheduler.finish(request.completions[0])
    assert has_requests(bench.scheduler)
    bench.run()
    assert bench.outputs["r/1"] == alone(1, 5)
    assert request.completions[0].reason is None
    assert request.completions[1].reason is FinishReason.LENGTH


def test_completion_that_ends_before_its_prompt_is_computed_leaves_its_place_to_the_next() -> None:
    bench = Bench(engine_config(block_size=BLOCK, max_num_batched_tokens=4), num_blocks=40)
    request = bench.add(generation("r", PROMPT, max_tokens=2, n=3))
    bench.step()
    bench.scheduler.finish(request.completions[0])
    bench.run()
    assert [bench.outputs[name] for name in ("r/1", "r/2")] == [alone(1, 2), alone(2, 2)]


def test_memory_is_counted_for_all_completions_with_the_arithmetic() -> None:
    scheduler = Scheduler(engine_config(block_size=BLOCK), num_blocks=9)
    with pytest.raises(
        InvalidRequest,
        match=r"sampling.max_tokens: 10 prompt tokens and max_tokens 10 need the KV of 19 positions = 5 blocks of 4; "
        r"3 completions share 2 of them and need 11; the KV cache has 8",
    ):
        scheduler.add(generation("r", PROMPT, max_tokens=10, n=3), now=0.0)
    scheduler.add(generation("r", PROMPT, max_tokens=10, n=2), now=0.0)


def test_open_max_tokens_is_what_fits_all_completions() -> None:
    bench = Bench(engine_config(block_size=BLOCK), num_blocks=9)
    # 8 blocks, 2 of them shared: 3 more for each, hence 20 positions and the last token beyond them.
    request = bench.add(generation("r", PROMPT, max_tokens=None, n=2))
    assert request.max_tokens == 20 - 10 + 1
    bench.run()
    assert bench.scheduler.stats().preemptions == 0
    assert bench.outputs["r/1"] == alone(1, 11)


# --- received tokens ------------------------------------------------------------------------------------


def test_received_tokens_are_known_and_not_told_again() -> None:
    whole = [alone(0, 6), alone(1, 6)]
    bench = Bench(engine_config(block_size=BLOCK), num_blocks=40)
    received = (tuple(whole[0][:4]), ())
    request = bench.add(generation("r", PROMPT, max_tokens=6, n=2, received=received))
    bench.run()
    assert (bench.outputs["r"], bench.outputs["r/1"]) == (whole[0][4:], whole[1])
    assert [completion.output_token_ids for completion in request.completions] == whole


def test_received_tokens_that_are_complete_have_ended() -> None:
    bench = Bench(engine_config(), num_blocks=40)
    received = ((1, 2, 3, 4, 5, 6), (7, 8, 9))
    asked = generation("r", PROMPT, max_tokens=6, n=2, stop_token_ids=frozenset({9}), received=received)
    request = bench.add(asked)
    first, second = request.completions
    assert (first.reason, first.stop_token_id) == (FinishReason.LENGTH, None)
    assert (second.reason, second.stop_token_id) == (FinishReason.STOP, 9)
    assert request.ended
    assert not has_requests(bench.scheduler)
    assert bench.is_idle


@pytest.mark.parametrize(
    ("asked", "problem"),
    [
        (generation("r", PROMPT, received=((1,), (2,))), "received: is of 2 completions; sampling.n asks for 1"),
        (generation("r", PROMPT, max_tokens=2, received=((1, 2, 3),)), r"received\[0\].token_ids: has 3 tokens; .* 2"),
        (generation("r", PROMPT, received=((1, 64),)), r"received\[0\].token_ids: token id 64 is outside"),
        (
            generation("r", PROMPT, n=2, received=((), (5, 6)), stop_token_ids=frozenset({5})),
            r"received\[1\].token_ids: goes on behind a token that ends",
        ),
        (generation("r", PROMPT, n=0), "sampling.n: must be at least 1"),
    ],
)
def test_received_tokens_that_cannot_be_are_rejected(asked: GenerationRequest, problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        Scheduler(engine_config(), num_blocks=40).add(asked, now=0.0)


# --- log-probabilities ----------------------------------------------------------------------------------


def test_logprobs_come_with_the_tokens_of_those_who_ask() -> None:
    bench = Bench(engine_config(), num_blocks=40)
    asks = bench.add(generation("asks", PROMPT, max_tokens=3, logprobs=2))
    bench.add(generation("does not", range(20, 24), max_tokens=3))
    bench.run()
    expected = logprobs_alone(asks.completions[0].token_ids, begin=10)
    assert [update.logprobs for update in bench.updates["asks"]] == expected
    assert [update.logprobs for update in bench.updates["does not"]] == [None] * 3


@pytest.mark.parametrize("budget", [3, 4, 64])
def test_prompt_logprobs_are_complete_although_the_prompt_is_cached(budget: int) -> None:
    bench = Bench(engine_config(block_size=BLOCK, max_num_batched_tokens=budget), num_blocks=40)
    bench.add(generation("first", PROMPT))
    bench.run()
    request = bench.add(generation("second", PROMPT, n=2, prompt_logprobs=1))
    bench.run()
    assert request.num_cached_tokens == 0
    assert bench.prompt_logprobs == {"second": logprobs_alone(PROMPT, begin=1)}
    assert bench.outputs["second/1"] == alone(1, 4)


def test_prompt_logprobs_of_a_prompt_of_one_token_are_none() -> None:
    bench = Bench(engine_config(), num_blocks=40)
    bench.add(generation("r", range(1), prompt_logprobs=1))
    bench.run()
    assert bench.prompt_logprobs == {"r": []}


def test_prompt_logprobs_begin_again_with_a_new_group_and_are_told_once() -> None:
    bench = Bench(engine_config(block_size=BLOCK, max_num_batched_tokens=4), num_blocks=40)
    bench.add(generation("r", PROMPT, prompt_logprobs=1))
    bench.step()
    bench.lose_group()
    bench.open_group()
    bench.step()
    bench.step()
    bench.step()
    assert bench.prompt_logprobs == {"r": logprobs_alone(PROMPT, begin=1)}
    bench.lose_group()
    bench.open_group()
    bench.run()
    assert bench.outputs["r"] == alone(0, 4)


def test_client_that_has_tokens_has_the_prompt_logprobs_too() -> None:
    bench = Bench(engine_config(), num_blocks=40)
    bench.add(generation("r", PROMPT, prompt_logprobs=1, received=(tuple(alone(0, 1)),)))
    bench.run()
    assert bench.prompt_logprobs == {}


def test_how_tokens_are_chosen_travels_with_the_sequence() -> None:
    bench = Bench(engine_config(eos_token_ids=frozenset({9, 3})), num_blocks=40)
    form = Constraint(ConstraintKind.CHOICE, "", ("yes", "no"))
    bench.add(generation("r", range(3), min_tokens=2, logprobs=0, prompt_logprobs=5, constraint=form))
    step = bench.schedule()
    assert step is not None
    sampling = step.plan.new_sequences[0].sampling
    assert (sampling.min_tokens, list(sampling.end_token_ids)) == (2, [3, 9])
    assert (sampling.HasField("num_logprobs"), sampling.num_logprobs, sampling.num_prompt_logprobs) == (True, 0, 5)
    assert (sampling.repetition_penalty, step.plan.new_sequences[0].num_prompt_tokens) == (1.0, 3)
