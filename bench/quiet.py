"""Whether the machine is quiet: CPU that others use while something is measured, from /proc/stat.

Time that the hypervisor took away (steal) counts as used by others: it could not be had.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from bench.processes import cpu_s

WINDOW_S: Final = 0.5
_STAT: Final = Path("/proc/stat")
_IDLE: Final = (3, 4)
"""Places of idle and iowait among the first line's numbers."""
_COUNTED: Final = 8
"""user, nice, system, idle, iowait, irq, softirq, steal; guest time is in user already."""


def busy_s(stat: str, ticks_per_s: int) -> float:
    """Seconds that all cores were busy, or stolen, since the machine started, from /proc/stat's text."""
    ticks = [int(number) for number in stat.partition("\n")[0].split()[1 : 1 + _COUNTED]]
    return sum(count for place, count in enumerate(ticks) if place not in _IDLE) / ticks_per_s


class ForeignLoad:
    """Cores that others than this process and the tree of `pid` used, since it was made or last asked."""

    def __init__(self, pid: int | None = None, *, read_stat: Callable[[], str] = _STAT.read_text) -> None:
        self._pid, self._read_stat = pid, read_stat
        self._began = self._now()

    def cores(self) -> float:
        """On average; at least 0, since the clocks tick apart."""
        began, self._began = self._began, self._now()
        elapsed_s, machine_s, own_s = (now - before for now, before in zip(self._began, began, strict=True))
        return max(0.0, machine_s - own_s) / elapsed_s

    def _now(self) -> tuple[float, float, float]:
        own_s = time.process_time() + (cpu_s(self._pid) if self._pid is not None else 0.0)
        return time.perf_counter(), busy_s(self._read_stat(), os.sysconf("SC_CLK_TCK")), own_s


def wait_quiet(most_cores: float, *, timeout_s: float) -> float:
    """Wait until others use no more than `most_cores`, or for `timeout_s`; what they used last."""
    deadline_s = time.monotonic() + timeout_s
    load = ForeignLoad()
    while True:
        time.sleep(WINDOW_S)
        cores = load.cores()
        if cores <= most_cores or time.monotonic() > deadline_s:
            return cores
