"""All ranks in one pod, on a real API server that enforces the Restricted profile: the test is kubelet and gateway."""

from __future__ import annotations

import base64
from collections.abc import Iterator

import pytest

from hetero_api.contract import KIND, LABEL_REVISION, ROLE_GATEWAY, ROLE_RANK, SECRET_ADMIN_TOKEN_KEY
from hetero_api.v1 import admin_pb2
from tests.support import pod_statuses
from tests.support.kube.client import Object
from tests.support.kube.kubelet import Kubelet, now
from tests.support.operator_scene import Scene
from tests.support.owned_objects import Owned
from tests.support.played_gateway import PlayedGateway, rank_status
from tests.support.restricted_profile import restricted_violations

READY, ABORTED = admin_pb2.GROUP_STATE_READY, admin_pb2.GROUP_STATE_ABORTED
NAME = "together"
POD = f"{NAME}-ranks-0"
ENFORCE = {"pod-security.kubernetes.io/enforce": "restricted", "pod-security.kubernetes.io/warn": "restricted"}


@pytest.fixture
def owned(scene: Scene) -> Iterator[Owned]:
    """The resource and all that it owns, with an operator that looks after it."""
    scene.client.patch("Namespace", scene.namespace, {"metadata": {"labels": ENFORCE}})
    scene.add_node()
    with scene.operator():
        scene.apply(NAME, {"topology.colocate": "Pod", "exchange.kind": "SharedMemory"})
        yield scene.owned.wait_settled(NAME)[NAME]


def status_of(scene: Scene) -> Object:
    found: Object = scene.client.get(KIND, NAME, scene.namespace)["status"]
    return found


def admin_token(scene: Scene, owned: Owned) -> str:
    revision = owned.pods[0]["metadata"]["labels"][LABEL_REVISION]
    secret = scene.client.get("Secret", f"{NAME}-group-{revision}", scene.namespace)
    return base64.b64decode(secret["data"][SECRET_ADMIN_TOKEN_KEY]).decode()


def ranks(*, lost: int | None = None) -> list[admin_pb2.RankStatus]:
    return [rank_status(rank, "cpu", POD, joined=rank != lost) for rank in range(2)]


def test_a_container_that_ends_heals_in_its_place(scene: Scene, owned: Owned) -> None:
    uids = owned.pod_uids(ROLE_RANK)
    assert set(uids) == {POD}
    (pod,) = [pod for pod in owned.pods if pod["metadata"]["name"] == POD]
    assert list(restricted_violations(pod["spec"])) == []
    assert [item["name"] for item in pod["spec"]["containers"]] == ["rank-0", "rank-1"]
    assert pod["status"]["qosClass"] == "Guaranteed"
    kubelet = Kubelet(scene.client, scene.namespace)
    kubelet.run(POD)
    with PlayedGateway(admin_token(scene, owned)) as gateway:
        gateway.say(READY, ranks())
        (front,) = owned.pod_uids(ROLE_GATEWAY)
        kubelet.bind(front)
        address = {"podIP": gateway.address, "podIPs": [{"ip": gateway.address}]}
        running = {**pod_statuses.running("gateway", at=now()), **address}
        scene.client.patch_status("Pod", front, running, scene.namespace)
        scene.wait_for_condition(NAME, "Ready", "True", reason="Serving")
        assert [item["pod"] for item in status_of(scene)["placements"]] == [POD, POD]

        gateway.say(ABORTED, ranks(lost=1), reason="rank 1 left")
        ended = pod_statuses.terminated("rank-1", exit_code=1, message="boom", at=now())
        together = pod_statuses.together(pod_statuses.running("rank-0", at=now()), ended)
        scene.client.patch_status("Pod", POD, together, scene.namespace)
        scene.wait_for_condition(NAME, "Ready", "False", reason="RankExited")
        (ready,) = [item for item in status_of(scene)["conditions"] if item["type"] == "Ready"]
        assert ready["message"].startswith(f"rank 1 (pod {POD}, node node): exited with code 1")

        again = pod_statuses.restarted("rank-1", exit_code=1, message="boom", restarts=1, ready=True, at=now())
        together = pod_statuses.together(pod_statuses.running("rank-0", at=now()), again)
        scene.client.patch_status("Pod", POD, together, scene.namespace)
        gateway.say(READY, ranks(), epoch=2)
        scene.wait_for_condition(NAME, "Ready", "True", reason="Serving")
        restarts = status_of(scene)["restarts"]
        assert (restarts["count"], restarts["lastRank"]) == (1, 1)
    assert scene.owned.of(NAME).pod_uids(ROLE_RANK) == uids
