"""Folders that look like /sys/devices/system of several machines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hetero_api.cpu_list import format_cpu_list


@dataclass(frozen=True, slots=True)
class Machine:
    """CPUs by node; `siblings` lists the hardware threads of each physical core that has more than one."""

    nodes: Mapping[int, tuple[int, ...]]
    siblings: tuple[tuple[int, ...], ...] = ()
    offline: frozenset[int] = field(default_factory=frozenset)
    siblings_file: str = "core_cpus_list"

    def write(self, root: Path) -> Path:
        """Lay the tree down as the kernel would: an offline CPU has a folder without a topology."""
        cpus = sorted(cpu for members in self.nodes.values() for cpu in members)
        _write(root / "cpu" / "online", format_cpu_list(set(cpus) - self.offline))
        _write(root / "cpu" / "present", format_cpu_list(cpus))
        for cpu in cpus:
            (root / "cpu" / f"cpu{cpu}").mkdir(parents=True)
            if cpu not in self.offline:
                core = next((core for core in self.siblings if cpu in core), (cpu,))
                threads = format_cpu_list(set(core) - self.offline)
                _write(root / "cpu" / f"cpu{cpu}" / "topology" / self.siblings_file, threads)
        for node, members in self.nodes.items():
            _write(root / "node" / f"node{node}" / "cpulist", format_cpu_list(set(members) - self.offline))
        return root


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


LAPTOP = Machine({0: (0, 1, 2, 3)}, siblings=((0, 1), (2, 3)))
"""One node, SMT on, siblings adjacent."""
VM_WITHOUT_SMT = Machine({0: (0, 1)})
TWO_SOCKETS_SMT = Machine(
    {0: (0, 1, 2, 3, 8, 9, 10, 11), 1: (4, 5, 6, 7, 12, 13, 14, 15)},
    siblings=tuple((cpu, cpu + 8) for cpu in range(8)),
)
"""Two nodes, SMT on, siblings in the upper half: the usual server."""
FOUR_NODES_SMT_OFF = Machine({node: tuple(range(4 * node, 4 * node + 4)) for node in range(4)})
OFFLINE_CPUS = Machine(
    {0: (0, 1, 2, 3), 1: (4, 5, 6, 7)}, offline=frozenset({1, 4}), siblings_file="thread_siblings_list"
)
"""Two nodes, two CPUs off, an older kernel's file names."""
