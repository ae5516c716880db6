"""Roots with /proc, /sys and /dev of a machine that lacks nothing: two sockets of eight cores, two threads a core."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tests.support.sysfs_trees import write_tree

LIMITS: Final = """Limit                     Soft Limit           Hard Limit           Units
Max open files            {files}                1048576              files
Max locked memory         {locked}              {locked}              bytes
"""
MOUNTS: Final = """22 27 0:21 / /proc rw,relatime - proc proc rw
25 24 0:23 / /dev/shm rw,nosuid,nodev - tmpfs tmpfs rw{options}
"""
FILES: Final[Mapping[str, str]] = {
    "proc/meminfo": "MemTotal:       268435456 kB\nMemFree:        200000000 kB\n",
    "proc/self/status": "Name:\tpython\nCpus_allowed_list:\t0-31\nMems_allowed_list:\t0-1\n",
    "proc/self/limits": LIMITS.format(files=65536, locked="unlimited"),
    "proc/self/mountinfo": MOUNTS.format(options=",size=134217728k"),
    "proc/self/numa_maps": "55d0 default anon=3 dirty=3 N0=3 kernelpagesize_kB=4\n",
    "proc/self/cgroup": "0::/\n",
    "proc/sys/kernel/numa_balancing": "0\n",
    "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
    "sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages": "0\n",
    "sys/kernel/mm/hugepages/hugepages-1048576kB/nr_hugepages": "0\n",
}
MACHINE: Final = "two_sockets_smt"
NUM_CPUS: Final = 32


def write_machine(root: Path, changes: Mapping[str, str | None] | None = None, *, machine: str = MACHINE) -> Path:
    """Lay the machine down under `root` with other contents of some files, None for a file that is not there."""
    write_tree(machine, root / "sys/devices/system")
    governors = {f"sys/devices/system/cpu/cpu{n}/cpufreq/scaling_governor": "performance\n" for n in range(NUM_CPUS)}
    for name, content in {**FILES, **governors, **(changes or {})}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_text(content)
    return root
