from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_api.cpu_list import format_cpu_list, parse_cpu_list
from hetero_worker.platforms.topology import CpuTopology
from tests.support import sysfs_trees
from tests.support.sysfs_trees import Machine

pytestmark = pytest.mark.unit


@given(st.sets(st.integers(0, 300)))
def test_cpu_list_survives_formatting_and_parsing(numbers: set[int]) -> None:
    assert set(parse_cpu_list(format_cpu_list(numbers))) == numbers


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("", ()), ("\n", ()), ("3", (3,)), ("0-2,8\n", (0, 1, 2, 8)), ("5,1-2,2", (1, 2, 5))],
)
def test_cpu_list_is_read_as_the_kernel_writes_it(text: str, numbers: tuple[int, ...]) -> None:
    assert parse_cpu_list(text) == numbers


@pytest.mark.parametrize("text", ["a", "1-", "-3", "3-1", "1;2", "0x1"])
def test_cpu_list_refuses_what_is_no_list(text: str) -> None:
    with pytest.raises(ValueError, match="no number or range"):
        parse_cpu_list(text)


@pytest.mark.parametrize(
    ("machine", "nodes", "cores"),
    [
        (sysfs_trees.LAPTOP, (0,), (0, 2)),
        (sysfs_trees.VM_WITHOUT_SMT, (0,), (0, 1)),
        (sysfs_trees.TWO_SOCKETS_SMT, (0, 1), tuple(range(8))),
        (sysfs_trees.FOUR_NODES_SMT_OFF, (0, 1, 2, 3), tuple(range(16))),
        (sysfs_trees.OFFLINE_CPUS, (0, 1), (0, 2, 3, 5, 6, 7)),
    ],
    ids=["laptop", "vm", "two-sockets", "four-nodes", "offline"],
)
def test_recorded_machines(machine: Machine, nodes: tuple[int, ...], cores: tuple[int, ...], tmp_path: Path) -> None:
    topology = CpuTopology.read(machine.write(tmp_path))

    assert topology.nodes == nodes
    assert topology.one_per_core(topology.cpus) == cores


def test_one_per_core_takes_the_sibling_that_was_given(tmp_path: Path) -> None:
    topology = CpuTopology.read(sysfs_trees.TWO_SOCKETS_SMT.write(tmp_path))

    assert topology.one_per_core([8, 9, 1, 4]) == (1, 4, 8)
    assert topology.nodes_of([8, 9, 1, 4]) == (0, 1)


def test_machine_without_topology_or_nodes_has_a_core_a_cpu_on_node_0(tmp_path: Path) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "online").write_text("0-2\n")

    topology = CpuTopology.read(tmp_path)

    assert topology.nodes == (0,)
    assert topology.one_per_core(topology.cpus) == (0, 1, 2)
