"""A binding looked at again: cpusets that change, memory that did not go where it should."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetero_api.contract import LEAST_LOCAL_MEMORY_PERCENT
from hetero_api.host.topology import CpuTopology, NumaPolicy
from hetero_worker.errors import PinningError
from hetero_worker.host.binding import CoreBinding, Unbound
from hetero_worker.host.numa import MemoryPolicy
from hetero_worker.host.pinning import PinningRequest
from tests.support.played_kernel import PlayedKernel
from tests.support.sysfs_trees import write_tree

pytestmark = pytest.mark.unit

REQUIRED, BEST_EFFORT = NumaPolicy.REQUIRED, NumaPolicy.BEST_EFFORT


def kernel_of_two_nodes() -> PlayedKernel:
    return PlayedKernel(range(32), pages={1: 256}, memory={0: 50, 1: 0}, memory_nodes={0, 1})


def bound(
    kernel: PlayedKernel, folder: Path, policy: NumaPolicy = REQUIRED, *, machine: str = "two_sockets_smt"
) -> CoreBinding:
    """To two cores of node 1."""
    topology = CpuTopology.read(write_tree(machine, folder))
    cores = (8, 9) if machine == "two_sockets_smt" else (4, 5)
    return CoreBinding.make(PinningRequest(cores, 2, policy, pool="cpu"), topology=topology, kernel=kernel)


def test_a_binding_that_holds_is_reported_as_it_was_made(tmp_path: Path) -> None:
    binding = bound(kernel_of_two_nodes(), tmp_path)
    made = binding.report
    assert binding.recheck() == made
    assert made.pinned
    binding.require()


@pytest.mark.parametrize(
    ("now", "cpus"), [({8}, (8,)), ({0, 1}, ()), (set(range(32)), ())], ids=["shrunk", "moved", "widened"]
)
def test_a_changed_cpuset_is_seen_said_and_refused_when_required(
    now: set[int], cpus: tuple[int, ...], tmp_path: Path
) -> None:
    kernel = kernel_of_two_nodes()
    binding = bound(kernel, tmp_path)
    kernel.mask = frozenset(now)

    report = binding.recheck()

    assert (report.pinned, report.cpus) == (False, cpus)
    assert "the cpuset changed after the rank was bound: it runs on CPUs" in report.reason
    with pytest.raises(PinningError, match="numa policy is Required, but the cpuset changed"):
        binding.require()


def test_best_effort_goes_on_with_a_changed_cpuset(tmp_path: Path) -> None:
    kernel = kernel_of_two_nodes()
    binding = bound(kernel, tmp_path, BEST_EFFORT)
    kernel.mask = frozenset({8})
    assert not binding.recheck().pinned
    binding.require()


def test_a_cpuset_that_is_as_before_again_is_pinned_again(tmp_path: Path) -> None:
    kernel = kernel_of_two_nodes()
    binding = bound(kernel, tmp_path)
    made, home = binding.report, kernel.mask
    kernel.mask = frozenset({8})
    binding.recheck()
    kernel.mask = home
    assert binding.recheck() == made


def test_memory_nodes_that_were_taken_away_are_seen(tmp_path: Path) -> None:
    kernel = kernel_of_two_nodes()
    binding = bound(kernel, tmp_path)
    kernel.mems = frozenset({0})
    assert "it allows memory of NUMA nodes 0 only" in binding.recheck().reason


def test_a_memory_policy_that_the_kernel_changed_is_seen(tmp_path: Path) -> None:
    kernel = kernel_of_two_nodes()
    binding = bound(kernel, tmp_path)
    kernel.policy = MemoryPolicy(2, (0,))
    assert "the memory policy changed from 2 of nodes '1' to 2 of nodes '0'" in binding.recheck().reason


def test_what_was_never_bound_has_nothing_to_check(tmp_path: Path) -> None:
    kernel = PlayedKernel(range(32), pages={0: 1})
    topology = CpuTopology.read(write_tree("two_sockets_smt", tmp_path))
    binding = CoreBinding.make(PinningRequest((), 2, NumaPolicy.NONE), topology=topology, kernel=kernel)
    made = binding.report
    kernel.mask = frozenset({3})
    assert binding.recheck() == made
    assert binding.check_memory() is None
    assert Unbound().recheck() is None
    assert Unbound().check_memory() is None


@pytest.mark.parametrize(
    ("cores", "communication", "within"),
    [((8, 9), (10, 26, 99), {10, 26}), ((8, 9), (), {8, 9}), ((), (10,), set(range(32)))],
    ids=["given", "none given", "not bound"],
)
def test_threads_are_kept_off_the_cores_that_compute_where_others_were_given(
    cores: tuple[int, ...], communication: tuple[int, ...], within: set[int], tmp_path: Path
) -> None:
    kernel = kernel_of_two_nodes()
    topology = CpuTopology.read(write_tree("two_sockets_smt", tmp_path))
    request = PinningRequest(cores, 2, BEST_EFFORT, communication)
    binding = CoreBinding.make(request, topology=topology, kernel=kernel)
    home = kernel.mask
    with binding.communicating():
        assert kernel.mask == within
    assert kernel.mask == home


def test_memory_from_before_the_binding_does_not_count(tmp_path: Path) -> None:
    kernel = kernel_of_two_nodes()
    binding = bound(kernel, tmp_path)
    kernel.memory = {0: 50, 1: 1000}
    assert binding.check_memory() == 100


def test_memory_on_the_wrong_node_is_refused_when_required_with_what_to_do(tmp_path: Path) -> None:
    kernel = kernel_of_two_nodes()
    binding = bound(kernel, tmp_path)
    kernel.memory = {0: 50 + 390, 1: 610}
    with pytest.raises(PinningError) as caught:
        binding.check_memory()
    for words in (
        "only 61 % of the rank's memory lies on its cores' NUMA node 1 (memory: bound)",
        "Lower spec.pools[cpu].cpu.memoryPerRank",
        "Memory Manager with policy Static",
    ):
        assert words in str(caught.value)


def test_the_least_share_is_enough(tmp_path: Path) -> None:
    kernel = kernel_of_two_nodes()
    binding = bound(kernel, tmp_path)
    kernel.memory = {0: 50 + 100 - LEAST_LOCAL_MEMORY_PERCENT, 1: LEAST_LOCAL_MEMORY_PERCENT}
    assert binding.check_memory() == LEAST_LOCAL_MEMORY_PERCENT


def test_best_effort_reports_the_share_whatever_it_is(tmp_path: Path) -> None:
    kernel = kernel_of_two_nodes()
    binding = bound(kernel, tmp_path, BEST_EFFORT)
    kernel.memory = {0: 50 + 90, 1: 10}
    assert binding.check_memory() == 10


def test_nodes_that_have_memory_only_are_named(tmp_path: Path) -> None:
    kernel = PlayedKernel(range(8), pages={1: 256}, memory={}, memory_nodes={0, 1, 2})
    binding = bound(kernel, tmp_path, machine="cxl_expander")
    kernel.memory = {1: 1, 2: 1}
    with pytest.raises(PinningError, match="NUMA nodes 2 have memory and no cores: Required does not use them"):
        binding.check_memory()


def test_a_kernel_that_tells_nothing_of_memory_is_not_held_against_the_rank(tmp_path: Path) -> None:
    kernel = kernel_of_two_nodes()
    binding = bound(kernel, tmp_path)
    kernel.memory = None
    assert binding.check_memory() is None
