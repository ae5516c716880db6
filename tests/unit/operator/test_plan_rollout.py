"""Roll-outs, and upgrades of the operator that roll out nothing."""

from __future__ import annotations

import copy
from typing import Any

from hetero_api.contract import ANNOTATION_RESTARTED_AT, LABEL_REVISION, LABEL_ROLE, ROLE_GATEWAY, ROLE_RANK
from hetero_operator.reconcile.inventory import label_of
from hetero_operator.reconcile.model import Plan
from tests.support.operator_world import OperatorWorld
from tests.support.render_cases import FULL, UPGRADED, everything, resource_of

TWO_POOLS = """
model: {uri: hf://a/b}
pools:
- {name: gpu, type: GPU, ranks: 2}
- {name: cpu, type: CPU, ranks: 3, cpu: {coresPerRank: 4, memoryPerRank: 8Gi}}
"""


def running() -> OperatorWorld:
    world = OperatorWorld(resource_of("x", TWO_POOLS))
    world.reconcile()
    return world


def with_field(world: OperatorWorld, section: str, **fields: Any) -> None:
    spec = world.resource["spec"]
    world.change({**spec, section: {**spec.get(section, {}), **fields}})


def deleted_pods(todo: Plan) -> set[str]:
    return {deletion.ref.name for deletion in todo.delete if deletion.ref.kind == "Pod"}


def deleted(todo: Plan, kind: str) -> list[str]:
    return [deletion.ref.name for deletion in todo.delete if deletion.ref.kind == kind]


RANKS = {"x-gpu-0", "x-gpu-1", "x-cpu-0", "x-cpu-1", "x-cpu-2"}


def test_a_new_revision_takes_all_ranks_away_together_once_their_sets_are_ready() -> None:
    world = running()
    with_field(world, "model", revision="v2")
    first = world.plan()
    assert {item["kind"] for item in first.apply} >= {"StatefulSet", "Deployment", "ConfigMap"}
    assert len(first.create) == 1
    assert first.delete == ()
    world.act(first)
    assert world.plan().idle, "no controller has seen the new templates yet"
    world.run_controllers()
    second = world.plan()
    assert deleted_pods(second) == RANKS
    assert second.apply == ()


def test_no_rank_goes_while_one_set_still_makes_the_old_ones() -> None:
    world = running()
    with_field(world, "model", revision="v2")
    todo = world.plan()
    # The write of one StatefulSet fails.
    world.act(Plan(create=todo.create, apply=tuple(item for item in todo.apply if item["metadata"]["name"] != "x-cpu")))
    world.run_controllers()
    assert deleted_pods(world.plan()) == set()


def test_pods_that_are_leaving_are_not_deleted_again() -> None:
    world = running()
    with_field(world, "model", revision="v2")
    world.act(world.plan())
    world.run_controllers()
    world.pods["x-gpu-0"]["metadata"]["deletionTimestamp"] = "2030-01-01T00:00:00Z"
    assert deleted_pods(world.plan()) == RANKS - {"x-gpu-0"}


def test_after_a_roll_out_only_the_new_revision_is_left() -> None:
    world = running()
    old = {kind: set(world.of_kind(kind)) for kind in ("Secret", "ConfigMap")}
    with_field(world, "model", revision="v2")
    world.reconcile()
    assert {pod["metadata"]["labels"][LABEL_REVISION] for pod in world.pods.values()} == {
        item["metadata"]["labels"][LABEL_REVISION] for item in world.of_kind("StatefulSet").values()
    }
    for kind, before in old.items():
        assert len(world.of_kind(kind)) == 1
        assert not before & set(world.of_kind(kind))


def test_the_old_secret_stays_as_long_as_a_pod_of_its_revision_does() -> None:
    world = running()
    [secret], [config] = world.of_kind("Secret"), world.of_kind("ConfigMap")
    gateway = next(pod for pod in world.pods.values() if label_of(pod, LABEL_ROLE) == ROLE_GATEWAY)
    with_field(world, "model", revision="v2")
    world.act(world.plan())
    world.run_controllers()
    todo = world.plan()
    assert deleted(todo, "Secret") == []
    assert deleted(todo, "ConfigMap") == [], "it tells that there is such a Secret"
    world.act(todo)
    world.run_controllers()
    world.pods["evicted"] = {**gateway, "status": {"phase": "Failed", "reason": "Evicted"}}  # it needs nothing
    todo = world.plan()
    assert (deleted(todo, "Secret"), deleted(todo, "ConfigMap")) == ([secret], [])
    world.act(todo)
    assert deleted(world.plan(), "ConfigMap") == [config]


def test_restarted_at_makes_all_pods_anew() -> None:
    world = running()
    ranks, gateway = world.uids(ROLE_RANK), world.uids(ROLE_GATEWAY)
    world.resource["metadata"]["annotations"] = {ANNOTATION_RESTARTED_AT: "2030-01-01T00:00:00Z"}
    world.reconcile()
    assert not ranks & world.uids(ROLE_RANK)
    assert not gateway & world.uids(ROLE_GATEWAY)


def test_a_gateways_field_leaves_ranks_alone() -> None:
    world = running()
    ranks, gateway, [secret] = world.uids(ROLE_RANK), world.uids(ROLE_GATEWAY), world.of_kind("Secret")
    with_field(world, "engine", maxNumSeqs=7)
    world.reconcile()
    assert world.uids(ROLE_RANK) == ranks
    assert not gateway & world.uids(ROLE_GATEWAY)
    assert list(world.of_kind("Secret")) == [secret]
    assert len(world.of_kind("ConfigMap")) == 1


def test_back_to_the_last_revision_is_a_roll_out_too() -> None:
    world = running()
    spec, first = copy.deepcopy(world.resource["spec"]), world.uids(ROLE_RANK)
    with_field(world, "model", revision="v2")
    world.reconcile()
    world.change(spec)
    world.reconcile()
    assert not first & world.uids(ROLE_RANK)
    assert len(world.pods) == 6


def test_an_upgrade_of_the_operator_writes_nothing() -> None:
    for resource in (resource_of("x", TWO_POOLS), everything()):
        world = OperatorWorld(resource, FULL)
        world.reconcile()
        world.options = UPGRADED
        assert world.plan().idle


def test_after_an_upgrade_a_new_revision_gets_the_new_images() -> None:
    world = running()
    world.options = UPGRADED
    with_field(world, "model", revision="v2")
    world.reconcile()
    images = {container["image"] for pod in world.pods.values() for container in pod["spec"]["containers"]}
    assert images == {UPGRADED.gateway_image, UPGRADED.cpu_worker_image, UPGRADED.gpu_worker_image}


def test_after_an_upgrade_a_new_gateway_is_of_the_version_of_the_ranks_that_stay() -> None:
    world = running()
    ranks, old = world.uids(ROLE_RANK), world.options
    world.options = UPGRADED
    for sequences in (7, 8):
        with_field(world, "engine", maxNumSeqs=sequences)
        world.reconcile()
    assert world.uids(ROLE_RANK) == ranks
    [gateway] = (pod for name, pod in world.pods.items() if "gateway" in name)
    assert gateway["spec"]["containers"][0]["image"] == old.gateway_image
    assert gateway["spec"]["securityContext"]["runAsUser"] == old.run_as_user


def test_an_upgrade_restarts_nothing_even_when_the_config_map_is_gone() -> None:
    world = running()
    pods = {name: pod["metadata"]["uid"] for name, pod in world.pods.items()}
    for key in [key for key in world.objects if key.kind == "ConfigMap"]:
        del world.objects[key]
    world.options = UPGRADED
    world.reconcile()
    assert {name: pod["metadata"]["uid"] for name, pod in world.pods.items()} == pods
    assert world.plan().idle


def test_a_resource_at_rest_keeps_what_it_was_rendered_with() -> None:
    world = running()
    world.change({**world.resource["spec"], "suspend": True})
    world.reconcile()
    world.options = UPGRADED
    world.change({key: value for key, value in world.resource["spec"].items() if key != "suspend"})
    world.reconcile()
    images = {container["image"] for pod in world.pods.values() for container in pod["spec"]["containers"]}
    assert not any("0.2.0" in image for image in images)
