"""All pools in one pod: a container each for `ranksPerPod` ranks, with resources, ports and claims of its own."""

from __future__ import annotations

from typing import Any

import pytest

from hetero_api.contract import LABEL_POOL, POD_HEALTH_PORT
from hetero_worker.pod.config import PodConfig
from tests.support.operator_world import OperatorWorld
from tests.support.render_cases import FULL, POD_MONITOR, one_pod
from tests.support.restricted_profile import restricted_violations

POD = "together-ranks-0"


@pytest.fixture
def world() -> OperatorWorld:
    world = OperatorWorld(one_pod(), FULL)
    world.reconcile()
    return world


def containers(world: OperatorWorld) -> dict[str, dict[str, Any]]:
    return {item["name"]: item for item in world.pods[POD]["spec"]["containers"]}


def options(world: OperatorWorld) -> dict[str, PodConfig]:
    """Command lines by container, as the program reads them."""
    environment = {"POD_NAME": POD, "POD_IP": "10.1.2.3"}
    return {name: PodConfig.from_command_line(item["args"], environment) for name, item in containers(world).items()}


def test_one_set_makes_one_pod_of_the_restricted_profile(world: OperatorWorld) -> None:
    assert set(world.of_kind("StatefulSet")) == {"together-ranks"}
    assert {name for name in world.pods if "gateway" not in name} == {POD}
    spec = world.pods[POD]["spec"]
    assert list(restricted_violations(spec)) == []
    assert not spec.get("shareProcessNamespace")
    assert spec["runtimeClassName"] == "nvidia"
    assert spec["nodeSelector"] == {"accelerator": "h100"}
    assert world.pods[POD]["metadata"]["labels"][LABEL_POOL] == "ranks"


def test_containers_are_named_for_their_first_rank_and_say_which_of_their_pool_they_are(world: OperatorWorld) -> None:
    places = {name: (told.pool, told.ordinal, told.ranks_per_pod) for name, told in options(world).items()}
    assert places == {
        "rank-0": ("gpu", 0, 2), "rank-2": ("cpu", 0, 1), "rank-3": ("cpu", 1, 1), "rank-4": ("more", 0, 2),
    }  # fmt: skip


def test_each_container_has_cores_memory_and_devices_of_its_own(world: OperatorWorld) -> None:
    limits = {name: item["resources"]["limits"] for name, item in containers(world).items()}
    assert limits == {
        "rank-0": {"cpu": "4", "memory": "18Gi", "nvidia.com/gpu": "2"},
        "rank-2": {"cpu": "8", "memory": "17Gi", "hugepages-1Gi": "4Gi"},
        "rank-3": {"cpu": "8", "memory": "17Gi", "hugepages-1Gi": "4Gi"},
        "rank-4": {"cpu": "8", "memory": "17Gi"},
    }
    assert all(item["resources"]["requests"] == limits[name] for name, item in containers(world).items())


def test_init_containers_take_no_more_cores_than_the_first_container(world: OperatorWorld) -> None:
    """A static CPU manager would bind the second container to the node of what is left."""
    [fetch] = world.pods[POD]["spec"]["initContainers"]
    assert fetch["resources"]["limits"] == {"cpu": "4", "memory": "18Gi"}
    assert fetch["image"] == containers(world)["rank-0"]["image"]


def test_all_share_one_memory_whose_size_their_limits_cover(world: OperatorWorld) -> None:
    volumes = {volume["name"]: volume for volume in world.pods[POD]["spec"]["volumes"]}
    mounted = {
        mount["name"]
        for item in containers(world).values()
        for mount in item["volumeMounts"]
        if mount["mountPath"] == "/dev/shm"
    }
    [name] = mounted
    assert volumes[name]["emptyDir"] == {"medium": "Memory", "sizeLimit": "5Gi"}


def test_huge_pages_are_mounted_where_they_were_asked_for(world: OperatorWorld) -> None:
    has_pages = {
        name: any(mount["mountPath"] == "/dev/hugepages" for mount in item["volumeMounts"])
        for name, item in containers(world).items()
    }
    assert has_pages == {"rank-0": False, "rank-2": True, "rank-3": True, "rank-4": False}


def test_each_container_that_claims_cores_has_a_claim_of_its_own(world: OperatorWorld) -> None:
    claims = world.pods[POD]["spec"]["resourceClaims"]
    [template] = world.of_kind("ResourceClaimTemplate")
    assert claims == [
        {"name": "cores-1", "resourceClaimTemplateName": template},
        {"name": "cores-2", "resourceClaimTemplateName": template},
    ]
    named = {name: item["resources"].get("claims") for name, item in containers(world).items()}
    assert named == {"rank-0": None, "rank-2": [{"name": "cores-1"}], "rank-3": [{"name": "cores-2"}], "rank-4": None}


def test_probes_metrics_and_policies_know_the_port_of_every_container(world: OperatorWorld) -> None:
    ports = {"health": 8080, "health-1": 8081, "health-2": 8082, "health-3": 8083}
    assert ports["health"] == POD_HEALTH_PORT
    assert [told.health_port for told in options(world).values()] == list(ports.values())
    policy = world.of_kind("NetworkPolicy")["together-ranks"]
    assert [port["port"] for port in policy["spec"]["ingress"][1]["ports"]] == list(ports.values())
    monitor = world.of_kind(POD_MONITOR[1])["together"]
    assert [point["port"] for point in monitor["spec"]["podMetricsEndpoints"]] == ["metrics", *ports]


def test_gangs_and_budgets_count_one_pod(world: OperatorWorld) -> None:
    assert world.of_kind("PodGroup")["together"]["spec"]["minMember"] == 1
    assert world.of_kind("PodDisruptionBudget")["together-ranks"]["spec"]["maxUnavailable"] == 0


def test_pools_move_into_one_pod_and_out_of_it_again() -> None:
    resource = one_pod()
    together = dict(resource["spec"])
    apart = {key: value for key, value in together.items() if key not in ("topology", "exchange")}
    world = OperatorWorld({**resource, "spec": apart}, FULL)
    world.reconcile()
    pods = {name for name in world.pods if "gateway" not in name}
    assert pods == {"together-cpu-0", "together-cpu-1", "together-gpu-0", "together-more-0"}
    for spec, wanted in ((together, {POD}), (apart, pods)):
        world.change(spec)
        world.reconcile()
        assert {name for name in world.pods if "gateway" not in name} == wanted
        assert {f"{name}-0" for name in world.of_kind("StatefulSet")} <= wanted
        assert len(world.of_kind("ConfigMap")) == len(world.of_kind("Secret")) == 1
