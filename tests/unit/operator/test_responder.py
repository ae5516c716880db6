"""The responder at zero replicas: when it is there, what its pod is, and that nothing else counts it."""

from __future__ import annotations

from typing import Any

import pytest

from hetero_api.contract import LABEL_NAME, LABEL_RESPONDER
from hetero_api.spec import HeteroInferenceSpec
from tests.support.render_cases import OPTIONS, UPGRADED
from tests.support.replica_scene import ReplicaScene, replicated
from tests.support.restricted_profile import restricted_violations

ENABLED = {"responder": {"enabled": True, "retryAfterSeconds": 7}}
OWN = {"Deployment/x-responder", "ServiceAccount/x-responder", "NetworkPolicy/x-responder"}


def objects(scene: ReplicaScene) -> set[str]:
    return {f"{key.kind}/{key.name}" for key in scene.world.objects}


def selector(scene: ReplicaScene) -> Any:
    return scene.world.of_kind("Service")["x"]["spec"]["selector"]


def template(scene: ReplicaScene) -> Any:
    return scene.world.of_kind("Deployment")["x-responder"]["spec"]["template"]


def pods(scene: ReplicaScene) -> set[str]:
    """Names without what a Deployment appends."""
    return {name.rpartition("-")[0] for name in scene.world.pods}


def test_it_comes_at_zero_and_goes_when_the_first_replica_serves() -> None:
    scene = ReplicaScene.of(2, idle=ENABLED)
    assert not OWN & objects(scene)
    gateways = selector(scene)
    scene.change(replicas=0)
    scene.settle()
    assert objects(scene) >= OWN
    assert pods(scene) == {"x-responder"}
    assert selector(scene) == {LABEL_RESPONDER: "x"}
    assert selector(scene).items() <= template(scene)["metadata"]["labels"].items()
    scene.change(replicas=1)
    todo = scene.world.plan()
    scene.world.act(todo)
    scene.world.run_controllers()  # pods are made, and nothing serves yet
    assert scene.world.plan().idle
    assert selector(scene) == {LABEL_RESPONDER: "x"}
    scene.settle()
    assert selector(scene) == gateways
    assert not OWN & objects(scene)


def test_the_service_is_switched_before_the_responder_goes() -> None:
    scene = ReplicaScene.of(0, idle=ENABLED)
    scene.change(replicas=1)
    scene.world.act(scene.world.plan())
    scene.move()
    scene.move()
    todo = scene.world.plan()
    assert "x" in {item["metadata"]["name"] for item in todo.apply if item["kind"] == "Service"}
    assert {f"{deletion.ref.kind}/{deletion.ref.name}" for deletion in todo.delete} == OWN


def test_its_pod_is_no_part_of_a_replica() -> None:
    scene = ReplicaScene.of(0, idle=ENABLED)
    assert LABEL_NAME not in template(scene)["metadata"]["labels"]
    status = scene.status()
    assert (status["replicas"], scene.condition("Ready")["reason"]) == (0, "ScaledToZero")
    assert scene.condition("Progressing")["reason"] == "ScaledToZero"


def test_its_pod_has_no_rights_no_way_out_and_little_of_everything() -> None:
    tls = {"secretName": "door", "clientCASecretName": "clients"}
    scene = ReplicaScene.of(0, idle=ENABLED, gateway={"tls": tls})
    pod = template(scene)["spec"]
    assert list(restricted_violations(pod)) == []
    assert (pod["serviceAccountName"], pod["automountServiceAccountToken"]) == ("x-responder", False)
    assert scene.world.of_kind("NetworkPolicy")["x-responder"]["spec"]["egress"] == []
    [container] = pod["containers"]
    assert container["command"] == ["python", "-m", "hetero_gateway", "respond"]
    assert container["image"] == OPTIONS.gateway_image
    assert container["args"][-6:] == [
        "--retry-after-s", "7", "--tls-dir", "/etc/hetero/tls", "--client-ca-dir", "/etc/hetero/client-ca",
    ]  # fmt: skip
    assert container["resources"] == {
        "requests": {"cpu": "50m", "memory": "128Mi"}, "limits": {"cpu": "500m", "memory": "128Mi"},
    }  # fmt: skip


@pytest.mark.parametrize(
    "fields",
    [{"idle": {}}, {"idle": ENABLED, "suspend": True}, {"idle": ENABLED, "replicas": 1}],
    ids=["not asked for", "suspended", "a replica is asked for"],
)
def test_it_is_not_there(fields: dict[str, Any]) -> None:
    scene = ReplicaScene.of(**{"number": fields.pop("replicas", 0), **fields})
    assert not OWN & objects(scene)


def test_an_upgrade_of_the_operator_leaves_it_as_it_is_and_a_changed_spec_does_not() -> None:
    scene = ReplicaScene.of(0, idle=ENABLED)
    before = template(scene)
    scene.world.options = UPGRADED
    scene.settle()
    assert template(scene) == before
    scene.change(idle={"responder": {"enabled": True, "retryAfterSeconds": 60}})
    scene.settle()
    assert "60" in template(scene)["spec"]["containers"][0]["args"]
    scene.change(idle={})
    scene.settle()
    assert not OWN & objects(scene)


def test_switching_it_on_restarts_nothing() -> None:
    scene = ReplicaScene.of(1)
    before = scene.uids([0])
    scene.change(idle=ENABLED)
    scene.settle()
    assert scene.uids([0]) == before


def test_by_default_there_is_none() -> None:
    assert not HeteroInferenceSpec.model_validate(replicated(0)).idle.responder.enabled
