"""The InferencePool on a real API server with the extension's own definition: made, changed and deleted with the spec,
and left out where there is no definition. The test plays the controller of a Gateway, which no cluster here has.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, Final

import pytest

from hetero_api.contract import HTTP_PORT, KIND, LABEL_NAME, LABEL_ROLE, ROLE_GATEWAY
from tests.cluster.conftest import OPTIONS
from tests.support.hetero_resources import ABSENT
from tests.support.kube.binaries import Binaries
from tests.support.kube.client import Object, is_established
from tests.support.kube.control_plane import ControlPlane
from tests.support.kube.polling import poll
from tests.support.operator_scene import Scene
from tests.support.stand_in_crds import inference_pool

POOLED: Final = {
    "pools.0.ranks": 1, "router.type": "InferencePool", "router.endpointPickerRef": {"name": "picker"},
}  # fmt: skip
ENGINE: Final = "inference.networking.k8s.io/engine-type"
DEFINITION: Final = "inferencepools.inference.networking.k8s.io"
COLLECTED_S: Final = 90.0
"""Collectors of garbage look for new kinds every half minute."""
LOOKED_S: Final = 30.0


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory, binaries: Binaries) -> Iterator[ControlPlane]:
    """A control plane of this module's own, since definitions are the whole cluster's."""
    with ControlPlane(tmp_path_factory.mktemp("plane"), binaries, OPTIONS) as plane:
        yield plane


@pytest.fixture
def scene(plane: ControlPlane) -> Iterator[Scene]:
    """A namespace of a cluster that has no InferencePools yet."""
    with Scene.alone(plane.cluster) as scene:
        yield scene
        scene.client.delete("CustomResourceDefinition", DEFINITION)
        scene.client.wait_gone("CustomResourceDefinition", DEFINITION)


def define(scene: Scene) -> None:
    scene.client.create(inference_pool(scene.cluster.version))
    scene.client.wait_for("CustomResourceDefinition", DEFINITION, until=is_established)


def pool(scene: Scene) -> Object:
    return scene.client.wait_for("InferencePool", "x", scene.namespace, until=lambda _: True, timeout_s=LOOKED_S)


def said(scene: Scene, **conditions: str) -> None:
    """A Gateway's controller says this of the pool as it is."""
    now, generation = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"), pool(scene)["metadata"]["generation"]
    told: list[dict[str, Any]] = [
        {
            "type": kind, "status": status, "reason": "Told", "message": "by the test", "lastTransitionTime": now,
            "observedGeneration": generation,
        }
        for kind, status in conditions.items()
    ]  # fmt: skip
    parent = {"parentRef": {"kind": "Gateway", "name": "front"}, "conditions": told}
    scene.client.patch_status("InferencePool", "x", {"parents": [parent]}, scene.namespace)


def gateway_labels(scene: Scene, name: str) -> dict[str, str]:
    found: dict[str, str] = scene.client.get("Deployment", name, scene.namespace)["spec"]["template"]["metadata"][
        "labels"
    ]
    return found


def test_it_follows_the_spec_and_the_condition_follows_gateways(scene: Scene) -> None:
    define(scene)
    with scene.operator():
        scene.apply("x", {**POOLED, "replicas": 2})
        spec = pool(scene)["spec"]
        assert spec["selector"] == {"matchLabels": {LABEL_NAME: "x", LABEL_ROLE: ROLE_GATEWAY}}
        assert spec["targetPorts"] == [{"number": HTTP_PORT}]
        picker = {"name": "picker", "port": {"number": 9002}, "failureMode": "FailClose", "kind": "Service"}
        assert {**spec["endpointPickerRef"], "group": ""} == {**picker, "group": ""}
        assert [owner["kind"] for owner in pool(scene)["metadata"]["ownerReferences"]] == [KIND]
        assert gateway_labels(scene, "x-gateway")[ENGINE] == "vllm"
        scene.wait_for_condition("x", "RouterReady", "False", reason="NotRouted")
        said(scene, Accepted="True", ResolvedRefs="False")
        told = scene.wait_for_condition("x", "RouterReady", "False", reason="PoolRefused")
        assert told["message"] == "Gateway front and InferencePool x: ResolvedRefs is False: Told: by the test"
        said(scene, Accepted="True", ResolvedRefs="True")
        scene.wait_for_condition("x", "RouterReady", "True", reason="Serving")

        scene.apply("x", {**POOLED, "replicas": 2, "router.endpointPickerRef": {"name": "other", "port": 9003}})
        poll(
            lambda: pool(scene)["spec"]["endpointPickerRef"]["port"]["number"] == 9003,
            timeout_s=LOOKED_S, describe=lambda: str(pool(scene)),
        )  # fmt: skip
        scene.wait_for_condition("x", "RouterReady", "False", reason="Starting")
        said(scene, Accepted="True", ResolvedRefs="True")
        scene.wait_for_condition("x", "RouterReady", "True", reason="Serving")
        scene.wait_quiet(quiet_s=1.0)

        scene.apply("x", {"pools.0.ranks": 1, "router.type": "SMG"})
        scene.client.wait_gone("InferencePool", "x", scene.namespace)
        scene.client.wait_for("Deployment", "x-router", scene.namespace, until=lambda _: True)
        scene.apply("x", POOLED)
        scene.client.wait_gone("Deployment", "x-router", scene.namespace)
        pool(scene)
        scene.apply("x", {"pools.0.ranks": 1, "router.type": ABSENT})
        scene.client.wait_gone("InferencePool", "x", scene.namespace)
        scene.wait_for_condition("x", "RouterReady", "False", reason="NotRequested")
        scene.wait_quiet(quiet_s=1.0)
        assert ENGINE not in gateway_labels(scene, "x-gateway")

        scene.apply("x", POOLED)
        pool(scene)
        scene.client.delete(KIND, "x", scene.namespace)
        scene.client.wait_gone("InferencePool", "x", scene.namespace, timeout_s=COLLECTED_S)


def test_a_pool_that_somebody_deletes_comes_back_and_a_strangers_is_left_alone(scene: Scene) -> None:
    define(scene)
    with scene.operator():
        scene.apply("x", POOLED)
        before = pool(scene)["metadata"]["uid"]
        scene.client.delete("InferencePool", "x", scene.namespace)
        poll(
            lambda: pool(scene)["metadata"]["uid"] != before,
            timeout_s=LOOKED_S, describe=lambda: "it did not come back",
        )  # fmt: skip
        theirs = {
            "apiVersion": "inference.networking.k8s.io/v1", "kind": "InferencePool",
            "metadata": {"name": "y", "namespace": scene.namespace},
            "spec": {
                "selector": {"matchLabels": {"a": "b"}}, "targetPorts": [{"number": 1}],
                "endpointPickerRef": {"name": "theirs", "port": {"number": 9002}},
            },
        }  # fmt: skip
        uid = scene.client.create(theirs)["metadata"]["uid"]
        scene.apply("y", POOLED)
        told = scene.wait_for_condition("y", "Accepted", "False", reason="NameConflict")
        assert "InferencePool y" in told["message"]
        found = scene.client.get("InferencePool", "y", scene.namespace)
        assert (found["metadata"]["uid"], found["spec"]["targetPorts"]) == (uid, [{"number": 1}])


def test_without_the_definition_all_else_serves_and_says_so_and_the_pool_comes_with_it(scene: Scene) -> None:
    with scene.operator():
        scene.apply("x", POOLED)
        told = scene.wait_for_condition("x", "RouterReady", "False", reason="InferencePoolUnknown")
        assert "inference.networking.k8s.io/v1 InferencePool" in told["message"]
        scene.wait_for_condition("x", "Degraded", "True", reason="InferencePoolUnknown")
        scene.wait_for_condition("x", "Accepted", "True")
        scene.client.get("Deployment", "x-gateway", scene.namespace)
    define(scene)
    with scene.operator():
        pool(scene)
        scene.wait_for_condition("x", "RouterReady", "False", reason="NotRouted")
        scene.wait_for_condition("x", "Degraded", "False")
