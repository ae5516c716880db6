"""What others use of the machine, by /proc/stat."""

from __future__ import annotations

import os
import time

import pytest

from bench.processes import cpu_s
from bench.quiet import ForeignLoad, busy_s

pytestmark = pytest.mark.unit

STAT = "cpu  100 20 30 5000 600 7 8 35 9 0\ncpu0 1 2 3 4 5 6 7 8 9 0\n"


def test_idle_and_waiting_are_not_busy_stolen_time_is_and_guests_count_once() -> None:
    assert busy_s(STAT, 100) == (100 + 20 + 30 + 7 + 8 + 35) / 100


def stat(busy_ticks: float) -> str:
    return f"cpu  {busy_ticks:.0f} 0 0 0 0 0 0 0 0 0\n"


def test_load_of_others_is_the_machines_less_ones_own() -> None:
    ticks = os.sysconf("SC_CLK_TCK")
    readings = iter([stat(1000), stat(1000 + 100 * ticks)])
    load = ForeignLoad(read_stat=lambda: next(readings))
    began_s = time.perf_counter()
    while time.perf_counter() - began_s < 0.05:
        pass
    assert load.cores() > 1


def test_ones_own_work_is_not_others() -> None:
    load = ForeignLoad(read_stat=lambda: stat(1000))
    sum(range(200_000))
    assert load.cores() == 0.0


def test_a_tree_counts_its_cpu_time() -> None:
    before = cpu_s(os.getpid())
    began_s = time.process_time()
    while time.process_time() - began_s < 0.1:
        pass
    assert cpu_s(os.getpid()) - before >= 0.05
