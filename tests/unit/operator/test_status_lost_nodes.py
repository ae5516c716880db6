"""Which pods are forced out: those on dead nodes, when their time is over, and no others."""

from __future__ import annotations

from datetime import timedelta

from hetero_api.manifest import parse_resource
from hetero_operator.reconcile.deletions import lost_pods, next_lost_pod
from tests.support import pod_statuses as pods
from tests.support.status_scene import GATEWAY, StatusScene, rank_status

GPU, CPU0, CPU1 = "x-gpu-0", "x-cpu-0", "x-cpu-1"


def forced_out(scene: StatusScene) -> list[str]:
    observed = scene.observe()
    deletions = lost_pods(observed, parse_resource(observed.resource).spec)
    assert all(deletion.grace_period_s == 0 for deletion in deletions)
    uids = {pod["metadata"]["uid"]: name for name, pod in scene.world.pods.items()}
    assert [uids[deletion.uid] for deletion in deletions] == [deletion.ref.name for deletion in deletions]
    return [deletion.ref.name for deletion in deletions]


def on_two_nodes(node: object) -> StatusScene:
    """The second node is in some state; nobody answers."""
    scene = StatusScene.of()
    for name in (GPU, CPU0):
        scene.put(name, pods.running(ready=False), node="n1")
    scene.put(CPU1, pods.running(ready=False), node="n2")
    scene.put(GATEWAY, pods.running("gateway", ready=False), node="n2")
    scene.world.nodes = {"n1": pods.node("True"), "n2": node}  # type: ignore[dict-item]
    scene.world.now = scene.world.now.replace(hour=0, minute=0, second=0)
    return scene


def test_pods_go_when_their_node_was_lost_for_long_enough() -> None:
    for ready in ("Unknown", "False"):
        scene = on_two_nodes(pods.node(ready))
        scene.pass_time(299)
        assert forced_out(scene) == []
        scene.pass_time(1)
        assert forced_out(scene) == [CPU1, scene.pod(GATEWAY)["metadata"]["name"]]


def test_pods_go_at_once_when_their_node_is_gone() -> None:
    assert CPU1 in forced_out(on_two_nodes(None))


def test_pods_stay_where_nothing_is_known_of_the_node() -> None:
    scene = on_two_nodes(pods.node("True"))
    scene.world.nodes.clear()
    scene.pass_time(10_000)
    assert forced_out(scene) == []


def test_pods_stay_on_a_node_that_never_said_how_it_is() -> None:
    scene = on_two_nodes({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n2"}, "status": {}})
    scene.pass_time(10_000)
    assert forced_out(scene) == []


def test_pods_without_a_node_stay() -> None:
    scene = on_two_nodes(None)
    scene.put(CPU1, pods.unschedulable(), node="")
    assert CPU1 not in forced_out(scene)


def test_pods_that_the_gateway_hears_of_stay() -> None:
    scene = on_two_nodes(pods.node("Unknown"))
    scene.pass_time(1000)
    scene.answer()
    assert forced_out(scene) == []
    scene.answer(ranks=(*scene.ranks()[:3], rank_status(3, "x-cpu-1", joined=False)))
    assert forced_out(scene) == [CPU1]
    scene.answer(error="UNAVAILABLE: no")
    assert forced_out(scene) == [CPU1, scene.pod(GATEWAY)["metadata"]["name"]]


def test_the_next_time_is_that_of_the_node_that_was_lost_first() -> None:
    scene = on_two_nodes(pods.node("Unknown"))
    scene.world.nodes["n1"] = pods.node("False", at="2029-12-31T23:59:00Z")
    observed = scene.observe()
    spec = parse_resource(observed.resource).spec
    assert next_lost_pod(observed, spec) == observed.now + timedelta(seconds=240)
    scene.pass_time(300)
    assert next_lost_pod(scene.observe(), spec) is None
