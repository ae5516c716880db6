"""What a tree of processes holds: what several have in common counts once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from bench.processes import Holdings, peak_rss_bytes, read_holdings, shared_bytes

pytestmark = pytest.mark.unit

MIB = 1 << 20
HELD = 64 * MIB
FORKING = f"""
import os, sys
held = bytearray(b"x") * {HELD}
for _ in range(2):
    if os.fork() == 0:
        if "write" in sys.argv:
            held[::4096] = bytes(len(held[::4096]))
        os.write(1, b"r")
        os.read(0, 1)
        os._exit(0)
os.write(1, b"r")
os.read(0, 1)
"""
ROLLUP = """55d0-7ffc ---p 00000000 00:00 0    [rollup]
Rss:     1000 kB
Pss:      600 kB
Pss_Anon: 300 kB
Pss_File: 250 kB
Pss_Shmem: 50 kB
"""
SMAPS = """55d0-55d1 r-xp 00000000 08:01 7    /lib/with a space.so
Rss:      200 kB
Anonymous: 0 kB
55d1-55d2 rw-p 00001000 08:01 7    /lib/with a space.so
Rss:      120 kB
Anonymous: 100 kB
55d3-55d4 rw-p 00000000 00:00 0
Rss:      300 kB
Anonymous: 300 kB
55d4-55d5 rw-s 00000000 00:01 9    /dev/shm/ranks
Rss:      100 kB
Anonymous: 0 kB
7ffc-7ffd rw-p 00000000 00:00 0    [stack]
Rss:       40 kB
Anonymous: 40 kB
"""


def test_files_and_what_is_of_none_are_told_apart() -> None:
    held = read_holdings(ROLLUP, SMAPS)
    assert held == Holdings(1000 * 1024, 350 * 1024, {"/lib/with a space.so": 220 * 1024})


def test_of_a_file_the_process_counts_that_has_most_of_it() -> None:
    first = Holdings(resident=100, own=40, files={"a": 50, "b": 10})
    second = Holdings(resident=90, own=40, files={"a": 30, "c": 20})
    assert shared_bytes([first]) == 0
    assert shared_bytes([first, second]) == 30
    assert shared_bytes([]) == 0


@contextmanager
def forking(*arguments: str) -> Iterator[int]:
    """A process that holds memory and has two children that hold it too."""
    with subprocess.Popen(
        [sys.executable, "-c", FORKING, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        told = b""
        while len(told) < 3:
            told += os.read(process.stdout.fileno(), 3)
        try:
            yield process.pid
        finally:
            for child in psutil.Process(process.pid).children():
                child.kill()
            process.kill()


def test_pages_of_forked_processes_count_once_until_they_are_written_to() -> None:
    with forking() as pid:
        assert HELD < peak_rss_bytes(pid) < 1.5 * HELD
    with forking("write") as pid:
        assert 3 * HELD < peak_rss_bytes(pid) < 3.5 * HELD


def test_a_process_alone_has_its_own_peak() -> None:
    source = "import os; held = bytearray(b'x') * (1 << 26); del held; os.write(1, b'r'); os.read(0, 1)"
    with subprocess.Popen([sys.executable, "-c", source], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.read(1) == b"r"
        peak, now = peak_rss_bytes(process.pid), psutil.Process(process.pid).memory_info().rss
        process.kill()
    assert peak > HELD > now
