"""Trees of processes: their peak memory and whether they are idle."""

from __future__ import annotations

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


def _peak(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/status", encoding="ascii") as status:
            lines = [line for line in status if line.startswith("VmHWM:")]
    except OSError:
        return 0
    return int(lines[0].split()[1]) * 1024 if lines else 0
