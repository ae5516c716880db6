"""Which cores ranks get, on machines of several shapes."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_api.host.cores import (
    CoreDemand,
    CoreGrant,
    LogicalCore,
    plan_cores,
    read_cpu_set,
)
from hetero_api.spec import NumaPolicy

pytestmark = pytest.mark.unit


def machine(*, nodes: int, physical: int, threads: int = 1) -> tuple[LogicalCore, ...]:
    """Cores numbered as Linux does: all first threads, then all second ones."""
    cores = []
    for thread in range(threads):
        for index in range(nodes * physical):
            cores.append(LogicalCore(thread * nodes * physical + index, index // physical, index))
    return tuple(cores)


def demand(ranks: int, cores: int, policy: NumaPolicy = NumaPolicy.BEST_EFFORT, *, index: int = 0) -> CoreDemand:
    return CoreDemand(path=f"spec.pools[{index}]", ranks=ranks, cores_per_rank=cores, policy=policy)


def test_two_ranks_on_two_cores_get_one_each() -> None:
    plan = plan_cores(machine(nodes=1, physical=2), [demand(2, 1)])
    assert plan.grants == ((CoreGrant((0,), 1), CoreGrant((1,), 1)),)
    assert not plan.warnings
    assert not plan.problems


def test_physical_cores_come_before_second_threads() -> None:
    plan = plan_cores(machine(nodes=1, physical=4, threads=2), [demand(2, 2)])
    assert [grant.cores for grant in plan.grants[0]] == [(0, 1), (2, 3)]


def test_second_threads_are_used_when_physical_cores_run_out() -> None:
    plan = plan_cores(machine(nodes=1, physical=2, threads=2), [demand(1, 4)])
    assert plan.grants[0][0].cores == (0, 1, 2, 3)


def test_a_rank_moves_to_a_node_with_whole_cores_before_it_takes_siblings() -> None:
    plan = plan_cores(machine(nodes=2, physical=4, threads=2), [demand(2, 3)])
    assert [grant.cores for grant in plan.grants[0]] == [(0, 1, 2), (4, 5, 6)]


def test_a_rank_never_spans_nodes() -> None:
    plan = plan_cores(machine(nodes=2, physical=2), [demand(1, 3, NumaPolicy.REQUIRED)])
    assert plan.problems == (
        "spec.pools[0].cpu.coresPerRank: 1 x 3 = 3 cores, each rank's on one NUMA node, are not free here "
        "(free: node 0: 2, node 1: 2); numa.policy Required needs them: lower coresPerRank or ranks",
    )


def test_best_effort_goes_on_unbound_with_a_warning_that_names_the_field() -> None:
    plan = plan_cores(machine(nodes=1, physical=2), [demand(3, 1)])
    assert plan.grants == ((CoreGrant((), 1),) * 3,)
    assert plan.warnings[0].startswith("spec.pools[0].cpu.coresPerRank: 3 x 1 = 3 cores")
    assert not plan.problems


def test_none_is_never_bound_and_runs_no_more_threads_than_there_are_cores() -> None:
    plan = plan_cores(machine(nodes=1, physical=2), [demand(1, 8, NumaPolicy.NONE)])
    assert plan.grants == ((CoreGrant((), 2),),)
    assert not plan.warnings


def test_required_pools_choose_before_others() -> None:
    demands = [demand(1, 2, index=0), demand(1, 2, NumaPolicy.REQUIRED, index=1)]
    plan = plan_cores(machine(nodes=1, physical=3), demands)
    assert plan.grants[1][0].cores == (0, 1)
    assert plan.grants[0][0].cores == ()
    assert not plan.problems


POOLS = st.tuples(st.integers(1, 5), st.integers(1, 6), st.sampled_from(NumaPolicy))


@given(
    nodes=st.integers(1, 4),
    physical=st.integers(1, 6),
    threads=st.integers(1, 2),
    pools=st.lists(
        st.tuples(st.integers(1, 5), st.integers(1, 6), st.sampled_from(NumaPolicy)), min_size=1, max_size=4
    ),
)
def test_no_core_is_dealt_twice_and_bound_ranks_have_one_node(
    nodes: int, physical: int, threads: int, pools: list[tuple[int, int, NumaPolicy]]
) -> None:
    cores = machine(nodes=nodes, physical=physical, threads=threads)
    node_of = {core.number: core.node for core in cores}
    plan = plan_cores(cores, [demand(*pool, index=index) for index, pool in enumerate(pools)])
    dealt = [number for grants in plan.grants for grant in grants for number in grant.cores]
    assert len(dealt) == len(set(dealt))
    for (ranks, per_rank, policy), grants in zip(pools, plan.grants, strict=True):
        assert len(grants) == ranks
        for grant in grants:
            assert len(grant.cores) in (0, per_rank)
            assert len({node_of[number] for number in grant.cores}) <= 1
            if policy == NumaPolicy.REQUIRED and not grant.cores:
                assert plan.problems


def test_machine_is_read_from_sysfs(tmp_path: Path) -> None:
    for node, cpus in ((0, "0,2"), (1, "1,3")):
        (tmp_path / "node" / f"node{node}").mkdir(parents=True)
        (tmp_path / "node" / f"node{node}" / "cpulist").write_text(cpus + "\n")
    for cpu, siblings in ((0, "0,2"), (1, "1,3"), (2, "0,2"), (3, "1,3")):
        (tmp_path / "cpu" / f"cpu{cpu}" / "topology").mkdir(parents=True)
        (tmp_path / "cpu" / f"cpu{cpu}" / "topology" / "thread_siblings_list").write_text(siblings)
    assert read_cpu_set([3, 0], sysfs=tmp_path) == (LogicalCore(0, 0, 0), LogicalCore(3, 1, 1))


def test_hidden_sysfs_means_one_node_of_whole_cores(tmp_path: Path) -> None:
    assert read_cpu_set([4, 5], sysfs=tmp_path) == (LogicalCore(4, 0, 4), LogicalCore(5, 0, 5))
