"""What users see of a group in every state, on a real API server: the test is the kubelet, the scheduler, the gateway.

One operator looks after all resources of the module; each test has one of its own.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator

import pytest

from hetero_api.contract import KIND, LABEL_NAME, LABEL_REVISION, LABEL_ROLE, ROLE_GATEWAY, SECRET_ADMIN_TOKEN_KEY
from hetero_api.v1 import admin_pb2
from tests.support import pod_statuses
from tests.support.kube.client import Client, Object
from tests.support.kube.cluster import Cluster
from tests.support.kube.kubelet import TOPOLOGY_MESSAGE, Kubelet, now
from tests.support.kube.nodes import ready_condition
from tests.support.kube.polling import poll
from tests.support.operator_process import OperatorProcess
from tests.support.operator_scene import Scene
from tests.support.played_gateway import PlayedGateway, rank_status

READY, ABORTED = admin_pb2.GROUP_STATE_READY, admin_pb2.GROUP_STATE_ABORTED
PULL_ERROR = 'rpc error: code = NotFound desc = failed to resolve reference "docker.io/library/nope:1": not found'
UNSCHEDULABLE = "0/2 nodes are available: 2 Insufficient cpu."


@pytest.fixture(scope="module")
def scene(cluster: Cluster, client: Client) -> Iterator[Scene]:
    with Scene.of(cluster, client) as scene:
        scene.add_node()
        yield scene


@pytest.fixture(scope="module")
def operator(scene: Scene) -> Iterator[OperatorProcess]:
    with scene.operator() as operator:
        yield operator


@pytest.fixture(scope="module")
def kubelet(scene: Scene) -> Kubelet:
    return Kubelet(scene.client, scene.namespace)


class Group:
    """A resource and its pods."""

    def __init__(self, scene: Scene, name: str) -> None:
        scene.apply(name)
        self._scene = scene
        self.name = name
        self.ranks = (f"{name}-cpu-0", f"{name}-cpu-1")
        pods = scene.client.wait_list(
            "Pod", scene.namespace, labels=f"{LABEL_NAME}={name}", until=lambda found: len(found) == 3
        )
        [gateway] = [pod for pod in pods if pod["metadata"]["labels"][LABEL_ROLE] == ROLE_GATEWAY]
        self.gateway = str(gateway["metadata"]["name"])
        self.revision = str(gateway["metadata"]["labels"][LABEL_REVISION])

    def admin_token(self) -> str:
        secret = self._scene.client.get("Secret", f"{self.name}-group-{self.revision}", self._scene.namespace)
        return base64.b64decode(secret["data"][SECRET_ADMIN_TOKEN_KEY]).decode()

    def status(self) -> Object:
        found: Object = self._scene.client.get(KIND, self.name, self._scene.namespace)["status"]
        return found

    def wait(self, reason: str, *, ready: str = "False") -> dict[str, str]:
        """Every condition as STATUS/REASON, once Ready has this status and reason."""
        self._scene.wait_for_condition(self.name, "Ready", ready, reason=reason)
        return {item["type"]: f"{item['status']}/{item['reason']}" for item in self.status()["conditions"]}

    def message(self, kind: str = "Ready") -> str:
        return str(next(item["message"] for item in self.status()["conditions"] if item["type"] == kind))

    def wait_for_events(self, *wanted: tuple[str, str]) -> None:
        """Until there is one Event of each of these types and reasons, and no other Warning."""

        def told() -> list[tuple[str, str]]:
            selector = f"involvedObject.kind={KIND},involvedObject.name={self.name}"
            events = self._scene.client.list_all("v1/Event", self._scene.namespace, fields=selector)
            return sorted((event["type"], event["reason"]) for event in events)

        def complete() -> bool:
            found = told()
            warnings = [event for event in found if event[0] == "Warning"]
            return set(wanted) <= set(found) and sorted(warnings) == sorted(
                event for event in wanted if event[0] == "Warning"
            )

        poll(complete, timeout_s=15, describe=lambda: f"Events are {told()}, not {sorted(wanted)}")

    def serve_at(self, address: str, kubelet: Kubelet, *, node: str = "node", probed: bool = True) -> None:
        """Every pod runs on `node` and is ready, ranks' if they were `probed`; the gateway's has this address."""
        for pod in self.ranks:
            kubelet.run(pod, node=node, ready=probed)
        kubelet.bind(self.gateway, node)
        status = pod_statuses.running("gateway", at=now())
        self._scene.client.patch_status(
            "Pod", self.gateway, {**status, "podIP": address, "podIPs": [{"ip": address}]}, self._scene.namespace
        )

    def say_of_node(self, node: str, ready: str) -> None:
        """A node's kubelet says how it is, and the node controller what that means for its pods: all of this group."""
        client, namespace = self._scene.client, self._scene.namespace
        client.patch_status("Node", node, {"conditions": [ready_condition(ready)]})
        for pod in (*self.ranks, self.gateway):
            found = client.get("Pod", pod, namespace)["status"]["conditions"]
            told = [{**item, "status": ready} if item["type"] == "Ready" else item for item in found]
            client.patch_status("Pod", pod, {"conditions": told}, namespace)


def broken(reason: str, **others: str) -> dict[str, str]:
    """All conditions of a group that fails before its gateway has a node."""
    return {
        "Ready": f"False/{reason}",
        "Progressing": f"True/{reason}",
        "Degraded": f"True/{reason}",
        "Accepted": "True/Accepted",
        "Scheduled": "False/Starting",
        "ModelReady": f"False/{reason}",
        "GroupFormed": f"False/{reason}",
        "GatewayReady": "False/Starting",
        "RouterReady": "False/NotRequested",
        "NUMAPinned": f"Unknown/{reason}",
        "Suspended": "False/NotSuspended",
        "Exposed": "False/NotExposed",
        **others,
    }


def test_an_image_that_cannot_be_pulled(scene: Scene, operator: OperatorProcess, kubelet: Kubelet) -> None:
    group = Group(scene, "pull")
    kubelet.creating(group.ranks[0])
    kubelet.image_pull_back_off(group.ranks[1], f'Back-off pulling image "nope:1": ErrImagePull: {PULL_ERROR}')
    assert group.wait("ImagePull") == broken("ImagePull")
    assert group.message().startswith(f"rank 1 (pod {group.ranks[1]}, node node): image ")
    assert group.message().endswith(f"cannot be pulled: {PULL_ERROR}")
    group.wait_for_events(("Warning", "ImagePull"))


def test_a_pod_that_fits_no_node(scene: Scene, operator: OperatorProcess, kubelet: Kubelet) -> None:
    group = Group(scene, "big")
    for pod in group.ranks:
        kubelet.unschedulable(pod, UNSCHEDULABLE)
    expected = broken("RankUnschedulable", Scheduled="False/RankUnschedulable")
    assert group.wait("RankUnschedulable") == expected
    assert group.message("Scheduled") == f"rank 0 (pod {group.ranks[0]}): {UNSCHEDULABLE}"
    group.wait_for_events(("Warning", "RankUnschedulable"))


def test_a_rank_that_crashes_again_and_again(scene: Scene, operator: OperatorProcess, kubelet: Kubelet) -> None:
    group = Group(scene, "crash")
    kubelet.creating(group.ranks[0])
    kubelet.crash_loop(group.ranks[1], exit_code=3, message="one\nconfig.json: no such file\n", restarts=3)
    assert group.wait("RankCrashLoop") == broken("RankCrashLoop")
    assert group.message() == (
        f"rank 1 (pod {group.ranks[1]}, node node): exited with code 3 (trying again cannot help): "
        "config.json: no such file"
    )
    # Round it goes: a restart is counted, and nothing else is told.
    before = group.status()
    again = pod_statuses.restarted(exit_code=3, message="one\nconfig.json: no such file\n", restarts=4, at=now())
    scene.client.patch_status("Pod", group.ranks[1], again, scene.namespace)
    count = before["restarts"]["count"] + 1
    counted = scene.client.wait_for(
        KIND, group.name, scene.namespace, until=lambda found: found["status"]["restarts"]["count"] == count
    )["status"]
    assert counted["conditions"] == before["conditions"]
    scene.wait_quiet()
    mark = scene.cluster.audit.mark()
    kubelet.terminated(group.ranks[1], exit_code=3, message="one\nconfig.json: no such file\n", restarts=4)
    scene.reconcile_again(operator)
    assert group.status() == counted
    assert [call for call in scene.writes(since=mark) if call.name == group.name] == []
    group.wait_for_events(("Warning", "RankCrashLoop"))


def test_a_node_that_cannot_align_a_pod(scene: Scene, operator: OperatorProcess, kubelet: Kubelet) -> None:
    group = Group(scene, "aligned")
    # Kept, for the StatefulSet controller makes such a pod anew at once (test_restart_budget.py is about that).
    scene.client.patch("Pod", group.ranks[0], {"metadata": {"finalizers": ["example.com/kept"]}}, scene.namespace)
    kubelet.topology_affinity_error(group.ranks[0])
    kubelet.creating(group.ranks[1])
    assert group.wait("TopologyAffinityError") == broken("TopologyAffinityError")
    assert group.message() == (
        f"rank 0 (pod {group.ranks[0]}, node node): the node refused the pod: TopologyAffinityError: {TOPOLOGY_MESSAGE}"
    )
    group.wait_for_events(("Warning", "TopologyAffinityError"))
    scene.client.patch("Pod", group.ranks[0], {"metadata": {"finalizers": None}}, scene.namespace)


def test_a_group_that_serves_and_loses_a_rank(scene: Scene, operator: OperatorProcess, kubelet: Kubelet) -> None:
    group = Group(scene, "served")
    ranks = [rank_status(number, "cpu", pod) for number, pod in enumerate(group.ranks)]
    with PlayedGateway(group.admin_token()) as gateway:
        gateway.say(READY, ranks)
        group.serve_at(gateway.address, kubelet)
        assert group.wait("Serving", ready="True") == {
            "Ready": "True/Serving",
            "Progressing": "False/Complete",
            "Degraded": "False/AsExpected",
            "Accepted": "True/Accepted",
            "Scheduled": "True/Scheduled",
            "ModelReady": "True/Loaded",
            "GroupFormed": "True/Formed",
            "GatewayReady": "True/Serving",
            "RouterReady": "False/NotRequested",
            "NUMAPinned": "True/Pinned",
            "Suspended": "False/NotSuspended",
            "Exposed": "False/NotExposed",
        }
        assert gateway.refused == 0
        status = group.status()
        assert (status["ranks"], status["readyReplicas"], status["epoch"]) == ("2/2", 1, 1)
        assert [item["node"] for item in status["placements"]] == ["node", "node"]
        told = status["placement"]
        assert (told["mode"], told["exchange"], told["measuredTokensPerSecond"]) == ("Tensor", "shm", 120)
        assert status["endpoint"] == f"served.{scene.namespace}.svc.cluster.local:50051"
        group.wait_for_events(("Normal", "Ready"))
        # Nothing changes: nothing is written.
        scene.wait_quiet()
        mark = scene.cluster.audit.mark()
        scene.reconcile_again(operator)
        assert [call for call in scene.writes(since=mark) if call.name == group.name] == []

        gateway.say(ABORTED, [ranks[0], rank_status(1, "cpu", group.ranks[1], joined=False)], reason="rank 1 went")
        kubelet.terminated(group.ranks[1], exit_code=1, message="ValueError: boom")
        found = group.wait("RankExited")
        assert (found["Degraded"], found["GroupFormed"]) == ("True/RankExited", "False/RankExited")
        assert group.message() == (
            f"rank 1 (pod {group.ranks[1]}, node node): exited with code 1 (it broke while running): ValueError: boom"
        )
        assert [item["rank"] for item in group.status()["placements"]] == [0]
        group.wait_for_events(("Normal", "Ready"), ("Warning", "RankExited"), ("Warning", "NotReady"))

        gateway.say(READY, ranks, epoch=2)
        kubelet.run(group.ranks[1], restarts=1)
        assert group.wait("Serving", ready="True")["Degraded"] == "False/AsExpected"
        assert (group.status()["epoch"], group.status()["restarts"]["count"]) == (2, 1)


def test_ranks_that_serve_are_counted_before_kubelets_have_probed_them(
    scene: Scene, operator: OperatorProcess, kubelet: Kubelet
) -> None:
    group = Group(scene, "early")
    with PlayedGateway(group.admin_token()) as gateway:
        gateway.say(READY, [rank_status(number, "cpu", pod) for number, pod in enumerate(group.ranks)])
        group.serve_at(gateway.address, kubelet, probed=False)
        group.wait("Serving", ready="True")
        assert (group.status()["ranks"], group.status()["readyRanks"]) == ("2/2", 2)


def test_a_kubelet_that_starts_anew_takes_the_gateway_out_of_service_and_loses_nothing(
    scene: Scene, operator: OperatorProcess, kubelet: Kubelet
) -> None:
    group, node = Group(scene, "anew"), f"{scene.namespace}-anew"
    scene.add_node(node)
    with PlayedGateway(group.admin_token()) as gateway:
        gateway.say(READY, [rank_status(number, "cpu", pod) for number, pod in enumerate(group.ranks)])
        group.serve_at(gateway.address, kubelet, node=node)
        before = group.wait("Serving", ready="True")
        group.say_of_node(node, "False")
        assert group.wait("GatewayNotReady") == {
            **before,
            "Ready": "False/GatewayNotReady",
            "Progressing": "True/GatewayNotReady",
            "GatewayReady": "False/GatewayNotReady",
        }
        # What was known of the node a moment ago may be told first: nodes are asked for every ten seconds.
        words = f"is not ready: node {node} is not ready: container runtime is down"
        poll(lambda: group.message().endswith(words), timeout_s=30, describe=group.message)
        assert group.status()["ranks"] == "2/2"
        group.say_of_node(node, "True")
        assert group.wait("Serving", ready="True") == before
    group.wait_for_events(("Normal", "Ready"), ("Warning", "NotReady"))
    scene.client.delete("Node", node)


def test_a_gateway_that_answers_no_more(scene: Scene, operator: OperatorProcess, kubelet: Kubelet) -> None:
    group = Group(scene, "silent")
    with PlayedGateway(group.admin_token()) as gateway:
        gateway.say(READY, [rank_status(number, "cpu", pod) for number, pod in enumerate(group.ranks)])
        group.serve_at(gateway.address, kubelet)
        group.wait("Serving", ready="True")
    scene.reconcile_again(operator)
    found = group.wait("GatewayUnreachable", ready="Unknown")
    assert found["GroupFormed"] == found["ModelReady"] == found["Degraded"] == "Unknown/GatewayUnreachable"
    assert "placements" not in group.status()
    assert gateway.address not in str(group.status())


def test_a_node_that_falls_silent(scene: Scene, operator: OperatorProcess, kubelet: Kubelet) -> None:
    group, node = Group(scene, "dark"), f"{scene.namespace}-dark"
    scene.add_node(node)
    kubelet.creating(group.ranks[0])
    kubelet.run(group.ranks[1], node=node, ready=False)
    scene.client.patch_status("Node", node, {"conditions": [ready_condition("Unknown")]})
    scene.reconcile_again(operator)
    assert group.wait("NodeLost") == broken("NodeLost")
    assert group.message() == (
        f"rank 1 (pod {group.ranks[1]}, node {node}): node {node} does not answer: Kubelet stopped posting node status."
    )
    group.wait_for_events(("Warning", "NodeLost"))
    scene.client.patch_status("Node", node, {"conditions": [ready_condition("True")]})
    scene.reconcile_again(operator)
    found = group.wait("Starting")
    assert found["Degraded"] == "False/AsExpected"
    group.wait_for_events(("Warning", "NodeLost"), ("Normal", "Recovered"))
    scene.client.delete("Node", node)
