"""Every check of a machine, for a machine that lacks nothing and for one that lacks what the check is about."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from hetero_client.doctor import machine_checks
from hetero_client.doctor.findings import Finding, Grade
from hetero_client.doctor.machine import Machine, read_machine
from hetero_client.doctor.machine_checks import MACHINE_CHECKS, check_machine
from tests.support.machine_trees import LIMITS, MOUNTS, write_machine

pytestmark = pytest.mark.unit

CPU = "sys/devices/system/cpu"
STATUS = "Cpus_allowed_list:\t{cpus}\nMems_allowed_list:\t{mems}\n"
DRIVER = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.124.06  Wed Feb 26 03:12:20 UTC 2025\n"
Check = Callable[[Machine], Finding]


def find(check: Check, root: Path, changes: dict[str, str | None], *, machine: str = "two_sockets_smt") -> Finding:
    return check(read_machine({}, root=write_machine(root, changes, machine=machine)))


def test_a_good_machine_passes_every_check(tmp_path: Path) -> None:
    findings = check_machine(read_machine({}, root=write_machine(tmp_path)))
    assert len(findings) == len(MACHINE_CHECKS) == len({finding.check for finding in findings})
    assert [finding for finding in findings if finding.grade is not Grade.OK] == []
    assert {finding.cost + finding.fix for finding in findings} == {""}


def test_a_machine_that_tells_next_to_nothing_is_not_blamed_for_it(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 16777216 kB\n")
    findings = check_machine(read_machine({}, root=tmp_path))
    assert {finding.grade for finding in findings} == {Grade.OK}
    assert sum("not told" in finding.seen for finding in findings) >= 6


SIBLINGS = ("core_cpus_list", "thread_siblings_list")
SLICE = {"proc/self/cgroup": "0::/user.slice/session.scope\n"}
CASES: list[tuple[Check, dict[str, str | None], Grade, str]] = [
    (machine_checks.check_memory, {"sys/fs/cgroup/memory.max": "268435456\n"}, Grade.FAIL, "0.2 GiB of 256.0 GiB"),
    (
        machine_checks.check_memory, {**SLICE, "sys/fs/cgroup/user.slice/memory.max": "8589934592\n"}, Grade.OK,
        "8.0 GiB of 256.0 GiB, by the limit of a cgroup or reserved huge pages",
    ),
    (
        machine_checks.check_cores, {"proc/self/status": STATUS.format(cpus="0-3", mems="0-1")}, Grade.WARN,
        "4 physical cores: CPUs 0-3 of 32; CPUs 16-19 are threads of the same cores and belong to others",
    ),
    (
        machine_checks.check_cores, {"proc/self/status": STATUS.format(cpus="0-3,16-19", mems="0-1")}, Grade.OK,
        "4 physical cores: CPUs 0-3,16-19 of 32",
    ),
    (machine_checks.check_quota, {"sys/fs/cgroup/cpu.max": "800000 100000\n"}, Grade.WARN, "8 CPUs of time, on 32"),
    (machine_checks.check_quota, {"sys/fs/cgroup/cpu.max": "3200000 100000\n"}, Grade.OK, "32 CPUs, for 32"),
    (machine_checks.check_quota, {"sys/fs/cgroup/cpu.max": "max 100000\n"}, Grade.OK, "none"),
    (
        machine_checks.check_quota,
        {"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "150000\n", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n"},
        Grade.WARN, "1.5 CPUs of time, on 32 CPUs",
    ),
    (
        machine_checks.check_smt,
        {f"{CPU}/cpu{n}/topology/{name}": None for n in range(32) for name in SIBLINGS},
        Grade.WARN, "does not tell which CPUs are of one core",
    ),
    (machine_checks.check_governor, {f"{CPU}/cpu3/cpufreq/scaling_governor": "powersave\n"}, Grade.WARN, "powersave"),
    (
        machine_checks.check_numa, {"proc/self/status": STATUS.format(cpus="0-31", mems="0")}, Grade.WARN,
        "2 with CPUs, 1 with memory; no memory for the CPUs of node 1",
    ),
    (machine_checks.check_balancing, {"proc/sys/kernel/numa_balancing": "1\n"}, Grade.WARN, "on"),
    (
        machine_checks.check_huge_pages, {"sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]\n"},
        Grade.WARN, "never",
    ),
    (
        machine_checks.check_reserved_pages, {"sys/kernel/mm/hugepages/hugepages-1048576kB/nr_hugepages": "64\n"},
        Grade.WARN, "64.0 GiB of 256.0 GiB",
    ),
    (
        machine_checks.check_locked_memory,
        {
            "sys/class/infiniband/mlx5_0/node_type": "1: CA\n",
            "proc/self/limits": LIMITS.format(files=65536, locked=8 << 20),
        },
        Grade.WARN, "8 MiB, with an RDMA device",
    ),
    (
        machine_checks.check_locked_memory, {"proc/self/limits": LIMITS.format(files=65536, locked=8 << 20)}, Grade.OK,
        "nothing here locks memory",
    ),
    (
        machine_checks.check_shared_memory, {"proc/self/mountinfo": MOUNTS.format(options=",size=65536k")}, Grade.WARN,
        "64 MiB",
    ),
    (
        machine_checks.check_shared_memory, {"proc/self/mountinfo": MOUNTS.format(options=",size=8m")}, Grade.FAIL,
        "8 MiB",
    ),
    (machine_checks.check_shared_memory, {"proc/self/mountinfo": MOUNTS.format(options="")}, Grade.OK, "128.0 GiB"),
    (
        machine_checks.check_shared_memory, {"proc/self/mountinfo": "22 27 0:21 / /proc rw - proc proc rw\n"},
        Grade.WARN, "nothing is mounted there",
    ),
    (
        machine_checks.check_open_files, {"proc/self/limits": LIMITS.format(files=1024, locked="unlimited")},
        Grade.WARN, "1,024",
    ),
    (machine_checks.check_driver, {"proc/driver/nvidia/version": DRIVER}, Grade.WARN, "570.124.06, and no device"),
    (
        machine_checks.check_driver, {"proc/driver/nvidia/version": DRIVER, "dev/nvidia0": ""}, Grade.OK,
        "570.124.06, 1 devices (GPU)",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("check", "changes", "grade", "seen"), CASES)
def test_a_check_finds_what_is_missing(
    check: Check, changes: dict[str, str | None], grade: Grade, seen: str, tmp_path: Path
) -> None:
    finding = find(check, tmp_path, changes)
    assert finding.grade is grade
    assert seen in finding.seen
    assert bool(finding.cost) == bool(finding.fix) == (grade is not Grade.OK)
    assert "\n" not in finding.fix


def test_every_check_can_find_something(tmp_path: Path) -> None:
    assert {check for check, _, grade, _ in CASES if grade is not Grade.OK} == set(MACHINE_CHECKS)


def test_hidden_numa_nodes_are_told_apart_from_a_machine_of_one(tmp_path: Path) -> None:
    root = write_machine(tmp_path)
    shutil.rmtree(root / "sys/devices/system/node")
    assert machine_checks.check_numa(read_machine({}, root=root)).grade is Grade.WARN
    (root / "proc/self/numa_maps").unlink()
    assert machine_checks.check_numa(read_machine({}, root=root)).grade is Grade.OK


def test_balancing_on_one_node_costs_nothing(tmp_path: Path) -> None:
    changes: dict[str, str | None] = {"proc/sys/kernel/numa_balancing": "1\n"}
    finding = find(machine_checks.check_balancing, tmp_path, changes, machine="vm_2_cpus")
    assert (finding.grade, finding.seen) == (Grade.OK, "on, with one node")
