"""Ratios of two checkouts' figures: pairs, intervals, and what only one of them measured."""

from __future__ import annotations

import math

import pytest

from bench.against import Pairs, ratios_of, table

pytestmark = pytest.mark.unit

DECODE = ("hetero int8", "decode1, tok/s")


def pairs_of(*values: tuple[float, float]) -> Pairs:
    return {DECODE: list(values)}


def test_a_ratio_is_the_mean_of_the_pairs_whatever_both_drift_by() -> None:
    (ratio,) = ratios_of(pairs_of((100, 110), (200, 220), (50, 55)))
    assert ratio.ratio == pytest.approx(1.1)
    assert [ratio.low, ratio.high] == pytest.approx([1.1, 1.1])
    assert (ratio.other, ratio.this, ratio.pairs) == (100, 110, 3)


def test_the_interval_is_students() -> None:
    (ratio,) = ratios_of(pairs_of((1, math.exp(0.1)), (1, math.exp(0.3))))
    half = 12.706 * 0.1  # deviation sqrt(0.02) over sqrt(2)
    assert math.log(ratio.low) == pytest.approx(0.2 - half, rel=1e-3)
    assert math.log(ratio.high) == pytest.approx(0.2 + half, rel=1e-3)


def test_one_pair_has_no_interval() -> None:
    (ratio,) = ratios_of(pairs_of((2, 1)))
    assert (ratio.ratio, ratio.low, ratio.high) == (0.5, 0, math.inf)


def test_each_entrant_and_quantity_has_a_ratio() -> None:
    start = ("hetero int4", "start, s")
    ratios = ratios_of({DECODE: [(1, 2)], start: [(4, 2)]})
    assert [(each.entrant, each.quantity, each.ratio) for each in ratios] == [(*start, 0.5), (*DECODE, 2.0)]


def test_the_table_has_a_line_for_each_ratio() -> None:
    assert table(ratios_of(pairs_of((1, 2), (2, 4)))).splitlines()[2:] == [
        "| hetero int8 | decode1, tok/s | 1.5 | 3 | 2.000 | 2.000 to 2.000 |"
    ]
