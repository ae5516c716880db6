"""The kernel's view of where this process runs and where its memory lies.

`LinuxKernel` is the only place that changes or reads affinity and memory policy; pinning decides, this does.
Affinity and policy belong to the calling thread and are inherited by threads that it starts.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Final, Protocol

MPOL_PREFERRED: Final = 1
MPOL_BIND: Final = 2
_SET_MEMPOLICY: Final = {"x86_64": 238, "aarch64": 237}
"""System call numbers by machine; glibc has no wrapper."""
_PROBE_BYTES: Final = 1 << 20
_NODE_PAGES: Final = re.compile(r"\bN(\d+)=(\d+)")
_PAGE_KIB: Final = re.compile(r"\bkernelpagesize_kB=(\d+)")


class Kernel(Protocol):
    """What pinning needs of the operating system."""

    def affinity(self) -> frozenset[int]:
        """CPUs that the calling thread may run on; the kernel keeps this inside the cpuset."""
        ...

    def set_affinity(self, cpus: Iterable[int]) -> None:
        """Raises OSError."""
        ...

    def set_memory_policy(self, mode: int, nodes: Iterable[int]) -> None:
        """Raises OSError, e.g. where a container's seccomp profile forbids it."""
        ...

    def probe_pages(self) -> dict[int, int] | None:
        """Touch fresh memory and tell its pages by node; None where the kernel does not say."""
        ...


class LinuxKernel:
    """The running kernel."""

    def __init__(self, proc_root: Path = Path("/proc")) -> None:
        self._proc_root = proc_root

    def affinity(self) -> frozenset[int]:
        return frozenset(os.sched_getaffinity(0))

    def set_affinity(self, cpus: Iterable[int]) -> None:
        os.sched_setaffinity(0, cpus)

    def set_memory_policy(self, mode: int, nodes: Iterable[int]) -> None:
        number = _SET_MEMPOLICY.get(platform.machine())
        if number is None:
            raise OSError(f"set_mempolicy is not known on {platform.machine()}")
        mask = sum(1 << node for node in nodes)
        words = (mask.bit_length() + 63) // 64
        nodemask = (ctypes.c_uint64 * words)(*(mask >> (64 * i) & (2**64 - 1) for i in range(words)))
        # The kernel reads one bit less than maxnode says.
        maxnode = ctypes.c_ulong(64 * words + 1)
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.syscall(ctypes.c_long(number), ctypes.c_int(mode), nodemask, maxnode):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))

    def probe_pages(self) -> dict[int, int] | None:
        # A shared mapping is never merged with a neighbour, so its line tells of these pages only.
        with mmap.mmap(-1, _PROBE_BYTES, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS) as probe:
            for offset in range(0, _PROBE_BYTES, mmap.PAGESIZE):
                probe[offset] = 1
            first_byte = ctypes.c_char.from_buffer(probe)
            address = ctypes.addressof(first_byte)
            del first_byte  # it would keep the mapping from being closed
            try:
                return parse_numa_maps((self._proc_root / "self" / "numa_maps").read_text(), address)
            except OSError:
                return None


def local_memory_percent(nodes: Collection[int], *, proc_root: Path = Path("/proc")) -> int | None:
    """Share of this process's anonymous memory that lies on `nodes`, in whole percent, rounded down.

    None when there are no nodes to speak of, or the kernel does not tell. Walks the whole memory: about a second for
    128 GiB in small pages.
    """
    try:
        by_node = anonymous_bytes((proc_root / "self" / "numa_maps").read_text())
    except OSError:
        return None
    total = sum(by_node.values())
    return sum(by_node.get(node, 0) for node in nodes) * 100 // total if nodes and total else None


def anonymous_bytes(text: str) -> dict[int, int]:
    """Bytes by node of the anonymous mappings that numa_maps tells of: what no file is behind."""
    by_node: dict[int, int] = {}
    for line in text.splitlines():
        if " anon=" not in line or " file=" in line:
            continue
        page = _PAGE_KIB.search(line)
        page_bytes = int(page.group(1)) * 1024 if page else mmap.PAGESIZE
        for node, pages in _NODE_PAGES.findall(line):
            by_node[int(node)] = by_node.get(int(node), 0) + int(pages) * page_bytes
    return by_node


def parse_numa_maps(text: str, address: int) -> dict[int, int] | None:
    """Pages by node of the mapping that begins at `address`; None when the text has no such mapping."""
    wanted = f"{address:x}"
    for line in text.splitlines():
        if line.partition(" ")[0].lstrip("0") == wanted:
            return {int(node): int(pages) for node, pages in _NODE_PAGES.findall(line)}
    return None
