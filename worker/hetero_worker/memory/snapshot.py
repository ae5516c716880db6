"""MemorySnapshot: what a rank's process and its machine have in memory at one moment.

Taken after the groups exist (for communicators take memory too), after the load, and around a largest step, whose
peak the kernel tells. All numbers are the kernel's: of this process from /proc/self, of the machine from /proc/meminfo
and from the memory cgroup that this process is in, whichever leaves less.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from hetero_worker.memory.budget import mib

_PROC: Final = Path("/proc")
_RESET_PEAK: Final = "5"


@dataclass(frozen=True, slots=True)
class CgroupFiles:
    """Where a memory cgroup's numbers are."""

    limit: Path
    use: Path
    """All that is charged to it, cached files too."""
    stat: Path

    def room_bytes(self) -> int | None:
        """What it leaves when it gives up cached files, a model's that was read among them; None without a limit."""
        try:
            limit, use = (int(path.read_text(encoding="ascii")) for path in (self.limit, self.use))
        except (OSError, ValueError):  # No such controller, or "max".
            return None
        return max(0, limit - max(0, use - self._file_bytes()))

    def _file_bytes(self) -> int:
        try:
            lines = self.stat.read_text(encoding="ascii").splitlines()
        except OSError:
            return 0
        counts = {name: int(value) for name, _, value in (line.partition(" ") for line in lines)}
        prefix = "total_" if "total_active_file" in counts else ""
        return sum(counts.get(f"{prefix}{kind}_file", 0) for kind in ("active", "inactive"))


_V2, _V1 = Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/memory")
_CGROUPS: Final = (
    CgroupFiles(_V2 / "memory.max", _V2 / "memory.current", _V2 / "memory.stat"),
    CgroupFiles(_V1 / "memory.limit_in_bytes", _V1 / "memory.usage_in_bytes", _V1 / "memory.stat"),
)


@dataclass(frozen=True, slots=True)
class MemorySnapshot:
    """Bytes."""

    resident_bytes: int
    """Of this process, shared and file-backed pages among them; 0 where the kernel does not tell."""
    anonymous_bytes: int
    """Of these: pages that no file is behind; 0 where the kernel does not tell."""
    available_bytes: int | None
    """What this machine or cgroup could still give to processes; None where the kernel does not tell."""

    @classmethod
    def take(cls, *, proc_root: Path = _PROC, cgroups: tuple[CgroupFiles, ...] = _CGROUPS) -> Self:
        status = _sizes(proc_root / "self" / "status")
        machine = _sizes(proc_root / "meminfo").get("MemAvailable")
        left = [room for cgroup in cgroups if (room := cgroup.room_bytes()) is not None]
        return cls(
            resident_bytes=status.get("VmRSS", 0),
            anonymous_bytes=status.get("RssAnon", 0),
            available_bytes=min([*left, *([] if machine is None else [machine])], default=None),
        )

    def __str__(self) -> str:
        available = "unknown" if self.available_bytes is None else mib(self.available_bytes)
        return f"resident {mib(self.resident_bytes)} (anonymous {mib(self.anonymous_bytes)}), available {available}"


class PeakMeter:
    """The most that this process is resident with, from `begin` on.

    Needs /proc/self/clear_refs, which some sandboxes lack: `begin` is then False, and nothing can be measured.
    """

    def __init__(self, *, proc_root: Path = _PROC) -> None:
        self._proc_root = proc_root
        self._before_bytes = 0

    def begin(self) -> bool:
        try:
            (self._proc_root / "self" / "clear_refs").write_text(_RESET_PEAK, encoding="ascii")
        except OSError:
            return False
        status = self._status()
        self._before_bytes = status.get("VmRSS", 0)
        return "VmHWM" in status

    def grown_bytes(self) -> int:
        """How much above its beginning the peak is."""
        return max(0, self._status().get("VmHWM", 0) - self._before_bytes)

    def _status(self) -> dict[str, int]:
        return _sizes(self._proc_root / "self" / "status")


def _sizes(path: Path) -> dict[str, int]:
    """Fields "Name: 123 kB" of a file, in bytes; none of a file that is not there."""
    sizes: dict[str, int] = {}
    try:
        text = path.read_text(encoding="utf-8")
    except OSError:
        return sizes
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if value.endswith(" kB"):
            sizes[name] = int(value.split()[0]) * 1024
    return sizes
