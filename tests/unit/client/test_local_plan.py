"""What of a manifest runs on one machine, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from hetero_api.host.cgroup import CgroupLimits
from hetero_api.host.gpus import Gpu
from hetero_api.host.topology import LogicalCore
from hetero_api.manifest import parse_resource
from hetero_api.spec import HeteroInference
from hetero_client.errors import LocalSpecError
from hetero_client.launcher import local_plan
from hetero_client.launcher.local_plan import GroupShare, LocalPlan, plan_here, plan_locally

pytestmark = pytest.mark.unit

GIB = 2**30
TWO_CORES = (LogicalCore(0, 0, 0), LogicalCore(1, 0, 1))


def resource(*pools: dict[str, Any], **spec: Any) -> HeteroInference:
    return parse_resource(
        {
            "apiVersion": "heteroinference.io/v1alpha1",
            "kind": "HeteroInference",
            "metadata": {"name": "test"},
            "spec": {"model": {"uri": "hf://org/tiny"}, "pools": list(pools), **spec},
        }
    )


def pool(ranks: int = 1, *, name: str = "cpu", ranks_per_pod: int = 1, **cpu: Any) -> dict[str, Any]:
    return {"name": name, "type": "CPU", "ranks": ranks, "ranksPerPod": ranks_per_pod, "cpu": cpu}


def gpu_pool(ranks: int = 1, *, name: str = "gpu", ranks_per_pod: int = 1, **gpu: Any) -> dict[str, Any]:
    return {"name": name, "type": "GPU", "ranks": ranks, "ranksPerPod": ranks_per_pod, "gpu": gpu}


def gpus(*nodes: int | None) -> tuple[Gpu, ...]:
    """Devices on these NUMA nodes."""
    return tuple(Gpu(number, numa_node=node) for number, node in enumerate(nodes))


def plan(
    resource: HeteroInference,
    *,
    memory_bytes: int = 8 * GIB,
    gpus: tuple[Gpu, ...] = (),
    cores: tuple[LogicalCore, ...] = TWO_CORES,
    **groups: Any,
) -> LocalPlan:
    return plan_locally(resource, cores=cores, memory_bytes=memory_bytes, gpus=gpus, **groups)


def problems(resource: HeteroInference, **machine: Any) -> tuple[str, ...]:
    with pytest.raises(LocalSpecError) as caught:
        plan(resource, **machine)
    return caught.value.problems


def test_ranks_are_numbered_within_pods_and_named_within_the_group() -> None:
    ranks = plan(resource(pool(4, ranks_per_pod=2, numa={"policy": "None"}))).ranks
    assert [(rank.name, rank.ordinal, rank.local_rank) for rank in ranks] == [
        ("cpu-0", 0, 0), ("cpu-1", 0, 1), ("cpu-2", 1, 0), ("cpu-3", 1, 1),
    ]  # fmt: skip


def test_given_memory_is_passed_on_and_the_rest_is_divided() -> None:
    ranks = plan(resource(pool(1, name="a", memoryPerRank="3Gi"), pool(2, name="b", numa={"policy": "None"}))).ranks
    assert [rank.memory_bytes for rank in ranks] == [3 * GIB, 2 * GIB, 2 * GIB]


def test_too_much_memory_is_refused_with_the_sum() -> None:
    found = problems(resource(pool(2, memoryPerRank="5Gi")))
    assert found == (
        "spec.pools[0].cpu.memoryPerRank: 2 x 5Gi; all ranks together ask for 10.0 GiB, this machine has 8.0 GiB",
    )


def test_too_many_required_cores_name_the_pool_of_the_manifest() -> None:
    first = pool(1, name="a", numa={"policy": "None"})
    second = pool(3, name="b", memoryPerRank="1Gi", numa={"policy": "Required"})
    (found,) = problems(resource(first, second))
    assert found.startswith("spec.pools[1].cpu.coresPerRank: 3 x 1 = 3 cores")


# --- GPU ranks --------------------------------------------------------------------------------------------

NO_GPU = "GPU: this machine has no NVIDIA GPU that may be used; use type CPU"


def test_gpu_pools_need_a_gpu_and_are_refused_where_they_stand() -> None:
    found = problems(resource(pool(), gpu_pool(), gpu_pool(name="b", devices=[0])))
    assert found == (f"spec.pools[1].type: {NO_GPU}", f"spec.pools[2].type: {NO_GPU}")


def test_gpu_ranks_come_first_and_take_devices_in_order() -> None:
    made = plan(resource(pool(), gpu_pool(2, name="a", ranks_per_pod=2), gpu_pool(name="b")), gpus=gpus(0, 0, 0, 0))
    assert [(rank.name, rank.device) for rank in made.ranks] == [
        ("a-0", "cuda:0"), ("a-1", "cuda:1"), ("b-0", "cuda:2"), ("cpu-0", "cpu"),
    ]  # fmt: skip
    assert made.uses_gpus
    assert not plan(resource(pool())).uses_gpus


def test_devices_with_gaps_are_taken_as_named_and_others_take_what_is_left() -> None:
    named = gpu_pool(3, name="a", ranks_per_pod=3, devices=[4, 0, 2])
    made = plan(resource(gpu_pool(2, name="b"), named), gpus=gpus(*[None] * 5))
    assert [(rank.name, rank.device) for rank in made.ranks] == [
        ("b-0", "cuda:1"), ("b-1", "cuda:3"), ("a-0", "cuda:4"), ("a-1", "cuda:0"), ("a-2", "cuda:2"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("pools", "found"),
    [
        (
            [gpu_pool(2, ranks_per_pod=2, devices=[1, 6])],
            "spec.pools[0].gpu.devices: there is no device 6; this machine has 0-1",
        ),
        ([gpu_pool(2, devices=[0])], "spec.pools[0].gpu.devices: device 0 would be two ranks'"),
        (
            [gpu_pool(name="a", devices=[1]), gpu_pool(name="b", devices=[1])],
            "spec.pools[1].gpu.devices: device 1 would be two ranks'",
        ),
        ([gpu_pool(3)], "spec.pools[0].ranks: 3 GPU ranks need a device each; free on this machine: 0-1"),
        (
            [gpu_pool(name="a", devices=[1]), gpu_pool(2, name="b")],
            "spec.pools[1].ranks: 2 GPU ranks need a device each; free on this machine: 0",
        ),
    ],
)
def test_devices_that_are_not_there_are_refused_by_field(pools: list[dict[str, Any]], found: str) -> None:
    (told,) = problems(resource(*pools), gpus=gpus(0, 0))
    assert told.startswith(found)


def test_a_second_group_takes_the_devices_and_cores_after_the_first() -> None:
    cores = tuple(LogicalCore(number, 0, number) for number in range(8))
    asked = resource(gpu_pool(2, coresPerRank=1), pool(coresPerRank=2))
    first, second = (plan(asked, gpus=gpus(0, 0, 0, 0), cores=cores, dp_local_rank=n) for n in (0, 1))
    assert [rank.device for rank in first.ranks] == ["cuda:0", "cuda:1", "cpu"]
    assert [rank.device for rank in second.ranks] == ["cuda:2", "cuda:3", "cpu"]
    taken = [number for made in (first, second) for rank in made.ranks for number in rank.cores]
    assert sorted(taken) == list(range(8))
    (told,) = problems(asked, gpus=gpus(0, 0, 0), cores=cores, dp_local_rank=1)
    assert told == (
        "spec.pools[0].ranks: 2 GPU ranks need a device each after those of the groups before this one "
        "(--dp-local-rank 1); free on this machine: 0-2"
    )


def test_a_second_group_does_not_compute_on_second_threads_of_the_first_ones_cores() -> None:
    cores = tuple(LogicalCore(number, 0, number % 4) for number in range(8))
    first, second = (plan(resource(pool(coresPerRank=2)), cores=cores, dp_local_rank=n).ranks[0] for n in (0, 1))
    assert (first.cores, second.cores) == ((0, 1), (2, 3))


def test_threads_that_do_not_compute_get_the_cores_that_are_left() -> None:
    cores = tuple(LogicalCore(number, 0, number) for number in range(4))
    ranks = plan(resource(pool(3, coresPerRank=1)), cores=cores).ranks
    assert [rank.communication_cores for rank in ranks] == [(3,)] * 3


def test_groups_after_the_first_share_out_the_devices_that_it_does_not_name() -> None:
    asked = resource(gpu_pool(2, name="a", ranks_per_pod=2, devices=[3, 1]), gpu_pool(name="b"))
    groups = [plan(asked, gpus=gpus(*[0] * 9), dp_local_rank=number).ranks for number in range(3)]
    assert [[rank.device for rank in ranks] for ranks in groups] == [
        ["cuda:3", "cuda:1", "cuda:0"], ["cuda:2", "cuda:4", "cuda:5"], ["cuda:6", "cuda:7", "cuda:8"],
    ]  # fmt: skip
    told = problems(asked, gpus=gpus(*[0] * 8), dp_local_rank=2)
    assert list(told) == [
        f"spec.pools[{index}].ranks: 3 GPU ranks need a device each after those of the groups before this one "
        "(--dp-local-rank 2); free on this machine: 0,2,4-7"
        for index in range(2)
    ]


def test_gpu_ranks_get_cores_near_their_device_and_no_cpu_rank_gets_these() -> None:
    cores = tuple(LogicalCore(number, number // 4, number) for number in range(8))
    cpu = pool(2, coresPerRank=2, memoryPerRank="1Gi", numa={"policy": "Required"})
    made = plan(resource(cpu, gpu_pool(2, coresPerRank=2)), gpus=gpus(1, 0), cores=cores)
    nodes = [{number // 4 for number in rank.cores} for rank in made.ranks]
    assert nodes[:2] == [{1}, {0}]
    assert sorted(number for rank in made.ranks for number in rank.cores) == list(range(8))
    assert [rank.num_threads for rank in made.ranks] == [2, 2, 2, 2]


def test_gpu_ranks_without_cores_of_their_own_run_unbound() -> None:
    made = plan(resource(gpu_pool(2, coresPerRank=2), pool()), gpus=gpus(0, 0))
    assert [rank.cores for rank in made.ranks if rank.device != "cpu"] == [(), ()]
    assert made.warnings[0].startswith("spec.pools[0].gpu.coresPerRank")


def test_cpu_ranks_divide_the_memory_that_gpu_ranks_do_not_ask_for() -> None:
    made = plan(resource(gpu_pool(1, name="a", memoryPerRank="3Gi"), gpu_pool(name="b"), pool()), gpus=gpus(0, 0))
    assert [rank.memory_bytes for rank in made.ranks] == [3 * GIB, 0, 4 * GIB]
    (told,) = problems(resource(gpu_pool(memoryPerRank="9Gi")), gpus=gpus(0))
    assert told.startswith("spec.pools[0].gpu.memoryPerRank: 1 x 9Gi; all ranks together ask for 9.0 GiB")


@pytest.mark.parametrize(("quota", "warned"), [(None, False), (0.5, False), (1.5, True)])
def test_more_threads_than_a_quota_has_time_for_are_warned_of(
    quota: float | None, warned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_plan, "cgroup_limits", lambda: CgroupLimits(quota, None))
    asked = resource(pool(3 if warned else 1, coresPerRank=1, memoryPerRank="1Mi", numa={"policy": "None"}))
    assert [text[:61] for text in plan_here(asked).warnings] == (
        ["ranks compute with 3 threads and have 1.5 CPUs of time, by th"] if warned else []
    )


# --- other groups on the machine --------------------------------------------------------------------------

FOUR_CORES = tuple(LogicalCore(number, 0, number) for number in range(4))


def test_groups_of_a_manifest_divide_the_memory() -> None:
    groups = [plan(resource(pool()), cores=FOUR_CORES, dp_local_rank=n, num_groups=4).ranks for n in range(4)]
    assert [rank.memory_bytes for ranks in groups for rank in ranks] == [int(2 * GIB * 0.8)] * 4
    (told,) = problems(resource(pool(memoryPerRank="3Gi")), dp_local_rank=1, num_groups=3)
    assert told == (
        "spec.pools[0].cpu.memoryPerRank: 1 x 3Gi; all ranks of 3 groups together ask for 9.0 GiB, this machine has "
        "8.0 GiB"
    )


def test_a_group_takes_the_cores_and_the_memory_that_groups_of_other_manifests_leave() -> None:
    cores = tuple(LogicalCore(number, 0, number % 4) for number in range(8))
    running = [plan(resource(pool(coresPerRank=2, memoryPerRank="3Gi")), cores=cores).share("other")]
    assert running == [GroupShare("other", (0, 1), 3 * GIB)]
    made = plan(resource(pool(coresPerRank=2)), cores=cores, running=running)
    assert (made.ranks[0].cores, made.ranks[0].memory_bytes) == ((2, 3), 4 * GIB)
    assert made.warnings == (
        "groups that run (other) have 3.0 of this machine's 8.0 GiB; all ranks of this one together get 4.0 GiB",
    )
    assert plan(resource(pool(coresPerRank=2, memoryPerRank="2Gi")), cores=cores, running=running).warnings == ()


def test_cores_are_shared_with_a_warning_where_too_few_are_left() -> None:
    running = [GroupShare("other", (0, 1, 2), 0), GroupShare("small", (3,), 0)]
    made = plan(resource(pool(coresPerRank=3)), cores=FOUR_CORES, running=running[:1])
    assert made.ranks[0].cores == (0, 1, 2)
    (told,) = made.warnings
    assert told.startswith("group 'other' computes on cores 0-2 too, because too few are free")
    both = plan(resource(pool(coresPerRank=4)), cores=FOUR_CORES, running=running).warnings
    assert [text.partition(" too")[0] for text in both] == [
        "group 'other' computes on cores 0-2", "group 'small' computes on cores 3",
    ]  # fmt: skip


def test_groups_of_one_manifest_know_each_other_by_their_number() -> None:
    asked = resource(pool(memoryPerRank="1Gi"))
    running = [plan(asked, cores=FOUR_CORES, dp_local_rank=n).share(name) for n, name in ((0, "test"), (2, "test.2"))]
    made = plan(asked, cores=FOUR_CORES, dp_local_rank=1, running=running)
    assert [group.cores for group in (*running, made.share("test.1"))] == [(0,), (2,), (1,)]
    # The second of two that are not started together gets memory that the first one leaves.
    half = plan(resource(pool()), cores=FOUR_CORES, dp_local_rank=1, running=[GroupShare("test", (0,), 3 * GIB)])
    assert half.ranks[0].memory_bytes == 4 * GIB


# --- what only a cluster has ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "path"),
    [
        ({"suspend": True}, "spec.suspend"),
        ({"replicas": 0}, "spec.replicas"),
        ({"gateway": {"tlsSecretName": "tls"}}, "spec.gateway.tlsSecretName"),
        ({"gateway": {"authTokenSecretRef": {"name": "auth"}}}, "spec.gateway.authTokenSecretRef"),
        ({"model": {"uri": "hf://org/tiny", "tokenSecretRef": {"name": "hub"}}}, "spec.model.tokenSecretRef"),
    ],
)
def test_what_only_a_cluster_has_is_refused_not_left_out(spec: dict[str, Any], path: str) -> None:
    (found,) = problems(resource(pool(), **spec))
    assert found.startswith(path)


def test_every_problem_is_told_at_once() -> None:
    gpu = {"name": "gpu", "type": "GPU", "ranks": 1}
    assert len(problems(resource(pool(memoryPerRank="9Gi"), gpu, suspend=True))) == 3
