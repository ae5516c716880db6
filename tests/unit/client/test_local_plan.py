"""What of a manifest runs on one machine, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from hetero_api.host.cores import LogicalCore
from hetero_api.manifest import parse_resource
from hetero_api.spec import HeteroInference
from hetero_client.errors import LocalSpecError
from hetero_client.launcher.local_plan import LocalPlan, plan_locally

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


def plan(resource: HeteroInference, *, memory_bytes: int = 8 * GIB) -> LocalPlan:
    return plan_locally(resource, cores=TWO_CORES, memory_bytes=memory_bytes)


def problems(resource: HeteroInference) -> tuple[str, ...]:
    with pytest.raises(LocalSpecError) as caught:
        plan(resource)
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


def test_gpu_pools_are_refused_where_they_stand() -> None:
    gpu = {"name": "gpu", "type": "GPU", "ranks": 1}
    assert problems(resource(pool(), gpu)) == (
        "spec.pools[1].type: GPU pools are not supported by this version; use type CPU",
    )


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
