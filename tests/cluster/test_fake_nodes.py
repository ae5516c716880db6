"""Pods that the real scheduler puts on nodes that do not exist, and the states that a kubelet would report."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.cluster.workloads import pod, stateful_set
from tests.support.kube.autopilot import Autopilot
from tests.support.kube.client import Client, Object, condition
from tests.support.kube.cluster import Cluster, discard_namespace
from tests.support.kube.kubelet import Kubelet
from tests.support.kube.nodes import FakeNodes


@pytest.fixture
def scheduled(scheduling_cluster: Cluster) -> Iterator[tuple[Client, str]]:
    """The administrator of the cluster with a scheduler, and a namespace there."""
    with scheduling_cluster.client() as client:
        namespace = scheduling_cluster.create_namespace(client)
        yield client, namespace
        discard_namespace(client, namespace)


def wants(**resources: str) -> list[Object]:
    """One container that requests resources."""
    amounts = {name.replace("_", "/"): amount for name, amount in resources.items()}
    return [{"name": "main", "image": "none", "resources": {"requests": amounts, "limits": amounts}}]


def test_the_scheduler_binds_by_capacity(scheduled: tuple[Client, str]) -> None:
    client, namespace = scheduled
    with FakeNodes(client) as nodes:
        nodes.add("numa-node", cpu=64)
        nodes.add("gpu-node", cpu=4, gpus=8)
        client.create(pod("cores", namespace, containers=wants(cpu="60")))
        client.create(pod("gpus", namespace, containers=wants(**{"nvidia.com_gpu": "8"})))
        client.create(pod("too-large", namespace, containers=wants(cpu="200")))
        assert client.wait_for("Pod", "cores", namespace, until=_bound)["spec"]["nodeName"] == "numa-node"
        assert client.wait_for("Pod", "gpus", namespace, until=_bound)["spec"]["nodeName"] == "gpu-node"
        refused = client.wait_for(
            "Pod", "too-large", namespace, until=lambda p: condition(p, "PodScheduled") is not None
        )
        assert "Insufficient cpu" in (condition(refused, "PodScheduled") or {})["message"]


def test_a_lost_node_is_tainted(scheduled: tuple[Client, str]) -> None:
    client, _ = scheduled
    with FakeNodes(client) as nodes:
        nodes.add("fragile")
        client.wait_for("Node", "fragile", until=lambda node: not node["spec"].get("taints"))
        nodes.lose("fragile")
        client.wait_for("Node", "fragile", until=lambda node: "unreachable" in str(node["spec"].get("taints")))
        nodes.recover("fragile")
        client.wait_for("Node", "fragile", until=lambda node: not node["spec"].get("taints"))


def _bound(found: Object) -> bool:
    return bool(found["spec"].get("nodeName"))


def _waiting(found: Object) -> Any:
    return found["status"]["containerStatuses"][0]["state"]["waiting"]["reason"]


def _last_exit(found: Object) -> Any:
    return found["status"]["containerStatuses"][0]["lastState"]["terminated"]["exitCode"]


STATES: list[tuple[str, Callable[[Kubelet], Object], Callable[[Object], Any], Any]] = [
    (
        "unschedulable",
        lambda k: k.unschedulable("one"),
        lambda p: p["status"]["conditions"][0]["reason"],
        "Unschedulable",
    ),
    ("creating", lambda k: k.creating("one"), _waiting, "ContainerCreating"),
    ("image pull", lambda k: k.image_pull_back_off("one"), _waiting, "ImagePullBackOff"),
    ("crash loop", lambda k: k.crash_loop("one", exit_code=3), _last_exit, 3),
    ("topology", lambda k: k.topology_affinity_error("one"), lambda p: p["status"]["reason"], "TopologyAffinityError"),
    ("running", lambda k: k.run("one"), lambda p: (condition(p, "Ready") or {})["status"], "True"),
    ("not ready", lambda k: k.run("one", ready=False), lambda p: (condition(p, "Ready") or {})["status"], "False"),
    ("init fails", lambda k: k.init_failing("one", exit_code=4), _waiting, "PodInitializing"),
    ("init runs", lambda k: k.init_running("one"), lambda p: (condition(p, "Initialized") or {})["status"], "False"),
]


@pytest.mark.parametrize(("play", "read", "expected"), [row[1:] for row in STATES], ids=[row[0] for row in STATES])
def test_a_pod_is_put_into_a_state(
    client: Client, namespace: str, play: Callable[[Kubelet], Object], read: Callable[[Object], Any], expected: object
) -> None:
    client.create(pod("one", namespace, initContainers=[{"name": "fetch", "image": "none"}]))
    play(Kubelet(client, namespace))
    assert read(client.get("Pod", "one", namespace)) == expected


def test_an_event_names_its_pod(client: Client, namespace: str) -> None:
    client.create(pod("one", namespace))
    Kubelet(client, namespace).event("one", "FailedMount", "no such claim")
    (event,) = client.list_all("v1/Event", namespace, fields="involvedObject.name=one")
    assert (event["reason"], event["message"]) == ("FailedMount", "no such claim")


def test_the_autopilot_runs_what_is_not_held(client: Client, namespace: str) -> None:
    with Autopilot(client, namespace) as autopilot:
        autopilot.hold("ranks-1")
        client.apply(stateful_set("ranks", namespace, replicas=2))
        client.wait_for("StatefulSet", "ranks", namespace, until=lambda s: s["status"].get("readyReplicas") == 1)
        autopilot.release("ranks-1")
        client.wait_for("StatefulSet", "ranks", namespace, until=lambda s: s["status"].get("readyReplicas") == 2)
        client.delete("Pod", "ranks-0", namespace)
        client.patch("StatefulSet", "ranks", {"spec": {"replicas": 0}}, namespace)
        client.wait_list("Pod", namespace, until=lambda pods: pods == [])
