"""Trees of processes: their peak memory, their CPU time, and holding them still while others are measured."""

from __future__ import annotations

import signal
import sys
from contextlib import suppress

import psutil


def tree(pid: int) -> list[psutil.Process]:
    """A process and its descendants, those that ended meanwhile left out."""
    try:
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def peak_rss_bytes(pid: int) -> int:
    """Sum over the tree of each process's own peak resident memory (VmHWM): an upper bound of the sum's peak."""
    return sum(_peak(process.pid) for process in tree(pid))


def cpu_s(pid: int) -> float:
    """CPU seconds of the tree so far; of processes that ended, what their parents have waited for."""
    total = 0.0
    for process in tree(pid):
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


def hold(pid: int) -> None:
    """Stop the tree (SIGSTOP): no thread of it spins or polls until `release`."""
    _signal(pid, signal.SIGSTOP)


def release(pid: int) -> None:
    """Let the tree go on."""
    _signal(pid, signal.SIGCONT)


def end_in_order() -> None:
    """Make SIGTERM end this program as an error would, so that it ends what it started: a tree that is held still does
    not see that its pipes were closed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def _signal(pid: int, number: signal.Signals) -> None:
    for process in tree(pid):
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def _peak(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/status", encoding="ascii") as status:
            lines = [line for line in status if line.startswith("VmHWM:")]
    except OSError:
        return 0
    return int(lines[0].split()[1]) * 1024 if lines else 0
