"""What is read of /sys, on machines of many kinds and in containers that hide parts of it."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_api.host.topology import (
    SYSFS_ROOT,
    UNKNOWN_NODE,
    CpuTopology,
    LogicalCore,
    NumaNode,
    allowed_memory_nodes,
    pci_numa_node,
)
from tests.support.sysfs_trees import MACHINES, record, write_tree

pytestmark = pytest.mark.unit

GIB = 2**30


def read(machine: str, folder: Path, *hidden: str) -> CpuTopology:
    return CpuTopology.read(write_tree(machine, folder, hidden=hidden), known=(0, 1))


@pytest.mark.parametrize(
    ("machine", "nodes", "cores", "caches"),
    [
        ("vm_2_cpus", (0,), (0, 1), 1),
        ("laptop_hybrid", (0,), (0, 2, 4, 5, 6, 7), 1),
        ("two_sockets_smt", (0, 1), tuple(range(16)), 2),
        ("two_sockets_smt_off", (0, 1), tuple(range(16)), 2),
        ("two_sockets_old_kernel", (0, 1), (0, 2, 3, 4, 5, 7), 2),
        ("four_nodes_snc2", (0, 1, 2, 3), tuple(range(16)), 2),
        ("epyc_nps4", tuple(range(8)), tuple(range(32)), 16),
        ("xeon_max_flat", (0, 1, 2, 3), tuple(range(8)), 1),
        ("cxl_expander", (0, 1), tuple(range(8)), 2),
        ("memoryless_node", (0, 1), tuple(range(8)), 2),
        ("arm64_two_sockets", (0, 1), tuple(range(16)), 1),
    ],
)
def test_cores_nodes_and_caches_of_each_machine(
    machine: str, nodes: tuple[int, ...], cores: tuple[int, ...], caches: int, tmp_path: Path
) -> None:
    topology = read(machine, tmp_path)

    assert topology.nodes == nodes
    assert topology.one_per_core(topology.cpus) == cores
    assert len({cpu.cache for cpu in topology.cores}) == caches
    assert topology.tells_nodes


def test_every_listing_is_of_a_machine_above() -> None:
    assert len(MACHINES) == 11


@pytest.mark.parametrize(
    ("machine", "with_memory", "memory_only"),
    [
        ("two_sockets_smt", (0, 1), ()),
        ("cxl_expander", (0, 1, 2), (2,)),
        ("xeon_max_flat", tuple(range(8)), (4, 5, 6, 7)),
        ("memoryless_node", (0,), ()),
    ],
)
def test_nodes_may_have_memory_only_or_none(
    machine: str, with_memory: tuple[int, ...], memory_only: tuple[int, ...], tmp_path: Path
) -> None:
    topology = read(machine, tmp_path)

    assert topology.nodes_of_memory == with_memory
    assert topology.memory_only_nodes == memory_only


def test_a_node_is_read_with_its_cpus_memory_and_distances(tmp_path: Path) -> None:
    topology = read("cxl_expander", tmp_path)

    assert topology.numa[1] == NumaNode(1, (4, 5, 6, 7), 64 * GIB, {0: 21, 1: 10, 2: 24})
    assert topology.numa[2].distance(0) == 14
    assert NumaNode(3, None, None).distance(3) < NumaNode(3, None, None).distance(0)


def test_a_logical_core_is_read_with_its_siblings_and_cache(tmp_path: Path) -> None:
    topology = read("epyc_nps4", tmp_path)

    assert topology.cpus[39] == LogicalCore(39, node=1, physical=7, cache=6)


def test_an_offline_cpu_is_on_no_node_and_no_core(tmp_path: Path) -> None:
    topology = read("two_sockets_smt_off", tmp_path)

    assert sorted(topology.cpus) == list(range(16))
    assert topology.numa[1].cpus == tuple(range(8, 16))


def test_one_per_core_takes_the_sibling_that_was_given(tmp_path: Path) -> None:
    topology = read("two_sockets_smt", tmp_path)

    assert topology.one_per_core([16, 17, 1, 4]) == (1, 4, 16)
    assert topology.nodes_of([16, 1, 8]) == (0, 1)


def test_hidden_nodes_are_node_0_and_said_to_be_untold(tmp_path: Path) -> None:
    topology = read("two_sockets_smt", tmp_path, "node/*")

    assert (topology.nodes, topology.tells_nodes) == ((0,), False)
    assert topology.nodes_of_memory == (0,)


def test_a_node_whose_cpus_are_hidden_leaves_these_unknown(tmp_path: Path) -> None:
    topology = read("two_sockets_smt", tmp_path, "node/node1/cpulist")

    assert topology.nodes == (UNKNOWN_NODE, 0)
    assert topology.memory_only_nodes == ()


def test_hidden_siblings_make_every_thread_a_core(tmp_path: Path) -> None:
    topology = read("laptop_hybrid", tmp_path, "cpu/cpu*/topology/*")

    assert topology.one_per_core(topology.cpus) == tuple(range(8))


def test_without_a_list_of_online_cpus_those_that_the_process_may_use_are(tmp_path: Path) -> None:
    topology = read("two_sockets_smt", tmp_path, "cpu/online")

    assert sorted(topology.cpus) == [0, 1]
    assert topology.nodes == (0,)


def test_hidden_memory_sizes_count_as_memory(tmp_path: Path) -> None:
    assert read("two_sockets_smt", tmp_path, "node/node*/meminfo").nodes_of_memory == (0, 1)


SMALL = ("vm_2_cpus", "laptop_hybrid", "cxl_expander", "memoryless_node")
PATTERNS = (
    "*", "cpu/*", "cpu/cpu?/*", "cpu/*/topology/*", "cpu/*/core_cpus_list", "*/thread_siblings_list", "cpu/*/cache/*",
    "node/*", "node/node0/*", "node/*/cpulist", "node/*/distance", "node/*/meminfo", "cpu/online",
)  # fmt: skip
REPLACED = ("cpu/online", "cpu/cpu1/topology/core_cpus_list", "node/node0/distance", "node/node0/meminfo")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, CpuTopology]:
    return {name: CpuTopology.read(write_tree(name, tmp_path_factory.mktemp(name))) for name in SMALL}


@settings(max_examples=settings().max_examples // 4)  # each writes a tree of files
@given(
    machine=st.sampled_from(SMALL),
    hidden=st.sets(st.sampled_from(PATTERNS)),
    replaced=st.dictionaries(st.sampled_from(REPLACED), st.sampled_from(["", "\n", "?\n", "-1\n", "0-\n", "\u00e4\n"])),
)
def test_reading_never_raises_and_makes_nothing_up(
    machine: str, hidden: set[str], replaced: dict[str, str], whole: dict[str, CpuTopology]
) -> None:
    with TemporaryDirectory() as folder:
        root = write_tree(machine, Path(folder), hidden=hidden)
        for path, content in replaced.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(content)
        partial = CpuTopology.read(root, known=(0, 1))

    assert {0, 1} <= partial.cpus.keys() <= whole[machine].cpus.keys()
    for number, cpu in partial.cpus.items():
        seen = whole[machine].cpus[number]
        assert cpu.node in ((seen.node, UNKNOWN_NODE) if partial.tells_nodes else (0,))
        assert cpu.physical in (number, seen.physical)
    assert set(partial.memory_only_nodes) <= set(whole[machine].memory_only_nodes)


def test_a_process_sees_the_cpus_and_memory_that_its_cpuset_has(tmp_path: Path) -> None:
    root = write_tree("two_sockets_smt", tmp_path / "sys")
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "status").write_text("Mems_allowed:\t00000001\nMems_allowed_list:\t0\n")

    topology = CpuTopology.of_this_process(root, allowed=(3, 9, 12, 19, 99), proc_root=tmp_path / "proc")

    assert [core.number for core in topology.cores] == [3, 9, 12, 19]
    assert topology.one_per_core(topology.cpus) == (3, 9, 12)
    assert topology.nodes_of_memory == (0,)


@pytest.mark.parametrize(
    ("status", "nodes"), [("Mems_allowed_list:\t0-1,3\n", {0, 1, 3}), ("Cpus_allowed:\t3\n", None)]
)
def test_memory_nodes_of_the_cpuset_are_read_from_status(status: str, nodes: set[int] | None, tmp_path: Path) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "status").write_text(status)
    assert allowed_memory_nodes(tmp_path) == nodes


@pytest.mark.parametrize(("content", "node"), [("1\n", 1), ("0\n", 0), ("-1\n", None), (None, None)])
def test_the_node_of_a_pci_device_is_told_or_none(content: str | None, node: int | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "0000:3b:00.0").mkdir()
        (tmp_path / "0000:3b:00.0" / "numa_node").write_text(content)
    assert pci_numa_node("0000:3B:00.0", root=tmp_path) == node


def test_a_recorded_tree_is_read_as_the_machine_it_was_recorded_on(tmp_path: Path) -> None:
    listing = record(write_tree("epyc_nps4", tmp_path))
    assert "cpu/cpu39/topology/core_cpus_list = 7,39\n" in listing
    assert r"node/node1/meminfo = Node 1 MemTotal:       32768000 kB\nNode 1 MemFree:" in listing


def test_this_machine_can_be_read() -> None:
    if not (SYSFS_ROOT / "cpu" / "online").exists():
        pytest.skip("this sandbox has no /sys/devices/system/cpu")
    topology = CpuTopology.of_this_process()
    assert topology.cores
    assert topology.nodes_of_memory
