"""Roll-outs over several replicas: in turn, stopped by a spec that does not work, and back again."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from hetero_api.contract import LABEL_GATEWAY_REVISION, LABEL_REVISION, LABEL_ROLE, ROLE_GATEWAY, ROLE_RANK
from hetero_operator.reconcile.inventory import label_of, ordinal_of
from tests.support import pod_statuses
from tests.support.owned_objects import normalised
from tests.support.replica_scene import MOST_ROUNDS, ReplicaScene, copy_of

NEW = {"uri": "hf://a/b", "revision": "v2"}


def new_revision(scene: ReplicaScene, **fields: Any) -> str:
    """The revision that a change would give, found out on a copy."""
    twin = copy_of(scene)
    twin.change(**fields)
    twin.settle()
    [revision] = set(twin.revisions().values())
    return revision


def test_a_changed_spec_goes_from_replica_to_replica() -> None:
    scene = ReplicaScene.of(3)
    before = scene.uids([0, 1, 2])
    [old] = set(scene.revisions().values())
    scene.change(model=NEW)
    scene.settle()
    assert scene.order == [2, 1, 0]
    assert scene.least_serving == 2
    assert set(scene.revisions().values()) != {old}
    assert not set(before.values()) & set(scene.uids([0, 1, 2]).values())
    assert (scene.condition("Ready")["observedGeneration"], scene.status()["updatedReplicas"]) == (2, 3)
    assert len(scene.world.of_kind("ConfigMap")) == len(scene.world.of_kind("Secret")) == 3


def test_while_it_goes_the_whole_tells_how_far_and_claims_nothing_of_the_new_spec() -> None:
    scene = ReplicaScene.of(3)
    scene.change(model=NEW)
    scene.world.act(scene.world.plan())
    scene.tell()
    progressing = scene.condition("Progressing")
    assert (progressing["status"], progressing["reason"]) == ("True", "RollingOut")
    assert progressing["message"] == "0 of 3 replicas have the spec as written."
    assert (scene.condition("Ready")["observedGeneration"], scene.status()["updatedReplicas"]) == (1, 0)
    for _ in range(MOST_ROUNDS):
        scene.move()
        scene.world.act(scene.world.plan())
        scene.tell()
        if scene.status()["updatedReplicas"]:
            break
    assert scene.status()["updatedReplicas"] == 1
    assert [group["updated"] for group in scene.status()["groups"]] == [False, False, True]


def test_the_gateway_of_the_next_replica_finishes_before_its_ranks_change() -> None:
    scene = ReplicaScene.of(2)
    scene.change(model=NEW)
    [first] = scene.world.plan().apply
    assert (first["metadata"]["name"], first["spec"]["replicas"]) == ("x-1-gateway", 0)
    scene.world.act(scene.world.plan())
    scene.move()
    second = scene.world.plan()
    assert second.delete == ()
    assert {item["metadata"]["name"] for item in second.apply} >= {"x-1-cpu", "x-1-gateway"}


def test_the_next_replica_makes_way_once_callers_have_had_time_to_learn_of_the_last_one() -> None:
    scene = ReplicaScene.of(2)
    before = scene.revisions()[1]
    scene.change(model=NEW)
    while scene.revisions().get(1, before) == before or 1 not in scene.serving():
        scene.world.act(scene.world.plan())
        scene.move()
    [gateway] = [
        pod for pod in scene.world.pods.values()
        if label_of(pod, LABEL_ROLE) == ROLE_GATEWAY and ordinal_of(pod) == 1
    ]  # fmt: skip
    [ready] = [one for one in gateway["status"]["conditions"] if one["type"] == "Ready"]
    ready["lastTransitionTime"] = scene.world.now.isoformat()
    assert not scene.world.plan().apply
    wait_s = scene.tell().look_again_s
    assert wait_s is not None
    assert 5 <= wait_s < 6
    scene.world.now += timedelta(seconds=wait_s)
    [stopped] = [item for item in scene.world.plan().apply if item["kind"] == "Deployment"]
    assert (stopped["metadata"]["name"], stopped["spec"]["replicas"]) == ("x-gateway", 0)


def test_two_may_make_way_at_a_time() -> None:
    scene = ReplicaScene.of(3, rollout={"maxUnavailable": 2})
    scene.change(model=NEW)
    scene.settle()
    assert scene.order == [2, 1, 0]
    assert scene.least_serving == 1


def test_recreate_takes_all_at_once() -> None:
    scene = ReplicaScene.of(3, rollout={"strategy": "Recreate"})
    scene.change(model=NEW)
    scene.settle()
    assert scene.least_serving == 0


@pytest.mark.parametrize("number", [1, 3])
def test_with_a_further_replica_as_many_as_asked_for_serve_all_the_time(number: int) -> None:
    scene = ReplicaScene.of(number, rollout={"maxUnavailable": 0, "maxSurge": 1})
    scene.change(model=NEW)
    scene.settle()
    assert scene.least_serving == number
    assert scene.order == [*reversed(range(number)), number], "the further one leaves last"
    assert {ordinal_of(item) for item in scene.world.objects.values()} == set(range(number))


def test_a_gateways_field_goes_from_replica_to_replica_and_leaves_ranks_alone() -> None:
    scene = ReplicaScene.of(3)
    ranks = scene.world.uids(ROLE_RANK)
    scene.change(engine={"maxNumSeqs": 7})
    scene.settle()
    assert scene.world.uids(ROLE_RANK) == ranks
    assert len({label_of(item, LABEL_GATEWAY_REVISION) for item in scene.world.of_kind("Deployment").values()}) == 1


def test_a_spec_that_does_not_work_stops_at_the_first_replica_and_says_so() -> None:
    scene = ReplicaScene.of(3)
    [old] = set(scene.revisions().values())
    scene.broken.add(new_revision(scene, model=NEW))
    scene.change(model=NEW)
    scene.settle()
    assert {ordinal for ordinal, revision in scene.revisions().items() if revision == old} == {0, 1}
    assert scene.serving() == {0, 1}
    degraded, progressing = scene.condition("Degraded"), scene.condition("Progressing")
    assert (degraded["status"], degraded["reason"]) == ("True", "RankCrashLoop")
    assert (progressing["status"], progressing["reason"]) == ("False", "RolloutStopped")
    assert degraded["message"].startswith("The roll-out stopped at replica 2: rank 0 (pod x-2-cpu-0, node n1): ")
    assert degraded["message"].endswith("no such model To go back, apply the earlier spec.")
    assert (scene.status()["readyReplicas"], scene.status()["updatedReplicas"]) == (2, 1)
    assert scene.condition("Ready")["observedGeneration"] == 1


def test_a_roll_out_that_waits_for_an_autoscaler_is_under_way_until_it_is_late() -> None:
    scene = ReplicaScene.of(3)
    revision = new_revision(scene, model=NEW)
    scene.broken.add(revision)
    scene.change(model=NEW)
    scene.settle()
    new = [pod for pod in scene.world.pods.values() if label_of(pod, LABEL_REVISION) == revision]
    for pod in new:
        del pod["spec"]["nodeName"]
        pod["status"] = pod_statuses.unschedulable()
    for _ in range(2):
        scene.tell()
        assert judgement(scene) == (("True", "RollingOut"), ("False", "AsExpected"))
        assert scene.world.resource["status"]["groups"][2]["reason"] == "RankUnschedulable"
    scene.world.now += timedelta(seconds=1800 + 600)
    scene.tell()
    assert judgement(scene) == (("False", "RolloutStopped"), ("True", "RankUnschedulable"))
    rank = scene.world.pods["x-2-cpu-1"]
    rank["spec"]["nodeName"] = "n1"
    rank["status"] = pod_statuses.crash_loop(exit_code=3, restarts=2)
    scene.world.now -= timedelta(seconds=2400)
    scene.tell()
    assert judgement(scene)[0] == ("False", "RolloutStopped"), "one of them is broken"


def judgement(scene: ReplicaScene) -> tuple[tuple[str, str], tuple[str, str]]:
    progressing, degraded = scene.condition("Progressing"), scene.condition("Degraded")
    return (progressing["status"], progressing["reason"]), (degraded["status"], degraded["reason"])


def test_the_earlier_spec_goes_back_to_the_broken_replica_alone() -> None:
    scene = ReplicaScene.of(3)
    earlier, pods = dict(scene.world.resource["spec"]), scene.uids([0, 1])
    scene.broken.add(new_revision(scene, model=NEW))
    scene.change(model=NEW)
    scene.settle()
    scene.watch()
    scene.world.change(earlier)
    scene.settle()
    assert scene.uids([0, 1]) == pods
    assert scene.least_serving == 2
    found = scene.condition("Ready")
    assert (found["status"], found["observedGeneration"]) == ("True", 3)
    assert scene.condition("Degraded")["status"] == "False"


def test_a_third_spec_mends_the_broken_replica_first() -> None:
    scene = ReplicaScene.of(3)
    scene.broken.add(new_revision(scene, model=NEW))
    scene.change(model=NEW)
    scene.settle()
    scene.watch()
    scene.change(model={**NEW, "revision": "v3"})
    scene.settle()
    assert scene.order == [1, 0]
    assert scene.least_serving == 2
    assert scene.status()["updatedReplicas"] == 3


def test_a_broken_spec_with_a_further_replica_costs_nothing() -> None:
    scene = ReplicaScene.of(2, rollout={"maxUnavailable": 0, "maxSurge": 1})
    pods, earlier = scene.uids([0, 1]), dict(scene.world.resource["spec"])
    scene.broken.add(new_revision(scene, model=NEW))
    scene.change(model=NEW)
    scene.settle()
    assert scene.uids([0, 1]) == pods
    assert scene.condition("Degraded")["message"].startswith("The roll-out stopped at replica 2: ")
    assert scene.condition("Ready")["status"] == "True"
    scene.world.change(earlier)
    scene.settle()
    assert scene.uids([0, 1, 2]) == pods


def test_no_replica_makes_way_while_another_is_down() -> None:
    scene = ReplicaScene.of(3)
    del scene.world.pods["x-cpu-0"]
    scene.world.gateways = dict(scene._reports())
    scene.change(model=NEW)
    names = {item["metadata"]["name"] for item in scene.world.plan().apply}
    assert all(name.startswith(("x-cpu", "x-gateway", "x-ranks")) or "x-1" not in name for name in names)
    assert not any(name.startswith(("x-1", "x-2")) for name in names), "replica 0 does not serve, and goes first"


def facts(scene: ReplicaScene) -> dict[str, Any]:
    """All objects without what differs from one making to the next."""
    return {str(key): normalised(item, name="x-nobody") for key, item in scene.world.objects.items()}


def test_an_operator_that_is_killed_at_any_write_of_a_roll_out_is_succeeded() -> None:
    begin = ReplicaScene.of(2)
    begin.change(model=NEW)
    undisturbed = copy_of(begin)
    undisturbed.settle()
    wanted = facts(undisturbed)
    for number in range(MOST_ROUNDS):
        scene = copy_of(begin)
        if not killed_after(scene, number):
            break
        scene.settle()
        assert facts(scene) == wanted, number
        assert scene.least_serving >= 1, number
    assert number > 15


def killed_after(scene: ReplicaScene, writes: int) -> bool:
    """Whether there were so many writes, after which nothing more of that plan was done."""
    for _ in range(MOST_ROUNDS):
        todo = scene.world.plan()
        number = len(todo.create) + len(todo.apply) + len(todo.delete)
        if writes < number:
            scene.world.act_partly(todo, calls=writes)
            scene.move()
            return True
        scene.world.act(todo)
        scene.move()
        writes -= number
        if todo.idle and scene.world.plan().idle:
            return False
    raise AssertionError("never idle")
