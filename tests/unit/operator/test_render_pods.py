"""What holds for every pod that is rendered: Restricted Pod Security, quality of service, references that resolve."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from hetero_api.contract import POD_MODEL_DIR
from hetero_api.spec_pools import PoolSpec
from hetero_operator.reconcile.manifests.containers import device_numbers, millis
from tests.support.operator_world import OperatorWorld
from tests.support.render_cases import render_cases
from tests.support.restricted_profile import restricted_violations

CASES = render_cases()

Pods = dict[str, dict[str, Any]]


def templates(name: str) -> Pods:
    """Pod templates of a case by the name of their workload."""
    case = CASES[name]
    todo = OperatorWorld(dict(case.resource), case.capabilities).plan()
    return {
        item["metadata"]["name"]: item["spec"]["template"] for item in todo.apply if "template" in item.get("spec", {})
    }


def every_pod() -> list[Any]:
    return [pytest.param(pod, id=f"{name}/{owner}") for name in CASES for owner, pod in templates(name).items()]


def containers(pod: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield from pod["spec"]["containers"]
    yield from pod["spec"].get("initContainers", ())


@pytest.mark.parametrize(
    ("named", "within_the_pod"), [(None, [0, 1, 2]), ([0, 2, 4], [0, 1, 2]), ([6, 1, 3], [2, 0, 1])]
)
def test_named_devices_are_the_order_of_ranks_on_those_that_the_pod_gets(
    named: list[int] | None, within_the_pod: list[int]
) -> None:
    pool = PoolSpec.model_validate(
        {"name": "gpu", "type": "GPU", "ranks": 3, "ranksPerPod": 3, "gpu": {"devices": named}}
    )
    assert device_numbers(pool) == within_the_pod


@pytest.mark.parametrize("pod", every_pod())
def test_pods_keep_to_the_restricted_profile_but_for_folders_of_the_node(pod: dict[str, Any]) -> None:
    violations = [found for found in restricted_violations(pod["spec"]) if "hostPath" not in found]
    assert violations == []


def test_only_models_caches_and_memory_on_the_node_leave_the_profile() -> None:
    outside = {name for name in CASES for pod in templates(name).values() if list(restricted_violations(pod["spec"]))}
    assert outside == {"model-folder", "model-hub-node-cache", "exchange-on-node", "example-gpu-cpu-auto"}


def test_pods_of_a_node_share_its_memory_when_the_user_says_so() -> None:
    pods = templates("exchange-on-node")
    rank, gateway = pods["shared-cpu"]["spec"], pods["shared-gateway"]["spec"]
    (volume,) = [volume for volume in rank["volumes"] if "hostPath" in volume]
    assert volume["hostPath"] == {"path": "/dev/shm", "type": "Directory"}
    mounts = rank["containers"][0]["volumeMounts"]
    assert [mount["name"] for mount in mounts if mount["mountPath"] == "/dev/shm"] == [volume["name"]]
    assert all("medium" not in item.get("emptyDir", {}) for item in rank["volumes"])
    assert all("hostPath" not in item for item in gateway["volumes"])


@pytest.mark.parametrize("pod", every_pod())
def test_pods_are_hardened_beyond_the_profile(pod: dict[str, Any]) -> None:
    # No pod but a router's has a right on the API server.
    assert pod["spec"]["automountServiceAccountToken"] is is_router(pod)
    assert pod["spec"]["enableServiceLinks"] is False
    for container in containers(pod):
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert container["terminationMessagePolicy"] == "FallbackToLogsOnError"


def is_router(pod: dict[str, Any]) -> bool:
    return [item["name"] for item in pod["spec"]["containers"]] == ["router"]


def is_guaranteed(pod: dict[str, Any]) -> bool:
    """Quality of service as the kubelet computes it."""
    amounts = [container["resources"] for container in containers(pod)]
    return all(
        item["requests"] == item["limits"] and {"cpu", "memory"} <= set(item["limits"]) for item in amounts
    )  # fmt: skip


@pytest.mark.parametrize("name", [name for name in CASES if name != "burstable"])
def test_cpu_pods_and_gateways_are_guaranteed_on_whole_cores(name: str) -> None:
    for owner, pod in templates(name).items():
        if owner.endswith("-gpu"):
            continue
        assert is_guaranteed(pod), owner
        if owner.endswith("-ranks"):
            assert all(item["resources"]["limits"]["cpu"].isdigit() for item in containers(pod))
        if owner.endswith("-cpu"):
            cores = {container["resources"]["limits"]["cpu"] for container in containers(pod)}
            assert len(cores) == 1
            assert cores.pop().isdigit()


def test_without_memory_a_cpu_pod_is_not_guaranteed() -> None:
    assert not is_guaranteed(templates("burstable")["burstable-cpu"])


def test_a_pods_memory_covers_its_ranks_and_its_shared_memory() -> None:
    pods = templates("everything")
    [rank] = pods["everything-cpu"]["spec"]["containers"]
    assert rank["resources"]["limits"] == {"cpu": "32", "memory": "132Gi", "hugepages-1Gi": "64Gi"}
    [rank] = pods["everything-gpu"]["spec"]["containers"]
    assert rank["resources"]["limits"] == {"cpu": "8", "memory": "72Gi", "amd.com/gpu": "2"}


def test_a_pod_asks_for_a_device_for_each_of_its_ranks_whatever_numbers_they_name() -> None:
    def devices(name: str, owner: str) -> tuple[str, str]:
        [rank] = templates(name)[owner]["spec"]["containers"]
        options = dict(zip(rank["args"][::2], rank["args"][1::2], strict=True))
        amount = next(value for key, value in rank["resources"]["limits"].items() if key.endswith("/gpu"))
        return options["--cuda-devices"], amount

    assert devices("example-gpu-cpu", "qwen3-8b-gpu") == ("0,1", "2")
    assert devices("everything", "everything-gpu") == ("0,1", "2")  # the pool names 0 and 2
    assert all(
        "--cuda-devices" not in item["args"] for item in templates("everything")["everything-cpu"]["spec"]["containers"]
    )


@pytest.mark.parametrize("pod", every_pod())
def test_every_mount_has_a_volume_and_every_volume_a_mount(pod: dict[str, Any]) -> None:
    mounted = {mount["name"] for container in containers(pod) for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["spec"]["volumes"]}
    for container in containers(pod):
        paths = [mount["mountPath"] for mount in container["volumeMounts"]]
        assert len(paths) == len(set(paths))


@pytest.mark.parametrize("pod", every_pod())
def test_the_model_is_there_and_cannot_be_written(pod: dict[str, Any]) -> None:
    for container in pod["spec"]["containers"]:
        if is_router(pod):
            assert POD_MODEL_DIR not in [mount["mountPath"] for mount in container["volumeMounts"]]
            continue
        [mount] = [mount for mount in container["volumeMounts"] if mount["mountPath"] == POD_MODEL_DIR]
        assert mount["readOnly"] is True


@pytest.mark.parametrize("pod", every_pod())
def test_probes_ask_ports_that_the_container_alone_has(pod: dict[str, Any]) -> None:
    names: list[str] = []
    numbers: list[int] = []
    for container in pod["spec"]["containers"]:
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            assert container[probe]["httpGet"]["port"] in ports
        names += ports.keys()
        numbers += ports.values()
    assert len(names) == len(set(names)) == len(set(numbers))
    assert all(len(name) <= 15 for name in names)


def test_a_ranks_startup_probe_lasts_as_long_as_the_user_says() -> None:
    [container] = templates("everything")["everything-cpu"]["spec"]["containers"]
    probe = container["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 3605
    assert probe["periodSeconds"] * (probe["failureThreshold"] - 1) < 3605


def test_lost_nodes_are_tolerated_for_a_minute_unless_the_user_says_otherwise() -> None:
    def seconds(pod: dict[str, Any]) -> dict[str, int]:
        return {t["key"]: t["tolerationSeconds"] for t in pod["spec"]["tolerations"] if "tolerationSeconds" in t}

    assert set(seconds(templates("kueue")["queued-cpu"]).values()) == {60}
    own = seconds(templates("everything")["everything-cpu"])
    assert own == {"node.kubernetes.io/not-ready": 10, "node.kubernetes.io/unreachable": 60}


def test_a_claim_is_named_by_the_ranks_container_alone() -> None:
    pod = templates("everything")["everything-cpu"]["spec"]
    [claim] = pod["resourceClaims"]
    assert claim["name"] == "cores"
    assert claim["resourceClaimTemplateName"].startswith("everything-cpu-")
    assert pod["containers"][0]["resources"]["claims"] == [{"name": "cores"}]
    assert all("claims" not in container["resources"] for container in pod["initContainers"])


def test_the_admin_token_is_the_gateways_alone() -> None:
    def keys(pod: dict[str, Any]) -> set[str]:
        secrets = (volume["secret"] for volume in pod["spec"]["volumes"] if "secret" in volume)
        return {
            item["key"] for secret in secrets for item in secret.get("items", ()) if "-group-" in secret["secretName"]
        }

    pods = templates("everything")
    assert keys(pods["everything-gateway"]) == {"group-token", "admin-token"}
    assert keys(pods["everything-cpu"]) == {"group-token"}


@pytest.mark.parametrize("drain_s", [0, 120])
def test_ranks_outlast_the_drain_of_a_gateway_that_is_stopped_with_them(drain_s: int) -> None:
    case = CASES["example-smollm2-cpu"]
    resource = {**case.resource, "spec": {**case.resource["spec"], "gateway": {"drainTimeoutSeconds": drain_s}}}
    todo = OperatorWorld(resource, case.capabilities).plan()
    [pod] = [item["spec"]["template"]["spec"] for item in todo.apply if item["kind"] == "StatefulSet"]
    [rank] = pod["containers"]
    stop_grace_s = int(rank["args"][rank["args"].index("--stop-grace-s") + 1])
    assert drain_s + 20 <= stop_grace_s <= pod["terminationGracePeriodSeconds"] - 20


@pytest.mark.parametrize(
    ("count", "text"), [(1500, "1500m"), (2000, "2"), (999_000, "999"), (1_000_000, "1k"), (1_500_000, "1500")]
)
def test_cores_are_written_as_the_api_server_writes_them(count: int, text: str) -> None:
    assert millis(count) == text
