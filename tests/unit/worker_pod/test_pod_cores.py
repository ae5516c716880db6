"""Which cores the ranks of a pod get, by what the kubelet gave the container."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from hetero_api.host.cores import CoreDemand, CorePlan
from hetero_api.host.topology import LogicalCore, NumaNode, NumaPolicy
from hetero_worker.pod.ranks import plan_pod_cores

pytestmark = pytest.mark.unit

REQUIRED, BEST_EFFORT, NONE = NumaPolicy.REQUIRED, NumaPolicy.BEST_EFFORT, NumaPolicy.NONE


def node(*, nodes: int = 2, physical: int = 8, threads: int = 2) -> tuple[LogicalCore, ...]:
    """Cores numbered as Linux does: all first threads, then all second ones; `physical` cores on each NUMA node."""
    total = nodes * physical
    return tuple(
        LogicalCore(thread * total + index, index // physical, index)
        for thread in range(threads)
        for index in range(total)
    )


def cpuset(*numbers: int, machine: tuple[LogicalCore, ...] | None = None) -> list[LogicalCore]:
    return [core for core in machine or node() if core.number in numbers]


def planned(
    available: Sequence[LogicalCore],
    *,
    pool: str,
    ranks: int,
    threads: int,
    ordinal: int,
    policy: NumaPolicy,
    nodes: dict[int, NumaNode] | None = None,
    near: tuple[int | None, ...] = (),
    memory_bytes: int = 0,
    field: str = "cpu.coresPerRank",
) -> CorePlan:
    demand = CoreDemand(
        path=f"spec.pools[{pool}]", ranks=ranks, cores_per_rank=threads, policy=policy, near=near,
        memory_bytes=memory_bytes, field=field,
    )  # fmt: skip
    return plan_pod_cores(available, demand, ordinal=ordinal, nodes=nodes)


def cores(
    available: list[LogicalCore] | tuple[LogicalCore, ...],
    *,
    ranks: int = 1,
    threads: int,
    ordinal: int = 0,
    policy: NumaPolicy = REQUIRED,
) -> list[tuple[int, ...]]:
    plan = planned(available, pool="cpu", ranks=ranks, threads=threads, ordinal=ordinal, policy=policy)
    assert not plan.problems
    assert not plan.warnings
    return [grant.cores for grant in plan.grants[0]]


def test_exclusive_cpus_are_taken_as_they_are() -> None:
    assert cores(cpuset(3, 4, 5, 6), threads=4) == [(3, 4, 5, 6)]


def test_both_threads_of_a_core_make_one_core() -> None:
    plan = planned(cpuset(2, 3, 18, 19), pool="cpu", ranks=1, threads=4, ordinal=0, policy=REQUIRED)
    ((grant,),) = plan.grants
    assert (grant.cores, grant.num_threads) == ((2, 3), 2)


def test_ranks_of_a_pod_never_share_a_physical_core() -> None:
    assert cores(cpuset(2, 3, 18, 19), ranks=2, threads=2) == [(2,), (3,)]


def test_each_rank_stays_on_one_numa_node() -> None:
    assert cores(cpuset(6, 7, 8, 9), ranks=2, threads=2) == [(6, 7), (8, 9)]


def test_pods_that_see_the_whole_node_take_different_cores() -> None:
    taken = [cores(node(), ranks=2, threads=2, ordinal=ordinal) for ordinal in range(4)]
    assert taken[0] == [(0, 1), (8, 9)]
    used = [number for grants in taken for grant in grants for number in grant]
    assert len(set(used)) == len(used) == 16


def test_an_ordinal_beyond_the_node_begins_again() -> None:
    assert cores(node(), threads=8, ordinal=5) == cores(node(), threads=8, ordinal=1)


def test_pods_that_share_a_node_leave_each_others_cores_to_compute() -> None:
    plans = [planned(node(), pool="cpu", ranks=1, threads=5, ordinal=ordinal, policy=REQUIRED) for ordinal in range(2)]
    grants = [plan.grants[0][0] for plan in plans]
    computing = {cpu for grant in grants for cpu in grant.cores}
    assert len(computing) == 10
    assert all(grant.communication and not set(grant.communication) & computing for grant in grants)


def test_pods_on_a_node_with_room_for_fewer_compute_with_all_the_threads_they_asked_for() -> None:
    assert [len(cores(node(), threads=5, ordinal=ordinal)[0]) for ordinal in range(6)] == [5] * 6


def test_a_rank_gets_cores_near_its_device() -> None:
    plan = planned(
        node(), pool="gpu", ranks=2, threads=2, ordinal=1, policy=BEST_EFFORT, near=(1, None), field="gpu.coresPerRank"
    )
    first, second = plan.grants[0]
    assert (first.cores[0] // 8, second.cores[0] // 8) == (1, 0)


def test_memory_that_a_node_lacks_is_refused_when_required() -> None:
    nodes = {0: NumaNode(0, None, 2**30), 1: NumaNode(1, None, 2**30)}
    plan = planned(node(), pool="cpu", ranks=1, threads=2, ordinal=0, policy=REQUIRED, nodes=nodes, memory_bytes=2**31)
    assert "one NUMA node with 2.0 GiB, are not free here (free: node 0: 16 with 1.0 GiB" in plan.problems[0]


def test_too_few_cpus_are_a_problem_when_required_and_a_warning_else() -> None:
    few = cpuset(0, 1)
    refused = planned(few, pool="cpu", ranks=1, threads=4, ordinal=0, policy=REQUIRED)
    assert "spec.pools[cpu].cpu.coresPerRank: 1 x 4 = 4 cores" in refused.problems[0]
    warned = planned(few, pool="cpu", ranks=1, threads=4, ordinal=0, policy=BEST_EFFORT)
    assert "are not bound" in warned.warnings[0]
    assert warned.grants[0][0].cores == ()


def test_a_rank_that_would_span_numa_nodes_is_refused_when_required() -> None:
    plan = planned(cpuset(7, 8), pool="cpu", ranks=1, threads=2, ordinal=0, policy=REQUIRED)
    assert "each rank's on one NUMA node" in plan.problems[0]


def test_policy_none_binds_nothing() -> None:
    plan = planned(cpuset(0, 1), pool="gpu", ranks=2, threads=8, ordinal=3, policy=NONE)
    assert [(grant.cores, grant.num_threads) for grant in plan.grants[0]] == [((), 2), ((), 2)]
