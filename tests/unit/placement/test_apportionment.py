"""Whole units by weight."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_placement.shard_plans import largest_remainder, level_up

pytestmark = pytest.mark.unit

WEIGHTS = st.lists(st.one_of(st.just(0.0), st.floats(1e-6, 1e6)), min_size=1, max_size=16).filter(any)


@given(units=st.integers(0, 5000), weights=WEIGHTS)
def test_counts_add_up_and_stay_within_one_of_the_quota(units: int, weights: list[float]) -> None:
    counts = largest_remainder(units, weights)
    total = sum(map(Fraction, weights))
    assert sum(counts) == units
    for count, weight in zip(counts, weights, strict=True):
        assert abs(count - units * Fraction(weight) / total) < 1
        assert weight or count == 0


@given(units=st.integers(0, 5000), weights=WEIGHTS)
def test_no_rank_below_has_a_larger_remainder_than_one_that_was_rounded_up(units: int, weights: list[float]) -> None:
    counts = largest_remainder(units, weights)
    total = sum(map(Fraction, weights))
    gains = [count - units * Fraction(weight) / total for count, weight in zip(counts, weights, strict=True)]
    rounded_up = [gain for gain in gains if gain > 0]
    rounded_down = [gain for gain in gains if gain < 0]
    # A remainder is 1 - gain where rounded up, and -gain where rounded down.
    assert not rounded_up or not rounded_down or 1 - max(rounded_up) >= -min(rounded_down)


@pytest.mark.parametrize(
    ("units", "weights", "expected"),
    [
        (3, [1, 1], [2, 1]),
        (8, [5, 2, 1, 0], [5, 2, 1, 0]),
        (3, [2, 1], [2, 1]),
        (2, [1, 1, 1], [1, 1, 0]),
        (5, [0, 1, 0], [0, 5, 0]),
        (10, [0.1, 0.2, 0.7], [1, 2, 7]),
        (0, [1, 2], [0, 0]),
    ],
)
def test_known_deals_ties_to_the_lower_rank(units: int, weights: list[float], expected: list[int]) -> None:
    assert largest_remainder(units, weights) == expected


@given(
    amount=st.integers(1, 10**6),
    ranks=st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 100)), min_size=1, max_size=10),
)
def test_leveling_gives_everything_and_leaves_nobody_below_the_level(amount: int, ranks: list[tuple[int, int]]) -> None:
    owned, weights = [r[0] for r in ranks], [r[1] for r in ranks]
    parts = level_up(amount, owned=owned, weights=weights)
    assert sum(parts) == amount
    assert min(parts) >= 0
    ratios = [(part + own) / weight for part, own, weight in zip(parts, owned, weights, strict=True)]
    level = min(ratios)
    for part, ratio in zip(parts, ratios, strict=True):
        assert ratio == level if part else ratio >= level
