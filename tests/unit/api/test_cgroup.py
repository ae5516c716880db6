"""Limits of cgroups of both versions, on machines and in containers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from hetero_api.host.cgroup import CgroupLimits, cgroup_limits
from hetero_api.host.memory import total_memory_bytes

pytestmark = pytest.mark.unit

UNLIMITED_1 = "9223372036854771712\n"
"""What version 1 says without a limit."""


def write(root: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "limits"),
    [
        ({}, CgroupLimits(None, None)),
        ({"cpu.max": "max 100000\n", "memory.max": "max\n"}, CgroupLimits(None, None)),
        ({"cpu.max": "250000 100000\n", "memory.max": "1048576\n"}, CgroupLimits(2.5, 1048576)),
        ({"cpu.max": "nonsense\n", "memory.max": "\n"}, CgroupLimits(None, None)),
        (
            {"a.slice/cpu.max": "200000 100000\n", "a.slice/b.scope/cpu.max": "max 100000\n",
             "a.slice/b.scope/memory.max": "4096\n", "a.slice/memory.max": "8192\n"},
            CgroupLimits(2.0, 4096),
        ),
        ({"other.slice/memory.max": "1\n"}, CgroupLimits(None, None)),
    ],
)  # fmt: skip
def test_the_least_limit_up_to_the_root_counts(files: dict[str, str], limits: CgroupLimits, tmp_path: Path) -> None:
    root = write(tmp_path, {f"sys/fs/cgroup/{name}": text for name, text in files.items()})
    write(root, {"proc/self/cgroup": "0::/a.slice/b.scope\n"})
    assert cgroup_limits(root) == limits


def test_version_1_has_a_path_for_each_controller(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/docker/x\n1:cpu,cpuacct:/docker\n0::/\n",
            "sys/fs/cgroup/cpu/docker/cpu.cfs_quota_us": "150000\n",
            "sys/fs/cgroup/cpu/docker/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/memory/docker/x/memory.limit_in_bytes": "65536\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": UNLIMITED_1,
        },
    )
    assert cgroup_limits(root) == CgroupLimits(1.5, 65536)


def test_a_container_that_is_told_the_hosts_path_has_its_own_limit(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "4:memory:/kubepods/pod1/c1\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "32768\n",
    }
    assert cgroup_limits(write(tmp_path, files)).memory_bytes == 32768


@pytest.mark.parametrize(("limit", "usable"), [("max\n", 4096), ("1024\n", 1024), ("1000000000\n", 4096)])
def test_usable_memory_is_the_machines_without_huge_pages_or_the_limit(limit: str, usable: int, tmp_path: Path) -> None:
    meminfo = "MemTotal: 6 kB\nHugePages_Total: 1\nHugetlb: 2 kB\n"
    root = write(tmp_path, {"proc/meminfo": meminfo, "sys/fs/cgroup/memory.max": limit})
    assert total_memory_bytes(root) == usable
