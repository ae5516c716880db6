"""Gateways that strangers reach: what is refused, what serves on, and what the condition Exposed says."""

from __future__ import annotations

from typing import Any

import pytest

from hetero_api.contract import ANNOTATION_CLIENTS
from hetero_operator.reconcile.inventory import ObjectKey
from tests.support.operator_world import OperatorWorld
from tests.support.render_cases import FULL, resource_of
from tests.support.replica_scene import ReplicaScene
from tests.support.status_scene import StatusScene

pytestmark = pytest.mark.unit

BASE: dict[str, Any] = {
    "model": {"uri": "hf://a/b"},
    "pools": [{"name": "cpu", "type": "CPU", "ranks": 1, "cpu": {"coresPerRank": 1, "memoryPerRank": "2Gi"}}],
}
POLICY = ObjectKey("networking.k8s.io", "NetworkPolicy", "x-gateway")
OPEN = {"ports": [{"protocol": "TCP", "port": 50051}, {"protocol": "TCP", "port": 8000}]}
OWN_NAMESPACE = {"from": [{"podSelector": {}}], **OPEN}
KEYS = {"auth": {"keysSecretRef": {"name": "clients"}}}
CERTIFICATES = {"tls": {"secretName": "tls", "clientCASecretName": "ca"}}
ASKED_FOR = {"auth": {"mode": "None"}}
BALANCER = {"service": {"type": "LoadBalancer"}}
ALL = {"clientsFrom": "All"}


def spec_of(gateway: dict[str, Any] | None = None, policy: dict[str, Any] | None = None) -> dict[str, Any]:
    return {**BASE, "gateway": gateway or {}, "networkPolicy": policy or {}}


def running(gateway: dict[str, Any] | None = None, policy: dict[str, Any] | None = None) -> OperatorWorld:
    world = OperatorWorld(resource_of("x", spec_of(gateway, policy)), FULL)
    world.reconcile()
    return world


def door(world: OperatorWorld) -> dict[str, Any]:
    """The rule about the doors' ports."""
    rules: list[dict[str, Any]] = world.objects[POLICY]["spec"]["ingress"]
    return next(rule for rule in rules if rule["ports"] == OPEN["ports"])


def exposed(gateway: dict[str, Any] | None = None, policy: dict[str, Any] | None = None) -> tuple[str, str]:
    scene = StatusScene.serving(spec_of(gateway, policy))
    (found,) = [item for item in scene.report().status["conditions"] if item["type"] == "Exposed"]
    return found["status"], found["reason"]


def test_clients_are_of_the_own_namespace_unless_the_service_is_for_others() -> None:
    assert door(running()) == OWN_NAMESPACE
    assert door(running(KEYS)) == OWN_NAMESPACE
    assert door(running({**KEYS, **BALANCER})) == OPEN
    assert door(running({**KEYS, **BALANCER}, {"clientsFrom": "Namespace"})) == OWN_NAMESPACE
    assert door(running(KEYS, ALL)) == OPEN


@pytest.mark.parametrize(
    ("gateway", "policy", "field"),
    [
        (BALANCER, {}, "spec.gateway.service.type: LoadBalancer lets in"),
        ({"service": {"type": "NodePort"}}, {}, "spec.gateway.service.type: NodePort lets in"),
        ({}, ALL, "spec.networkPolicy.clientsFrom: All lets in"),
        ({"tls": {"secretName": "tls"}, **BALANCER}, {}, "spec.gateway.service.type: LoadBalancer lets in"),
    ],
)
def test_a_gateway_is_not_exposed_unless_the_spec_says_so(
    gateway: dict[str, Any], policy: dict[str, Any], field: str
) -> None:
    plan = OperatorWorld(resource_of("x", spec_of(gateway, policy)), FULL).plan()
    assert plan.idle
    assert plan.refusal_reason == "InvalidSpec"
    assert plan.refusal[0].startswith(field)
    assert "spec.gateway.auth.mode: None" in plan.refusal[0]
    for proof in (KEYS, CERTIFICATES, ASKED_FOR):
        assert not OperatorWorld(resource_of("x", spec_of({**gateway, **proof}, policy)), FULL).plan().refusal


def test_keys_are_not_taken_away_from_a_gateway_that_strangers_reach() -> None:
    world = running({**KEYS, **BALANCER})
    world.change(spec_of(BALANCER))
    assert world.plan().refusal[0].startswith("spec.gateway.service.type")
    world.change(spec_of({**BALANCER, **ASKED_FOR}))
    assert not world.plan().refusal


def as_before(world: OperatorWorld) -> OperatorWorld:
    """Have the gateway's policy as an earlier version made it: open, and without a word about clients."""
    policy = world.objects[POLICY]
    del policy["metadata"]["annotations"][ANNOTATION_CLIENTS]
    policy["spec"]["ingress"][1].pop("from", None)
    return world


def test_what_an_earlier_version_opened_stays_open_until_the_spec_says_otherwise() -> None:
    world = as_before(running())
    world.reconcile()
    assert door(world) == OPEN
    assert world.objects[POLICY]["metadata"]["annotations"][ANNOTATION_CLIENTS] == "AsBefore"
    assert world.reconcile() == []
    world.change(spec_of(None, {"clientsFrom": "Namespace"}))
    world.reconcile()
    assert door(world) == OWN_NAMESPACE
    world.change(spec_of())
    world.reconcile()
    assert door(world) == OWN_NAMESPACE


def test_a_service_that_an_earlier_version_exposed_stays() -> None:
    world = running({**ASKED_FOR, **BALANCER})
    world.change(spec_of(BALANCER))
    assert not world.plan().refusal
    world.change(spec_of({"service": {"type": "NodePort"}}))
    assert world.plan().refusal[0].startswith("spec.gateway.service.type: NodePort")


def doors(world: OperatorWorld) -> tuple[str, bool]:
    """Type of the Service, and whether clients may be anywhere."""
    return world.of_kind("Service")["x"]["spec"]["type"], door(world) == OPEN


def guarded(world: OperatorWorld) -> set[str]:
    """Deployments whose containers ask for keys."""
    found = world.of_kind("Deployment").items()
    return {name for name, item in found if "--keys" in item["spec"]["template"]["spec"]["containers"][0]["args"]}


@pytest.mark.parametrize(("gateway", "policy"), [({**KEYS, **BALANCER}, {}), (KEYS, ALL), ({**KEYS, **BALANCER}, ALL)])
def test_doors_open_when_all_replicas_ask_for_keys(gateway: dict[str, Any], policy: dict[str, Any]) -> None:
    scene = ReplicaScene.of(3)
    scene.change(gateway=gateway, networkPolicy=policy)
    for _ in range(60):
        scene.world.act(scene.world.plan())
        scene.tell()
        if len(guarded(scene.world)) < 3:
            assert doors(scene.world) == ("ClusterIP", False)
            assert scene.condition("Exposed")["status"] == "False"
        scene.move()
    assert doors(scene.world) == (gateway.get("service", {}).get("type", "ClusterIP"), True)


def test_doors_of_one_gateway_open_when_its_last_pod_without_keys_is_gone() -> None:
    world = running()
    gateway = world.of_kind("Deployment")["x-gateway"]
    world.change(spec_of({**KEYS, **BALANCER}))
    world.act(world.plan())
    gateway = world.of_kind("Deployment")["x-gateway"]
    assert guarded(world) == {"x-gateway"}
    for observed, updated in ((1, 1), (2, 0)):
        gateway["status"] = {"observedGeneration": observed, "replicas": 1, "updatedReplicas": updated}
        world.act(world.plan())
        assert doors(world) == ("ClusterIP", False)
    gateway["status"]["updatedReplicas"] = 1
    world.reconcile()
    assert doors(world) == ("LoadBalancer", True)


def test_doors_wait_for_the_router_and_close_at_once() -> None:
    world = running()
    router = {"type": "SMG", "cacheIsolation": "Shared"}
    world.change({**spec_of(), "router": router})
    world.reconcile()
    asking = {**spec_of(KEYS, ALL), "router": {**router, "keysSecretRef": {"name": "router"}}}
    world.change(asking)
    world.act(world.plan())
    assert (doors(world), guarded(world)) == (("ClusterIP", False), {"x-gateway", "x-router"})
    world.of_kind("Deployment")["x-router"]["status"] = {"replicas": 2, "updatedReplicas": 1}
    world.reconcile()
    assert doors(world) == ("ClusterIP", False)
    del world.of_kind("Deployment")["x-router"]["status"]
    world.reconcile()
    assert doors(world) == ("ClusterIP", True)
    world.change({**asking, "networkPolicy": {}, "gateway": {}})
    world.act(world.plan())
    assert doors(world) == ("ClusterIP", False)


def test_the_condition_says_whether_strangers_get_in() -> None:
    assert exposed() == ("False", "NotExposed")
    assert exposed({**KEYS, **BALANCER}) == ("False", "NotExposed")
    assert exposed({**CERTIFICATES, **BALANCER}) == ("False", "NotExposed")
    assert exposed({**ASKED_FOR, **BALANCER}) == ("True", "ExposedAsAsked")
    assert exposed(ASKED_FOR) == ("False", "NotExposed")
    assert exposed(None, {"enabled": False}) == ("True", "Exposed")


def test_what_stays_open_is_told_once() -> None:
    scene = StatusScene.serving(spec_of())
    as_before(scene.world)
    report = scene.report()
    (found,) = [item for item in report.status["conditions"] if item["type"] == "Exposed"]
    assert (found["status"], found["reason"]) == ("True", "Exposed")
    assert "spec.networkPolicy.clientsFrom does not say where" in found["message"]
    assert [(event.type, event.reason) for event in report.events if event.reason == "Exposed"] == [
        ("Warning", "Exposed")
    ]


def test_the_operator_asks_at_the_front_door_for_its_health() -> None:
    rules: list[dict[str, Any]] = running().objects[POLICY]["spec"]["ingress"]
    operator = [rule for rule in rules if "namespaceSelector" in rule.get("from", [{}])[0]]
    assert [[port["port"] for port in rule["ports"]] for rule in operator] == [[50052, 50051]]
