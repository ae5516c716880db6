"""Plans: what is accepted and refused, made and healed, kept and taken away."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any

import pytest
import yaml

from hetero_api.contract import CONFIG_MANIFEST_KEY, CONFIG_TEMPLATES_KEY, LABEL_GATEWAY_REVISION
from hetero_api.effects import fields_with
from hetero_api.manifest import parse_manifest, parse_resource
from hetero_operator.reconcile.inventory import ObjectKey
from hetero_operator.reconcile.model import Plan
from hetero_operator.reconcile.revision import GATEWAY_EFFECTS
from tests.support.operator_world import OperatorWorld
from tests.support.render_cases import (
    BARE,
    BUDGET,
    FULL,
    OLD,
    OPTIONS,
    PLAIN,
    UPGRADED,
    everything,
    render_cases,
    resource_of,
)

SMALL = """
model: {uri: hf://a/b}
pools:
- {name: cpu, type: CPU, ranks: 2, cpu: {coresPerRank: 4, memoryPerRank: 8Gi}}
"""


def small(**metadata: Any) -> OperatorWorld:
    return OperatorWorld(resource_of("x", SMALL, **metadata))


def running() -> OperatorWorld:
    world = small()
    world.reconcile()
    return world


def kinds(todo: Plan) -> list[str]:
    return [item["kind"] for item in todo.apply]


def names(todo: Plan) -> set[str]:
    return {f"{item['kind']}/{item['metadata']['name']}" for item in todo.apply}


# --- making ---------------------------------------------------------------------------------------------


def test_a_new_resource_gets_all_its_objects_at_once() -> None:
    todo = small().plan()
    [secret] = todo.create
    assert secret.manifest["metadata"]["name"].startswith("x-group-")
    assert secret.generated_keys == ("group-token", "admin-token")
    config = next(item["metadata"]["name"] for item in todo.apply if item["kind"] == "ConfigMap")
    assert names(todo) == {
        "ServiceAccount/x-rank", "ServiceAccount/x-gateway", f"ConfigMap/{config}", "NetworkPolicy/x-ranks",
        "NetworkPolicy/x-gateway", "Service/x", "Service/x-gateway", "Service/x-ranks", "StatefulSet/x-cpu",
        "Deployment/x-gateway",
    }  # fmt: skip
    assert todo.delete == ()


def test_what_pods_need_is_made_before_the_pods() -> None:
    order = kinds(OperatorWorld(everything(), FULL).plan())
    workloads = order.index("StatefulSet")
    needed = ("ServiceAccount", "ConfigMap", "Service", "NetworkPolicy", "ResourceClaimTemplate", "PodGroup")
    assert all(order.index(kind) < workloads for kind in needed)


def test_a_plan_holds_no_secret_value() -> None:
    [secret] = small().plan().create
    assert "data" not in secret.manifest
    assert "stringData" not in secret.manifest


def test_every_object_is_owned_and_says_so() -> None:
    world = small()
    todo = world.plan()
    for item in (*todo.apply, *(secret.manifest for secret in todo.create)):
        [owner] = item["metadata"]["ownerReferences"]
        assert owner["uid"] == world.resource["metadata"]["uid"]
        assert owner["controller"] is True
        assert owner["blockOwnerDeletion"] is False
        assert item["metadata"]["labels"]["heteroinference.io/name"] == "x"
        assert item["metadata"]["namespace"] == "models"
        assert "finalizers" not in item["metadata"]
        assert "generateName" not in item["metadata"]


def test_a_second_look_finds_nothing_to_do() -> None:
    assert running().plan().idle


def test_the_gateway_can_read_its_manifest() -> None:
    [config] = running().of_kind("ConfigMap").values()
    manifest = parse_manifest(config["data"][CONFIG_MANIFEST_KEY])
    assert manifest.metadata.name == "x"
    assert manifest.spec.model.uri == "hf://a/b"


@pytest.mark.parametrize("name", render_cases())
def test_a_manifest_without_defaults_is_read_as_what_was_written(name: str) -> None:
    case = render_cases()[name]
    plan = OperatorWorld(dict(case.resource), case.capabilities).plan()
    config = next(item for item in plan.apply if item["kind"] == "ConfigMap")
    read, written = parse_manifest(config["data"][CONFIG_MANIFEST_KEY]), parse_resource(case.resource)
    found, wanted = (item.spec.model_dump(mode="json", by_alias=True, exclude_none=True) for item in (read, written))
    assert fields_with(found, GATEWAY_EFFECTS) == fields_with(wanted, GATEWAY_EFFECTS)


def test_an_old_gateway_beside_ranks_that_stay_reads_no_field_that_nobody_wrote() -> None:
    world = running()
    world.options = UPGRADED
    world.change({**world.resource["spec"], "engine": {"maxNumSeqs": 32}})
    world.reconcile()
    gateway = world.of_kind("Deployment")["x-gateway"]["spec"]["template"]
    assert gateway["spec"]["containers"][0]["image"] == OPTIONS.gateway_image
    config = world.of_kind("ConfigMap")[f"x-{gateway['metadata']['labels'][LABEL_GATEWAY_REVISION]}"]
    spec = yaml.safe_load(config["data"][CONFIG_MANIFEST_KEY])["spec"]
    assert (spec["engine"], [*spec]) == ({"maxNumSeqs": 32}, ["engine", "model", "pools"])


# --- healing --------------------------------------------------------------------------------------------


def test_an_object_that_was_deleted_is_made_again() -> None:
    world = running()
    del world.objects[ObjectKey("", "Service", "x")]
    assert names(world.plan()) == {"Service/x"}


def test_a_field_that_was_changed_is_set_back() -> None:
    world = running()
    world.objects[ObjectKey("apps", "StatefulSet", "x-cpu")]["spec"]["replicas"] = 7
    assert names(world.plan()) == {"StatefulSet/x-cpu"}


def test_a_secret_that_was_deleted_is_made_again_and_one_that_is_there_never() -> None:
    world = running()
    [key] = [key for key in world.objects if key.kind == "Secret"]
    world.objects[key]["data"] = {"group-token": "b3RoZXI="}
    assert world.plan().idle
    del world.objects[key]
    assert [secret.manifest["metadata"]["name"] for secret in world.plan().create] == [key.name]


def test_a_config_map_that_was_deleted_comes_back_with_the_templates_that_run() -> None:
    world = running()
    [key] = [key for key in world.objects if key.kind == "ConfigMap"]
    before, pods = copy.deepcopy(world.objects[key]), dict(world.pods)
    del world.objects[key]
    world.reconcile()
    assert world.pods == pods
    assert world.objects[key]["data"][CONFIG_MANIFEST_KEY] == before["data"][CONFIG_MANIFEST_KEY]
    kept = json.loads(world.objects[key]["data"][CONFIG_TEMPLATES_KEY])
    assert kept["ranks"]["cpu"]["spec"]["containers"][0]["args"]


# --- leaving, resting -----------------------------------------------------------------------------------


def test_a_resource_that_is_leaving_is_left_alone() -> None:
    world = running()
    world.resource["metadata"]["deletionTimestamp"] = "2030-01-01T00:00:00Z"
    world.objects.clear()
    assert world.plan() == Plan()


@pytest.mark.parametrize("rest", [{"suspend": True}, {"replicas": 0}])
def test_at_rest_there_are_no_pods_but_all_objects(rest: dict[str, Any]) -> None:
    world = running()
    before = set(world.objects)
    world.change({**world.resource["spec"], **rest})
    world.reconcile()
    assert world.pods == {}
    assert set(world.objects) == before
    world.change({key: value for key, value in world.resource["spec"].items() if key not in rest})
    world.reconcile()
    assert len(world.pods) == 3


# --- refusing -------------------------------------------------------------------------------------------


def refused(world: OperatorWorld) -> Plan:
    todo = world.plan()
    assert todo.idle
    assert todo.refusal
    return todo


def test_an_invalid_spec_changes_nothing_and_says_why() -> None:
    world = running()
    world.change(
        {"model": {"uri": "hf://a/b"}, "pools": [{"name": "cpu", "type": "CPU", "ranks": 3, "ranksPerPod": 2}]}
    )
    todo = refused(world)
    assert todo.refusal_reason == "InvalidSpec"
    assert todo.refusal[0].startswith("spec.pools[0].ranks: must be a multiple of ranksPerPod")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"model": {"uri": "hf://a/b", "dtype": "float16"}}, "spec.model.dtype: float16: CPU ranks do not compute"),
        ({"gateway": {"tlsSecretName": "tls"}}, "spec.gateway.tlsSecretName: spec.gateway.tls.secretName took"),
        (
            {"gateway": {"authTokenSecretRef": {"name": "a"}}},
            "spec.gateway.authTokenSecretRef: spec.gateway.auth.keysSecretRef took",
        ),
        (
            {"placement": {"mode": "Layer", "shares": {"vocabulary": [1, 1]}}},
            "spec.placement.shares.vocabulary: does not apply in mode Layer",
        ),
        (
            {"placement": {"mode": "Layer", "shares": {"mlp": [1, 1], "attention": [2, 1]}}},
            "spec.placement.shares: attention and mlp differ",
        ),
        ({"placement": {"mode": "Layer", "shares": {"mlp": [1, 0]}}}, "spec.placement.shares.mlp: rank 1 would own"),
        (
            {"placement": {"shares": {kind: [0, 1] for kind in ("attention", "mlp", "vocabulary")}}},
            "spec.placement.shares.attention, spec.placement.shares.mlp, spec.placement.shares.vocabulary: rank 0",
        ),
    ],
)
def test_a_spec_that_no_gateway_starts_with_leaves_the_old_revision_in_force(
    change: dict[str, Any], problem: str
) -> None:
    world = running()
    before = copy.deepcopy((world.objects, world.pods))
    world.change({**world.resource["spec"], **change})
    todo = refused(world)
    assert todo.refusal_reason == "InvalidSpec"
    assert len(todo.refusal) == 1
    assert todo.refusal[0].startswith(problem)
    assert world.reconcile() == []
    assert (world.objects, world.pods) == before


def test_shares_that_leave_something_to_deal_are_for_the_gateway_to_judge() -> None:
    world = running()
    world.change({**world.resource["spec"], "placement": {"shares": {"attention": [1, 0], "mlp": [1, 0]}}})
    assert not world.plan().refusal


def test_a_pool_cannot_change_its_type() -> None:
    world = running()
    world.change({"model": {"uri": "hf://a/b"}, "pools": [{"name": "cpu", "type": "GPU", "ranks": 2}]})
    todo = refused(world)
    assert todo.refusal_reason == "InvalidSpec"
    assert any("pools[0].type" in problem for problem in todo.refusal)


def test_a_pool_cannot_change_its_name() -> None:
    world = running()
    world.change({"model": {"uri": "hf://a/b"}, "pools": [{"name": "other", "type": "CPU", "ranks": 2}]})
    assert refused(world).refusal_reason == "InvalidSpec"


def test_the_way_back_from_a_refused_spec_is_open() -> None:
    world = running()
    good = copy.deepcopy(world.resource["spec"])
    world.change({"model": {"uri": "hf://a/b"}, "pools": [{"name": "other", "type": "CPU", "ranks": 2}]})
    refused(world)
    world.change(good)
    assert world.plan().idle


def test_claims_need_their_api() -> None:
    world = OperatorWorld(everything(), PLAIN)
    todo = refused(world)
    assert todo.refusal_reason == "NotSupportedByCluster"
    assert todo.refusal == (
        "spec.pools[1].cpu.numa.claim: needs the API resource.k8s.io/v1 ResourceClaimTemplate, which this cluster "
        "(Kubernetes 1.33) does not have",
        "spec.scheduling.gang.scheduler: needs the API scheduling.volcano.sh/v1beta1 PodGroup, which this cluster "
        "(Kubernetes 1.33) does not have",
    )


def test_ranks_of_several_pods_share_memory_through_their_node_or_not_at_all() -> None:
    def world(ranks_per_pod: int, **exchange: str) -> OperatorWorld:
        pool = {"name": "cpu", "type": "CPU", "ranks": 2, "ranksPerPod": ranks_per_pod}
        spec = {"model": {"uri": "hf://a/b"}, "pools": [pool], "exchange": {"kind": "SharedMemory", **exchange}}
        return OperatorWorld(resource_of("x", spec))

    todo = refused(world(1))
    assert todo.refusal_reason == "NotSupportedByCluster"
    assert todo.refusal[0].startswith(
        "spec.exchange.hostPath: is required where kind is SharedMemory: the ranks are in 2"
    )
    one_pod = world(1)
    spec = one_pod.resource["spec"]
    spec["topology"], spec["pools"][0]["cpu"] = {"colocate": "Pod"}, {"memoryPerRank": "1Gi"}
    for accepted in (world(2), world(1, hostPath="/dev/shm"), world(1, kind="Auto"), one_pod):
        assert accepted.plan().refusal == ()


def test_an_object_of_somebody_else_is_never_taken_over() -> None:
    world = small()
    foreign = {
        "apiVersion": "v1", "kind": "Service", "spec": {},
        "metadata": {"name": "x-gateway", "uid": "1", "labels": {"heteroinference.io/name": "x"}},
    }  # fmt: skip
    world.objects[ObjectKey.from_object(foreign)] = foreign
    todo = refused(world)
    assert todo.refusal_reason == "NameConflict"
    assert "Service x-gateway" in todo.refusal[0]


def test_objects_of_an_earlier_resource_of_the_name_are_not_touched() -> None:
    world = running()
    world.resource["metadata"]["uid"] = "another"
    assert refused(world).refusal_reason == "NameConflict"


def test_foreign_objects_that_are_in_nobodys_way_stay() -> None:
    world = running()
    foreign = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "notes", "uid": "1"}, "data": {}}
    world.objects[ObjectKey.from_object(foreign)] = foreign
    assert world.plan().idle


# --- optional objects -----------------------------------------------------------------------------------


def test_an_optional_object_goes_when_it_is_no_longer_wanted() -> None:
    world = OperatorWorld(resource_of("x", SMALL), FULL)
    world.change({**world.resource["spec"], "disruptionBudget": {"enabled": True}})
    world.reconcile()
    assert {"PodDisruptionBudget", "PodMonitor", "NetworkPolicy"} <= {key.kind for key in world.objects}
    world.change({
        **world.resource["spec"],
        "disruptionBudget": {"enabled": False},
        "monitoring": {"podMonitor": False},
        "networkPolicy": {"enabled": False},
    })  # fmt: skip
    world.reconcile()
    assert not {"PodDisruptionBudget", "PodMonitor", "NetworkPolicy"} & {key.kind for key in world.objects}


def test_a_budget_seen_in_two_versions_is_one_budget() -> None:
    world = small()
    world.change({**world.resource["spec"], "disruptionBudget": {"enabled": True}})
    world.capabilities = OLD
    world.reconcile()
    world.capabilities = PLAIN
    world.reconcile()
    assert list(world.of_kind("PodDisruptionBudget")) == ["x-ranks"]
    assert world.of_kind("PodDisruptionBudget")["x-ranks"]["apiVersion"] == BUDGET[0]
    assert world.plan().idle


@pytest.mark.parametrize(("version", "policy"), [((1, 26), None), ((1, 27), "AlwaysAllow"), ((1, 37), "AlwaysAllow")])
def test_pods_that_are_not_ready_may_be_evicted_where_the_cluster_knows_how(
    version: tuple[int, int], policy: str | None
) -> None:
    world = small()
    world.capabilities = replace(PLAIN, version=version)
    world.change({**world.resource["spec"], "disruptionBudget": {"enabled": True}, "router": {"type": "SMG"}})
    world.reconcile()
    budgets = world.of_kind("PodDisruptionBudget")
    assert {name: item["spec"].get("unhealthyPodEvictionPolicy") for name, item in budgets.items()} == {
        "x-ranks": policy, "x-router": policy,
    }  # fmt: skip


def test_without_optional_apis_everything_else_is_made() -> None:
    world = OperatorWorld(resource_of("x", SMALL), BARE)
    world.change({**world.resource["spec"], "disruptionBudget": {"enabled": True}})
    assert not {"PodDisruptionBudget", "PodMonitor"} & set(kinds(world.plan()))


def test_a_stateful_set_of_no_pool_goes() -> None:
    world = running()
    stray = copy.deepcopy(world.objects[ObjectKey("apps", "StatefulSet", "x-cpu")])
    stray["metadata"] |= {"name": "x-old", "uid": "stray"}
    world.objects[ObjectKey.from_object(stray)] = stray
    [deletion] = world.plan().delete
    assert (deletion.ref.kind, deletion.ref.name, deletion.uid) == ("StatefulSet", "x-old", "stray")


def test_nothing_is_deleted_twice() -> None:
    world = running()
    stray = copy.deepcopy(world.objects[ObjectKey("", "Service", "x")])
    stray["metadata"] |= {"name": "x-old", "uid": "stray", "deletionTimestamp": "2030-01-01T00:00:00Z"}
    world.objects[ObjectKey.from_object(stray)] = stray
    assert world.plan().idle


def test_the_gateways_pod_names_the_config_map_that_it_reads() -> None:
    world = running()
    [config] = world.of_kind("ConfigMap").values()
    template = world.of_kind("Deployment")["x-gateway"]["spec"]["template"]
    volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
    assert volumes["config"]["configMap"]["name"] == config["metadata"]["name"]
    revision = config["metadata"]["labels"][LABEL_GATEWAY_REVISION]
    assert template["metadata"]["labels"][LABEL_GATEWAY_REVISION] == revision


# --- failing --------------------------------------------------------------------------------------------


def test_a_pool_that_failed_too_often_gets_no_pods_until_the_next_attempt() -> None:
    world = OperatorWorld(resource_of("x", SMALL + "- {name: more, type: CPU, ranks: 1}"))
    world.reconcile()
    revision = world.of_kind("StatefulSet")["x-cpu"]["metadata"]["labels"]["heteroinference.io/revision"]
    world.resource["status"] = {
        "revision": revision,
        "restarts": {"count": 9, "attempts": 1, "nextAttemptTime": "2030-01-01T00:05:00Z"},
    }
    world.pods["x-cpu-0"]["status"] = {"phase": "Failed", "reason": "TopologyAffinityError"}
    [held] = world.plan().apply
    assert (held["metadata"]["name"], held["spec"]["replicas"]) == ("x-cpu", 0)


def test_a_pod_on_a_node_that_is_gone_is_forced_out() -> None:
    world = running()
    world.pods["x-cpu-1"]["spec"]["nodeName"] = "gone"
    world.nodes["gone"] = None
    [deletion] = world.plan().delete
    assert (deletion.ref.name, deletion.grace_period_s) == ("x-cpu-1", 0)


def test_a_lost_pod_of_an_old_revision_is_forced_out_and_not_asked_to_leave() -> None:
    world = running()
    world.pods["x-cpu-1"]["spec"]["nodeName"] = "gone"
    world.nodes["gone"] = None
    world.change({**world.resource["spec"], "model": {"uri": "hf://a/c"}})
    world.act(Plan(create=world.plan().create, apply=world.plan().apply))
    world.run_controllers()
    of_pods = [item for item in world.plan().delete if item.ref.kind == "Pod"]
    assert {item.ref.name: item.grace_period_s for item in of_pods} == {"x-cpu-0": None, "x-cpu-1": 0}
