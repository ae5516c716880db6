"""Pods on nodes that died: made anew elsewhere once the node was lost for long enough, and never otherwise.

Real scheduler, real node controller, which finds out that a node is silent and says so of its pods; the nodes are Node
objects without machines. No controller here collects pods of lost nodes, so whoever is gone was taken by the operator.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from hetero_api.contract import ROLE_GATEWAY, ROLE_RANK
from tests.cluster.conftest import OPTIONS
from tests.support.kube.autopilot import Autopilot
from tests.support.kube.binaries import Binaries
from tests.support.kube.client import Client, Object, condition
from tests.support.kube.control_plane import ControlPlane
from tests.support.kube.flags import CONTROLLERS
from tests.support.kube.nodes import FakeNodes
from tests.support.kube.polling import poll
from tests.support.operator_process import OperatorProcess
from tests.support.operator_scene import Scene

NODE_LOST_S = 10
REPLACED_WITHIN_S = 40.0
PODS = ("x-cpu-0", "x-cpu-1", "x-cpu-2")


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory, binaries: Binaries) -> Iterator[ControlPlane]:
    """One that notices a silent node soon."""
    options = replace(
        OPTIONS,
        scheduler=True,
        controllers=[*CONTROLLERS, "nodelifecycle"],
        controller_manager_arguments=["--node-monitor-grace-period=6s", "--node-monitor-period=1s"],
    )
    with ControlPlane(tmp_path_factory.mktemp("nodes") / "control-plane", binaries, options) as plane:
        yield plane


@pytest.fixture
def scene(plane: ControlPlane) -> Iterator[Scene]:
    with Scene.alone(plane.cluster) as scene:
        yield scene


@pytest.fixture
def nodes(scene: Scene) -> Iterator[FakeNodes]:
    with FakeNodes(scene.client) as nodes:
        yield nodes


@pytest.fixture
def running(scene: Scene, nodes: FakeNodes) -> Iterator[OperatorProcess]:
    """Three ranks, each on a node of its own (they fit nowhere together), a spare node, and an operator."""
    label = {"scene": scene.namespace}
    for number in range(4):
        nodes.add(node(scene, number), cpu=4, labels=label)
    with scene.operator() as operator, Autopilot(scene.client, scene.namespace):
        scene.apply(
            "x",
            {
                "pools.0.ranks": 3,
                "pools.0.cpu.coresPerRank": 3,
                "gateway.resources.cpuMillis": 500,
                "scheduling.nodeSelector": label,
                "recovery.nodeLostTimeoutSeconds": NODE_LOST_S,
                "recovery.maxRestarts": 100,
            },
        )
        scene.client.wait_list("Pod", scene.namespace, until=lambda pods: len(pods) == 4 and all(map(is_running, pods)))
        yield operator


def node(scene: Scene, number: int) -> str:
    return f"{scene.namespace}-{number}"


def is_running(pod: Object) -> bool:
    return bool(pod["status"]["phase"] == "Running" and not pod["metadata"].get("deletionTimestamp"))


def where(scene: Scene, pod: str) -> str:
    return str(scene.client.get("Pod", pod, scene.namespace)["spec"]["nodeName"])


def uids(client: Client, scene: Scene) -> dict[str, str]:
    owned = scene.owned.of("x")
    return {**owned.pod_uids(ROLE_RANK), **owned.pod_uids(ROLE_GATEWAY)}


def on_node(scene: Scene, name: str) -> set[str]:
    pods = scene.client.list_all("Pod", scene.namespace)
    return {pod["metadata"]["name"] for pod in pods if pod["spec"].get("nodeName") == name}


def stays(holds: Callable[[], bool], for_s: float) -> None:
    """`holds` is true the whole time."""
    end = time.monotonic() + for_s

    def over() -> bool:
        assert holds()
        return time.monotonic() >= end

    poll(over, timeout_s=for_s + 10.0, interval_s=0.5)


def wait_replaced(scene: Scene, before: dict[str, str], lost: set[str], dead: str) -> None:
    """Until the pods that were on a dead node run elsewhere; all others are those of before."""
    ranks = {name for name in before if name in PODS}

    def replaced() -> bool:
        pods = [pod for pod in scene.client.list_all("Pod", scene.namespace) if is_running(pod)]
        uid_of = {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in pods}
        anew = [pod for pod in pods if pod["metadata"]["uid"] not in before.values()]
        return (
            ranks <= set(uid_of)
            and len(uid_of) == len(before)
            and len(anew) == len(lost)
            and all(pod["spec"]["nodeName"] != dead for pod in anew)
        )

    poll(replaced, timeout_s=REPLACED_WITHIN_S, describe=lambda: str(scene.client.list_all("Pod", scene.namespace)))
    left = {uid for name, uid in before.items() if name not in lost}
    found = uids(scene.client, scene)
    assert left <= set(found.values()), "a pod on a node that is well was taken"


@pytest.mark.slow
def test_pods_of_a_node_that_falls_silent_run_elsewhere(
    scene: Scene, nodes: FakeNodes, running: OperatorProcess
) -> None:
    before, dead = uids(scene.client, scene), where(scene, "x-cpu-1")
    lost = on_node(scene, dead)
    nodes.lose(dead, say_so=False)
    scene.client.wait_for("Node", dead, until=lambda node: (condition(node, "Ready") or {})["status"] == "Unknown")
    # Nothing is taken before its time, to the second that Kubernetes writes times in.
    stays(lambda: set(before.values()) <= set(uids(scene.client, scene).values()), NODE_LOST_S - 2)
    wait_replaced(scene, before, lost, dead)


@pytest.mark.slow
def test_pods_of_a_node_that_is_gone_run_elsewhere(scene: Scene, nodes: FakeNodes, running: OperatorProcess) -> None:
    """At once: nobody waits for a node that does not exist."""
    before, dead = uids(scene.client, scene), where(scene, "x-cpu-2")
    lost = on_node(scene, dead)
    nodes.lose(dead, say_so=False)
    scene.client.wait_for("Node", dead, until=lambda node: (condition(node, "Ready") or {})["status"] == "Unknown")
    nodes.remove(dead)
    wait_replaced(scene, before, lost, dead)


@pytest.mark.slow
def test_a_node_that_comes_back_in_time_keeps_its_pods(
    scene: Scene, nodes: FakeNodes, running: OperatorProcess
) -> None:
    before, shaky = uids(scene.client, scene), where(scene, "x-cpu-0")
    for _ in range(2):  # each time anew: two short absences are no long one
        nodes.lose(shaky)
        stays(lambda: uids(scene.client, scene) == before, NODE_LOST_S - 4)
        nodes.recover(shaky)
        scene.reconcile_again(running)
    stays(lambda: uids(scene.client, scene) == before, NODE_LOST_S + 2)
