"""The machine's logical CPUs, physical cores, caches and NUMA nodes: the project's one reader of /sys/devices/system.

Who picks cores (launcher, pod) and who binds to them and proves it (rank) read the same value here, so they cannot
disagree. Files are as the kernel documents them (Documentation/admin-guide/cputopology.rst, ABI/stable/
sysfs-devices-node); only online CPUs appear.

Containers hide parts of /sys, and what is hidden is never made up:
- no list of online CPUs: those that this process may run on, which are online;
- no siblings of a CPU: it is a physical core of its own;
- no third-level cache: all cores of a node count as sharing one;
- nodes, but no list of their CPUs: these are of `UNKNOWN_NODE`, which Required accepts nowhere;
- no nodes at all: one node 0, and `tells_nodes` is False. A kernel without NUMA looks like this, but so does a sandbox
  on a machine of many nodes; whoever needs certainty has to ask the kernel otherwise (`host.pinning` does).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Final

from hetero_api.cpu_list import parse_cpu_list

SYSFS_ROOT: Final = Path("/sys/devices/system")
PROC_ROOT: Final = Path("/proc")
PCI_ROOT: Final = Path("/sys/bus/pci/devices")
UNKNOWN_NODE: Final = -1
"""As the kernel numbers it: no node, or none that it tells."""
_OWN_DISTANCE: Final = 10
_OTHER_DISTANCE: Final = 20
"""Distance that firmware reports where nothing is known: ACPI 6.5, section 5.2.17 (SLIT)."""
_NODE_FOLDER: Final = re.compile(r"node(\d+)")
_MEMS_ALLOWED: Final = re.compile(r"^Mems_allowed_list:[ \t]*([\d,-]+)$", re.MULTILINE)
_CPUS_ALLOWED: Final = re.compile(r"^Cpus_allowed_list:[ \t]*([\d,-]+)$", re.MULTILINE)
_MEM_TOTAL: Final = re.compile(r"\bMemTotal:\s*(\d+) kB")


@dataclass(frozen=True, slots=True)
class LogicalCore:
    """One online hardware thread: a logical CPU in the kernel's words."""

    number: int
    node: int
    """NUMA node, or UNKNOWN_NODE."""
    physical: int
    """The lowest number among the threads of its physical core: alike for these, and for no other."""
    cache: int = 0
    """The lowest number among the CPUs that share its third-level cache; 0 where it is unknown."""


@dataclass(frozen=True, slots=True)
class NumaNode:
    """One online node. It may have CPUs only (no module in its slots) or memory only (CXL, HBM in flat mode)."""

    number: int
    cpus: tuple[int, ...] | None
    """Online CPUs, ascending; None where they are unknown."""
    memory_bytes: int | None
    """Memory that may be used; None where it is unknown."""
    distances: Mapping[int, int] = field(default_factory=dict)
    """By node, itself included; 10 is its own memory, 20 twice as slow."""

    def distance(self, other: int) -> int:
        """Return the distance to another node; firmware's default where it is unknown."""
        return self.distances.get(other, _OWN_DISTANCE if other == self.number else _OTHER_DISTANCE)

    @property
    def is_memory_only(self) -> bool:
        """True if it has no CPUs."""
        return self.cpus == () and bool(self.memory_bytes)


@dataclass(frozen=True, slots=True)
class CpuTopology:
    """All online CPUs and nodes, by number."""

    cpus: Mapping[int, LogicalCore]
    numa: Mapping[int, NumaNode]
    tells_nodes: bool = True
    """True if the kernel names NUMA nodes at all; see the module."""

    @classmethod
    def read(cls, root: Path = SYSFS_ROOT, *, known: Iterable[int] | None = None) -> CpuTopology:
        """Never raises for what is hidden. `known`: online CPUs where no file lists them; default: the caller's own."""
        online = _read_list(root / "cpu" / "online")
        if not online:
            online = tuple(sorted(_affinity() if known is None else known))
        numa = {node.number: node for node in _read_nodes(root / "node")}
        node_of = {cpu: node.number for node in numa.values() for cpu in node.cpus or ()}
        absent = UNKNOWN_NODE if numa else 0
        cpus = {n: _read_cpu(root / "cpu", n, node=node_of.get(n, absent)) for n in online}
        return cls(cpus, numa or {0: NumaNode(0, online, None)}, tells_nodes=bool(numa))

    @classmethod
    def of_this_process(
        cls, root: Path = SYSFS_ROOT, *, allowed: Iterable[int] | None = None, proc_root: Path = PROC_ROOT
    ) -> CpuTopology:
        """Return the part of the machine that the calling thread may use: its affinity's CPUs, its cpuset's memory.

        `allowed` replaces the affinity. Nodes whose memory the cpuset withholds have none.
        """
        allowed = frozenset(_affinity() if allowed is None else allowed)
        machine = cls.read(root, known=allowed)
        cpus = {number: cpu for number, cpu in machine.cpus.items() if number in allowed}
        mems = allowed_memory_nodes(proc_root)
        return replace(machine, cpus=cpus, numa={n: _withhold(node, mems) for n, node in machine.numa.items()})

    @property
    def nodes(self) -> tuple[int, ...]:
        """NUMA nodes that have online CPUs, ascending."""
        return self.nodes_of(self.cpus)

    @property
    def nodes_of_memory(self) -> tuple[int, ...]:
        """Nodes where a page can lie, ascending: all but those that are known to have no memory."""
        return tuple(sorted(n for n, node in self.numa.items() if node.memory_bytes is None or node.memory_bytes > 0))

    @property
    def memory_only_nodes(self) -> tuple[int, ...]:
        """Nodes with memory and no CPU, ascending."""
        return tuple(sorted(n for n, node in self.numa.items() if node.is_memory_only))

    @property
    def cores(self) -> tuple[LogicalCore, ...]:
        """All of `cpus`, ascending."""
        return tuple(self.cpus[number] for number in sorted(self.cpus))

    def nodes_of(self, numbers: Iterable[int]) -> tuple[int, ...]:
        """Return the NUMA nodes of the given online CPUs, ascending; UNKNOWN_NODE among them where one is unknown."""
        return tuple(sorted({self.cpus[number].node for number in numbers}))

    def one_per_core(self, numbers: Iterable[int]) -> tuple[int, ...]:
        """Return the lowest of the given online CPUs on each physical core, ascending."""
        first: dict[int, int] = {}
        for number in sorted(numbers):
            first.setdefault(self.cpus[number].physical, number)
        return tuple(sorted(first.values()))


def _affinity() -> Iterable[int]:
    """Return the CPUs that the calling thread may run on; all where the system tells of none, as macOS."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)


def pci_numa_node(address: str, *, root: Path = PCI_ROOT) -> int | None:
    """Return the node next to a PCI device such as "0000:3b:00.0" (either case); None where the machine does not
    tell.
    """
    text = read_text(root / address.lower() / "numa_node").strip()
    return int(text) if text.isdecimal() else None  # -1 where firmware names none


def allowed_memory_nodes(proc_root: Path = PROC_ROOT) -> frozenset[int] | None:
    """Nodes whose memory this process's cpuset lets it have; None where the kernel does not tell.

    The kubelet's Memory Manager narrows them with policy Static, `--cpuset-mems` of a container runtime does too.
    """
    return _allowed(_MEMS_ALLOWED, proc_root)


def allowed_cpus(proc_root: Path = PROC_ROOT) -> frozenset[int] | None:
    """CPUs that this process may run on; None where the kernel does not tell."""
    return _allowed(_CPUS_ALLOWED, proc_root)


def _allowed(line: re.Pattern[str], proc_root: Path) -> frozenset[int] | None:
    match = line.search(read_text(proc_root / "self" / "status"))
    return frozenset(parse_cpu_list(match[1])) if match else None


def _withhold(node: NumaNode, mems: frozenset[int] | None) -> NumaNode:
    return node if mems is None or node.number in mems else replace(node, memory_bytes=0)


def _read_nodes(folder: Path) -> list[NumaNode]:
    """Online nodes, ascending: an offline one has no folder."""
    numbers = sorted(int(match[1]) for name in list_names(folder) if (match := _NODE_FOLDER.fullmatch(name)))
    nodes = []
    for number in numbers:
        path = folder / f"node{number}"
        distances = dict(zip(numbers, _read_numbers(path / "distance"), strict=False))
        nodes.append(NumaNode(number, _read_list(path / "cpulist"), _read_memory_bytes(path / "meminfo"), distances))
    return nodes


def _read_memory_bytes(path: Path) -> int | None:
    match = _MEM_TOTAL.search(read_text(path))
    return int(match[1]) * 1024 if match else None


def _read_cpu(folder: Path, number: int, *, node: int) -> LogicalCore:
    topology = folder / f"cpu{number}" / "topology"
    # The second is the name before Linux 5.5.
    siblings = _read_list(topology / "core_cpus_list") or _read_list(topology / "thread_siblings_list") or ()
    sharers = _read_list(folder / f"cpu{number}" / "cache" / "index3" / "shared_cpu_list") or ()
    return LogicalCore(number, node, min((number, *siblings)), cache=min(sharers, default=0))


def _read_numbers(path: Path) -> list[int]:
    words = read_text(path).split()
    return [int(word) for word in words] if all(word.isdecimal() for word in words) else []


def _read_list(path: Path) -> tuple[int, ...] | None:
    """Return the numbers of a list; () for an empty one, which is a line too; None for one that cannot be read."""
    text = read_text(path)
    try:
        return parse_cpu_list(text) if text.endswith("\n") else None
    except ValueError:  # A sandbox that answers with something else tells as little as one that hides it.
        return None


def list_names(folder: Path) -> list[str]:
    """Return the names in a folder; [] if it cannot be read."""
    try:
        return os.listdir(folder)
    except OSError:
        return []


def read_text(path: Path) -> str:
    """Return the text of a file of the kernel's; "" if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


class NumaPolicy(StrEnum):
    """Strictness with which a rank is bound to a NUMA node: the words of spec.pools[].cpu.numa.policy.

    It stands here, without pydantic, for ranks, which read no manifest.
    """

    REQUIRED = "Required"
    BEST_EFFORT = "BestEffort"
    NONE = "None"
