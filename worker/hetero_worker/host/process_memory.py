"""Memory of a rank's process: freed buffers are kept, code that ran once is given back.

*Buffers.* Left alone, glibc may give large buffers back to the kernel when a step frees them, and the next step pays a
page fault for every 4 KiB of them again: measured, 1,536 in every decode step of 32 sequences (its 6 MiB of logits). So
malloc keeps freed memory of up to 32 MiB a piece and never trims its heap. A rank keeps no more in this way than its
largest step takes. When a rank goes to sleep between steps, it gives back what is kept
(`hetero_api.host.memory`).

*Code.* Pages of a library that were read once count as a process's memory as long as they are mapped, though the system
keeps them for all processes anyway, and many of them served initialisers alone. Pages that were given back are mapped
again when they are needed: a small page fault, for some pages together. The initialisers of torch's libraries go
through much of their code, so `import_torch` gives it back before and after Python's part of the import, which takes as
much memory again.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import re
import sys
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Final, NamedTuple

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_MMAP_THRESHOLD_BYTES: Final = 32 * 1024 * 1024
"""The largest that glibc takes."""
_NEVER_TRIM: Final = 2**31 - 1


def keep_freed_memory() -> bool:
    """Set it up for this process; False where the C library has no mallopt, and only time is lost then."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES)) and bool(mallopt(_M_TRIM_THRESHOLD, _NEVER_TRIM))


_SMAPS: Final = Path("/proc/self/smaps")
_UNCHANGED: Final = re.compile(
    r"^([0-9a-f]+)-([0-9a-f]+) r-[x-]p \S+ \S+ \d+ +(/.*)\n"
    r"(?:[A-Z].*\n)*?Anonymous: +0 kB\n"
    r"(?:[A-Z].*\n)*?Swap: +0 kB\n",
    re.MULTILINE,
)
"""A private mapping of a file, read-only, no page of which is the process's own: there are such pages where the loader
wrote to them before it made them read-only."""
_DONT_NEED: Final = 4
_STAYING: Final = {os.path.realpath("/proc/self/exe")}
"""Files that stay mapped as they are until the process ends: the program, and libraries that were opened to stay."""


class Mapping(NamedTuple):
    """Addresses, the end not in it, and the file."""

    begin: int
    end: int
    path: str


def let_go_of_code() -> None:
    """Give back pages of the program and its libraries. Threads may go on meanwhile, and load libraries.

    Libraries are kept from being unloaded first: another thread could get the addresses of one that goes, or of one
    that is being loaded, for memory of its own, before the kernel is told that their content is not needed.
    Nothing happens where the kernel does not report mappings, or whose the pages are.
    """
    try:
        mappings = _own_mappings()
        if new := set(filter(_stays, {mapping.path for mapping in mappings} - _STAYING)):
            _STAYING.update(new)
            mappings = _own_mappings()  # they may have been loaded elsewhere meanwhile
    except OSError:
        return
    for begin, end, path in mappings:
        if path in _STAYING:
            advise(begin, end - begin, _DONT_NEED)


def _own_mappings() -> list[Mapping]:
    return unchanged_mappings(_SMAPS.read_text(encoding="utf-8", errors="replace"))


def _stays(path: str) -> bool:
    """Keep a library loaded, if it is; nobody closes what ctypes opens."""
    try:
        ctypes.CDLL(path, mode=os.RTLD_NOLOAD)
    except OSError:
        return False
    return True


def advise(begin: int, num_bytes: int, advice: int) -> bool:
    """Give the kernel advice on memory (madvise) and return whether it was taken. `begin` is a page's address."""
    return bool(_madvise()(begin, num_bytes, advice) == 0)


@cache
def _madvise() -> Callable[[int, int, int], int]:
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return madvise


def unchanged_mappings(smaps: str) -> list[Mapping]:
    """Those that can be let go and come back as they were: from the text of /proc/PID/smaps."""
    return [Mapping(int(begin, 16), int(end, 16), path) for begin, end, path in _UNCHANGED.findall(smaps)]


_LIBRARIES: Final = (("libtorch_global_deps.so", ctypes.RTLD_GLOBAL), ("libtorch_cpu.so", ctypes.RTLD_LOCAL))
"""In the order and the way in which torch loads them."""


def prepare_threads(num_threads: int) -> None:
    """Set the environment for the threads of torch and numpy, which read it when they are imported.

    OpenMP's threads would spin for some milliseconds after each operation, on cores that the native team computes on.
    """
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[variable] = str(num_threads)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def import_torch() -> None:
    """Nothing is started by it. Without effect where torch is imported already."""
    if "torch" in sys.modules:
        return
    _load_libraries()
    let_go_of_code()
    importlib.import_module("torch")
    let_go_of_code()


def _load_libraries() -> None:
    """Load the large ones, before Python's part. One that cannot be loaded by itself is left to torch."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return
    for name, mode in _LIBRARIES:
        try:
            ctypes.CDLL(str(Path(spec.origin).parent / "lib" / name), mode=mode)
        except OSError:
            return
