"""The machine's logical CPUs, physical cores and NUMA nodes, read from sysfs.

Only online CPUs appear. A machine whose kernel tells no topology (some sandboxes) has one core a CPU; one whose
kernel knows no NUMA has the single node 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hetero_api.cpu_list import parse_cpu_list

SYSFS_ROOT: Final = Path("/sys/devices/system")


@dataclass(frozen=True, slots=True)
class LogicalCpu:
    """One hardware thread. `core` is the lowest CPU number among the threads of its physical core."""

    number: int
    core: int
    node: int


@dataclass(frozen=True, slots=True)
class CpuTopology:
    """All online CPUs by number."""

    cpus: Mapping[int, LogicalCpu]

    @property
    def nodes(self) -> tuple[int, ...]:
        """NUMA nodes that have online CPUs, ascending."""
        return self.nodes_of(self.cpus)

    def nodes_of(self, numbers: Iterable[int]) -> tuple[int, ...]:
        """NUMA nodes of the given online CPUs, ascending."""
        return tuple(sorted({self.cpus[number].node for number in numbers}))

    def one_per_core(self, numbers: Iterable[int]) -> tuple[int, ...]:
        """The lowest of the given online CPUs on each physical core, ascending."""
        first: dict[tuple[int, int], int] = {}
        for number in sorted(numbers):
            cpu = self.cpus[number]
            first.setdefault((cpu.node, cpu.core), number)
        return tuple(sorted(first.values()))

    @classmethod
    def read(cls, root: Path = SYSFS_ROOT) -> CpuTopology:
        """Raises OSError when not even the list of online CPUs can be read."""
        node_of = _nodes_by_cpu(root / "node")
        online = parse_cpu_list((root / "cpu" / "online").read_text())
        return cls({n: LogicalCpu(n, _core_of(root / "cpu", n), node_of.get(n, 0)) for n in online})


def _nodes_by_cpu(folder: Path) -> dict[int, int]:
    node_of: dict[int, int] = {}
    for cpulist in folder.glob("node[0-9]*/cpulist"):
        node = int(cpulist.parent.name.removeprefix("node"))
        node_of.update(dict.fromkeys(parse_cpu_list(cpulist.read_text()), node))
    return node_of


def _core_of(folder: Path, number: int) -> int:
    topology = folder / f"cpu{number}" / "topology"
    for name in ("core_cpus_list", "thread_siblings_list"):  # the second is the name before Linux 5.5
        path = topology / name
        if path.exists():
            return min(parse_cpu_list(path.read_text()), default=number)
    return number
