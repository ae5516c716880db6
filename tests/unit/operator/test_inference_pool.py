"""The InferencePool: the object and the labels that it comes and goes with, and the condition that tells of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import pytest
import yaml

from hetero_api.contract import HTTP_PORT, LABEL_NAME, LABEL_ROLE, ROLE_GATEWAY
from hetero_operator.reconcile.inventory import ObjectKey
from tests.support.crd_judge import rule_problems, schema_problems, stored
from tests.support.operator_world import OperatorWorld
from tests.support.render_cases import EXAMPLES, FULL, INFERENCE_POOL, PLAIN, resource_of
from tests.support.replica_scene import ReplicaScene
from tests.support.stand_in_crds import INFERENCE_POOL as CRD

POOL: Final = {"type": "InferencePool", "endpointPickerRef": {"name": "picker"}}
KEY: Final = ObjectKey("inference.networking.k8s.io", "InferencePool", "x")
ENGINE: Final = "inference.networking.k8s.io/engine-type"


def pool(scene: ReplicaScene) -> Any:
    return scene.world.objects.get(KEY)


def gateways(scene: ReplicaScene) -> dict[str, dict[str, str]]:
    """Labels of the gateways' pods, by name."""
    labels = {name: pod["metadata"]["labels"] for name, pod in scene.world.pods.items()}
    return {name: found for name, found in labels.items() if found.get(LABEL_ROLE) == ROLE_GATEWAY}


def told(scene: ReplicaScene, *parents: dict[str, Any]) -> tuple[str, str, str]:
    """Status, reason and message of RouterReady once controllers of Gateways say this of the pool."""
    pool(scene)["status"] = {"parents": list(parents)}
    scene.settle()
    found = scene.condition("RouterReady")
    return found["status"], found["reason"], found["message"]


def parent(name: str = "front", **conditions: str) -> dict[str, Any]:
    """What a Gateway's controller says of the first pool: the status of each condition, and why where it is False."""
    return {
        "parentRef": {"group": "gateway.networking.k8s.io", "kind": "Gateway", "name": name},
        "conditions": [
            {"type": kind, "status": status, "reason": "R", "message": "why", "observedGeneration": 1}
            for kind, status in conditions.items()
        ],
    }


def test_it_selects_the_gateways_of_all_replicas_at_their_http_port() -> None:
    scene = ReplicaScene.of(3, capabilities=FULL, router={**POOL, "endpointPickerRef": {"name": "p", "port": 9003}})
    spec = pool(scene)["spec"]
    selector = spec["selector"]["matchLabels"]
    assert selector == {LABEL_NAME: "x", LABEL_ROLE: ROLE_GATEWAY}
    pods = scene.world.pods.items()
    selected = {name for name, pod in pods if selector.items() <= pod["metadata"]["labels"].items()}
    assert selected == set(gateways(scene))
    assert len(selected) == 3
    assert spec["targetPorts"] == [{"number": HTTP_PORT}]
    assert spec["endpointPickerRef"] == {"name": "p", "port": {"number": 9003}, "failureMode": "FailClose"}
    assert [owner["uid"] for owner in pool(scene)["metadata"]["ownerReferences"]] == [
        scene.world.resource["metadata"]["uid"]
    ]


def test_it_is_what_the_published_definition_asks_for() -> None:
    scene = ReplicaScene.of(1, capabilities=FULL, router=POOL)
    (version,) = CRD["spec"]["versions"]
    schema = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
    assert stored(schema, pool(scene)["spec"])["endpointPickerRef"]["kind"] == "Service"
    found = stored(schema, pool(scene)["spec"])
    assert (schema_problems(schema, found), rule_problems(schema, found)) == ([], [])
    del found["endpointPickerRef"]["port"]
    assert rule_problems(schema, found) != []


def test_pods_of_a_pool_say_that_their_metrics_are_named_as_vllms() -> None:
    scene = ReplicaScene.of(2, capabilities=FULL)
    assert not any(ENGINE in labels for labels in gateways(scene).values())
    scene.change(router=POOL)
    scene.settle()
    assert [labels[ENGINE] for labels in gateways(scene).values()] == ["vllm", "vllm"]


def test_another_type_takes_it_away_and_brings_it_back_and_gateways_go_one_by_one() -> None:
    scene = ReplicaScene.of(2, capabilities=FULL, router={"type": "SMG"})
    assert pool(scene) is None
    for router, has_pool in ((POOL, True), ({"type": "SMG"}, False), (POOL, True), ({}, False)):
        scene.change(router=router)
        scene.watch()
        scene.settle()
        assert (pool(scene) is not None) is has_pool
        names = {key.name for key in scene.world.objects if key.kind == "Deployment"}
        assert ("x-router" in names) is (router.get("type") == "SMG")
        assert scene.least_serving >= 1
        assert scene.condition("Ready")["status"] == "True"


def test_gateways_open_no_port_for_it() -> None:
    scene = ReplicaScene.of(1, capabilities=FULL, router=POOL)
    container = scene.world.of_kind("Deployment")["x-gateway"]["spec"]["template"]["spec"]["containers"][0]
    assert "--router-port" not in container["args"]


def test_gateways_with_keys_need_no_keys_of_a_router() -> None:
    scene = ReplicaScene.of(1, capabilities=FULL, router=POOL, gateway={"auth": {"keysSecretRef": {"name": "clients"}}})
    assert scene.condition("Accepted")["status"] == "True"
    status, reason, message = told(scene, parent(Accepted="True", ResolvedRefs="True"))
    assert (status, reason) == ("True", "Serving")
    assert "reads no metrics" in message


@pytest.mark.parametrize("replicas", [1, 2])
def test_without_the_definition_the_resource_serves_and_says_what_is_missing(replicas: int) -> None:
    scene = ReplicaScene.of(replicas, capabilities=PLAIN, router=POOL)
    assert pool(scene) is None
    found, degraded = scene.condition("RouterReady"), scene.condition("Degraded")
    assert (found["status"], found["reason"]) == ("False", "InferencePoolUnknown")
    assert "inference.networking.k8s.io/v1 InferencePool" in found["message"]
    assert (degraded["status"], degraded["reason"]) == ("True", "InferencePoolUnknown")
    assert (scene.condition("Ready")["status"], scene.condition("Accepted")["status"]) == ("True", "True")
    scene.world.capabilities = replace(PLAIN, kinds=PLAIN.kinds | {INFERENCE_POOL})
    scene.settle()
    assert pool(scene) is not None
    assert scene.condition("RouterReady")["reason"] == "NotRouted"
    assert scene.condition("Degraded")["status"] == "False"


def test_the_condition_says_what_gateways_say() -> None:
    scene = ReplicaScene.of(2, capabilities=FULL, router=POOL)
    assert told(scene)[:2] == ("False", "NotRouted")
    assert told(scene, parent())[:2] == ("False", "NotRouted")
    assert told(scene, parent(Accepted="Unknown"))[:2] == ("False", "NotRouted")
    assert told(scene, parent(Accepted="True", ResolvedRefs="True")) == (
        "True", "Serving", "Gateway front routes to InferencePool x.",
    )  # fmt: skip
    scene.change(replicas=0)
    scene.settle()
    assert scene.condition("RouterReady")["reason"] == "ScaledToZero"


@pytest.mark.parametrize("refused", [{"Accepted": "False"}, {"Accepted": "True", "ResolvedRefs": "False"}])
def test_a_gateway_that_refuses_it_degrades_the_resource_which_serves_on(refused: dict[str, str]) -> None:
    scene = ReplicaScene.of(1, capabilities=FULL, router=POOL)
    status, reason, message = told(scene, parent("one", Accepted="True"), parent("two", **refused))
    assert (status, reason) == ("False", "PoolRefused")
    assert message == f"Gateway two and InferencePool x: {list(refused)[-1]} is False: R: why"
    assert scene.condition("Degraded")["reason"] == "PoolRefused"
    assert scene.condition("Ready")["status"] == "True"


def test_what_was_said_of_an_earlier_pool_does_not_count() -> None:
    scene = ReplicaScene.of(1, capabilities=FULL, router=POOL)
    scene.change(router={**POOL, "endpointPickerRef": {"name": "other"}})
    scene.settle()
    assert pool(scene)["metadata"]["generation"] == 2
    for said in ({"Accepted": "True"}, {"Accepted": "False"}):
        assert told(scene, parent(**said))[:2] == ("False", "Starting")
        assert scene.condition("Degraded")["status"] == "False"


def test_the_example_is_accepted_and_its_route_is_to_its_pool() -> None:
    documents = yaml.safe_load_all((EXAMPLES / "replicas/smollm2-pool.yaml").read_text(encoding="utf-8"))
    by_kind = {document["kind"]: document for document in documents}
    resource = by_kind["HeteroInference"]
    todo = OperatorWorld(resource_of(resource["metadata"]["name"], resource["spec"]), FULL).plan()
    assert todo.refusal == ()
    (made,) = [item for item in todo.apply if item["kind"] == "InferencePool"]
    (rule,) = by_kind["HTTPRoute"]["spec"]["rules"]
    (backend,) = rule["backendRefs"]
    assert (backend["group"], backend["kind"], backend["name"]) == (KEY.group, KEY.kind, made["metadata"]["name"])
    assert {item["name"] for item in by_kind["HTTPRoute"]["spec"]["parentRefs"]} == {
        by_kind["Gateway"]["metadata"]["name"]
    }
