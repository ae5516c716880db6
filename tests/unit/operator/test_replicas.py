"""Several replicas: made, counted, and taken away; what they share, and what each has."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hetero_api.contract import CONFIG_TEMPLATES_KEY, LABEL_REPLICA, LABEL_ROLE, ROLE_RANK
from hetero_operator.reconcile.inventory import ObjectKey, ordinal_of
from hetero_operator.reconcile.model import Plan
from tests.support.operator_world import OperatorWorld
from tests.support.render_cases import BARE, FULL, UPGRADED, everything, resource_of
from tests.support.replica_scene import ReplicaScene, replicated

SHARED = {
    "Service/x", "ServiceAccount/x-rank", "ServiceAccount/x-gateway", "NetworkPolicy/x-ranks",
    "NetworkPolicy/x-gateway",
}  # fmt: skip
OF_EACH = {"Service/{}-ranks", "Service/{}-gateway", "StatefulSet/{}-cpu", "Deployment/{}-gateway"}


def names_of(world: OperatorWorld, *, ordinal: int) -> set[str]:
    """Kinds and names of one replica's objects but ConfigMap and Secret, which are named by revisions."""
    found = ((key, item) for key, item in world.objects.items() if ordinal_of(item) == ordinal)
    return {f"{key.kind}/{key.name}" for key, _ in found if key.kind not in ("ConfigMap", "Secret")}


def test_each_replica_has_a_group_of_its_own_and_all_share_the_front_door() -> None:
    scene = ReplicaScene.of(3)
    assert names_of(scene.world, ordinal=0) == SHARED | {name.format("x") for name in OF_EACH}
    for ordinal in (1, 2):
        assert names_of(scene.world, ordinal=ordinal) == {name.format(f"x-{ordinal}") for name in OF_EACH}
    secrets = scene.world.of_kind("Secret")
    assert {ordinal_of(item) for item in secrets.values()} == {0, 1, 2}
    assert len(scene.world.pods) == 9


@pytest.mark.parametrize("resource", [resource_of("x", replicated(1)), everything()], ids=["small", "everything"])
def test_replica_0_of_three_is_the_lone_one(resource: dict[str, Any]) -> None:
    lone = OperatorWorld({**resource, "spec": {**resource["spec"], "replicas": 1}}, FULL)
    several = OperatorWorld({**resource, "spec": {**resource["spec"], "replicas": 3}}, FULL)
    lone.reconcile()
    several.reconcile()
    for key, item in lone.objects.items():
        if key.kind != "PodDisruptionBudget":
            assert several.objects[key]["metadata"]["labels"] == item["metadata"]["labels"], key
            assert several.objects[key].get("spec") == item.get("spec"), key
            assert several.objects[key].get("data") == item.get("data"), key


def selected(scene: ReplicaScene, selector: dict[str, str]) -> set[str]:
    pods = scene.world.pods.items()
    return {name for name, pod in pods if selector.items() <= pod["metadata"]["labels"].items()}


def test_ranks_find_the_gateway_of_their_own_replica_alone() -> None:
    scene = ReplicaScene.of(3)
    services = scene.world.of_kind("Service")
    for base in ("x", "x-1", "x-2"):
        assert selected(scene, services[f"{base}-ranks"]["spec"]["selector"]) == {f"{base}-cpu-0", f"{base}-cpu-1"}
        [gateway] = selected(scene, services[f"{base}-gateway"]["spec"]["selector"])
        assert gateway.startswith(f"{base}-gateway-")
        [container] = scene.world.pods[f"{base}-cpu-0"]["spec"]["containers"]
        assert f"{base}-gateway.models.svc.cluster.local:50053" in container["args"]
    assert len(selected(scene, services["x"]["spec"]["selector"])) == 3


def test_scaling_touches_no_replica_that_stays() -> None:
    scene = ReplicaScene.of(1)
    first = scene.uids([0])
    scene.change(replicas=3)
    scene.settle()
    assert scene.uids([0]) == first
    assert (scene.status()["replicas"], scene.status()["readyReplicas"]) == (3, 3)
    scene.change(replicas=1)
    scene.settle()
    assert scene.uids([0, 1, 2]) == first
    assert {ordinal_of(item) for item in scene.world.objects.values()} == {0}
    assert scene.least_serving == 1
    scene.change(replicas=0)
    scene.settle()
    assert scene.world.pods == {}
    assert (scene.status()["replicas"], scene.condition("Ready")["reason"]) == (0, "ScaledToZero")
    scene.change(replicas=2)
    scene.settle()
    assert (len(scene.world.pods), scene.status()["readyReplicas"]) == (6, 2)


def test_a_gateway_that_serves_finishes_before_its_ranks_go() -> None:
    scene = ReplicaScene.of(2)
    scene.change(replicas=1)
    todo = scene.world.plan()
    assert [item["metadata"]["name"] for item in todo.apply] == ["x-1-gateway"]
    assert (todo.apply[0]["spec"]["replicas"], todo.delete) == (0, ())
    # Its pod is told to end, and still has requests.
    scene.world.act(todo)
    gateway = next(name for name in scene.world.pods if name.startswith("x-1-gateway"))
    scene.world.pods[gateway]["metadata"]["deletionTimestamp"] = "2030-01-01T00:00:00Z"
    assert scene.world.plan().idle
    assert scene.condition("Suspended")["reason"] == "NotSuspended"
    scene.tell()
    assert scene.condition("Progressing")["reason"] == "Stopping"
    del scene.world.pods[gateway]
    assert {deletion.ref.kind for deletion in scene.world.plan().delete} >= {"StatefulSet", "Deployment", "Service"}


def test_the_last_replica_finishes_too() -> None:
    scene = ReplicaScene.of(1)
    scene.change(replicas=0)
    todo = scene.world.plan()
    assert [item["metadata"]["name"] for item in todo.apply] == ["x-gateway"]
    scene.world.act(todo)
    scene.move()
    [statefulset] = scene.world.plan().apply
    assert (statefulset["metadata"]["name"], statefulset["spec"]["replicas"]) == ("x-cpu", 0)


def test_a_suspension_ends_all_pods_and_keeps_all_replicas() -> None:
    scene = ReplicaScene.of(3)
    scene.change(suspend=True)
    scene.settle()
    assert scene.world.pods == {}
    found = scene.condition("Suspended")
    assert (found["status"], found["reason"]) == ("True", "Suspended")
    assert {ordinal_of(item) for item in scene.world.objects.values()} == {0, 1, 2}


def test_the_whole_is_ready_when_all_serve_and_says_who_does_not() -> None:
    scene = ReplicaScene.of(3)
    assert scene.condition("Ready")["message"] == "3 of 3 replicas serve requests."
    assert [group["ranks"] for group in scene.status()["groups"]] == ["2/2"] * 3
    assert (scene.status()["ranks"], scene.status()["updatedReplicas"]) == ("6/6", 3)
    [pool] = scene.status()["pools"]
    assert (pool["desired"], pool["ready"]) == (6, 6)
    del scene.world.pods["x-1-cpu-1"]
    scene.world.gateways = dict(scene._reports())
    scene.tell()
    ready = scene.condition("Ready")
    assert (ready["status"], ready["reason"], scene.status()["readyReplicas"]) == ("False", "Starting", 2)
    assert ready["message"].startswith("2 of 3 replicas serve; replica 1: rank 1 (pod x-1-cpu-1): ")
    assert [scene.condition("Ready", ordinal=ordinal)["status"] for ordinal in range(3)] == ["True", "False", "True"]


def test_a_lone_replica_is_told_of_as_ever() -> None:
    scene = ReplicaScene.of(1)
    assert not {"groups", "updatedReplicas"} & set(scene.status())
    scene.change(replicas=2)
    scene.settle()
    assert len(scene.status()["groups"]) == 2
    scene.change(replicas=1)
    scene.settle()
    assert not {"groups", "updatedReplicas"} & set(scene.status())


def test_restarts_are_counted_for_each_replica_and_together() -> None:
    scene = ReplicaScene.of(2)
    for name, count in (("x-cpu-0", 1), ("x-1-cpu-1", 2)):
        scene.world.pods[name]["status"]["containerStatuses"][0]["restartCount"] = count
    scene.tell()
    assert [group["restarts"]["count"] for group in scene.status()["groups"]] == [1, 2]
    assert scene.status()["restarts"]["count"] == 3
    scene.change(replicas=1)
    scene.settle()
    assert scene.status()["restarts"]["count"] == 1


def test_a_budget_is_open_while_all_others_serve() -> None:
    scene = ReplicaScene.of(3, disruptionBudget={"enabled": True})
    budgets = scene.world.of_kind("PodDisruptionBudget")
    assert {name: item["spec"]["maxUnavailable"] for name, item in budgets.items()} == dict.fromkeys(
        ("x-ranks", "x-1-ranks", "x-2-ranks"), "100%"
    )
    chosen = [selected(scene, item["spec"]["selector"]["matchLabels"]) for item in budgets.values()]
    assert sorted(name for names in chosen for name in names) == sorted(scene.world.pods)
    del scene.world.pods["x-1-cpu-1"]
    scene.world.gateways = dict(scene._reports())
    closed = {item["metadata"]["name"]: item["spec"]["maxUnavailable"] for item in scene.world.plan().apply}
    assert closed == {"x-ranks": 0, "x-2-ranks": 0}


def test_a_stranger_in_a_replicas_place_is_left_alone() -> None:
    scene = ReplicaScene.of(1)
    stranger = {**scene.world.objects[ObjectKey("apps", "StatefulSet", "x-cpu")]}
    stranger["metadata"] = {"name": "x-1-cpu", "namespace": "models", "labels": {"heteroinference.io/name": "x"}}
    scene.world.objects[ObjectKey("apps", "StatefulSet", "x-1-cpu")] = stranger
    scene.change(replicas=2)
    todo = scene.world.plan()
    assert todo == Plan(refusal=todo.refusal, refusal_reason="NameConflict")
    assert "StatefulSet x-1-cpu" in todo.refusal[0]


@pytest.mark.parametrize(
    ("name", "pool", "problem"),
    [
        ("a" * 40, "elevenchars", "metadata.name: must be shorter by 2 characters for 3 replicas"),
        ("x", "1-cpu", "spec.pools: a pool is named like another replica's"),
    ],
)
def test_names_that_replicas_cannot_have_are_refused(name: str, pool: str, problem: str) -> None:
    spec = replicated(3)
    spec["pools"] = [{**spec["pools"][0], "name": pool}, {**spec["pools"][0], "name": "cpu"}]
    todo = OperatorWorld(resource_of(name, spec)).plan()
    assert todo.refusal[0].startswith(problem)
    assert OperatorWorld(resource_of(name, {**spec, "replicas": 1})).plan().refusal == ()


def test_a_refused_spec_leaves_all_replicas_as_they_are() -> None:
    scene = ReplicaScene.of(2)
    pods = scene.uids([0, 1])
    scene.change(engine={"maxNumSeqs": 0})
    scene.settle()
    assert scene.uids([0, 1]) == pods
    assert (scene.condition("Accepted")["status"], scene.condition("Ready")["status"]) == ("False", "True")
    assert scene.status()["readyReplicas"] == 2


def test_an_upgrade_of_the_operator_writes_nothing_to_replicas() -> None:
    world = OperatorWorld(resource_of("x", replicated(2)), BARE)
    world.reconcile()
    world.options = UPGRADED
    assert world.plan().idle


def test_ranks_of_a_replica_carry_its_ordinal() -> None:
    scene = ReplicaScene.of(2)
    labels = [pod["metadata"]["labels"] for pod in scene.world.pods.values()]
    assert sorted(one.get(LABEL_REPLICA, "") for one in labels if one[LABEL_ROLE] == ROLE_RANK) == ["", "", "1", "1"]


def test_replicas_are_kept_apart_and_the_ranks_of_each_together() -> None:
    topology = {"key": "rack", "policy": "Required"}
    scene = ReplicaScene.of(2, scheduling={"topology": topology, "replicaSpread": {"key": "zone"}})
    labels = {name: pod["metadata"]["labels"] for name, pod in scene.world.pods.items()}
    affinity = scene.world.pods["x-1-cpu-0"]["spec"]["affinity"]
    [near] = affinity["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    [weighted] = affinity["podAntiAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    far = weighted["podAffinityTerm"]
    assert (near["topologyKey"], far["topologyKey"]) == ("rack", "zone")
    assert selected(scene, near["labelSelector"]["matchLabels"]) == {"x-1-cpu-0", "x-1-cpu-1"}
    [rule] = far["labelSelector"]["matchExpressions"]
    assert rule["operator"] == "NotIn"
    others = {name for name, found in labels.items() if found[rule["key"]] not in rule["values"]}
    assert others & selected(scene, far["labelSelector"]["matchLabels"]) == {"x-cpu-0", "x-cpu-1"}


PREFERRED, REQUIRED = (f"{policy}DuringSchedulingIgnoredDuringExecution" for policy in ("preferred", "required"))


@pytest.mark.parametrize(
    ("spread", "key", "when"),
    [
        (None, "kubernetes.io/hostname", PREFERRED),
        ({"key": "zone"}, "zone", PREFERRED),
        ({"key": "zone", "policy": "Required"}, "zone", REQUIRED),
    ],
)
def test_gateways_of_replicas_are_kept_apart_as_their_ranks_are(spread: Any, key: str, when: str) -> None:
    scene = ReplicaScene.of(2, scheduling={"replicaSpread": spread} if spread else {})
    first, second = sorted(name for name in scene.world.pods if "-gateway-" in name)[::-1]
    assert second.startswith("x-1-")
    [rule] = scene.world.pods[second]["spec"]["affinity"]["podAntiAffinity"][when]
    term = rule if when == REQUIRED else rule["podAffinityTerm"]
    selector = term["labelSelector"]
    assert term["topologyKey"] == key
    [other] = selector["matchExpressions"]
    kept = {name for name in selected(scene, selector["matchLabels"]) if other["operator"] == "NotIn"}
    labels = {name: scene.world.pods[name]["metadata"]["labels"] for name in kept}
    assert {name for name, found in labels.items() if found[other["key"]] not in other["values"]} == {first}


def test_an_upgrade_of_the_operator_spreads_no_gateway_that_is_there() -> None:
    scene = ReplicaScene.of(2)
    for item in scene.world.of_kind("Deployment").values():
        del item["spec"]["template"]["spec"]["affinity"]
    for item in scene.world.of_kind("ConfigMap").values():
        templates = json.loads(item["data"][CONFIG_TEMPLATES_KEY])
        del templates["gateway"]["spec"]["affinity"]
        item["data"][CONFIG_TEMPLATES_KEY] = json.dumps(templates)
    scene.settle()
    specs = [item["spec"]["template"]["spec"] for item in scene.world.of_kind("Deployment").values()]
    assert [spec.get("affinity") for spec in specs] == [None, None]
