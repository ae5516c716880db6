"""What steps take that only decode, by their size."""

from __future__ import annotations

import pytest

from hetero_gateway.engine.step_pace import MOST_SIZES, DecodePace, DecodeSize

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


def test_only_the_heaviest_sizes_are_told() -> None:
    pace = DecodePace(memory_s=1e9)
    for rows in range(1, 1001):
        for _ in range(1 + (rows > 1000 - MOST_SIZES)):
            pace.add_step(0.1, rows=rows, tokens=100 * rows)
    assert {paced.size.rows for paced in pace.sizes()} == set(range(1001 - MOST_SIZES, 1001))


def test_sizes_of_minutes_ago_are_let_go() -> None:
    pace = DecodePace()
    for step in range(20_000):
        pace.add_step(0.03, rows=1 + step // 10, tokens=100)
    assert len(pace._sums) < 1000, "of 2000 in ten minutes"
