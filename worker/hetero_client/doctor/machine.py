"""Snapshot of a machine, as far as ranks depend on it, which `machine_checks` judges.

Everything is read from files below a root, which tests replace. What the kernel does not tell, or a container hides, is
None or empty: checks say so, and assume neither good nor bad.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hetero_api.host.cgroup import CgroupLimits, cgroup_limits
from hetero_api.host.gpus import Gpu, installed_driver, visible_gpus
from hetero_api.host.memory import physical_memory_bytes, total_memory_bytes
from hetero_api.host.topology import CpuTopology, allowed_cpus, list_names, read_text

_CHOSEN: Final = re.compile(r"\[(\w+)\]")
_SHM: Final = re.compile(r"^(?:\S+ ){4}/dev/shm (.*)$", re.MULTILINE)
_SIZE: Final = re.compile(r"\bsize=(\d+)([kmg]?)\b")
_UNITS: Final = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine, as this process sees it."""

    whole: CpuTopology
    """All of its CPUs."""
    own: CpuTopology
    """CPUs and memory that this process may use."""
    knows_numa: bool
    """True if the kernel is built with NUMA, even where its nodes are hidden."""
    limits: CgroupLimits
    physical_bytes: int
    usable_bytes: int
    """Memory within the limits."""
    has_smt: bool | None
    governors: frozenset[str]
    """Frequency governors of the usable CPUs; empty where none is told, as on virtual machines."""
    numa_balancing: bool | None
    huge_pages: str
    """Transparent huge pages: "always", "madvise" or "never"; "" where they are not told."""
    reserved_page_bytes: int
    """Memory set aside as huge pages of fixed number."""
    locked_bytes: float | None
    """Limit of locked memory; infinite: none; None: not told."""
    open_files: float | None
    """Limit of open files, as `locked_bytes`."""
    shm_bytes: int | None
    """Size of /dev/shm; 0: nothing is mounted there; None: not told."""
    has_rdma: bool
    gpus: tuple[Gpu, ...]
    driver: str
    """Version of NVIDIA's driver; "" without one."""


def read_machine(environment: Mapping[str, str], *, root: Path = Path("/")) -> Machine:
    """Read a machine. `root` is where /proc, /sys and /dev are. Raises OSError without a readable /proc/meminfo."""
    system, proc = root / "sys/devices/system", root / "proc"
    allowed = allowed_cpus(proc)
    whole = CpuTopology.read(system, known=allowed)
    usable = frozenset(whole.cpus) if allowed is None else allowed
    limits = read_text(proc / "self/limits")
    return Machine(
        whole=whole,
        own=CpuTopology.of_this_process(system, allowed=usable, proc_root=proc),
        knows_numa=bool(read_text(proc / "self/numa_maps")),
        limits=cgroup_limits(root),
        physical_bytes=physical_memory_bytes(root),
        usable_bytes=total_memory_bytes(root),
        has_smt=_switch(read_text(system / "cpu/smt/active")),
        governors=_governors(system / "cpu", usable),
        numa_balancing=_switch(read_text(proc / "sys/kernel/numa_balancing")),
        huge_pages=_chosen(read_text(root / "sys/kernel/mm/transparent_hugepage/enabled")),
        reserved_page_bytes=_reserved_page_bytes(root / "sys/kernel/mm/hugepages"),
        locked_bytes=_limit(limits, "Max locked memory"),
        open_files=_limit(limits, "Max open files"),
        shm_bytes=_shm_bytes(read_text(proc / "self/mountinfo"), physical_memory_bytes(root)),
        has_rdma=bool(list_names(root / "sys/class/infiniband")),
        gpus=visible_gpus(environment, root=root),
        driver=installed_driver(root),
    )


def _switch(text: str) -> bool | None:
    return int(text) != 0 if text.strip().isdecimal() else None


def _chosen(text: str) -> str:
    """Return the word in brackets of a line such as "always [madvise] never"."""
    match = _CHOSEN.search(text)
    return match[1] if match else ""


def _governors(folder: Path, cpus: Iterable[int]) -> frozenset[str]:
    texts = (read_text(folder / f"cpu{cpu}/cpufreq/scaling_governor").strip() for cpu in cpus)
    return frozenset(text for text in texts if text)


def _reserved_page_bytes(folder: Path) -> int:
    """Return the bytes of the pools of huge pages: hugepages-2048kB/nr_hugepages and the like."""
    total = 0
    for name in list_names(folder):
        size, count = name.removeprefix("hugepages-").removesuffix("kB"), read_text(folder / name / "nr_hugepages")
        if size.isdecimal() and count.strip().isdecimal():
            total += int(size) * 1024 * int(count)
    return total


def _limit(text: str, name: str) -> float | None:
    """Return the soft limit of that name in the text of /proc/self/limits."""
    for line in text.splitlines():
        if line.startswith(name):
            soft = line.removeprefix(name).split()[0]
            return math.inf if soft == "unlimited" else float(soft)
    return None


def _shm_bytes(mounts: str, physical_bytes: int) -> int | None:
    """Return the size of /dev/shm by the text of /proc/self/mountinfo, whose last mount of it counts."""
    found = _SHM.findall(mounts)
    if not found:
        return 0 if mounts else None
    size = _SIZE.search(found[-1])
    if size is None:
        return physical_bytes // 2  # tmpfs, if it is not told a size
    return int(size[1]) * _UNITS[size[2]]
