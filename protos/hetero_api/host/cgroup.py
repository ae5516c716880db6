"""Limits of this process's cgroup: CPU time and memory, of either version of cgroups.

A limit holds for everything below it, so the least on the way from the process's cgroup to the root counts: a user's
slice may be limited, and its sessions not. A container sees its own part of the tree below /sys/fs/cgroup, and may be
told the path that its host has; levels that are not there limit nothing here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TypeVar

from hetero_api.host.topology import read_text

_Limit = TypeVar("_Limit", int, float)


@dataclass(frozen=True, slots=True)
class CgroupLimits:
    """Limits of a cgroup; None: it has none, or the kernel does not tell."""

    cpus: float | None
    """CPU time a second, in seconds."""
    memory_bytes: int | None


def cgroup_limits(root: Path = Path("/")) -> CgroupLimits:
    """Return the limits of the calling process. `root` is where /proc and /sys are. Never raises."""
    paths, mount = _paths(read_text(root / "proc/self/cgroup")), root / "sys/fs/cgroup"
    unified = [*_levels(mount, paths.get("", "/"))]
    quotas = [_quota(read_text(level / "cpu.max")) for level in unified]
    quotas += [_quota_of_version_1(level) for level in _levels(mount / "cpu", paths.get("cpu", "/"))]
    sizes = [_number(read_text(level / "memory.max")) for level in unified]
    sizes += [
        _number(read_text(level / "memory.limit_in_bytes"))
        for level in _levels(mount / "memory", paths.get("memory", "/"))
    ]
    return CgroupLimits(_least(quotas), _least(sizes))


def _paths(text: str) -> dict[str, str]:
    """Return the path of each controller of version 1, and of version 2 under ""."""
    lines = (line.split(":", 2) for line in text.splitlines() if line.count(":") >= 2)
    return {name: path for _, names, path in lines for name in names.split(",")}


def _levels(mount: Path, path: str) -> Iterator[Path]:
    """Yield the folders of a cgroup and of those above it."""
    inner = PurePosixPath("/", path)
    for level in (inner, *inner.parents):
        yield mount.joinpath(*level.parts[1:])


def _quota(text: str) -> float | None:
    """Return the CPUs of a line "200000 100000", microseconds a period; None for "max 100000"."""
    words = text.split()
    return int(words[0]) / int(words[1]) if len(words) == 2 and all(word.isdecimal() for word in words) else None


def _quota_of_version_1(folder: Path) -> float | None:
    quota, period = (read_text(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
    return _quota(f"{quota.strip()} {period.strip()}")  # -1: no quota


def _number(text: str) -> int | None:
    return int(text) if text.strip().isdecimal() else None


def _least(limits: Iterable[_Limit | None]) -> _Limit | None:
    return min((limit for limit in limits if limit is not None), default=None)
