from __future__ import annotations

import errno
from collections.abc import Iterable
from pathlib import Path

import pytest

from hetero_api.spec import NumaPolicy
from hetero_worker.errors import PinningError
from hetero_worker.platforms.numa import (
    MPOL_BIND,
    MPOL_PREFERRED,
    LinuxKernel,
    anonymous_bytes,
    local_memory_percent,
    parse_numa_maps,
)
from hetero_worker.platforms.pinning import PinningReport, PinningRequest, pin
from hetero_worker.platforms.topology import CpuTopology
from tests.support import sysfs_trees
from tests.support.sysfs_trees import Machine

pytestmark = pytest.mark.unit

REQUIRED, BEST_EFFORT, NONE = NumaPolicy.REQUIRED, NumaPolicy.BEST_EFFORT, NumaPolicy.NONE


class FakeKernel:
    """Obeys, except for what the test says it does not."""

    def __init__(
        self,
        allowed: Iterable[int],
        *,
        pages: dict[int, int] | None = None,
        forbids_policy: bool = False,
        ignores_affinity: bool = False,
    ) -> None:
        self.mask = frozenset(allowed)
        self.pages = pages
        self.forbids_policy = forbids_policy
        self.ignores_affinity = ignores_affinity
        self.policy: tuple[int, tuple[int, ...]] | None = None

    def affinity(self) -> frozenset[int]:
        return self.mask

    def set_affinity(self, cpus: Iterable[int]) -> None:
        if not self.ignores_affinity:
            self.mask = frozenset(cpus)

    def set_memory_policy(self, mode: int, nodes: Iterable[int]) -> None:
        if self.forbids_policy:
            raise OSError(errno.EPERM, "Operation not permitted")
        self.policy = (mode, tuple(nodes))

    def probe_pages(self) -> dict[int, int] | None:
        return self.pages


def bind(
    machine: Machine,
    kernel: FakeKernel,
    folder: Path,
    *,
    cores: tuple[int, ...],
    threads: int | None = None,
    policy: NumaPolicy = REQUIRED,
) -> PinningReport:
    topology = CpuTopology.read(machine.write(folder))
    request = PinningRequest(cores, threads or len(cores), policy)
    return pin(request, topology=topology, kernel=kernel)


def test_binds_to_given_cores_of_one_node_and_proves_it(tmp_path: Path) -> None:
    kernel = FakeKernel(range(16), pages={1: 256})

    report = bind(sysfs_trees.TWO_SOCKETS_SMT, kernel, tmp_path, cores=(4, 5, 6))

    assert report == PinningReport(
        pinned=True, cpus=(4, 5, 6), numa_nodes=(1,), num_threads=3, memory="bound", reason=""
    )
    assert kernel.mask == {4, 5, 6}
    assert kernel.policy == (MPOL_BIND, (1,))


def test_best_effort_prefers_the_node_but_leaves_other_memory_usable(tmp_path: Path) -> None:
    kernel = FakeKernel(range(16), pages={0: 256})

    report = bind(sysfs_trees.TWO_SOCKETS_SMT, kernel, tmp_path, cores=(0, 1), policy=BEST_EFFORT)

    assert (report.pinned, report.memory) == (True, "preferred")
    assert kernel.policy == (MPOL_PREFERRED, (0,))


def test_siblings_of_a_core_get_one_thread(tmp_path: Path) -> None:
    kernel = FakeKernel(range(4))

    report = bind(sysfs_trees.LAPTOP, kernel, tmp_path, cores=(0, 1, 2, 3), threads=2)

    assert (report.pinned, report.cpus, report.num_threads) == (True, (0, 2), 2)


def test_more_threads_than_physical_cores_is_said_and_not_done(tmp_path: Path) -> None:
    kernel = FakeKernel(range(4))

    report = bind(sysfs_trees.LAPTOP, kernel, tmp_path, cores=(0, 1), threads=2, policy=BEST_EFFORT)

    assert (report.pinned, report.cpus, report.num_threads) == (False, (0,), 1)
    assert "2 threads need as many physical cores" in report.reason


def test_hole_in_the_cpuset_is_left_out_and_said(tmp_path: Path) -> None:
    kernel = FakeKernel({0, 2, 3}, pages={0: 256})

    report = bind(sysfs_trees.FOUR_NODES_SMT_OFF, kernel, tmp_path, cores=(0, 1, 2), policy=BEST_EFFORT)

    assert (report.pinned, report.cpus) == (False, (0, 2))
    assert "CPUs 1 are outside this process's cpuset or affinity (0,2-3)" in report.reason


def test_offline_cpu_is_left_out_and_said(tmp_path: Path) -> None:
    kernel = FakeKernel({0, 2, 3, 5, 6, 7}, pages={0: 256})

    report = bind(sysfs_trees.OFFLINE_CPUS, kernel, tmp_path, cores=(0, 1), policy=BEST_EFFORT)

    assert (report.pinned, report.cpus) == (False, (0,))
    assert "CPUs 1 are not online" in report.reason


def test_memory_falls_back_to_first_touch_where_the_policy_is_forbidden(tmp_path: Path) -> None:
    kernel = FakeKernel(range(16), pages={1: 256}, forbids_policy=True)

    report = bind(sysfs_trees.TWO_SOCKETS_SMT, kernel, tmp_path, cores=(4, 5))

    assert report.pinned
    assert report.memory == "first touch (set_mempolicy: Operation not permitted)"


@pytest.mark.parametrize(
    ("kernel", "cores", "reason"),
    [
        (FakeKernel(range(16), pages={0: 1, 1: 255}), (4, 5), "fresh memory lies on NUMA nodes 0, not 1"),
        (FakeKernel(range(16), pages=None), (4, 5), "nothing is proven"),
        (FakeKernel(range(16), pages={}), (4, 5), "nothing is proven"),
        (FakeKernel(range(16), pages={1: 1}, ignores_affinity=True), (4, 5), "bound to CPUs 0-15, not 4-5"),
        (FakeKernel(range(16), pages={0: 1}), (3, 4), "on NUMA nodes 0-1, not on one"),
        (FakeKernel(range(4), pages={0: 1}), (4, 5), "outside this process's cpuset"),
        (FakeKernel(range(16), pages={0: 1}), (0, 99), "CPUs 99 are not online"),
        (FakeKernel(range(16), pages={0: 1}), (), "no cores were given"),
    ],
)
def test_required_fails_closed_and_best_effort_says_why(
    kernel: FakeKernel, cores: tuple[int, ...], reason: str, tmp_path: Path
) -> None:
    before = kernel.mask
    with pytest.raises(PinningError) as caught:
        bind(sysfs_trees.TWO_SOCKETS_SMT, kernel, tmp_path / "required", cores=cores, threads=2)
    kernel.mask = before
    report = bind(sysfs_trees.TWO_SOCKETS_SMT, kernel, tmp_path / "best", cores=cores, threads=2, policy=BEST_EFFORT)

    assert reason in str(caught.value)
    assert not report.pinned
    assert reason in report.reason


def test_policy_none_binds_nothing(tmp_path: Path) -> None:
    kernel = FakeKernel(range(4))

    report = bind(sysfs_trees.LAPTOP, kernel, tmp_path, cores=(0, 1), policy=NONE)

    assert kernel.mask == frozenset(range(4))
    assert (report.pinned, report.cpus, report.num_threads) == (False, (), 2)


NUMA_MAPS = """\
55a0c0000000 default file=/usr/bin/python3.11 mapped=2 N0=2 kernelpagesize_kB=4
7f6c00000000 bind:1 anon=3 dirty=3 N0=1 N1=2 kernelpagesize_kB=4
7f6c10000000 default file=/dev/zero\\040(deleted) dirty=256 N1=256 kernelpagesize_kB=4
7f6c20000000 default
"""


def test_numa_maps_tells_the_pages_of_the_mapping_asked_for() -> None:
    assert parse_numa_maps(NUMA_MAPS, 0x7F6C00000000) == {0: 1, 1: 2}
    assert parse_numa_maps(NUMA_MAPS, 0x7F6C10000000) == {1: 256}
    assert parse_numa_maps(NUMA_MAPS, 0x7F6C20000000) == {}
    assert parse_numa_maps(NUMA_MAPS, 0x1000) is None


MEMORY_MAPS = """\
55a0c0000000 default file=/usr/bin/python3.11 mapped=2 N0=2 kernelpagesize_kB=4
55a0c1000000 default file=/usr/bin/python3.11 anon=4 dirty=4 N0=4 kernelpagesize_kB=4
55a0c2000000 default heap anon=512 dirty=512 N0=512 kernelpagesize_kB=4
7f6c00000000 bind:1 anon=1024 dirty=1024 N0=512 N1=512 kernelpagesize_kB=4
7f6c10000000 default huge anon=2 dirty=2 N1=2 kernelpagesize_kB=2048
7f6c20000000 default file=/dev/shm/x dirty=256 N1=256 kernelpagesize_kB=4
7f6c30000000 default stack:1 anon=0
"""


def test_anonymous_memory_is_counted_in_bytes_of_its_pages() -> None:
    assert anonymous_bytes(MEMORY_MAPS) == {0: 1024 * 4096, 1: 512 * 4096 + 2 * 2**21}


@pytest.mark.parametrize(
    ("nodes", "percent"),
    [((0,), 40), ((1,), 60), ((0, 1), 100), ((7,), 0), ((), None)],
)
def test_share_of_the_ranks_own_nodes_is_rounded_down(
    nodes: tuple[int, ...], percent: int | None, tmp_path: Path
) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "numa_maps").write_text(MEMORY_MAPS)
    assert local_memory_percent(nodes, proc_root=tmp_path) == percent


def test_share_is_unknown_where_the_kernel_does_not_tell(tmp_path: Path) -> None:
    assert local_memory_percent((0,), proc_root=tmp_path) is None


def test_probe_tells_nothing_where_the_kernel_has_no_numa_maps(tmp_path: Path) -> None:
    assert LinuxKernel(proc_root=tmp_path).probe_pages() is None
