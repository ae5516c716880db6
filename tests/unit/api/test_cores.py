"""Which cores ranks get, on machines of several shapes."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_api.host.cores import CoreDemand, CoreGrant, CorePlan, plan_cores
from hetero_api.host.topology import CpuTopology, LogicalCore, NumaNode, NumaPolicy
from tests.support.sysfs_trees import write_tree

pytestmark = pytest.mark.unit

REQUIRED, BEST_EFFORT, NONE = NumaPolicy.REQUIRED, NumaPolicy.BEST_EFFORT, NumaPolicy.NONE
GIB = 2**30


def machine(*, nodes: int, physical: int, threads: int = 1) -> tuple[LogicalCore, ...]:
    """Cores numbered as Linux does: all first threads, then all second ones."""
    cores = []
    for thread in range(threads):
        for index in range(nodes * physical):
            cores.append(LogicalCore(thread * nodes * physical + index, index // physical, index))
    return tuple(cores)


def demand(
    ranks: int,
    cores: int,
    policy: NumaPolicy = BEST_EFFORT,
    *,
    index: int = 0,
    near: tuple[int | None, ...] = (),
    memory_bytes: int = 0,
) -> CoreDemand:
    return CoreDemand(f"spec.pools[{index}]", ranks, cores, policy, near, memory_bytes)


def cores_of(plan: CorePlan, pool: int = 0) -> list[tuple[int, ...]]:
    return [grant.cores for grant in plan.grants[pool]]


def on(name: str, folder: Path, *demands: CoreDemand, allowed: tuple[int, ...] | None = None) -> CorePlan:
    """On one of the machines of tests/data/sysfs, with all of its CPUs or the `allowed` ones."""
    topology = CpuTopology.of_this_process(
        write_tree(name, folder / "sys"), allowed=range(99) if allowed is None else allowed, proc_root=folder
    )
    return plan_cores(topology.cores, demands, nodes=topology.numa)


def test_two_ranks_on_two_cores_get_one_each() -> None:
    plan = plan_cores(machine(nodes=1, physical=2), [demand(2, 1)])
    assert plan.grants == ((CoreGrant((0,), 1), CoreGrant((1,), 1)),)
    assert not plan.warnings
    assert not plan.problems


def test_a_rank_takes_one_thread_of_each_core() -> None:
    plan = plan_cores(machine(nodes=1, physical=4, threads=2), [demand(2, 2)])
    assert cores_of(plan) == [(0, 1), (2, 3)]


def test_two_ranks_never_share_a_physical_core() -> None:
    plan = plan_cores(machine(nodes=1, physical=3, threads=2), [demand(2, 2, REQUIRED)])
    assert cores_of(plan) == [(0,), (1,)]


def test_more_cpus_than_cores_are_had_as_threads_of_these_and_it_is_said() -> None:
    plan = plan_cores(machine(nodes=1, physical=2, threads=2), [demand(1, 4, REQUIRED)])
    assert plan.grants[0][0] == CoreGrant((0, 1), 2, communication=(2, 3))
    assert plan.warnings == (
        "spec.pools[0].cpu.coresPerRank: 4 CPUs are threads of fewer physical cores here; "
        "each rank computes with 2, one a core",
    )
    assert not plan.problems


def test_all_ranks_of_a_pool_compute_with_the_same_number_of_threads() -> None:
    lopsided = (LogicalCore(2, 0, 2), LogicalCore(3, 0, 3), LogicalCore(4, 0, 4), LogicalCore(18, 0, 2))
    plan = plan_cores(lopsided, [demand(2, 2, REQUIRED)])
    assert [grant.num_threads for grant in plan.grants[0]] == [1, 1]


def test_ranks_are_spread_over_nodes() -> None:
    plan = plan_cores(machine(nodes=2, physical=8), [demand(4, 2)])
    assert cores_of(plan) == [(0, 1), (8, 9), (2, 3), (10, 11)]


def test_a_second_rank_goes_to_the_nearest_other_node(tmp_path: Path) -> None:
    near_first = on("epyc_nps4", tmp_path, demand(2, 2), allowed=(*range(4, 8), *range(16, 24), *range(12, 16)))
    assert cores_of(near_first) == [(4, 6), (12, 14)]


def test_nodes_are_filled_where_spreading_would_leave_a_pool_without_cores() -> None:
    demands = [demand(2, 2, REQUIRED, index=0), demand(1, 4, REQUIRED, index=1)]
    plan = plan_cores(machine(nodes=2, physical=4), demands)
    assert not plan.problems
    assert cores_of(plan, 1) == [(0, 1, 2, 3)]
    assert cores_of(plan, 0) == [(4, 5), (6, 7)]


def test_nodes_are_filled_where_spreading_would_leave_ranks_fewer_threads() -> None:
    demands = [demand(2, 2, index=0), demand(1, 4, index=1)]
    plan = plan_cores(machine(nodes=2, physical=4, threads=2), demands)
    assert cores_of(plan, 1) == [(0, 1, 2, 3)]
    assert not plan.warnings


def test_a_rank_goes_where_a_core_is_left_for_communication() -> None:
    uneven = [LogicalCore(n, 0 if n < 2 else 1, n) for n in range(5)]
    plan = plan_cores(uneven, [demand(1, 2)])
    assert plan.grants[0][0] == CoreGrant((2, 3), 2, communication=(4,))


def test_communication_gets_idle_cores_of_the_ranks_own_node_first() -> None:
    plan = plan_cores(machine(nodes=2, physical=4, threads=2), [demand(2, 3)])
    assert [grant.communication for grant in plan.grants[0]] == [(3, 11), (7, 15)]


def test_communication_gets_second_threads_where_no_core_is_idle() -> None:
    plan = plan_cores(machine(nodes=1, physical=4, threads=2), [demand(2, 2)])
    assert [grant.communication for grant in plan.grants[0]] == [(4, 5), (6, 7)]


def test_communication_goes_to_the_nearest_node_where_its_own_is_full(tmp_path: Path) -> None:
    allowed = (*range(4), 4, 16)  # a full node, one core of its neighbour, one of the other socket
    plan = on("epyc_nps4", tmp_path, demand(1, 4, REQUIRED), allowed=allowed)
    assert plan.grants[0][0] == CoreGrant((0, 1, 2, 3), 4, communication=(4,))


def test_nothing_of_what_was_asked_is_kept_back_for_communication() -> None:
    plan = plan_cores(machine(nodes=1, physical=4), [demand(1, 4, REQUIRED)])
    assert plan.grants[0][0] == CoreGrant((0, 1, 2, 3), 4, communication=())


def test_cores_of_a_rank_are_of_all_caches_of_its_node(tmp_path: Path) -> None:
    plan = on("epyc_nps4", tmp_path, demand(2, 2), allowed=tuple(range(4)))
    assert cores_of(plan) == [(0, 2), (1, 3)]


def test_a_rank_is_put_near_its_device_and_else_as_near_as_can_be(tmp_path: Path) -> None:
    plan = on("epyc_nps4", tmp_path, demand(3, 4, near=(5, 5, None)))
    nodes = [cores[0] // 4 for cores in cores_of(plan)]
    assert nodes == [5, 4, 6]


def test_memory_only_nodes_get_no_ranks(tmp_path: Path) -> None:
    plan = on("cxl_expander", tmp_path, demand(2, 4, REQUIRED))
    assert cores_of(plan) == [(0, 1, 2, 3), (4, 5, 6, 7)]


def test_a_node_without_memory_is_refused_when_required_and_the_last_choice_else(tmp_path: Path) -> None:
    strict = on("memoryless_node", tmp_path / "strict", demand(2, 4, REQUIRED))
    assert "node 1: 4 with 0.0 GiB" in strict.problems[0]
    loose = on("memoryless_node", tmp_path / "loose", demand(2, 2))
    assert cores_of(loose) == [(0, 1), (2, 3)]


def test_required_memory_must_fit_the_node_with_that_of_other_ranks() -> None:
    nodes = {n: NumaNode(n, None, 64 * GIB) for n in (0, 1)}
    cores = machine(nodes=2, physical=8)
    fits = plan_cores(cores, [demand(4, 2, REQUIRED, memory_bytes=32 * GIB)], nodes=nodes)
    assert [cores[0] // 8 for cores in cores_of(fits)] == [0, 1, 0, 1]
    refused = plan_cores(cores, [demand(5, 2, REQUIRED, memory_bytes=32 * GIB)], nodes=nodes)
    assert refused.problems == (
        "spec.pools[0].cpu.coresPerRank: 5 x 2 = 10 cores, each rank's on one NUMA node with 32.0 GiB, are not free "
        "here (free: node 0: 8 with 64.0 GiB, node 1: 8 with 64.0 GiB); numa.policy Required needs them: lower "
        "coresPerRank or ranks",
    )


def test_required_takes_no_core_whose_node_is_not_told(tmp_path: Path) -> None:
    root = write_tree("two_sockets_smt", tmp_path / "sys", hidden=["node/node1/cpulist"])
    topology = CpuTopology.of_this_process(root, allowed=range(32), proc_root=tmp_path)
    plan = plan_cores(topology.cores, [demand(1, 8, index=0), demand(3, 8, REQUIRED, index=1)], nodes=topology.numa)
    assert "unknown node: 16" in plan.problems[0]
    assert cores_of(plan, 0) == [(0, 1, 2, 3, 4, 5, 6, 7)]


def test_a_cpuset_with_holes_is_kept_to(tmp_path: Path) -> None:
    plan = on("two_sockets_smt", tmp_path, demand(2, 3, REQUIRED), allowed=(1, 3, 6, 9, 12, 14, 22, 30))
    assert cores_of(plan) == [(1, 3, 6), (9, 12, 14)]
    assert [grant.communication for grant in plan.grants[0]] == [(22,), (30,)]


def test_a_rank_never_spans_nodes() -> None:
    plan = plan_cores(machine(nodes=2, physical=2), [demand(1, 3, REQUIRED)])
    assert plan.problems == (
        "spec.pools[0].cpu.coresPerRank: 1 x 3 = 3 cores, each rank's on one NUMA node, are not free here "
        "(free: node 0: 2, node 1: 2); numa.policy Required needs them: lower coresPerRank or ranks",
    )


def test_best_effort_goes_on_unbound_with_a_warning_that_names_the_field() -> None:
    wanted = CoreDemand("spec.pools[0]", 3, 1, BEST_EFFORT, field="gpu.coresPerRank")
    plan = plan_cores(machine(nodes=1, physical=2), [wanted])
    assert plan.grants == ((CoreGrant((), 1),) * 3,)
    assert plan.warnings[0].startswith("spec.pools[0].gpu.coresPerRank: 3 x 1 = 3 cores")
    assert not plan.problems
    assert not plan.binds_all


def test_none_is_never_bound_and_runs_no_more_threads_than_there_are_cores() -> None:
    plan = plan_cores(machine(nodes=1, physical=2), [demand(1, 8, NONE)])
    assert plan.grants == ((CoreGrant((), 2),),)
    assert not plan.warnings


def test_required_pools_choose_before_others() -> None:
    demands = [demand(1, 2, index=0), demand(1, 2, REQUIRED, index=1)]
    plan = plan_cores(machine(nodes=1, physical=3), demands)
    assert plan.grants[1][0].cores == (0, 1)
    assert plan.grants[0][0].cores == ()
    assert not plan.problems


@st.composite
def cpusets(draw: st.DrawFn) -> tuple[tuple[LogicalCore, ...], dict[int, NumaNode]]:
    """Part of a machine of uneven nodes, with or without memory, and cores of one to three threads."""
    sizes = draw(st.lists(st.integers(0, 5), min_size=1, max_size=4))
    cores: list[LogicalCore] = []
    for node, size in enumerate(sizes):
        for _ in range(size):
            first, cache = len(cores), draw(st.integers(0, 2))
            cores += [LogicalCore(first + n, node, first, cache) for n in range(draw(st.integers(1, 3)))]
    kept = tuple(core for core in cores if draw(st.integers(0, 3)))
    memory = st.sampled_from([None, 0, 4 * GIB, 64 * GIB])
    return kept, {node: NumaNode(node, None, draw(memory)) for node in range(len(sizes))}


@given(
    cpuset=cpusets(),
    pools=st.lists(
        st.tuples(
            st.integers(1, 4), st.integers(1, 6), st.sampled_from(NumaPolicy), st.sampled_from([0, GIB, 9 * GIB])
        ),
        min_size=1,
        max_size=3,
    ),
)
def test_what_always_holds(
    cpuset: tuple[tuple[LogicalCore, ...], dict[int, NumaNode]], pools: list[tuple[int, int, NumaPolicy, int]]
) -> None:
    available, nodes = cpuset
    place = {core.number: core for core in available}
    demands = [
        demand(ranks, cores, policy, index=index, memory_bytes=memory)
        for index, (ranks, cores, policy, memory) in enumerate(pools)
    ]
    plan = plan_cores(available, demands, nodes=nodes)

    computing = [cpu for grants in plan.grants for grant in grants for cpu in grant.cores]
    assert set(computing) <= place.keys()
    physical = [place[cpu].physical for cpu in computing]
    assert len(physical) == len(set(physical))
    for index, (wanted, grants) in enumerate(zip(demands, plan.grants, strict=True)):
        assert len(grants) == wanted.ranks
        assert len({(bool(grant.cores), grant.num_threads) for grant in grants}) == 1
        for grant in grants:
            assert set(grant.communication) <= place.keys() - set(computing)
            assert len({place[cpu].node for cpu in grant.cores}) <= 1
            assert grant.num_threads == len(grant.cores) or not grant.cores
            assert grant.num_threads <= wanted.cores_per_rank
        bound = bool(grants[0].cores)
        assert bound or wanted.policy != REQUIRED or any(p.startswith(f"spec.pools[{index}]") for p in plan.problems)
    _check_nodes_are_not_overcommitted(demands, plan, available, nodes)


def _check_nodes_are_not_overcommitted(
    demands: list[CoreDemand], plan: CorePlan, available: tuple[LogicalCore, ...], nodes: dict[int, NumaNode]
) -> None:
    """Ranks have the CPUs they asked for, as threads at least; strict ones their memory too."""
    node_of = {core.number: core.node for core in available}
    bound = [
        (wanted, node_of[grant.cores[0]])
        for wanted, grants in zip(demands, plan.grants, strict=True)
        for grant in grants
        if grant.cores
    ]
    for node in nodes:
        here = [wanted for wanted, of in bound if of == node]
        assert sum(wanted.cores_per_rank for wanted in here) <= sum(core.node == node for core in available)
        strict = [wanted for wanted in here if wanted.policy == REQUIRED]
        size = nodes[node].memory_bytes
        assert not strict or size is None or (size and sum(wanted.memory_bytes for wanted in strict) <= size)
