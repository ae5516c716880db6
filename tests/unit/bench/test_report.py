"""Figures from runs, their limits by hand, and the table."""

from __future__ import annotations

import pytest

from bench.report import Figure, Row, Width, figure, limit, rate, table
from tests.unit.bench.bench_setup import (
    BATCH,
    BODY_WEIGHTS,
    CONFIG,
    DECODE,
    EXACT,
    HEAD_WEIGHTS,
    LIMITS,
    PREFILL,
    measured,
    row,
)

pytestmark = pytest.mark.unit


def test_a_stream_counts_from_its_first_token_on_a_batch_from_the_start() -> None:
    assert rate(DECODE, measured(DECODE, elapsed_s=5.0, first_token_s=1.0)) == 8 / 4
    assert rate(PREFILL, measured(PREFILL, elapsed_s=2.5, first_token_s=2.0)) == 16 / 2
    assert rate(BATCH, measured(BATCH, elapsed_s=4.0)) == 20 / 4


@pytest.mark.parametrize(("bits", "bytes_a_weight"), [(32, 4.0), (16, 2.0), (8, 1.0), (4, 0.5)])
def test_decoding_reads_all_weights_in_their_width(bits: int, bytes_a_weight: float) -> None:
    wanted = 1e9 / (bytes_a_weight * (BODY_WEIGHTS + HEAD_WEIGHTS))
    assert limit(DECODE, CONFIG, LIMITS, Width(bits, "float32")) == pytest.approx(wanted)


@pytest.mark.parametrize(("arithmetic", "operations_per_s"), [("float32", 1e9), ("bfloat16", 2e9), ("int8", 8e9)])
def test_prefill_is_bound_by_its_arithmetic_and_the_head_works_once(arithmetic: str, operations_per_s: float) -> None:
    operations = 2 * BODY_WEIGHTS * (16 + 1) + 2 * HEAD_WEIGHTS
    wanted = 16 / (operations / operations_per_s)
    assert limit(PREFILL, CONFIG, LIMITS, Width(4, arithmetic)) == pytest.approx(wanted)


def test_a_small_batch_with_fast_arithmetic_is_bound_by_reading_the_weights_each_step() -> None:
    wanted = 20 / (10 * 2 * CONFIG.num_parameters / 1e9)
    assert limit(BATCH, CONFIG, LIMITS, Width(16, "int8")) == pytest.approx(wanted)


def test_without_instructions_for_bfloat16_its_limit_is_that_of_float32() -> None:
    assert LIMITS.rate_of("bfloat16") == 2e9
    assert LIMITS.__class__(2, 1.0, fp32_flops=5.0, bf16_flops=1.0, int8_ops=2.0).rate_of("bfloat16") == 5.0
    with pytest.raises(ValueError, match="float8"):
        LIMITS.rate_of("float8")


def test_a_figure_is_the_median_with_its_spread_and_share() -> None:
    assert figure([3.0, 9.0, 4.0], 8.0, disturbed=1) == Figure(4.0, 3.0, 9.0, 0.5, 3, 1)


def test_the_table_has_a_line_a_contender_with_shares_ratios_and_a_mark_on_the_disturbed() -> None:
    disturbed = Row(EXACT, {"decode1": Figure(30.0, 30.0, 30.0, 0.6, 3, disturbed=2)}, 4.0, 2.5, 250_000_000)
    head, slow, fast = table({"slow": row({"decode1": 20.0}), "fast": disturbed}, base="slow").splitlines()
    assert head.split("  ")[0] == "contender"
    assert "20.0 (50%, 1.00x)" in slow
    assert "30.0~ (60%, 1.50x)" in fast
    assert "4.0 s, again 2.5 s" in fast
    assert "250 MB" in fast
    assert "x)" not in table({"slow": row({"decode1": 20.0})})
