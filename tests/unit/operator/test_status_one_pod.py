"""Ranks in one pod, as the status tells of them: each by its container, and all by the pod that they have in common."""

from __future__ import annotations

import copy

from hetero_api.group_state import GroupState
from hetero_api.manifest import parse_resource
from hetero_operator.reconcile import budget
from hetero_operator.reconcile.inventory import Inventory
from hetero_operator.reconcile.model import Outcome, Plan
from hetero_operator.reconcile.revision import revisions_of
from hetero_operator.reconcile.status.causes import all_causes
from hetero_operator.reconcile.status.situation import Situation
from tests.support import pod_statuses as pods
from tests.support.status_scene import GATEWAY, StatusScene, conditions, message, rank_status

SPEC = """
model: {uri: hf://a/b}
pools:
- {name: cpu, type: CPU, ranks: 2, cpu: {coresPerRank: 4, memoryPerRank: 8Gi}}
- {name: gpu, type: GPU, ranks: 2, ranksPerPod: 2, gpu: {memoryPerRank: 8Gi}}
topology: {colocate: Pod}
recovery: {maxRestarts: 3, windowSeconds: 600}
"""
POD = "x-ranks-0"
CONTAINERS = ("rank-0", "rank-2", "rank-3")
REFUSED = pods.rejected("TopologyAffinityError", "Pod was rejected: Resources cannot be allocated with locality")


def put(scene: StatusScene, **states: pods.Status) -> None:
    """The pod's containers are in these states (rank_2 for rank-2); others run."""
    given = {name.replace("_", "-"): status for name, status in states.items()}
    scene.put(POD, pods.together(*(given.get(name, pods.running(name)) for name in CONTAINERS)))


def serving() -> StatusScene:
    scene = StatusScene.of(SPEC)
    put(scene)
    scene.put(GATEWAY, pods.running("gateway"))
    answer(scene)
    scene.tell()
    return scene


def answer(scene: StatusScene, *, lost: int | None = None) -> None:
    """The gateway says that all ranks serve, or that it waits for one."""
    ranks = [rank_status(rank, POD, joined=rank != lost) for rank in range(4)]
    if lost is None:
        scene.answer(ranks=ranks)
    else:
        scene.answer(ranks=ranks, state=GroupState.ABORTED, serving=False)


def held(scene: StatusScene) -> frozenset[str]:
    observed = scene.observe()
    spec = parse_resource(observed.resource).spec
    revision = revisions_of(observed.resource, spec).ranks
    return budget.held_pools(observed, spec, Inventory.from_observed(observed), revision=revision)


def replace_pod(scene: StatusScene) -> None:
    """The StatefulSet controller replaces it; the operator remembers one that had failed."""
    pod = copy.deepcopy(scene.pod(POD))
    scene.world.failed_pods = [copy.deepcopy(pod)] if pod["status"]["phase"] == "Failed" else []
    pod["metadata"]["uid"] = f"{pod['metadata']['uid']}+"
    scene.world.pods[POD] = pod
    put(scene)


def test_a_group_in_one_pod_serves() -> None:
    told = serving().tell()
    assert conditions(told)["Ready"] == ("True", "Serving")
    assert told.status["ranks"] == "4/4"
    assert [(pool["name"], pool["ready"]) for pool in told.status["pools"]] == [("cpu", 2), ("gpu", 2)]
    assert [(item["rank"], item["pool"], item["pod"], item["node"]) for item in told.status["placements"]] == [
        (0, "gpu", POD, "n1"), (1, "gpu", POD, "n1"), (2, "cpu", POD, "n1"), (3, "cpu", POD, "n1"),
    ]  # fmt: skip


def test_a_container_that_ended_is_told_as_its_rank_alone() -> None:
    scene = serving()
    put(scene, rank_2=pods.terminated("rank-2", exit_code=1, message="boom"))
    answer(scene, lost=2)
    told = scene.tell()
    words = "rank 2 (pod x-ranks-0, node n1): exited with code 1 (it broke while running): boom"
    assert conditions(told)["Ready"] == ("False", "RankExited")
    assert message(told, "Ready") == message(told, "Degraded") == words


def test_neighbours_of_a_container_that_is_not_ready_have_no_trouble_of_their_own() -> None:
    scene = serving()
    put(scene, rank_3=pods.running("rank-3", ready=False))
    answer(scene, lost=3)
    causes = all_causes(Situation.from_look(scene.observe(), Plan(), Outcome()))
    assert [cause.subject for cause in causes] == ["rank 3 (pod x-ranks-0, node n1)", "group"]


def test_restarts_of_all_containers_count_and_the_last_one_is_named() -> None:
    scene = serving()
    later = "2030-01-01T00:00:09Z"
    put(
        scene,
        rank_0=pods.restarted("rank-0", exit_code=1, message="first", restarts=1),
        rank_3=pods.restarted("rank-3", exit_code=3, message="second", restarts=2, at=later),
    )
    for _ in range(2):
        told = scene.tell().status["restarts"]
        assert (told["count"], told["lastRank"], told["lastTime"]) == (3, 3, later)
        assert told["lastReason"].startswith("rank 3 (pod x-ranks-0): exited with code 3")
        assert [item["pod"] for item in told["seen"]] == [POD]


def test_the_pod_that_is_replaced_counts_once_for_all_its_ranks() -> None:
    scene = serving()
    scene.put(POD, REFUSED)
    replace_pod(scene)
    told = scene.tell().status["restarts"]
    assert told["count"] == 1
    assert told["lastReason"].startswith("ranks 0-1 (pod x-ranks-0): the node refused the pod: TopologyAffinityError")


def test_a_pod_that_is_refused_once_too_often_waits() -> None:
    scene = serving()
    scene.put(POD, REFUSED)
    for _ in range(4):
        assert held(scene) == frozenset()
        scene.pass_time(1)
        replace_pod(scene)
        scene.tell()
        scene.put(POD, REFUSED)
    assert held(scene) == {"ranks"}
    told = scene.tell()
    assert "TopologyAffinityError" in message(told, "Degraded")
    assert told.status["restarts"]["nextAttemptTime"] == "2030-01-01T00:00:35Z"
