"""Threads of torch, started in a process of their own: in this one they run already."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.unit

_PROGRAM = textwrap.dedent(
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
