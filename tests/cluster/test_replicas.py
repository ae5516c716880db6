"""Several replicas on a real API server: scaled, rolled out, stopped by a spec that does not work, and back.

The test is the kubelet, the ranks and the gateways of all groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from hetero_api.contract import KIND, LABEL_REPLICA
from tests.support.kube.client import Client, Object, condition
from tests.support.kube.cluster import Cluster
from tests.support.kube.polling import poll
from tests.support.operator_process import OperatorProcess
from tests.support.operator_scene import Scene
from tests.support.played_groups import BROKEN, PlayedGroups

TIMEOUT_S = 40.0
NEW = {"images.cpuWorker": "example.com/cpu:2"}
NEWEST = {"images.cpuWorker": "example.com/cpu:3"}


@pytest.fixture(scope="module")
def scene(cluster: Cluster, client: Client) -> Iterator[Scene]:
    with Scene.of(cluster, client) as scene:
        scene.add_node()
        yield scene


@pytest.fixture(scope="module")
def operator(scene: Scene) -> Iterator[OperatorProcess]:
    with scene.operator() as operator:
        yield operator


@pytest.fixture
def groups(scene: Scene) -> Iterator[PlayedGroups]:
    with PlayedGroups(scene.client, scene.namespace) as groups:
        yield groups


class Resource:
    """A resource and its status."""

    def __init__(self, scene: Scene, name: str) -> None:
        self._scene = scene
        self.name = name

    def scale(self, replicas: int) -> None:
        """As `kubectl scale` does."""
        body = {"spec": {"replicas": replicas}}
        self._scene.client.patch(KIND, self.name, body, self._scene.namespace, subresource="scale")

    def found(self) -> Object:
        return self._scene.client.get(KIND, self.name, self._scene.namespace)

    def wait(self, holds: Callable[[Object], bool]) -> Object:
        """The status, once it is of the newest generation and holds."""

        def probe() -> Object | None:
            found = self.found()
            status: Object = found.get("status") or {}
            is_seen = status.get("observedGeneration") == found["metadata"]["generation"]
            return status if is_seen and holds(status) else None

        return poll(probe, timeout_s=TIMEOUT_S, describe=lambda: f"the status is {self.found().get('status')}")

    def wait_ready(self, replicas: int) -> Object:
        """The status, once so many replicas serve, and no others, with the spec as written."""
        return self.wait(lambda status: serves(status, replicas))

    def is_ready(self, replicas: int) -> bool:
        """Whether that is so now."""
        found = self.found()
        status: Object = found.get("status") or {}
        return status.get("observedGeneration") == found["metadata"]["generation"] and serves(status, replicas)

    def selector(self) -> dict[str, str]:
        """Labels of the pods that the Service for clients sends to."""
        return dict(self._scene.client.get("Service", self.name, self._scene.namespace)["spec"]["selector"])

    def uids(self, ordinal: int) -> dict[str, str]:
        """Uids of a replica's pods by name."""
        return {
            pod["metadata"]["name"]: pod["metadata"]["uid"]
            for pod in self._scene.owned.pods(self.name)
            if pod["metadata"]["labels"].get(LABEL_REPLICA, "0") == str(ordinal)
        }


def serves(status: Object, replicas: int) -> bool:
    """Whether a status says that so many replicas serve, and no others, with the spec as written."""
    found = condition({"status": status}, "Ready") or {}
    newest = found.get("observedGeneration") == status["observedGeneration"]
    counted = (status["replicas"], status["readyReplicas"]) == (replicas, replicas)
    listed = len(status.get("groups", [])) == (replicas if replicas > 1 else 0)
    return bool(counted and listed and newest and found.get("status") == ("True" if replicas else "False"))


def test_replicas_come_and_go_as_they_are_asked_for(
    scene: Scene, operator: OperatorProcess, groups: PlayedGroups
) -> None:
    scene.apply("scaled", {"idle": {"responder": {"enabled": True}}})
    resource = Resource(scene, "scaled")
    resource.wait_ready(1)
    first = resource.uids(0)
    gateways = resource.selector()
    groups.watch()
    for replicas in (3, 1):
        resource.scale(replicas)
        resource.wait_ready(replicas)
        assert resource.uids(0) == first
    assert groups.least_serving == 1
    resource.scale(0)
    assert (condition({"status": resource.wait_ready(0)}, "Ready") or {})["reason"] == "ScaledToZero"
    assert scene.owned.pods("scaled") == []
    responder = scene.client.get("Deployment", "scaled-responder", scene.namespace)
    labels = responder["spec"]["template"]["metadata"]["labels"]
    assert resource.selector().items() <= labels.items()
    scene.wait_quiet(quiet_s=1.0)
    resource.scale(2)
    assert resource.wait_ready(2)["ranks"] == "4/4"
    scene.client.wait_gone("Deployment", "scaled-responder", scene.namespace)
    assert resource.selector() == gateways
    scene.client.delete(KIND, "scaled", scene.namespace)
    scene.owned.wait_gone("scaled")


def test_a_spec_is_rolled_out_in_turn_stops_where_it_does_not_work_and_goes_back(
    scene: Scene, operator: OperatorProcess, groups: PlayedGroups
) -> None:
    scene.apply("rolled", {"replicas": 3})
    resource = Resource(scene, "rolled")
    resource.wait_ready(3)
    groups.watch()
    scene.apply("rolled", {"replicas": 3, **NEW})
    assert resource.wait_ready(3)["updatedReplicas"] == 3
    assert groups.least_serving == 2

    kept = {ordinal: resource.uids(ordinal) for ordinal in (0, 1)}
    groups.watch()
    scene.apply("rolled", {"replicas": 3, "images.cpuWorker": BROKEN})
    status = resource.wait(
        lambda status: (condition({"status": status}, "Progressing") or {}).get("reason") == "RolloutStopped"
    )
    assert (status["readyReplicas"], status["updatedReplicas"]) == (2, 1)
    degraded = condition({"status": status}, "Degraded") or {}
    # A played pod fails so fast that by now the group may have restarted more often than it may.
    assert degraded["message"].startswith("The roll-out stopped at replica 2: ")
    assert "(pod rolled-2-cpu-0" in degraded["message"]
    assert {ordinal: resource.uids(ordinal) for ordinal in (0, 1)} == kept

    scene.apply("rolled", {"replicas": 3, **NEW})
    assert resource.wait_ready(3)["updatedReplicas"] == 3
    assert {ordinal: resource.uids(ordinal) for ordinal in (0, 1)} == kept
    assert groups.least_serving == 2
    scene.client.delete(KIND, "rolled", scene.namespace)
    scene.owned.wait_gone("rolled")


def test_a_further_replica_keeps_the_lone_one_serving(
    scene: Scene, operator: OperatorProcess, groups: PlayedGroups
) -> None:
    surge = {"rollout": {"maxUnavailable": 0, "maxSurge": 1}}
    scene.apply("surged", surge)
    resource = Resource(scene, "surged")
    resource.wait_ready(1)
    first = resource.uids(0)
    groups.watch()
    scene.apply("surged", {**surge, **NEWEST})
    resource.wait_ready(1)
    assert not set(first.values()) & set(resource.uids(0).values())
    assert groups.least_serving == 1
    assert scene.owned.wait_settled("surged")["surged"].pods
    scene.client.delete(KIND, "surged", scene.namespace)
    scene.owned.wait_gone("surged")
