"""Pages of libraries that are let go: which, that they come back, and what that saves when torch is imported."""

from __future__ import annotations

import mmap
import os
import shutil
import subprocess
import sys
from pathlib import Path

import cffi
import pytest
import torch

from hetero_worker.host.process_memory import let_go_of_code, unchanged_mappings
from hetero_worker.native.build import EXCHANGE_LIBRARY

pytestmark = pytest.mark.unit

KIB = 1024
TORCH = "libtorch_cpu.so"

IMPORT = """
import importlib, os, sys
from hetero_worker.host.process_memory import import_torch
import_torch() if sys.argv[1] == "lean" else importlib.import_module("torch")
assert len(os.listdir("/proc/self/task")) == 1
import torch
assert torch.mm(torch.ones(3, 5), torch.ones(5, 2)).tolist() == [[5.0, 5.0]] * 3
with open("/proc/self/status") as status:
    print(next(int(line.split()[1]) for line in status if line.startswith("VmHWM")))
"""


def mapping(
    begin: int, mode: str, path: str = "/lib/x.so", *, anonymous_kib: int = 0, swap_kib: int = 0, rss_kib: int = 8
) -> str:
    """As the kernel tells of one of 16 KiB."""
    return (
        f"{begin:x}-{begin + 16 * KIB:x} {mode} 00001000 fe:00 4711                       {path}\n"
        f"Size:                 16 kB\nRss:                  {rss_kib} kB\nAnonymous:            {anonymous_kib} kB\n"
        f"AnonHugePages:         0 kB\nSwap:                 {swap_kib} kB\nLocked:                0 kB\n"
        "VmFlags: rd ex mr mw me sd\n"
    )


def test_only_what_is_as_in_its_file_is_let_go() -> None:
    smaps = "".join(
        [
            mapping(0x10000, "r-xp"),
            mapping(0x20000, "r--p", anonymous_kib=4),  # written to by the loader, then protected
            mapping(0x30000, "r--p", "/lib/with space.so"),
            mapping(0x40000, "r-xp", swap_kib=4),
            mapping(0x50000, "rw-p"),
            mapping(0x60000, "r--s"),
            mapping(0x70000, "r-xp", "[vdso]"),
            mapping(0x80000, "r--p", ""),
            mapping(0x90000, "r-xp"),
        ]
    )
    assert [found.begin for found in unchanged_mappings(smaps)] == [0x10000, 0x30000, 0x90000]
    assert all(found.end - found.begin == 16 * KIB for found in unchanged_mappings(smaps))
    assert {found.path for found in unchanged_mappings(smaps)} == {"/lib/x.so", "/lib/with space.so"}


def test_code_that_was_let_go_runs_as_before() -> None:
    x = torch.randn(64, 32)
    expected = torch.softmax(x @ x.T, dim=1)
    before = resident_kib(TORCH)
    let_go_of_code()
    assert resident_kib(TORCH) < before / 2
    assert torch.equal(torch.softmax(x @ x.T, dim=1), expected)


def test_a_library_whose_pages_were_let_go_stays_loaded(tmp_path: Path) -> None:
    """Its addresses could be another thread's by the time that the kernel is told."""
    ffi = cffi.FFI()
    library = ffi.dlopen(str(shutil.copy(EXCHANGE_LIBRARY, tmp_path / "another.so")))
    let_go_of_code()
    ffi.dlclose(library)
    assert resident_kib("another.so") > 0


def test_files_that_are_no_libraries_are_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "table"
    path.write_bytes(bytes(64 * KIB))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ) as table:
        assert not any(table[:])
        let_go_of_code()
        assert resident_kib("table") == 64


def test_torch_is_imported_with_less_memory() -> None:
    assert peak_kib("lean") < peak_kib("as ever") - 16 * KIB


def resident_kib(library: str) -> int:
    """Of the library, in this process."""
    count, is_of_library = 0, False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        if "-" in line.split(" ")[0]:
            is_of_library = line.endswith(library)
        elif is_of_library and line.startswith("Rss:"):
            count += int(line.split()[1])
    return count


def peak_kib(how: str) -> int:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, "-c", IMPORT, how], check=True, capture_output=True, text=True, env=environment
    )
    return int(result.stdout)
