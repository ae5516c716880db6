"""From `kubectl apply` of an example to all that it owns, and back: what appears, what is written, what stays."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from hetero_api.contract import (
    API_VERSION,
    CONFIG_MANIFEST_KEY,
    CONFIG_TEMPLATES_KEY,
    GROUP,
    HTTP_PORT,
    INFERENCE_PORT,
    KIND,
    LABEL_GATEWAY_REVISION,
    LABEL_NAME,
    LABEL_POOL,
    LABEL_REVISION,
    LABEL_ROLE,
    ROLE_GATEWAY,
    ROLE_RANK,
    SECRET_ADMIN_TOKEN_KEY,
    SECRET_GROUP_TOKEN_KEY,
)
from tests.cluster.conftest import ROOT
from tests.support.kube.client import Object
from tests.support.kube.tools import find_kubectl
from tests.support.operator_scene import Scene
from tests.support.owned_objects import Owned

DELETION_TIMEOUT_S = 10
RECONCILED = "hetero_operator_resources_reconciled"


def example(path: Path) -> Object:
    resource: Object = yaml.safe_load(path.read_text(encoding="utf-8"))
    return resource


EXAMPLES = [path for path in sorted((ROOT / "examples").glob("*.yaml")) if example(path)["kind"] == KIND]


def kubectl(scene: Scene, *arguments: str) -> None:
    """As a user, who has no time: a deletion that hangs fails."""
    kubeconfig = scene.cluster.admin_kubeconfig
    command = [str(find_kubectl()), "--kubeconfig", str(kubeconfig), "--namespace", scene.namespace, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=DELETION_TIMEOUT_S)
    assert done.returncode == 0, done.stderr


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 4


def test_an_example_owns_all_that_it_needs_and_nothing_is_left_of_it(scene: Scene) -> None:
    with scene.operator():
        for path in EXAMPLES:
            # Without client-side validation: 1.20 does not know all that our CRD says.
            kubectl(scene, "apply", "--validate=false", "--filename", str(path))
        settled = scene.owned.wait_settled()
        assert set(settled) == {example(path)["metadata"]["name"] for path in EXAMPLES}
        for owned in settled.values():
            assert_as_designed(owned)
        gone, *left = settled
        kubectl(scene, "delete", KIND, gone)
        scene.owned.wait_gone(gone)
    for name in left:  # and without an operator
        kubectl(scene, "delete", KIND, name)
        scene.owned.wait_gone(name)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_kubectl_applies_an_example_and_it_is_accepted(scene: Scene, path: Path) -> None:
    with scene.operator():
        kubectl(scene, "apply", "--validate=false", "--filename", str(path))
        scene.wait_for_condition(example(path)["metadata"]["name"], "Accepted", "True", reason="Accepted")


def assert_as_designed(owned: Owned) -> None:
    """Names, labels, owners and the fields that the design names; golden renders hold the rest."""
    name, spec = owned.name, owned.resource["spec"]
    revision, gateway_revision = owned.resource["status"]["revision"], owned.resource["status"]["gatewayRevision"]
    is_one_pod = spec["topology"]["colocate"] == "Pod"
    pools = {f"{name}-{pool['name']}": pool for pool in spec["pools"]}
    sets = [f"{name}-ranks"] if is_one_pod else list(pools)
    assert {str(key) for key in owned.objects} == {
        f"Service/{name}", f"Service/{name}-gateway", f"Service/{name}-ranks",
        f"ServiceAccount/{name}-rank", f"ServiceAccount/{name}-gateway",
        f"Secret/{name}-group-{revision}", f"ConfigMap/{name}-{gateway_revision}",
        f"NetworkPolicy/{name}-ranks", f"NetworkPolicy/{name}-gateway",
        f"Deployment/{name}-gateway", *(f"StatefulSet/{item}" for item in sets),
    }  # fmt: skip
    assert owned.resource["metadata"].get("finalizers", []) == []
    for item in owned.objects.values():
        assert_owned_by(item, owned.resource)
    for item in owned.of_kind("StatefulSet"):
        if is_one_pod:
            assert_one_pod(item, spec["pools"], name, revision)
            continue
        folder = spec["exchange"].get("hostPath", "")
        assert_stateful_set(item, pools[item["metadata"]["name"]], name, revision, folder=folder)
    (deployment,) = owned.of_kind("Deployment")
    assert_gateway(deployment, name, revision, gateway_revision)
    services = {item["metadata"]["name"]: item["spec"] for item in owned.of_kind("Service")}
    assert_services(services, name)
    for account in owned.of_kind("ServiceAccount"):
        assert account["automountServiceAccountToken"] is False
    (config,) = owned.of_kind("ConfigMap")
    assert config["immutable"] is True
    assert set(config["data"]) == {CONFIG_MANIFEST_KEY, CONFIG_TEMPLATES_KEY}
    assert yaml.safe_load(config["data"][CONFIG_MANIFEST_KEY])["spec"]["pools"][0]["name"] == spec["pools"][0]["name"]
    (secret,) = owned.of_kind("Secret")
    assert set(secret["data"]) == {SECRET_GROUP_TOKEN_KEY, SECRET_ADMIN_TOKEN_KEY}
    assert len(set(secret["data"].values())) == 2
    apart = (
        f"{pool}-{number}" for pool, of in pools.items() for number in range(of["ranks"] // of.get("ranksPerPod", 1))
    )
    assert sorted(owned.pod_uids(ROLE_RANK)) == ([f"{name}-ranks-0"] if is_one_pod else sorted(apart))
    assert len(owned.pod_uids(ROLE_GATEWAY)) == 1


def assert_owned_by(item: Object, resource: Object) -> None:
    metadata, name = item["metadata"], resource["metadata"]["name"]
    assert metadata["ownerReferences"] == [
        {
            "apiVersion": f"{GROUP}/{API_VERSION}", "kind": KIND, "name": name, "uid": resource["metadata"]["uid"],
            "controller": True, "blockOwnerDeletion": False,
        }
    ]  # fmt: skip
    assert metadata.get("finalizers", []) == []
    labels = metadata["labels"]
    assert labels[LABEL_NAME] == labels["app.kubernetes.io/instance"] == name
    assert labels["app.kubernetes.io/name"] == "heteroinference"
    assert labels["app.kubernetes.io/managed-by"] == "heteroinference-operator"
    assert labels["app.kubernetes.io/component"] in (ROLE_RANK, ROLE_GATEWAY)


def assert_stateful_set(item: Object, pool: Object, name: str, revision: str, *, folder: str) -> None:
    spec, template = item["spec"], item["spec"]["template"]
    assert (spec["serviceName"], spec["podManagementPolicy"]) == (f"{name}-ranks", "Parallel")
    assert spec["updateStrategy"] == {"type": "OnDelete"}
    assert spec["replicas"] == pool["ranks"] // pool.get("ranksPerPod", 1)
    labels = template["metadata"]["labels"]
    assert (labels[LABEL_ROLE], labels[LABEL_POOL], labels[LABEL_REVISION]) == (ROLE_RANK, pool["name"], revision)
    assert template["spec"]["serviceAccountName"] == f"{name}-rank"
    assert_restricted(template["spec"])
    for container in containers(template["spec"]):
        resources = container["resources"]
        assert resources["requests"] == resources["limits"]
        assert {"cpu", "memory"} <= set(resources["limits"]) or pool["type"] == "GPU"
    if pool["type"] == "GPU":
        (rank,) = template["spec"]["containers"]
        assert rank["resources"]["limits"]["nvidia.com/gpu"] == str(pool["ranksPerPod"])
    (rank,) = template["spec"]["containers"]
    (at,) = [mount["name"] for mount in rank["volumeMounts"] if mount["mountPath"] == "/dev/shm"]
    (memory,) = [volume for volume in template["spec"]["volumes"] if volume["name"] == at]
    assert {key: value for key, value in memory.items() if key != "name"} == (
        {"hostPath": {"path": folder, "type": "Directory"}}
        if folder
        else {"emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}}
    )


def assert_one_pod(item: Object, pools: list[Object], name: str, revision: str) -> None:
    spec, pod = item["spec"], item["spec"]["template"]["spec"]
    labels = spec["template"]["metadata"]["labels"]
    assert (spec["replicas"], labels[LABEL_POOL], labels[LABEL_REVISION]) == (1, "ranks", revision)
    assert pod["serviceAccountName"] == f"{name}-rank"
    assert_restricted(pod)
    assert len(pod["containers"]) == sum(pool["ranks"] // pool.get("ranksPerPod", 1) for pool in pools)
    for container in containers(pod):
        assert container["resources"]["requests"] == container["resources"]["limits"]
        assert {"cpu", "memory"} <= set(container["resources"]["limits"])
    assert {"emptyDir"} == {key for volume in pod["volumes"] if "medium" in str(volume) for key in volume} - {"name"}


def assert_gateway(item: Object, name: str, revision: str, gateway_revision: str) -> None:
    spec, template = item["spec"], item["spec"]["template"]
    assert (spec["replicas"], spec["strategy"]) == (1, {"type": "Recreate"})
    labels = template["metadata"]["labels"]
    assert (labels[LABEL_ROLE], labels[LABEL_REVISION]) == (ROLE_GATEWAY, revision)
    assert labels[LABEL_GATEWAY_REVISION] == gateway_revision
    assert template["spec"]["serviceAccountName"] == f"{name}-gateway"
    assert template["spec"]["terminationGracePeriodSeconds"] == 90
    assert_restricted(template["spec"])
    (container,) = template["spec"]["containers"]
    assert {"startupProbe", "readinessProbe", "livenessProbe"} <= set(container)


def assert_restricted(pod: Object) -> None:
    """The Restricted profile of Pod Security, and no API access."""
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in containers(pod):
        security = container["securityContext"]
        assert security["allowPrivilegeEscalation"] is False
        assert security["readOnlyRootFilesystem"] is True
        assert security["capabilities"] == {"drop": ["ALL"]}


def assert_services(services: dict[str, Any], name: str) -> None:
    client, gateway, ranks = services[name], services[f"{name}-gateway"], services[f"{name}-ranks"]
    assert (client["type"], [port["port"] for port in client["ports"]]) == ("ClusterIP", [INFERENCE_PORT, HTTP_PORT])
    own = {"app.kubernetes.io/instance": name}
    assert client["selector"] == {LABEL_NAME: name, LABEL_ROLE: ROLE_GATEWAY}
    assert gateway["selector"] == {LABEL_NAME: name, LABEL_ROLE: ROLE_GATEWAY, **own}
    assert ranks["selector"] == {LABEL_NAME: name, LABEL_ROLE: ROLE_RANK, **own}
    for headless in (gateway, ranks):
        assert (headless["clusterIP"], headless["publishNotReadyAddresses"]) == ("None", True)
    assert client.get("publishNotReadyAddresses", False) is False


def containers(pod: Object) -> list[Object]:
    return [*pod["containers"], *pod.get("initContainers", [])]


@pytest.mark.slow
def test_nothing_is_written_while_nothing_changes(scene: Scene) -> None:
    """Not by a second reconcile, not for the same YAML again, not by a restarted operator, not by an upgraded one."""
    with scene.autopilot():
        with scene.operator() as operator:
            apply_examples(scene)
            before = wait_for_running_pods(scene)
            scene.wait_quiet()
            mark = scene.cluster.audit.mark()
            scene.reconcile_again(operator)
            assert scene.writes(since=mark) == []
            apply_examples(scene)
            scene.reconcile_again(operator)
            assert scene.writes(since=mark) == []
        with scene.operator() as operator:
            operator.wait_metric(RECONCILED, lambda count: count == len(EXAMPLES))
            scene.reconcile_again(operator)
            assert scene.writes(since=mark) == []
        images = {f"{image}_image": f"example.com/{image}:next" for image in ("gateway", "cpu_worker", "gpu_worker")}
        with scene.operator(settings={**images, "run_as_user": "12345"}) as operator:
            operator.wait_metric(RECONCILED, lambda count: count == len(EXAMPLES))
            scene.reconcile_again(operator)
            assert scene.writes(since=mark) == []
            assert pods_of(scene.owned.every()) == pods_of(before)
            # The upgraded one does work: a new revision gets the new images.
            name = example(EXAMPLES[0])["metadata"]["name"]
            scene.client.patch(KIND, name, {"spec": {"podMetadata": {"labels": {"team": "blue"}}}}, scene.namespace)
            owned = scene.owned.wait_settled(name)[name]
            assert all("example.com/" in str(item["spec"]["template"]) for item in owned.of_kind("StatefulSet"))


def apply_examples(scene: Scene) -> None:
    for path in EXAMPLES:
        scene.client.apply_file(path, namespace=scene.namespace)


def wait_for_running_pods(scene: Scene) -> dict[str, Owned]:
    scene.owned.wait_settled()
    scene.client.wait_list(
        "Pod", scene.namespace, until=lambda pods: all(pod["status"]["phase"] == "Running" for pod in pods)
    )
    return scene.owned.every()


def pods_of(every: dict[str, Owned]) -> dict[str, dict[str, str]]:
    return {name: {**owned.pod_uids(ROLE_RANK), **owned.pod_uids(ROLE_GATEWAY)} for name, owned in every.items()}


def test_what_somebody_changes_or_deletes_is_put_right(scene: Scene) -> None:
    with scene.operator():
        scene.apply("x")
        scene.owned.wait_settled("x")
        service = {"spec": {"selector": {LABEL_ROLE: "nobody"}}}
        scene.client.patch("Service", "x-ranks", service, scene.namespace)
        scene.client.patch("StatefulSet", "x-cpu", {"spec": {"replicas": 7}}, scene.namespace)
        scene.client.delete("ServiceAccount", "x-rank", scene.namespace)
        scene.client.wait_for(
            "Service", "x-ranks", scene.namespace, until=lambda item: item["spec"]["selector"][LABEL_ROLE] == ROLE_RANK
        )
        scene.client.wait_for("StatefulSet", "x-cpu", scene.namespace, until=lambda item: item["spec"]["replicas"] == 2)
        scene.client.wait_for("ServiceAccount", "x-rank", scene.namespace)


def test_what_belongs_to_another_is_not_taken_over(scene: Scene) -> None:
    theirs = {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": {"name": "x-rank", "namespace": scene.namespace},
    }
    scene.client.create(theirs)
    with scene.operator():
        scene.apply("x")
        found = scene.wait_for_condition("x", "Accepted", "False", reason="NameConflict")
        assert "x-rank" in str(found["message"])
        assert scene.client.get("ServiceAccount", "x-rank", scene.namespace)["metadata"].get("ownerReferences") is None
        scene.client.delete("ServiceAccount", "x-rank", scene.namespace)
        scene.wait_for_condition("x", "Accepted", "True", timeout_s=60)
        scene.owned.wait_settled("x")
