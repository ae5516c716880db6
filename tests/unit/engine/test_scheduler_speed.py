"""What a step costs in the gateway, loosely: `python -m bench.scheduler_steps` holds it to the figures."""

from __future__ import annotations

import asyncio
import statistics

import pytest

from bench.scheduler_steps import PLAN_LIMIT_US, SEND_LIMIT_US, measure

pytestmark = pytest.mark.unit

# Of the thread's CPU time; neighbours on the machine still take caches and hyper-threads.
LOOSE = 4


@pytest.mark.parametrize("num_waiting", [0, 4096])
def test_step_of_256_decodes_is_quick_however_many_wait(num_waiting: int) -> None:
    costs = asyncio.run(measure(num_running=256, num_waiting=num_waiting, num_steps=60, num_ranks=4))
    assert statistics.median(costs.plan) < LOOSE * PLAN_LIMIT_US
    assert statistics.median(costs.send) < LOOSE * SEND_LIMIT_US
