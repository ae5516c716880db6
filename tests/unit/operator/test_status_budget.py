"""The budget of restarts: what counts, what does not, and how long pools have to wait."""

from __future__ import annotations

import copy
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_api.contract import LABEL_REVISION
from hetero_api.manifest import parse_resource
from hetero_operator.reconcile import budget
from hetero_operator.reconcile.inventory import Inventory
from hetero_operator.reconcile.revision import revisions_of
from hetero_operator.reconcile.status.text import parsed_time
from tests.support import pod_statuses as pods
from tests.support.examples import examples
from tests.support.status_scene import GATEWAY, StatusScene, conditions, message

SPEC = """
model: {uri: hf://a/b}
pools:
- {name: cpu, type: CPU, ranks: 2, cpu: {coresPerRank: 4, memoryPerRank: 8Gi}}
- {name: more, type: CPU, ranks: 1}
recovery: {maxRestarts: 3, windowSeconds: 600}
"""
RANKS = ("x-cpu-0", "x-cpu-1", "x-more-0")
REFUSED = pods.rejected(
    "TopologyAffinityError", "Pod was rejected: Resources cannot be allocated with Topology locality"
)


def scene_of_running_ranks() -> StatusScene:
    scene = StatusScene.of(SPEC)
    for name in (*RANKS, GATEWAY):
        scene.put(name, pods.running(scene.container(name), ready=False))
    scene.tell()
    return scene


def restarts(scene: StatusScene) -> dict[str, Any]:
    found: dict[str, Any] = scene.tell().status["restarts"]
    return found


def restart(scene: StatusScene, name: str, times: int) -> None:
    """Its container has restarted so often by now."""
    scene.put(name, pods.restarted(exit_code=1, message="boom", restarts=times))


def replace_pod(scene: StatusScene, name: str) -> None:
    """The StatefulSet controller makes it anew; the operator remembers one that had failed."""
    pod = copy.deepcopy(scene.pod(name))
    others = [item for item in scene.world.failed_pods if item["metadata"]["name"] != name]
    failed = [copy.deepcopy(pod)] if pod["status"]["phase"] == "Failed" else []
    scene.world.failed_pods = [*others, *failed]
    pod["metadata"]["uid"] = f"{pod['metadata']['uid']}+"
    scene.world.pods[name] = pod
    scene.put(name, pods.running(ready=False))


def held(scene: StatusScene) -> frozenset[str]:
    observed = scene.observe()
    spec = parse_resource(observed.resource).spec
    revision = revisions_of(observed.resource, spec).ranks
    return budget.held_pools(observed, spec, Inventory.from_observed(observed), revision=revision)


def hold(scene: StatusScene, *pools: str) -> None:
    """The operator takes the pods of pools away, and their controllers do it."""
    for pool in pools:
        scene.workload("StatefulSet", f"x-{pool}")["spec"]["replicas"] = 0
        for name in [name for name in scene.world.pods if name.startswith(f"x-{pool}-")]:
            del scene.world.pods[name]


# --- what counts ----------------------------------------------------------------------------------------


def test_a_container_that_restarts_counts_once() -> None:
    scene = scene_of_running_ranks()
    restart(scene, "x-cpu-1", 2)
    told = restarts(scene)
    assert (told["count"], told["lastRank"]) == (2, 1)
    assert told["lastReason"] == "rank 1 (pod x-cpu-1): exited with code 1 (it broke while running): boom"
    assert told["lastTime"] == pods.AT
    for _ in range(3):
        scene.pass_time(10)
        assert restarts(scene) == told


DELETED = {"phase": "Failed", "containerStatuses": pods.terminated(exit_code=143)["containerStatuses"]}
"""As a kubelet leaves a pod that was deleted: it names no reason."""
DRAINED = {**DELETED, "conditions": [{"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}]}
PREEMPTED = {**DRAINED, "reason": "Preempting", "message": "Preempted in order to admit critical pod"}
DISRUPTIONS = {
    "running": pods.running(),
    "deleted": DELETED,
    "drained": DRAINED,
    "preempted": PREEMPTED,
    "evicted": pods.rejected("Evicted", "The node was low on resource: memory."),
    "shutdown": pods.rejected("Terminated", "Pod was terminated in response to imminent node shutdown."),
    "lost": pods.rejected("NodeLost", "Node n1 which was running pod x-cpu-0 is unresponsive"),
}


@pytest.mark.parametrize("how", DISRUPTIONS)
def test_pods_that_are_deleted_or_evicted_never_use_the_budget_up(how: str) -> None:
    scene = scene_of_running_ranks()
    for _ in range(3):
        for name in RANKS:
            scene.put(name, DISRUPTIONS[how])
            assert (restarts(scene)["count"], held(scene)) == (0, frozenset())
            replace_pod(scene, name)
            assert (restarts(scene)["count"], held(scene)) == (0, frozenset())


def test_a_drain_takes_no_pods_from_a_set_whose_containers_used_the_budget_up() -> None:
    scene = scene_of_running_ranks()
    restart(scene, "x-cpu-0", 9)
    assert restarts(scene)["count"] == 9
    scene.put("x-cpu-1", DRAINED)
    replace_pod(scene, "x-cpu-1")
    assert "nextAttemptTime" not in restarts(scene)
    assert held(scene) == frozenset()


def test_containers_that_restarted_in_a_new_pod_count() -> None:
    scene = scene_of_running_ranks()
    replace_pod(scene, "x-cpu-1")
    restart(scene, "x-cpu-1", 2)
    told = restarts(scene)
    assert (told["count"], told["lastRank"]) == (2, 1)
    assert told["lastReason"] == "rank 1 (pod x-cpu-1): exited with code 1 (it broke while running): boom"


def test_a_pod_that_failed_and_is_made_anew_counts_with_its_reason() -> None:
    scene = scene_of_running_ranks()
    scene.put("x-cpu-0", REFUSED)
    assert restarts(scene)["count"] == 0
    replace_pod(scene, "x-cpu-0")
    told = restarts(scene)
    assert told["count"] == 1
    assert told["lastReason"].startswith("rank 0 (pod x-cpu-0): the node refused the pod: TopologyAffinityError: ")


def test_a_pod_that_failed_and_was_replaced_before_anybody_looked_counts_with_its_reason() -> None:
    scene = scene_of_running_ranks()
    scene.put("x-cpu-0", REFUSED)
    replace_pod(scene, "x-cpu-0")
    told = restarts(scene)
    assert told["count"] == 1
    assert told["lastReason"].startswith("rank 0 (pod x-cpu-0): the node refused the pod: TopologyAffinityError: ")


def test_a_failed_pod_of_another_revision_counts_nothing() -> None:
    scene = scene_of_running_ranks()
    scene.put("x-cpu-0", REFUSED)
    replace_pod(scene, "x-cpu-0")
    scene.world.failed_pods[0]["metadata"]["labels"][LABEL_REVISION] = "earlier"
    assert restarts(scene)["count"] == 0


def test_a_pod_that_is_away_for_a_while_counts_when_it_is_back() -> None:
    scene = scene_of_running_ranks()
    scene.put("x-cpu-0", REFUSED)
    pod = scene.world.pods.pop("x-cpu-0")
    assert restarts(scene)["count"] == 0
    scene.world.pods["x-cpu-0"] = pod
    replace_pod(scene, "x-cpu-0")
    assert restarts(scene)["count"] == 1


def test_what_was_before_the_first_look_does_not_count() -> None:
    scene = StatusScene.of(SPEC)
    restart(scene, "x-cpu-0", 7)
    assert restarts(scene)["count"] == 0


def test_other_containers_and_the_gateway_do_not_count() -> None:
    scene = scene_of_running_ranks()
    scene.put("x-cpu-0", pods.init({"running": {"startedAt": pods.AT}}, restarts=9))
    scene.put(GATEWAY, pods.restarted("gateway", exit_code=1, restarts=9))
    assert restarts(scene)["count"] == 0


def test_a_roll_out_does_not_count_and_begins_anew() -> None:
    scene = scene_of_running_ranks()
    restart(scene, "x-cpu-0", 2)
    assert restarts(scene)["count"] == 2
    spec = {**scene.world.resource["spec"], "podMetadata": {"labels": {"a": "b"}}}
    scene.world.change(spec)
    scene.world.act(scene.world.plan())
    assert restarts(scene)["count"] == 0
    scene.world.run_controllers()
    scene.world.reconcile()
    assert restarts(scene)["count"] == 0


def test_a_suspension_does_not_count_and_begins_anew() -> None:
    scene = scene_of_running_ranks()
    restart(scene, "x-cpu-0", 2)
    scene.tell()
    spec = scene.world.resource["spec"]
    scene.world.change({**spec, "suspend": True})
    scene.world.reconcile()
    assert restarts(scene) == {"count": 0, "attempts": 0}
    scene.world.change(spec)
    scene.world.reconcile()
    assert restarts(scene)["count"] == 0


# --- windows --------------------------------------------------------------------------------------------


def test_a_window_ends_and_the_next_restart_begins_another() -> None:
    scene = scene_of_running_ranks()
    restart(scene, "x-cpu-0", 2)
    assert restarts(scene)["windowStart"] == "2030-01-01T00:00:01Z"
    scene.pass_time(599)
    assert restarts(scene)["count"] == 2
    scene.pass_time(1)
    told = restarts(scene)
    assert told["count"] == 0
    assert "windowStart" not in told
    assert told["lastRank"] == 0
    restart(scene, "x-cpu-0", 3)
    assert restarts(scene)["windowStart"] == "2030-01-01T00:10:01Z"


def test_containers_that_crash_in_place_are_told_and_left_to_the_kubelet() -> None:
    scene = scene_of_running_ranks()
    scene.put("x-cpu-0", pods.crash_loop(exit_code=1, message="boom", restarts=4))
    told = scene.tell()
    assert conditions(told)["Ready"] == ("False", "RestartBudgetExhausted")
    assert conditions(told)["Degraded"] == ("True", "RestartBudgetExhausted")
    assert conditions(told)["Progressing"] == ("False", "RestartBudgetExhausted")
    assert message(told, "Ready") == (
        "group: ranks restarted more than spec.recovery.maxRestarts (3) times within 600 s; the last was rank 0 (pod "
        "x-cpu-0): exited with code 1 (it broke while running): boom"
    )
    assert held(scene) == frozenset()
    assert "nextAttemptTime" not in told.status["restarts"]


def test_a_group_that_serves_again_is_not_told_of_its_budget() -> None:
    scene = StatusScene.serving()
    scene.put("x-cpu-0", pods.restarted(exit_code=1, restarts=9, ready=True))
    told = scene.tell()
    assert told.status["restarts"]["count"] == 9
    assert conditions(told)["Ready"] == ("True", "Serving")
    assert conditions(told)["Degraded"] == ("False", "AsExpected")


# --- waits ----------------------------------------------------------------------------------------------


def used_up() -> StatusScene:
    """A pool whose pod is refused again and again, once too often."""
    scene = scene_of_running_ranks()
    scene.put("x-cpu-0", REFUSED)
    for _ in range(4):
        assert held(scene) == frozenset()
        scene.pass_time(1)
        replace_pod(scene, "x-cpu-0")
        scene.tell()
        scene.put("x-cpu-0", REFUSED)
    return scene


def test_a_pool_that_is_refused_once_too_often_waits() -> None:
    scene = used_up()
    assert held(scene) == {"cpu"}
    told = scene.tell()
    assert told.status["restarts"]["attempts"] == 1
    assert told.status["restarts"]["nextAttemptTime"] == "2030-01-01T00:00:35Z"
    assert conditions(told)["Ready"] == ("False", "RestartBudgetExhausted")
    assert "TopologyAffinityError" in message(told, "Degraded")
    assert "they are started again at 2030-01-01T00:00:35Z" in message(told, "Degraded")
    hold(scene, "cpu")
    scene.pass_time(29)
    assert held(scene) == {"cpu"}
    scene.pass_time(1)
    assert held(scene) == frozenset()


def test_the_status_of_a_wait_stands_still_until_it_is_over() -> None:
    scene = used_up()
    scene.tell()
    hold(scene, "cpu")
    first = scene.tell()
    scene.pass_time(20)
    again = scene.tell()
    assert again.status == first.status
    assert again.events == ()
    assert again.look_again_s is not None
    assert again.look_again_s <= 10


def test_pods_of_an_attempt_do_not_count_as_restarts() -> None:
    scene = used_up()
    scene.tell()
    hold(scene, "cpu")
    count = restarts(scene)["count"]
    scene.pass_time(30)
    scene.world.reconcile()  # the pool gets its pods again
    told = scene.tell()
    assert told.status["restarts"]["count"] == count
    assert "nextAttemptTime" not in told.status["restarts"]
    assert conditions(told)["Ready"] == ("False", "Starting")


def test_gaps_double_up_to_an_hour() -> None:
    assert [budget.gap_s(attempt) for attempt in range(1, 10)] == [30, 60, 120, 240, 480, 960, 1920, 3600, 3600]
    scene = used_up()
    for attempt in range(1, 6):
        told = restarts(scene)
        gap = parsed_time(told["nextAttemptTime"])
        assert gap is not None
        assert (told["attempts"], (gap - scene.world.now).total_seconds()) == (attempt, budget.gap_s(attempt))
        hold(scene, "cpu")
        scene.tell()
        scene.world.now = gap
        scene.world.reconcile()
        scene.tell()
        for name in ("x-cpu-0", "x-cpu-1"):
            scene.put(name, REFUSED)


def test_a_new_spec_gets_a_whole_budget_at_once() -> None:
    scene = used_up()
    scene.tell()
    hold(scene, "cpu")
    scene.tell()
    scene.world.change({**scene.world.resource["spec"], "podMetadata": {"labels": {"a": "b"}}})
    assert held(scene) == frozenset()
    assert restarts(scene)["count"] == 0


def test_a_pool_does_not_wait_while_one_of_its_pods_is_pending() -> None:
    scene = used_up()
    for status in (pods.unschedulable(), pods.creating(), pods.waiting("rank", "ImagePullBackOff", "no")):
        scene.put("x-cpu-1", status)
        assert held(scene) == frozenset()
    scene.put("x-cpu-1", pods.running())
    assert held(scene) == {"cpu"}


def test_an_attempt_that_holds_ends_the_gaps_after_a_window_of_peace() -> None:
    scene = used_up()
    scene.tell()
    hold(scene, "cpu")
    scene.tell()
    scene.pass_time(30)
    scene.world.reconcile()
    assert restarts(scene)["attempts"] == 1
    scene.pass_time(600)
    told = restarts(scene)
    assert (told["count"], told["attempts"]) == (0, 0)


# --- whatever happens -----------------------------------------------------------------------------------

STEP = st.sampled_from(["restart", "replace", "refuse", "run", "unschedulable", "look", "look", "wait", "wait long"])


@settings(max_examples=examples(40))
@given(steps=st.lists(st.tuples(STEP, st.sampled_from(RANKS)), max_size=40), limit=st.integers(0, 3))
def test_the_account_never_tells_more_than_happened(steps: list[tuple[str, str]], limit: int) -> None:
    scene = scene_of_running_ranks()
    scene.world.resource["spec"]["recovery"]["maxRestarts"] = limit
    happened, counts = 0, dict.fromkeys(RANKS, 0)
    for step, name in steps:
        if name not in scene.world.pods:
            continue
        if step == "restart":
            happened, counts[name] = happened + 1, counts[name] + 1
            restart(scene, name, counts[name])
        elif step == "replace":
            happened, counts[name] = happened + 1, 0
            replace_pod(scene, name)
        elif step == "refuse":
            scene.put(name, REFUSED)
            counts[name] = 0  # newer kubelets write another container status there
        elif step in ("run", "unschedulable"):
            status = pods.running(restartCount=counts[name]) if step == "run" else pods.unschedulable()
            scene.put(name, status, node="n1" if step == "run" else "")
            counts[name] = counts[name] if step == "run" else 0
        else:
            scene.pass_time({"look": 1, "wait": 45, "wait long": 700}[step])
        waiting = held(scene)
        told = restarts(scene)
        assert told["count"] <= happened
        assert restarts(scene) == told, "a second look at the same counts nothing"
        assert len(told.get("seen", ())) <= len(RANKS)
        next_attempt = parsed_time(told.get("nextAttemptTime"))
        assert bool(waiting) <= (next_attempt is not None)
        if next_attempt is not None:
            gap_s = (next_attempt - scene.world.now).total_seconds()
            assert 0 < gap_s <= budget.LONGEST_GAP_S
            assert told["count"] > limit
        for pool in waiting:
            phases = {pod["status"]["phase"] for item, pod in scene.world.pods.items() if item.startswith(f"x-{pool}-")}
            assert "Pending" not in phases


@pytest.mark.parametrize("attempts", [1, 17, 1000, 10**6])
def test_a_gap_is_bounded_however_often_it_was_tried(attempts: int) -> None:
    assert timedelta(seconds=budget.gap_s(attempts)) <= timedelta(hours=1)


def test_a_wait_that_begins_within_a_look_is_told_at_its_end() -> None:
    """The operator takes the pods away and looks again before it reports: the stored status knows nothing of it."""
    scene = used_up()
    assert held(scene) == {"cpu"}
    hold(scene, "cpu")
    assert held(scene) == {"cpu"}
    assert restarts(scene)["attempts"] == 1


def test_a_wait_is_over_only_when_pods_are_asked_for_again() -> None:
    scene = used_up()
    before = restarts(scene)
    hold(scene, "cpu")
    scene.tell()
    scene.pass_time(31)
    assert held(scene) == frozenset()
    told = restarts(scene)  # the write that gives the pool its pods failed
    assert (told["attempts"], told["nextAttemptTime"]) == (1, before["nextAttemptTime"])
    assert held(scene) == frozenset()


def test_a_pool_waits_though_nobody_saw_its_pods_fail() -> None:
    """A StatefulSet's controller makes a failed pod anew within milliseconds: a Pending pod is all there is to see."""
    scene = scene_of_running_ranks()
    for _ in range(3):
        scene.pass_time(1)
        scene.put("x-cpu-0", REFUSED)
        replace_pod(scene, "x-cpu-0")
        assert held(scene) == frozenset()
        scene.tell()
    scene.pass_time(1)
    assert held(scene) == frozenset()
    scene.put("x-cpu-0", REFUSED)
    replace_pod(scene, "x-cpu-0")
    assert held(scene) == {"cpu"}
    assert scene.tell().status["restarts"]["nextAttemptTime"] == "2030-01-01T00:00:35Z"
