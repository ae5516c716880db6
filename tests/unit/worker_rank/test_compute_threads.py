"""Threads of torch, started in a process of their own: in this one they run already."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from typing import Final

import pytest

pytestmark = pytest.mark.unit

_PROGRAM: Final = textwrap.dedent(
    """
    import json, os
    import torch
    from hetero_worker.backends.cpu import start_compute_threads
    from hetero_worker.host.numa import LinuxKernel, threads_started_on

    def tasks():
        return {int(name) for name in os.listdir("/proc/self/task")}

    kernel = LinuxKernel()
    home = kernel.affinity()
    before = tasks()
    start_compute_threads(3)
    started = tasks() - before
    with threads_started_on([max(home)], kernel):
        torch.ones(1 << 20).sum()
    later = tasks() - before - started
    print(json.dumps([[sorted(os.sched_getaffinity(task)) for task in started], len(later), torch.get_num_threads()]))
    """
)


def test_compute_threads_start_at_home_and_none_follows_later() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "3"}
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True, timeout=120, env=environment
    )
    affinities, later, num_threads = json.loads(done.stdout)

    assert len(affinities) >= 2
    assert all(affinity == sorted(os.sched_getaffinity(0)) for affinity in affinities)
    assert (later, num_threads) == (0, 3)


_IDLE_AFTER_AN_OPERATION: Final = textwrap.dedent(
    """
    import time
    from hetero_worker.host.process_memory import import_torch, prepare_threads

    prepare_threads(2)
    import_torch()
    import torch

    numbers, spent_s = torch.rand(400_000), []
    torch.log1p(numbers)
    for _ in range(10):
        torch.log1p(numbers)
        began_s = time.process_time()
        time.sleep(0.03)
        spent_s.append(time.process_time() - began_s)
    print(torch.get_num_threads(), sorted(spent_s)[len(spent_s) // 2])
    """
)


def test_threads_of_torch_do_not_spin_once_they_have_nothing_to_do() -> None:
    """They did so for 6 to 10 ms, on the cores that the native team computes on."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    done = subprocess.run(
        [sys.executable, "-c", _IDLE_AFTER_AN_OPERATION],
        capture_output=True, text=True, check=True, timeout=120, env=environment,
    )  # fmt: skip
    num_threads, spent_s = done.stdout.split()

    assert int(num_threads) == 2
    assert float(spent_s) < 2e-3
