"""How much memory this machine, or the cgroup that this process is in, has."""

from __future__ import annotations

from pathlib import Path
from typing import Final

MEMINFO: Final = Path("/proc/meminfo")
CGROUP_LIMITS: Final = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


def total_memory_bytes(*, meminfo: Path = MEMINFO, cgroup_limits: tuple[Path, ...] = CGROUP_LIMITS) -> int:
    """Bytes of memory that all processes here may use together."""
    limits = [limit for path in cgroup_limits if (limit := _limit(path)) is not None]
    return min([_mem_total(meminfo), *limits])


def _mem_total(meminfo: Path) -> int:
    for line in meminfo.read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if name == "MemTotal":
            return int(value.split()[0]) * 1024
    raise OSError(f"{meminfo} lacks MemTotal")


def _limit(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):  # No such controller, or "max".
        return None
