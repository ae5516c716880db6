"""Memory of this machine, or of this process's cgroup: its size, whether it was too little, and how to give it back."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Final

from hetero_api.host.cgroup import cgroup_limits

CGROUP_EVENTS: Final = (Path("/sys/fs/cgroup/memory.events"), Path("/sys/fs/cgroup/memory/memory.oom_control"))


def total_memory_bytes(root: Path = Path("/")) -> int:
    """Return the bytes of memory that all processes here may use together. `root` is where /proc and /sys are.

    Pools of huge pages do not count: only programs that ask for these get them.
    """
    ordinary = physical_memory_bytes(root) - (_meminfo(root, "Hugetlb") or 0)
    limit = cgroup_limits(root).memory_bytes
    return ordinary if limit is None else min(ordinary, limit)


def physical_memory_bytes(root: Path = Path("/")) -> int:
    """Return the bytes of the machine's memory. Raises OSError where the kernel does not tell."""
    if (total := _meminfo(root, "MemTotal")) is None:
        raise OSError(f"{root}/proc/meminfo lacks MemTotal")
    return total


def _meminfo(root: Path, wanted: str) -> int | None:
    """Return the bytes in a line of /proc/meminfo. Raises OSError where it cannot be read."""
    for line in (root / "proc/meminfo").read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if name == wanted:
            return int(value.split()[0]) * 1024
    return None


def out_of_memory_kills(*, cgroup_events: tuple[Path, ...] = CGROUP_EVENTS) -> int:
    """How often the kernel killed a process of this cgroup, a container's for instance, for want of memory.

    It counts before it kills. 0 where it does not tell.
    """
    return next((count for path in cgroup_events if (count := _kills(path)) is not None), 0)


def _kills(path: Path) -> int | None:
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except OSError:  # No such controller.
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)


def release_freed_memory() -> bool:
    """Give memory that was freed, but kept by the C library, back to the system; return False if the library cannot."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim is not None and bool(trim(0))
