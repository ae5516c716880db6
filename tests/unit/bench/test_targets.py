"""Targets against rivals of the same width, and what is said where nobody was measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.report import Row
from bench.targets import INT8, ONE_RANK, TWO_RANKS, Verdict, ratios, table, verdicts
from tests.unit.bench.bench_setup import row

pytestmark = pytest.mark.unit

SPEEDS = {"decode1": 50.0, "prefill512": 600.0, "batch8": 100.0, "batch32": 200.0}


def scaled(factor: float) -> dict[str, float]:
    return {name: factor * speed for name, speed in SPEEDS.items()}


ROWS = {
    ONE_RANK: row(scaled(1.3), ours=True),
    TWO_RANKS: row(scaled(1.2), ours=True),
    INT8: row(scaled(2.0), bits=8, arithmetic="int8", ours=True, start_s=5.0, peak_bytes=2000),
    "exact": row(SPEEDS),
    "narrow arithmetic": row(scaled(2.0), arithmetic="bfloat16"),
    "eight bits": row(scaled(1.8), bits=8, arithmetic="int8"),
    "four bits": row(scaled(0.5), bits=4, arithmetic="int8"),
}


def verdict(what: str, rows: dict[str, Row] = ROWS) -> Verdict:
    return next(each for each in verdicts(rows) if each.what == what)


def said(found: Verdict) -> tuple[str, float | None, bool | None]:
    return found.against, found.ratio and round(found.ratio, 3), found.met


def test_exact_arithmetic_is_compared_with_exact_arithmetic() -> None:
    assert said(verdict("batch8, fp32-class")) == ("exact 100.0", 1.3, True)


def test_prefill_that_is_too_slow_is_not_met() -> None:
    assert said(verdict("prefill512, fp32-class")) == ("exact 600.0", 1.3, False)


def test_the_best_of_any_arithmetic_is_told_without_a_target() -> None:
    assert said(verdict("batch32, 16 bit, any arithmetic")) == ("narrow arithmetic 400.0", 0.65, None)


def test_decoding_in_16_bits_is_compared_with_all_of_16_bits_and_more() -> None:
    assert verdict("decode1, 16-bit weights").against == "narrow arithmetic 100.0"


def test_int8_decodes_against_int8_and_prefills_against_anything_quantised() -> None:
    faster = {**ROWS, "four bits": row(scaled(1.9), bits=4, arithmetic="int8")}
    assert verdict("decode1, int8", faster).against == "eight bits 90.0"
    assert verdict("prefill512, int8", faster).against == "four bits 1140.0"


def test_two_ranks_are_compared_with_one() -> None:
    assert verdict("2 ranks x 1 core, decode1").ratio == pytest.approx(1.2 / 1.3)
    assert verdict("2 ranks x 1 core, decode1").met is False


def test_what_was_not_measured_is_said_and_counts_neither_way() -> None:
    assert verdict("decode1, int4").ours == "not measured"
    alone = {ONE_RANK: ROWS[ONE_RANK]}
    assert verdict("decode1, 16-bit weights", alone).against == "nobody was measured"
    assert verdict("decode1, 16-bit weights", alone).met is None


def test_workloads_that_were_left_out_have_no_row() -> None:
    rows = {name: replace(each, figures={"batch8": each.figures["batch8"]}) for name, each in ROWS.items()}
    assert not any("decode1" in each.what for each in verdicts(rows))
    assert any("batch8" in each.what for each in verdicts(rows))


def test_start_and_memory_are_asked_of_ours_alone() -> None:
    assert verdict(f"first start to first token, {ONE_RANK}").met is False
    assert verdict(f"second start to first token, {ONE_RANK}").met is True
    assert verdict(f"second start to first token, {INT8}").met is False
    assert verdict(f"peak memory, {ONE_RANK}").met is True
    assert verdict(f"peak memory, {INT8}").met is False
    assert not any("exact" in each.what for each in verdicts(ROWS))


def test_the_table_says_yes_no_or_nothing() -> None:
    lines = {line.split("  ")[0]: line.split()[-1] for line in table(verdicts(ROWS)).splitlines()}
    assert lines["batch8, fp32-class"] == "yes"
    assert lines["prefill512, fp32-class"] == "NO"
    assert lines["decode1, int4"] == "-"


def test_history_keeps_the_ratios_that_there_are() -> None:
    kept = ratios(verdicts(ROWS))
    assert kept["batch8, fp32-class"] == 1.3
    assert "decode1, int4" not in kept
