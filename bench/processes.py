"""Trees of processes: their peak memory, their CPU time, and holding them still while others are measured."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

_OF_NO_FILE: Final = ("/dev/", "/memfd:", "/SYSV")
"""Memory that processes share, as the kernel calls it."""


def tree(pid: int) -> list[psutil.Process]:
    """A process and its descendants, those that ended meanwhile left out."""
    try:
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def peak_rss_bytes(pid: int) -> int:
    """Sum over the tree of each process's own peak resident memory (VmHWM), less what several of them hold together.

    An upper bound of the sum's peak, for the processes need not have had theirs at once. Forked processes share pages
    until they write to them, and libraries are in memory once for all.
    """
    pids = [process.pid for process in tree(pid)]
    return sum(map(_peak, pids)) - shared_bytes([_holdings(pid) for pid in pids])


@dataclass(frozen=True, slots=True)
class Holdings:
    """Resident memory of one process, in bytes."""

    resident: int
    own: int
    """Its share of what is of no file: a page that is in N processes is an Nth of a page in each."""
    files: Mapping[str, int]


def shared_bytes(all_of_them: Sequence[Holdings]) -> int:
    """What is counted more than once in the sum of `resident`.

    Of a file, the processes are taken to have the pages in common of whoever has most: who else on the machine maps the
    same file makes no difference.
    """
    files: dict[str, int] = {}
    for holdings in all_of_them:
        for path, num_bytes in holdings.files.items():
            files[path] = max(files.get(path, 0), num_bytes)
    once = sum(holdings.own for holdings in all_of_them) + sum(files.values())
    return sum(holdings.resident for holdings in all_of_them) - once


def cpu_s(pid: int) -> float:
    """CPU seconds of the tree so far; of processes that ended, what their parents have waited for."""
    total = 0.0
    for process in tree(pid):
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


def wait_without_spinning(module: str) -> None:
    """Run `python -m module` again in this process's place unless OpenMP's threads wait as ranks have them wait.

    They read it when torch is imported. Those that spin take cores from the native team for milliseconds.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
        os.execv(sys.executable, [sys.executable, "-m", module, *sys.argv[1:]])


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


def _holdings(pid: int) -> Holdings:
    """Nothing, of a process that ended."""
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
        mappings = Path(f"/proc/{pid}/smaps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return Holdings(0, 0, {})
    return read_holdings(rollup, mappings)


def read_holdings(rollup: str, mappings: str) -> Holdings:
    """From /proc/PID/smaps_rollup and /proc/PID/smaps."""
    total = {line.partition(":")[0]: line.split()[1] for line in rollup.splitlines()[1:]}
    files: dict[str, int] = {}
    path, resident = "", 0
    for line in mappings.splitlines():
        name, *values = line.split(maxsplit=5)
        if not name.endswith(":"):
            path = values[4] if len(values) == 5 else ""
        elif name == "Rss:":
            resident = int(values[0])
        elif name == "Anonymous:" and path.startswith("/") and not path.startswith(_OF_NO_FILE):
            files[path] = files.get(path, 0) + (resident - int(values[0])) * 1024  # what was written to is its own
    own = (int(total["Pss_Anon"]) + int(total["Pss_Shmem"])) * 1024
    return Holdings(int(total["Rss"]) * 1024, own, files)
