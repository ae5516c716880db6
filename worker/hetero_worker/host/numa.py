"""The kernel's view of where this process runs and where its memory lies.

`LinuxKernel` is the only place that changes or reads affinity and memory policy; pinning decides, this does.
Affinity and policy belong to the calling thread and are inherited by threads that it starts.

A container's seccomp profile may forbid the system calls of memory policies (EPERM); a kernel without NUMA lacks them
(ENOSYS). /proc/self/numa_maps needs no right, and tells where pages lie whatever policy put them there.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import platform
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from hetero_api.cpu_list import format_cpu_list
from hetero_api.host.topology import PROC_ROOT, allowed_memory_nodes

_log = logging.getLogger(__name__)

MPOL_PREFERRED: Final = 1
MPOL_BIND: Final = 2
_SET_MEMPOLICY: Final = {"x86_64": 238, "aarch64": 237}
"""System call numbers by machine; glibc has no wrapper."""
_GET_MEMPOLICY: Final = {"x86_64": 239, "aarch64": 236}
_MODE_FLAGS: Final = 0xE000
"""Flags that the kernel mixes into a policy's mode: MPOL_F_STATIC_NODES and its like."""
_MASK_WORDS: Final = 16
"""Words of 64 bits: as many nodes as any kernel is built for."""
_PROBE_BYTES: Final = 1 << 20
_NODE_PAGES: Final = re.compile(r"\bN(\d+)=(\d+)")
_PAGE_KIB: Final = re.compile(r"\bkernelpagesize_kB=(\d+)")


@dataclass(frozen=True, slots=True)
class MemoryPolicy:
    """The calling thread's, as the kernel has it."""

    mode: int
    nodes: tuple[int, ...]
    """Ascending."""


class Kernel(Protocol):
    """Operating system, as far as pinning needs it."""

    def affinity(self) -> frozenset[int]:
        """CPUs that the calling thread may run on; the kernel keeps this inside the cpuset."""
        ...

    def set_affinity(self, cpus: Iterable[int]) -> None:
        """Bind the calling thread to these CPUs. Raises OSError."""
        ...

    def knows_numa(self) -> bool:
        """Return True if it was built with NUMA, even if /sys shows one node."""
        ...

    def memory_nodes(self) -> frozenset[int] | None:
        """Nodes whose memory this process's cpuset allows; None where the kernel does not say."""
        ...

    def memory_policy(self) -> MemoryPolicy | None:
        """Return the memory policy of the calling thread; None where the kernel does not say."""
        ...

    def set_memory_policy(self, mode: int, nodes: Iterable[int]) -> None:
        """Set the memory policy of the calling thread. Raises OSError, e.g. where a seccomp profile forbids it."""
        ...

    def probe_pages(self) -> dict[int, int] | None:
        """Touch fresh memory and tell its pages by node; None where the kernel does not say."""
        ...

    def memory_by_node(self) -> dict[int, int] | None:
        """Bytes of this process's anonymous memory; None where the kernel does not say.

        Walks all of it: about a second for 128 GiB in small pages.
        """
        ...


class LinuxKernel:
    """The running kernel."""

    def __init__(self, proc_root: Path = PROC_ROOT) -> None:
        self._proc_root = proc_root

    def affinity(self) -> frozenset[int]:
        """See `Kernel.affinity`."""
        return frozenset(os.sched_getaffinity(0))

    def set_affinity(self, cpus: Iterable[int]) -> None:
        """See `Kernel.set_affinity`."""
        os.sched_setaffinity(0, cpus)

    def knows_numa(self) -> bool:
        """See `Kernel.knows_numa`."""
        if self._numa_maps() is not None:
            return True
        try:
            _get_mempolicy()
        except OSError as error:
            return error.errno != errno.ENOSYS
        return True

    def memory_nodes(self) -> frozenset[int] | None:
        """See `Kernel.memory_nodes`."""
        return allowed_memory_nodes(self._proc_root)

    def memory_policy(self) -> MemoryPolicy | None:
        """See `Kernel.memory_policy`."""
        try:
            return _get_mempolicy()
        except OSError:
            return None

    def set_memory_policy(self, mode: int, nodes: Iterable[int]) -> None:
        """See `Kernel.set_memory_policy`."""
        mask = sum(1 << node for node in nodes)
        words = (mask.bit_length() + 63) // 64
        nodemask = (ctypes.c_uint64 * words)(*(mask >> (64 * i) & (2**64 - 1) for i in range(words)))
        # The kernel reads one bit less than maxnode says.
        _call(_SET_MEMPOLICY, ctypes.c_int(mode), nodemask, ctypes.c_ulong(64 * words + 1))

    def probe_pages(self) -> dict[int, int] | None:
        # A shared mapping is never merged with a neighbour, so its line tells of these pages only.
        """See `Kernel.probe_pages`."""
        with mmap.mmap(-1, _PROBE_BYTES, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS) as probe:
            for offset in range(0, _PROBE_BYTES, mmap.PAGESIZE):
                probe[offset] = 1
            first_byte = ctypes.c_char.from_buffer(probe)
            address = ctypes.addressof(first_byte)
            del first_byte  # it would keep the mapping from being closed
            text = self._numa_maps()
            return None if text is None else parse_numa_maps(text, address)

    def memory_by_node(self) -> dict[int, int] | None:
        """See `Kernel.memory_by_node`."""
        text = self._numa_maps()
        return None if text is None else anonymous_bytes(text)

    def _numa_maps(self) -> str | None:
        try:
            return (self._proc_root / "self" / "numa_maps").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None


@contextmanager
def threads_started_on(cpus: Collection[int], kernel: Kernel) -> Iterator[None]:
    """Threads that start within are at home on `cpus`, e.g. those of a library that offers no other way.

    Threads inherit the affinity of the one that starts them: a bound rank's would all compete with its compute threads
    for their cores. The calling thread runs there too, until the end. Empty `cpus` change nothing.
    """
    home = kernel.affinity()
    if not cpus or not _move(cpus, kernel):
        yield
        return
    try:
        yield
    finally:
        _move(home, kernel)


def _move(cpus: Collection[int], kernel: Kernel) -> bool:
    """Bind the thread; return False if the cpuset has changed meanwhile and allows none of the CPUs."""
    try:
        kernel.set_affinity(cpus)
    except OSError as error:
        _log.warning("cannot run on CPUs %s: %s", format_cpu_list(cpus), error.strerror)
        return False
    return True


def _get_mempolicy() -> MemoryPolicy:
    mode, nodemask = ctypes.c_int(), (ctypes.c_uint64 * _MASK_WORDS)()
    maxnode = ctypes.c_ulong(64 * _MASK_WORDS + 1)
    _call(_GET_MEMPOLICY, ctypes.byref(mode), nodemask, maxnode, ctypes.c_void_p(), ctypes.c_ulong(0))
    nodes = tuple(64 * word + bit for word in range(_MASK_WORDS) for bit in range(64) if nodemask[word] >> bit & 1)
    return MemoryPolicy(mode.value & ~_MODE_FLAGS, nodes)


def _call(numbers: Mapping[str, int], *arguments: object) -> None:
    number = numbers.get(platform.machine())
    if number is None:
        raise OSError(errno.EOPNOTSUPP, f"memory policies are not known on {platform.machine()}")
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(ctypes.c_long(number), *arguments):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def local_percent(
    nodes: Collection[int], by_node: Mapping[int, int], *, before: Mapping[int, int] | None = None
) -> int | None:
    """Share of memory that lies on `nodes`, in whole percent, rounded down, of what came since `before`.

    Bytes by node, both. None when there are no nodes to speak of, or no memory.
    """
    grown = {node: max(0, size - (before or {}).get(node, 0)) for node, size in by_node.items()}
    total = sum(grown.values())
    return sum(grown.get(node, 0) for node in nodes) * 100 // total if nodes and total else None


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
