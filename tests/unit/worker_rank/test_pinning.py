"""Binding to cores and memory, as far as the kernel lets."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetero_api.host.topology import CpuTopology, LogicalCore, NumaNode, NumaPolicy
from hetero_worker.errors import PinningError
from hetero_worker.host.numa import MPOL_BIND, MPOL_PREFERRED, MemoryPolicy
from hetero_worker.host.pinning import PinningReport, PinningRequest, pin
from tests.support.played_kernel import PlayedKernel
from tests.support.sysfs_trees import write_tree

pytestmark = pytest.mark.unit

REQUIRED, BEST_EFFORT, NONE = NumaPolicy.REQUIRED, NumaPolicy.BEST_EFFORT, NumaPolicy.NONE
GIB = 2**30


def bind(
    machine: str,
    kernel: PlayedKernel,
    folder: Path,
    *,
    cores: tuple[int, ...],
    threads: int | None = None,
    policy: NumaPolicy = REQUIRED,
    communication: tuple[int, ...] = (),
    memory_bytes: int = 0,
    hidden: tuple[str, ...] = (),
) -> PinningReport:
    topology = CpuTopology.read(write_tree(machine, folder, hidden=hidden), known=kernel.affinity())
    request = PinningRequest(cores, threads or len(cores), policy, communication, memory_bytes, pool="cpu")
    return pin(request, topology=topology, kernel=kernel)


def test_binds_to_given_cores_of_one_node_and_proves_it(tmp_path: Path) -> None:
    kernel = PlayedKernel(range(32), pages={1: 256})

    report = bind("two_sockets_smt", kernel, tmp_path, cores=(8, 9, 10), communication=(11, 27, 99))

    assert report == PinningReport(
        pinned=True, cpus=(8, 9, 10), numa_nodes=(1,), num_threads=3, memory="bound", reason="", communication=(11, 27),
        allowed=32,
    )  # fmt: skip
    assert kernel.mask == {8, 9, 10}
    assert kernel.policy == MemoryPolicy(MPOL_BIND, (1,))


def test_best_effort_prefers_the_node_but_leaves_other_memory_usable(tmp_path: Path) -> None:
    kernel = PlayedKernel(range(32), pages={0: 256})

    report = bind("two_sockets_smt", kernel, tmp_path, cores=(0, 1), policy=BEST_EFFORT)

    assert (report.pinned, report.memory) == (True, "preferred")
    assert kernel.policy == MemoryPolicy(MPOL_PREFERRED, (0,))


def test_threads_that_do_not_compute_stay_where_they_were_when_no_cores_are_for_them(tmp_path: Path) -> None:
    report = bind("laptop_hybrid", PlayedKernel(range(6)), tmp_path, cores=(0, 2))
    assert report.communication == (0, 1, 2, 3, 4, 5)


def test_siblings_of_a_core_get_one_thread(tmp_path: Path) -> None:
    report = bind("laptop_hybrid", PlayedKernel(range(8)), tmp_path, cores=(0, 1, 2, 3), threads=2)

    assert (report.pinned, report.cpus, report.num_threads) == (True, (0, 2), 2)


def test_more_threads_than_physical_cores_is_said_and_not_done(tmp_path: Path) -> None:
    kernel = PlayedKernel(range(8))

    report = bind("laptop_hybrid", kernel, tmp_path, cores=(0, 1), threads=2, policy=BEST_EFFORT)

    assert (report.pinned, report.cpus, report.num_threads) == (False, (0,), 1)
    assert "2 threads need as many physical cores" in report.reason


def test_hole_in_the_cpuset_is_left_out_and_said(tmp_path: Path) -> None:
    kernel = PlayedKernel({0, 2, 3}, pages={0: 256})

    report = bind("arm64_two_sockets", kernel, tmp_path, cores=(0, 1, 2), policy=BEST_EFFORT)

    assert (report.pinned, report.cpus) == (False, (0, 2))
    assert "CPUs 1 are outside this process's cpuset or affinity (0,2-3)" in report.reason


def test_offline_cpu_is_left_out_and_said(tmp_path: Path) -> None:
    kernel = PlayedKernel({0, 2, 3, 4, 5, 7}, pages={0: 256})

    report = bind("two_sockets_old_kernel", kernel, tmp_path, cores=(0, 6), policy=BEST_EFFORT)

    assert (report.pinned, report.cpus) == (False, (0,))
    assert "CPUs 6 are not online" in report.reason


def test_memory_falls_back_to_first_touch_where_the_policy_is_forbidden(tmp_path: Path) -> None:
    kernel = PlayedKernel(range(32), pages={1: 256}, forbids_policy=True)

    report = bind("two_sockets_smt", kernel, tmp_path, cores=(8, 9))

    assert report.pinned
    assert report.memory == "first touch (set_mempolicy: Operation not permitted)"


def kernel_of(**options: object) -> PlayedKernel:
    return PlayedKernel(**{"allowed": range(32), "pages": {1: 1}} | options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kernel", "cores", "reason"),
    [
        (kernel_of(pages={0: 1, 1: 255}), (8, 9), "fresh memory lies on NUMA nodes 0, not 1"),
        (kernel_of(pages=None), (8, 9), "nothing is proven"),
        (kernel_of(pages={}), (8, 9), "nothing is proven"),
        (kernel_of(ignores_affinity=True), (8, 9), "bound to CPUs 0-31, not 8-9"),
        (kernel_of(ignores_policy=True), (8, 9), "the kernel has memory policy 0 of NUMA nodes "),
        (kernel_of(memory_nodes={0}), (8, 9), "cpuset allows memory of NUMA nodes 0 only, not of 1"),
        (kernel_of(), (7, 8), "on NUMA nodes 0-1, not on one"),
        (kernel_of(allowed=range(4)), (8, 9), "outside this process's cpuset"),
        (kernel_of(), (0, 99), "CPUs 99 are not online"),
        (kernel_of(), (), "no cores were given"),
    ],
)
def test_required_fails_closed_and_best_effort_says_why(
    kernel: PlayedKernel, cores: tuple[int, ...], reason: str, tmp_path: Path
) -> None:
    before = kernel.mask
    with pytest.raises(PinningError) as caught:
        bind("two_sockets_smt", kernel, tmp_path / "required", cores=cores, threads=2)
    kernel.mask = before
    report = bind("two_sockets_smt", kernel, tmp_path / "best", cores=cores, threads=2, policy=BEST_EFFORT)

    assert reason in str(caught.value)
    assert not report.pinned
    assert reason in report.reason


def test_required_refuses_more_memory_than_the_node_has(tmp_path: Path) -> None:
    with pytest.raises(PinningError, match=r"spec\.pools\[cpu\]\.cpu\.memoryPerRank is 48\.0 GiB, and NUMA node 0 has"):
        bind("xeon_max_flat", kernel_of(), tmp_path, cores=(0, 1), memory_bytes=48 * GIB)


def test_best_effort_takes_the_rest_of_its_memory_from_elsewhere(tmp_path: Path) -> None:
    kernel = kernel_of(pages={0: 1})
    report = bind("xeon_max_flat", kernel, tmp_path, cores=(0, 1), memory_bytes=48 * GIB, policy=BEST_EFFORT)
    assert report.pinned


def test_a_node_without_memory_is_no_place_to_bind_memory_to(tmp_path: Path) -> None:
    with pytest.raises(PinningError, match="NUMA node 1 has no memory"):
        bind("memoryless_node", kernel_of(), tmp_path, cores=(4, 5))


def test_memory_of_a_node_without_cpus_is_other_memory_too() -> None:
    """One socket and a CXL expander."""
    nodes = {0: NumaNode(0, (0, 1), 64 * GIB), 1: NumaNode(1, (), 64 * GIB)}
    topology = CpuTopology({cpu: LogicalCore(cpu, 0, cpu) for cpu in (0, 1)}, nodes)
    kernel = kernel_of(allowed=range(2), pages={1: 256})

    report = pin(PinningRequest((0, 1), 2, BEST_EFFORT), topology=topology, kernel=kernel)

    assert "fresh memory lies on NUMA nodes 1, not 0" in report.reason


def test_hidden_nodes_prove_nothing_where_the_kernel_has_numa(tmp_path: Path) -> None:
    kernel = kernel_of(pages={0: 256})
    report = bind("two_sockets_smt", kernel, tmp_path, cores=(8, 9), policy=BEST_EFFORT, hidden=("node/*",))
    assert (report.pinned, report.cpus) == (False, (8, 9))
    assert "the machine's NUMA nodes are hidden" in report.reason


def test_a_kernel_without_numa_has_one_node(tmp_path: Path) -> None:
    kernel = kernel_of(pages=None, has_numa=False, forbids_policy=True)
    report = bind("two_sockets_smt", kernel, tmp_path, cores=(8, 9), hidden=("node/*",))
    assert (report.pinned, report.numa_nodes) == (True, (0,))


def test_a_core_of_an_untold_node_is_never_pinned(tmp_path: Path) -> None:
    kernel = kernel_of(pages={1: 256})
    report = bind("two_sockets_smt", kernel, tmp_path, cores=(8, 9), policy=BEST_EFFORT, hidden=("node/node1/cpulist",))
    assert (report.pinned, report.numa_nodes, report.memory) == (False, (), "first touch")
    assert "the NUMA node of CPUs 8-9 is not known" in report.reason


def test_policy_none_binds_nothing(tmp_path: Path) -> None:
    kernel = PlayedKernel(range(4))

    report = bind("laptop_hybrid", kernel, tmp_path, cores=(0, 1), policy=NONE)

    assert kernel.mask == frozenset(range(4))
    assert (report.pinned, report.cpus, report.num_threads) == (False, (), 2)
