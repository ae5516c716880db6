"""Ratios of two checkouts' figures: pairs, intervals, and what only one of them measured."""

from __future__ import annotations

import math

import pytest

from bench.against import Figures, figures_of, ratios_of, table

pytestmark = pytest.mark.unit

DECODE = ("hetero int8", "decode1, tok/s")


def pairs_of(*values: tuple[float, float]) -> list[tuple[Figures, Figures]]:
    return [({DECODE: other}, {DECODE: this}) for other, this in values]


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


def test_entrants_of_one_checkout_alone_have_no_ratio() -> None:
    new = ("hetero bf16", "decode1, tok/s")
    assert [each.entrant for each in ratios_of([({DECODE: 1.0}, {DECODE: 1.0, new: 2.0})])] == ["hetero int8"]


def test_figures_of_a_result_are_rates_seconds_and_bytes() -> None:
    row = {"figures": {"decode1": {"tokens_per_s": 5.0}}, "first_start_s": 4.0, "start_s": 3.0, "peak_bytes": 7}
    assert figures_of({"rows": {"a": row}}) == {
        ("a", "decode1, tok/s"): 5.0,
        ("a", "first start, s"): 4.0,
        ("a", "start, s"): 3.0,
        ("a", "peak memory, bytes"): 7,
    }


def test_the_table_has_a_line_for_each_ratio() -> None:
    assert table(ratios_of(pairs_of((1, 2), (2, 4)))).splitlines()[2:] == [
        "| hetero int8 | decode1, tok/s | 1.5 | 3 | 2.000 | 2.000 to 2.000 |"
    ]
