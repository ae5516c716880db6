"""The speed that status shows: of stepping, not of waiting."""

from __future__ import annotations

import pytest

from hetero_gateway.engine.step_pace import Throughput

pytestmark = pytest.mark.unit


def test_before_any_step_it_is_0() -> None:
    assert Throughput().tokens_per_second == 0


def test_steady_steps_give_their_rate() -> None:
    throughput = Throughput()
    for _ in range(1000):
        throughput.add_step(0.05, tokens=4)
    assert throughput.tokens_per_second == pytest.approx(80, rel=0.01)


def test_steps_that_only_read_prompts_take_time() -> None:
    throughput = Throughput()
    throughput.add_step(1.0, tokens=0)
    throughput.add_step(1.0, tokens=10)
    assert throughput.tokens_per_second == pytest.approx(5, rel=0.05)


def test_old_steps_are_forgotten_with_stepping_time_only() -> None:
    throughput = Throughput(memory_s=1.0)
    throughput.add_step(0.1, tokens=1000)
    for _ in range(100):
        throughput.add_step(0.1, tokens=1)
    assert throughput.tokens_per_second == pytest.approx(10, rel=0.1)
