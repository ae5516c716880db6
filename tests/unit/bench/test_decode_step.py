"""The table of bench.decode_step, and limits that are measured twice."""

from __future__ import annotations

import pytest

from bench.decode_step import Taken, table
from tests.unit.bench.bench_setup import LIMITS

pytestmark = pytest.mark.unit


def test_the_table_tells_rates_and_what_is_not_in_kernels() -> None:
    taken = Taken(rows=4, together=2, step_s=0.010, kernels_s=0.009, weight_bytes=5_000_000)
    line = table([("int8", taken)], LIMITS).splitlines()[-1]
    assert line.split() == ["int8", "4", "2", "10.00", "9.00", "10.0%", "400.0", "0.5", "(50%)"]
    assert taken.overhead == pytest.approx(0.1)


def test_of_two_measured_limits_the_higher_rates_count() -> None:
    again = LIMITS.or_better(type(LIMITS)(2, 0.5e9, 4e9, 1e9, 9e9))
    assert again == type(LIMITS)(2, 1e9, 4e9, 2e9, 9e9)
