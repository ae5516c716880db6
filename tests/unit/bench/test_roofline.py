"""The least time of steps: the formula by hand, and what a scheduler's steps are counted as."""

from __future__ import annotations

import pytest

from bench.gpu.recipes import Recipe, decoding, throughput
from bench.gpu.roofline import Rates, Roofline, StepWork, works_of
from bench.gpu.shapes import QWEN3_06B, QWEN3_8B, QWEN3_32B, TINY
from hetero_api.v1 import ranks_pb2
from hetero_gateway.engine.config import EngineConfig
from hetero_gateway.engine.scheduler import Scheduler
from hetero_gateway.engine.step import ScheduledStep
from hetero_gateway.engine.steps_in_flight import StepsInFlight

pytestmark = pytest.mark.unit

HEAD = 512 * 64
LAYER = 64 * 16 * (2 * 2 + 2) * 2 + 3 * 64 * 256 + 2 * 64 + 2 * 16
BODY = 2 * LAYER + 64


def roofline(*, bandwidth: float = 1.0, flops: float = float("inf"), size: int = 2) -> Roofline:
    return Roofline(TINY, size, Rates(bandwidth, flops))


def test_a_decode_step_reads_all_weights_and_the_keys_and_values_of_its_sequences() -> None:
    work = StepWork(rows=3, draws=3, tokens=100, pairs=100)
    kept = 2 * 2 * 2 * 16 * 100
    assert roofline().read_bytes(work) == 2 * (BODY + HEAD + kept)
    assert roofline().step_s(work) == 2 * (BODY + HEAD + kept)
    assert roofline(size=4, bandwidth=8.0).step_s(work) == 4 * (BODY + HEAD + kept) / 8


def test_a_step_that_draws_nothing_reads_no_output_head() -> None:
    assert roofline().read_bytes(StepWork(10, 0, 0, 0)) == 2 * BODY


def test_a_step_of_many_rows_takes_as_long_as_its_arithmetic() -> None:
    work = StepWork(rows=1000, draws=1, tokens=1000, pairs=500_500)
    flops = 2 * BODY * 1000 + 2 * HEAD + 4 * 2 * 4 * 16 * 500_500
    assert roofline().flops(work) == flops
    assert roofline(bandwidth=float("inf"), flops=10.0).step_s(work) == flops / 10


@pytest.mark.parametrize(("config", "billions"), [(QWEN3_06B, 0.596), (QWEN3_8B, 8.19), (QWEN3_32B, 32.76)])
def test_shapes_are_as_large_as_the_models(config: object, billions: float) -> None:
    assert config.num_parameters / 1e9 == pytest.approx(billions, rel=0.002)  # type: ignore[attr-defined]


def play(recipe: Recipe, *, chunk: int) -> list[ScheduledStep]:
    """The steps of a recipe, results made up."""
    config = EngineConfig(
        max_num_seqs=4, max_num_batched_tokens=chunk, block_size=16, max_model_len=200, max_queued_requests=99,
        enable_prefix_caching=False, eos_token_ids=frozenset(), vocab_size=TINY.vocab_size,
    )  # fmt: skip
    scheduler, in_flight, steps = Scheduler(config, num_blocks=200), StepsInFlight(), list[ScheduledStep]()
    for request in recipe.requests:
        scheduler.add(request, now=0.0)
    while in_flight or not scheduler.is_idle:
        while (step := scheduler.schedule(0.0, in_flight=in_flight)) is not None:
            in_flight.submit(step)
            steps.append(step)
        assert in_flight.oldest is not None
        oldest = in_flight.oldest.step
        slots = [*oldest.decodes.slots, *(span.slot for span in oldest.spans if span.sample)]
        result = ranks_pb2.StepResult(step_id=oldest.plan.step_id, slots=slots, token_ids=[5] * len(slots))
        in_flight.answer(result)
        in_flight.take()
        scheduler.apply(oldest, result)
    return steps


def test_steps_are_counted_whole_whatever_the_chunks_and_the_overlap() -> None:
    recipe = decoding(TINY.vocab_size, sequences=3, prompt=30, output=5)
    for chunk in (7, 16, 200):
        works = list(works_of(play(recipe, chunk=chunk)))
        assert sum(work.rows for work in works) == 3 * 34
        assert sum(work.draws for work in works) == 3 * 5
        assert sum(work.pairs for work in works) == 3 * (34 * 35 // 2)


def test_a_decode_row_attends_to_all_tokens_so_far() -> None:
    works = list(works_of(play(decoding(TINY.vocab_size, sequences=1, prompt=10, output=4), chunk=64)))
    assert [(work.rows, work.tokens) for work in works if work.rows] == [(10, 10), (1, 11), (1, 12), (1, 13)]


def test_the_recipe_is_nano_vllms() -> None:
    recipe = throughput(QWEN3_06B.vocab_size)
    assert len(recipe.requests) == 256
    assert {round(request.sampling.temperature, 6) for request in recipe.requests} == {0.6}
    lengths = [len(request.prompt_token_ids) for request in recipe.requests]
    assert min(lengths) >= 100
    assert max(lengths) <= 1024
    assert recipe.output_tokens == 133_966
    assert throughput(QWEN3_06B.vocab_size) == recipe
