"""Memory pool of a rank's device: how much memory there is and how much is taken, with one interface for all devices.

On the host the numbers are the kernel's (`MemorySnapshot`): those of the process come from /proc/self, those of the
machine from /proc/meminfo or from this process's memory cgroup, whichever leaves less. Devices with memory of their own
have their pools in `backends`.

Weights and the KV cache are each allocated `apart`: on a device in a pool of their own, whose pages hold nothing
else. The driver then gets all of their memory back when they sleep, regardless of later allocations.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

import torch

from hetero_api.host.memory import release_freed_memory
from hetero_api.rank_memory import RUNTIME_BYTES
from hetero_worker.memory.budget import mib
from hetero_worker.memory.huge_pages import empty_on_huge_pages

_PROC: Final = Path("/proc")
_RESET_PEAK: Final = "5"


class MemoryPool(ABC):
    """One device's memory, from this process's view."""

    remedy: str
    """Advice to the user how to give the rank more memory."""

    @abstractmethod
    def describe(self) -> str:
        """Return the present numbers, for a log."""

    @abstractmethod
    def runtime_bytes(self) -> int:
        """Return the memory that is taken for any model: interpreter and libraries, or contexts and communicators."""

    @abstractmethod
    def available_bytes(self) -> int | None:
        """Return the memory that can still be allocated; None if unknown."""

    @abstractmethod
    def held_bytes(self) -> int:
        """Return the memory that this process holds."""

    @abstractmethod
    def release_unused(self) -> None:
        """Give back memory that an allocator caches."""

    @abstractmethod
    def apart(self) -> AbstractContextManager[None]:
        """Keep this thread's allocations on the device inside the context on pages of their own.

        After all of them are freed, `release_unused` gives back all of their memory.
        """

    @abstractmethod
    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return long-lived zeros of this memory, such as a KV cache."""

    @abstractmethod
    def begin_peak(self) -> bool:
        """Begin to measure the peak of held memory; return False if that is not possible."""

    @abstractmethod
    def peak_growth_bytes(self) -> int:
        """Return by how much the peak exceeds the memory that was held at `begin_peak`."""


class HostMemoryPool(MemoryPool):
    """Memory of this machine or container."""

    remedy = "give the rank more memory (memoryPerRank)"

    def __init__(self) -> None:
        self._meter = PeakMeter()

    def describe(self) -> str:
        """See `MemoryPool.describe`."""
        return str(MemorySnapshot.take())

    def runtime_bytes(self) -> int:
        """See `MemoryPool.runtime_bytes`."""
        return RUNTIME_BYTES

    def available_bytes(self) -> int | None:
        """See `MemoryPool.available_bytes`."""
        return MemorySnapshot.take().available_bytes

    def held_bytes(self) -> int:
        """See `MemoryPool.held_bytes`."""
        return MemorySnapshot.take().resident_bytes

    def release_unused(self) -> None:
        """See `MemoryPool.release_unused`."""
        release_freed_memory()

    def apart(self) -> AbstractContextManager[None]:
        """See `MemoryPool.apart`."""
        return nullcontext()

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """See `MemoryPool.zeros`; on huge pages, which the thread that writes first places on its NUMA node."""
        return empty_on_huge_pages(shape, dtype)

    def begin_peak(self) -> bool:
        """See `MemoryPool.begin_peak`."""
        return self._meter.begin()

    def peak_growth_bytes(self) -> int:
        """See `MemoryPool.peak_growth_bytes`."""
        return self._meter.grown_bytes()


@dataclass(frozen=True, slots=True)
class CgroupFiles:
    """Files with a memory cgroup's numbers."""

    limit: Path
    use: Path
    """Everything that is charged to the cgroup, cached files too."""
    stat: Path

    def room_bytes(self) -> int | None:
        """Return what is left after dropping cached files, such as a model's that was read; None without a limit."""
        try:
            limit, use = (int(path.read_text(encoding="ascii")) for path in (self.limit, self.use))
        except (OSError, ValueError):  # no such controller, or "max"
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
    """Memory at one moment, in bytes."""

    resident_bytes: int
    """Memory of this process, with shared and file-backed pages; 0 if unknown."""
    anonymous_bytes: int
    """The part of it that no file backs; 0 if unknown."""
    available_bytes: int | None
    """Memory that this machine or cgroup can still give to processes; None if unknown."""

    @classmethod
    def take(cls, *, proc_root: Path = _PROC, cgroups: tuple[CgroupFiles, ...] = _CGROUPS) -> Self:
        """Return the memory at this moment."""
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
    """Peak of this process's resident memory from `begin` on.

    It needs /proc/self/clear_refs, which some sandboxes lack: `begin` then returns False, and nothing can be measured.
    """

    def __init__(self, *, proc_root: Path = _PROC) -> None:
        self._proc_root = proc_root
        self._before_bytes = 0

    def begin(self) -> bool:
        """Reset the peak; return False if the kernel cannot measure it."""
        try:
            (self._proc_root / "self" / "clear_refs").write_text(_RESET_PEAK, encoding="ascii")
        except OSError:
            return False
        status = self._status()
        self._before_bytes = status.get("VmRSS", 0)
        return "VmHWM" in status

    def grown_bytes(self) -> int:
        """Return by how much the peak exceeds the memory at `begin`."""
        return max(0, self._status().get("VmHWM", 0) - self._before_bytes)

    def _status(self) -> dict[str, int]:
        return _sizes(self._proc_root / "self" / "status")


def _sizes(path: Path) -> dict[str, int]:
    """Return the fields "Name: 123 kB" of a file in bytes; none if the file does not exist."""
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
