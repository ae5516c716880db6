"""What is made of the times of an exchange between hosts."""

from __future__ import annotations

import pytest

from bench.exchange_hosts import summary, verdicts

pytestmark = pytest.mark.unit

US = {
    "round trip": 20.0, "line": 500.0, "line both ways": 800.0,
    "tcp 4096": 46.0, "tcp 65536": 100.0, "tcp 1048576": 651.0,
    "gloo 4096": 230.0, "gloo 65536": 499.0, "gloo 1048576": 3255.0,
}  # fmt: skip


def test_a_sum_counts_as_long_as_it_took_the_slower_rank() -> None:
    times = [
        {"round trip": [2e-6, 4e-6, 9e-6], "tcp 4096": [1e-6, 5e-6, 1e-6]},
        {"round trip": [9e-6, 9e-6, 9e-6], "tcp 4096": [3e-6, 1e-6, 2e-6]},
    ]

    assert summary(times) == pytest.approx({"round trip": 4.0, "tcp 4096": 3.0})


def test_each_target_is_judged_by_its_own_limit() -> None:
    _, small, large, *ratios = verdicts(US)

    assert small.endswith("= 46.0 µs: met")
    assert large.endswith("= 650 µs: missed")
    assert [ratio.rpartition(": ")[2] for ratio in ratios] == ["met", "missed", "met"]
