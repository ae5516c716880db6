"""What steps take that only decode, by their size."""

from __future__ import annotations

import pytest

from hetero_gateway.engine.step_pace import DecodePace, DecodeSize

pytestmark = pytest.mark.unit


def test_steps_of_one_size_are_taken_together() -> None:
    pace = DecodePace(memory_s=1e9)
    for seconds, tokens in ((0.1, 2 * 64), (0.3, 2 * 127)):
        pace.add_step(seconds, rows=2, tokens=tokens)
    pace.add_step(0.5, rows=2, tokens=2 * 128)
    pace.add_step(0.7, rows=1, tokens=64)
    found = {paced.size: paced for paced in pace.sizes()}
    assert {size: round(paced.seconds, 6) for size, paced in found.items()} == {
        DecodeSize(2, 96): 0.2, DecodeSize(2, 160): 0.5, DecodeSize(1, 96): 0.7,
    }  # fmt: skip
    assert found[DecodeSize(2, 96)].weight == pytest.approx(2 * found[DecodeSize(1, 96)].weight)


def test_older_steps_count_less() -> None:
    pace = DecodePace(memory_s=1.0)
    for seconds in [0.1] * 100 + [0.2] * 100:
        pace.add_step(seconds, rows=1, tokens=10)
    [paced] = pace.sizes()
    assert paced.seconds == pytest.approx(0.2, rel=1e-3)


def test_a_long_life_neither_overflows_nor_forgets_what_is_new() -> None:
    pace = DecodePace(memory_s=0.1)
    for step in range(5000):
        pace.add_step(0.1, rows=1 + step // 4000, tokens=100)
    found = {paced.size.rows: paced for paced in pace.sizes()}
    assert found[2].seconds == pytest.approx(0.1)
    assert 0 < found[2].weight < 10
    assert 1 not in found, "what counts for nothing is let go"
