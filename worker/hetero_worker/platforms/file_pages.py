"""Gives back the memory that code takes which is not run any more.

Pages of a library that were read once count as a process's memory as long as they are mapped, though the system keeps
them for all processes anyway, and much of them served initialisers alone. What was let go is mapped again when it is
needed: a small page fault, for some pages together.
"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Final, NamedTuple

_SMAPS: Final = Path("/proc/self/smaps")
_UNCHANGED: Final = re.compile(
    r"^([0-9a-f]+)-([0-9a-f]+) r-[x-]p \S+ \S+ \d+ +/.*\n"
    r"(?:[A-Z].*\n)*?Anonymous: +0 kB\n"
    r"(?:[A-Z].*\n)*?Swap: +0 kB\n",
    re.MULTILINE,
)
"""A private mapping of a file, read-only, no page of which is the process's own: there are such pages where the loader
wrote to them before it made them read-only."""
_DONT_NEED: Final = 4


class Mapping(NamedTuple):
    """Addresses, the end not in it."""

    begin: int
    end: int


def let_go_of_code() -> None:
    """Of all files that are mapped to be read or run, as they are. Threads may go on meanwhile.

    Nothing happens where the kernel does not tell of mappings, or whose the pages are.
    """
    try:
        smaps = _SMAPS.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for begin, end in unchanged_mappings(smaps):
        madvise(begin, end - begin, _DONT_NEED)


def unchanged_mappings(smaps: str) -> list[Mapping]:
    """Those that can be let go and come back as they were: from the text of /proc/PID/smaps."""
    return [Mapping(int(begin, 16), int(end, 16)) for begin, end in _UNCHANGED.findall(smaps)]
