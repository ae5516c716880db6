"""How many steps go out ahead: as many as take little time together, and only such as do nothing but decode."""

from __future__ import annotations

import pytest

from hetero_api.v1 import ranks_pb2
from hetero_gateway.engine.step_pace import MOST_STEPS_OUT, Lookahead
from tests.unit.engine.core_setup import VOCAB_SIZE as CORE_VOCAB_SIZE
from tests.unit.engine.core_setup import alone, engine, read, turn_loop, until
from tests.unit.engine.engine_setup import Bench, engine_config, generation

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("step_s", "steps"), [(0.1, 2), (0.02, 2), (0.011, 2), (0.01, 3), (0.007, 3), (0.004, 6), (0.0001, MOST_STEPS_OUT)]
)
def test_as_many_as_take_so_long_together_and_the_one_that_ranks_are_at(step_s: float, steps: int) -> None:
    lookahead = Lookahead(0.02)
    for _ in range(50):
        lookahead.add_step(step_s)
    assert lookahead.steps_out() == steps


def test_two_before_anything_is_known_and_where_it_is_turned_off() -> None:
    assert Lookahead(0.02).steps_out() == 2
    off = Lookahead(0.0)
    off.add_step(0.001)
    assert off.steps_out() == 2


def test_it_follows_a_change() -> None:
    lookahead = Lookahead(0.02)
    lookahead.add_step(0.002)
    assert lookahead.steps_out() == MOST_STEPS_OUT
    for _ in range(100):
        lookahead.add_step(0.05)
    assert lookahead.steps_out() == 2
    for _ in range(100):
        lookahead.add_step(0.0039)
    assert lookahead.steps_out() == 6


@pytest.mark.parametrize(("most", "expected"), [(1, 1), (2, 5)])
def test_steps_that_decode_go_out_ahead(most: int, expected: int) -> None:
    bench = Bench(engine_config(max_steps_in_flight=most), num_blocks=40, steps_out=5)
    bench.add(generation("a", [1, 2, 3], max_tokens=30))
    bench.step()
    while bench.send() is not None:
        pass
    assert len(bench.in_flight) == expected
    bench.run()
    assert len(bench.outputs["a"]) == 30


def test_nothing_but_the_next_step_goes_out_behind_a_prefill() -> None:
    bench = Bench(engine_config(max_steps_in_flight=2), num_blocks=40, steps_out=8)
    bench.add(generation("a", [1, 2, 3], max_tokens=30))
    while bench.send() is not None:
        pass
    assert len(bench.in_flight) == 2
    bench.receive()
    while bench.send() is not None:
        pass
    assert len(bench.in_flight) == 8
    bench.add(generation("b", [4, 5, 6], max_tokens=30))
    bench.receive()
    assert bench.send() is not None
    assert bench.send() is None
    bench.run()
    assert [len(bench.outputs[name]) for name in "ab"] == [30, 30]


@pytest.mark.parametrize("steps_out", [None, 3, 10])
def test_what_is_told_does_not_depend_on_it(steps_out: int | None) -> None:
    bench = Bench(engine_config(max_num_seqs=3), num_blocks=12, steps_out=steps_out)
    for number in range(8):
        bench.add(generation(str(number), range(1, 3 + number), max_tokens=4 + number, n=1 + number % 2))
    bench.run()
    alone = Bench(engine_config(max_steps_in_flight=1, max_num_seqs=3), num_blocks=12)
    for number in range(8):
        alone.add(generation(str(number), range(1, 3 + number), max_tokens=4 + number, n=1 + number % 2))
    alone.run()
    assert bench.outputs == alone.outputs


async def test_a_core_looks_ahead_once_it_knows_how_long_steps_take() -> None:
    def took(result: ranks_pb2.StepResult) -> None:
        result.step_s = 0.004

    async with engine(engine_config(vocab_size=CORE_VOCAB_SIZE, lookahead_s=0.02)) as it:
        it.ranks.spoil = took
        it.ranks.hold()
        asked = generation("r", range(3), max_tokens=40)
        stream = it.core.submit(asked)
        await until(lambda: it.ranks.num_out == 2)
        for _ in range(3):
            it.ranks.do_one()
            await turn_loop()
        assert it.ranks.num_out == 6
        it.ranks.let_go()
        assert (await read(stream)).token_ids == alone(asked, 40)
