"""Pods as users adapt them: variables, volumes and patches, and patches that would make them others than ours."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hetero_operator.reconcile.manifests.adaptation import merged
from tests.support.operator_world import OperatorWorld
from tests.support.render_cases import resource_of
from tests.support.replica_scene import replicated

PROXY = {"HTTPS_PROXY": "http://proxy:3128"}
AUTHORITY = {"name": "ca", "mountPath": "/etc/ssl/own", "configMapName": "authorities"}


def world_of(pool: dict[str, Any] | None = None, gateway: dict[str, Any] | None = None) -> OperatorWorld:
    spec = replicated(1)
    spec["pools"][0] |= pool or {}
    spec["gateway"] = gateway or {}
    return OperatorWorld(resource_of("x", spec))


def template_of(world: OperatorWorld, kind: str = "StatefulSet") -> dict[str, Any]:
    [workload] = (item for item in world.plan().apply if item["kind"] == kind)
    found: dict[str, Any] = workload["spec"]["template"]
    return found


def containers(template: dict[str, Any]) -> list[dict[str, Any]]:
    return [*template["spec"].get("initContainers", ()), *template["spec"]["containers"]]


@pytest.mark.parametrize(("place", "kind"), [("pool", "StatefulSet"), ("gateway", "Deployment")])
def test_variables_and_volumes_are_in_every_container(place: str, kind: str) -> None:
    template = template_of(world_of(**{place: {"env": PROXY, "volumes": [AUTHORITY]}}), kind)
    for container in containers(template):
        assert {"name": "HTTPS_PROXY", "value": "http://proxy:3128"} in container["env"]
        mount = {"name": "user-ca", "mountPath": "/etc/ssl/own", "readOnly": True}
        assert mount in container["volumeMounts"]
    assert {"name": "user-ca", "configMap": {"name": "authorities"}} in template["spec"]["volumes"]


def test_a_pool_alone_is_adapted() -> None:
    world = world_of(pool={"env": PROXY})
    assert "HTTPS_PROXY" not in str(template_of(world, "Deployment"))


def test_containers_of_one_pod_have_the_variables_of_their_pools() -> None:
    spec = replicated(1, topology={"colocate": "Pod"}, exchange={"kind": "SharedMemory"})
    other = {**spec["pools"][0], "name": "other", "ranks": 1, "env": {"OMP_PROC_BIND": "true"}, "volumes": [AUTHORITY]}
    spec["pools"] = [{**spec["pools"][0], "env": PROXY, "volumes": [AUTHORITY]}, other]
    template = template_of(OperatorWorld(resource_of("x", spec)))
    found = {item["name"]: {one["name"] for one in item["env"]} for item in template["spec"]["containers"]}
    assert {name: found[name] & {"HTTPS_PROXY", "OMP_PROC_BIND"} for name in found} == {
        "rank-0": {"HTTPS_PROXY"}, "rank-1": {"HTTPS_PROXY"}, "rank-2": {"OMP_PROC_BIND"},
    }  # fmt: skip
    assert sum(volume["name"] == "user-ca" for volume in template["spec"]["volumes"]) == 1
    for container in containers(template):
        assert len({mount["mountPath"] for mount in container["volumeMounts"]}) == len(container["volumeMounts"])


def test_a_patch_is_merged_last() -> None:
    patch = {
        "metadata": {"labels": {"team": "blue"}, "annotations": {"sidecar.example/inject": "false"}},
        "spec": {
            "dnsPolicy": "None",
            "dnsConfig": {"nameservers": ["192.0.2.1"]},
            "terminationGracePeriodSeconds": 240,
            "containers": [{"name": "rank", "env": [{"name": "NCCL_DEBUG", "value": "INFO"}]}],
        },
    }
    template = template_of(world_of(pool={"podTemplate": patch, "env": {"NCCL_DEBUG": "WARN"}}))
    assert template["metadata"]["labels"]["team"] == "blue"
    assert template["spec"]["dnsConfig"] == {"nameservers": ["192.0.2.1"]}
    assert template["spec"]["terminationGracePeriodSeconds"] == 240
    [rank] = template["spec"]["containers"]
    assert [item["value"] for item in rank["env"] if item["name"] == "NCCL_DEBUG"] == ["INFO"]
    assert rank["command"] == ["python", "-m", "hetero_worker.pod"]


def test_a_changed_addition_restarts_what_it_is_about() -> None:
    world = world_of()
    world.reconcile()
    pods = {name: pod["metadata"]["uid"] for name, pod in world.pods.items()}
    world.change({**world.resource["spec"], "gateway": {"env": PROXY}})
    world.reconcile()
    now = {name: pod["metadata"]["uid"] for name, pod in world.pods.items()}
    assert [name for name in pods if now.get(name) != pods[name]] == [name for name in pods if "gateway" in name]


CONTAINER: dict[str, Any] = {"name": "rank"}
RESTRICTED = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
LOOSER: list[tuple[dict[str, Any], str]] = [
    ({"runAsNonRoot": False}, "runAsNonRoot"),
    ({"privileged": True}, "privileged"),
    ({"procMount": "Unmasked"}, "procMount"),
    ({"seccompProfile": {"type": "Unconfined"}}, "seccompProfile"),
    ({"appArmorProfile": {"type": "Unconfined"}}, "appArmorProfile.type"),
    ({"seLinuxOptions": {"type": "spc_t"}}, "seLinuxOptions.type"),
    ({"seLinuxOptions": {"user": "root"}}, "seLinuxOptions.user"),
    ({"windowsOptions": {"hostProcess": True}}, "windowsOptions.hostProcess"),
    ({"sysctls": [{"name": "kernel.msgmax", "value": "1"}]}, "sysctls"),
]
MALFORMED: list[dict[str, Any]] = [
    {"spec": {"containers": [1]}},
    {"spec": {"containers": [{"name": "s", "securityContext": RESTRICTED, "ports": [80]}]}},
    {"spec": {"containers": [{**CONTAINER, "env": ["A"]}]}},
    {"spec": {"volumes": ["x"]}},
    {"spec": {"securityContext": {"seLinuxOptions": 1}}},
    {"metadata": {"labels": "a"}},
]
BROKEN = {
    "a label of ours": ({"metadata": {"labels": {"heteroinference.io/role": "x"}}}, "heteroinference.io/role"),
    "the account": ({"spec": {"serviceAccountName": "root"}}, "spec.serviceAccountName"),
    "the node's network": ({"spec": {"hostNetwork": True}}, "spec.hostNetwork"),
    "a disk of a cloud": (
        {"spec": {"volumes": [{"name": "a", "gcePersistentDisk": {"pdName": "a"}}]}},
        "spec.volumes[a].gcePersistentDisk",
    ),
    "our volume as another": (
        {"spec": {"volumes": [{"name": "tmp", "hostPath": {"path": "/"}}]}}, "spec.volumes[tmp]"
    ),
    "root": ({"spec": {"securityContext": {"runAsNonRoot": False}}}, "spec.securityContext.runAsNonRoot"),
    "privileges": (
        {"spec": {"containers": [{**CONTAINER, "securityContext": {"privileged": True}}]}}, "spec.containers[rank]"
    ),
    "another program": ({"spec": {"containers": [{**CONTAINER, "command": ["sh"]}]}}, "spec.containers[rank].command"),
    "our variable": (
        {"spec": {"containers": [{**CONTAINER, "env": [{"name": "POD_NAME", "value": "x"}]}]}},
        "spec.containers[rank].env[POD_NAME]",
    ),
    "over our files": (
        {"spec": {"containers": [{**CONTAINER, "volumeMounts": [{"mountPath": "/tmp", "name": "model"}]}]}},
        "spec.containers[rank].volumeMounts[/tmp]",
    ),
    "a sidecar with rights": ({"spec": {"containers": [{"name": "s", "image": "s"}]}}, "spec.containers[s]"),
    "a port of the node": (
        {"spec": {"containers": [{"name": "s", "image": "s", "ports": [{"hostPort": 1}]}]}}, "spec.containers[s]"
    ),
    **{
        f"pod {json.dumps(context)}": ({"spec": {"securityContext": context}}, f"spec.securityContext.{field}")
        for context, field in LOOSER
    },
    **{
        f"{name} {json.dumps(context)}": (
            {"spec": {"containers": [{"name": name, "securityContext": {**RESTRICTED, **context}}]}},
            f"spec.containers[{name}].securityContext.{field}",
        )
        for name in ("rank", "sidecar")
        for context, field in LOOSER
    },
    "a profile of old clusters": (
        {"metadata": {"annotations": {"container.apparmor.security.beta.kubernetes.io/rank": "unconfined"}}},
        "metadata.annotations.container.apparmor",
    ),
    **{f"malformed {json.dumps(patch)}": (patch, "is no patch of a pod") for patch in MALFORMED},
    "no pod at all": ({"spec": {"containers": {"name": "rank"}}}, "spec.containers"),
    "a field beside spec": ({"status": {"phase": "Running"}}, "status"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_patch_that_breaks_a_promise_is_refused_by_field(name: str) -> None:
    patch, field = BROKEN[name]
    todo = world_of(pool={"podTemplate": patch}).plan()
    assert todo.refusal_reason == "InvalidSpec"
    assert any(problem.startswith("spec.pools[0].podTemplate") and field in problem for problem in todo.refusal)


def test_what_restricted_allows_is_taken() -> None:
    context = {
        "runAsNonRoot": True, "runAsUser": 1000, "seccompProfile": {"type": "Localhost", "localhostProfile": "a"},
        "appArmorProfile": {"type": "RuntimeDefault"}, "procMount": "Default", "seLinuxOptions": {"level": "s0:c1"},
    }  # fmt: skip
    world = world_of(pool={"podTemplate": {"spec": {"containers": [{**CONTAINER, "securityContext": context}]}}})
    [rank] = template_of(world)["spec"]["containers"]
    assert rank["securityContext"] == {**RESTRICTED, **context}


def test_pods_that_have_a_profile_taken_away_by_metadata_are_refused() -> None:
    world = world_of()
    profile = "container.apparmor.security.beta.kubernetes.io/rank"
    world.change({**world.resource["spec"], "podMetadata": {"annotations": {profile: "unconfined"}}})
    assert world.plan().refusal[0].startswith(f"spec.podMetadata.annotations.{profile}: ")
    world.change({**world.resource["spec"], "podMetadata": {"annotations": {profile: "localhost/own"}}})
    assert not world.plan().refusal


def test_patches_of_pools_that_share_a_pod_have_to_fit_together() -> None:
    spec = replicated(1, topology={"colocate": "Pod"}, exchange={"kind": "SharedMemory"})
    patches: list[dict[str, Any]] = [{"spec": {"hostname": "a"}}, {"spec": {"hostname": {"a": "b"}}}]
    spec["pools"] = [{**spec["pools"][0], "name": f"p{i}", "podTemplate": patch} for i, patch in enumerate(patches)]
    [problem] = OperatorWorld(resource_of("x", spec)).plan().refusal
    assert problem.startswith("spec.pools[1].podTemplate: ")


def test_patches_take_away_and_replace() -> None:
    below = {"a": {"b": 1, "c": 2}, "list": [1, 2], "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}]}
    patch = {"a": {"b": None}, "list": [3], "env": [{"name": "B", "value": "3"}, {"name": "C", "value": "4"}]}
    assert merged(below, patch) == {
        "a": {"c": 2},
        "list": [3],
        "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "3"}, {"name": "C", "value": "4"}],
    }
