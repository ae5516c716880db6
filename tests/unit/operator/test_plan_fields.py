"""Field by field: a change does what it should, and restarts what the table of effects says and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import pytest

from hetero_api.contract import ROLE_GATEWAY, ROLE_RANK
from hetero_api.effects import Effect, effect_of, spec_leaves
from hetero_operator.reconcile.inventory import ObjectKey
from hetero_operator.reconcile.model import Plan
from tests.support.operator_world import OperatorWorld
from tests.support.render_cases import FULL
from tests.support.spec_changes import AFTER, REFUSED, before, changed

LIVE_CHANGES: Final[Mapping[str, set[str]]] = {
    "gateway.service.type": {"Service/everything"},
    "gateway.service.port": {"Service/everything"},
    "gateway.service.httpPort": {"Service/everything"},
    "gateway.service.annotations": {"Service/everything"},
    "gateway.auth.mode": set(),
    "recovery.maxRestarts": set(),
    "recovery.windowSeconds": set(),
    "recovery.nodeLostTimeoutSeconds": set(),
    "networkPolicy.enabled": {"NetworkPolicy/everything-ranks", "NetworkPolicy/everything-gateway"},
    "networkPolicy.clientsFrom": {"NetworkPolicy/everything-gateway"},
    "networkPolicy.metricsFrom": {"NetworkPolicy/everything-ranks", "NetworkPolicy/everything-gateway"},
    "networkPolicy.allowModelEgress": {"NetworkPolicy/everything-ranks", "NetworkPolicy/everything-gateway"},
    "disruptionBudget.enabled": {"PodDisruptionBudget/everything-ranks"},
    "monitoring.podMonitor": {"PodMonitor/everything"},
    "monitoring.intervalSeconds": {"PodMonitor/everything"},
    "monitoring.labels": {"PodMonitor/everything"},
    "monitoring.keySecretRef.name": {"PodMonitor/everything"},
    "monitoring.keySecretRef.key": {"PodMonitor/everything"},
    "suspend": {"StatefulSet/everything-gpu", "StatefulSet/everything-cpu", "Deployment/everything-gateway"},
    "replicas": {"StatefulSet/everything-gpu", "StatefulSet/everything-cpu", "Deployment/everything-gateway"},
    "rollout.strategy": set(),
    "rollout.maxUnavailable": set(),
    "rollout.maxSurge": set(),
    "idle.responder.enabled": set(),
    "idle.responder.retryAfterSeconds": set(),
    "images.router": {"Deployment/everything-router"},
    "router.policy": {"Deployment/everything-router"},
    "router.port": {"Service/everything-router"},
    "router.replicas": {"Deployment/everything-router"},
    "router.resources.cpuMillis": {"Deployment/everything-router"},
    "router.resources.memory": {"Deployment/everything-router"},
    "router.keysSecretRef.name": {"Deployment/everything-router"},
    "router.keysSecretRef.key": {"Deployment/everything-router"},
    "router.tlsSecretName": {"Deployment/everything-router"},
    "router.endpointPickerRef.name": {"InferencePool/everything"},
    "router.endpointPickerRef.port": {"InferencePool/everything"},
    "router.endpointPickerRef.failureMode": {"InferencePool/everything"},
}
"""Objects that are written or deleted by a change that restarts nothing."""

COMES: Final = "router.type"
"""The field whose change brings objects of its own (test_router.py)."""
AT_REST: Final = {"suspend", "replicas"}
MORE_PORTS: Final = {"topology.colocate": {"NetworkPolicy", "PodMonitor"}}
"""Kinds that name the ports of rank pods, by the field that changes these."""
UNTOUCHED: Final = {"NetworkPolicy", "Service", "PodDisruptionBudget", "PodMonitor", "ServiceAccount"}


def running(field: str) -> OperatorWorld:
    world = OperatorWorld(before(field), FULL)
    world.reconcile()
    return world


def touched(plans: list[Plan]) -> set[str]:
    """Objects but pods that plans write or delete."""
    keys = [ObjectKey.from_object(item) for todo in plans for item in todo.apply]
    keys += [ObjectKey.from_object(secret.manifest) for todo in plans for secret in todo.create]
    refs = [deletion.ref for todo in plans for deletion in todo.delete if deletion.ref.kind != "Pod"]
    return {f"{key.kind}/{key.name}" for key in keys} | {f"{ref.kind}/{ref.name}" for ref in refs}


def test_the_table_has_every_field_once() -> None:
    assert set(AFTER) | set(REFUSED) == set(spec_leaves())
    assert not set(AFTER) & set(REFUSED)
    assert set(LIVE_CHANGES) == {field for field in AFTER if effect_of(field) is Effect.NONE}


@pytest.mark.parametrize("field", AFTER)
def test_a_change_restarts_what_its_effect_says(field: str) -> None:
    world = running(field)
    ranks, gateway = world.uids(ROLE_RANK), world.uids(ROLE_GATEWAY)
    world.change(changed(world.resource["spec"], AFTER[field]))
    plans = world.reconcile()
    effect = effect_of(field)
    if field in AT_REST:
        assert world.pods == {}
        return
    assert bool(plans) or not LIVE_CHANGES.get(field, True)
    assert (world.uids(ROLE_RANK) == ranks) == (effect is not Effect.RANKS)
    assert (world.uids(ROLE_GATEWAY) == gateway) == (effect is Effect.NONE)
    if effect is Effect.RANKS:
        assert not world.uids(ROLE_RANK) & ranks
    if effect is not Effect.NONE:
        assert not world.uids(ROLE_GATEWAY) & gateway


@pytest.mark.parametrize("field", LIVE_CHANGES)
def test_a_change_that_restarts_nothing_writes_what_it_is_about(field: str) -> None:
    world = running(field)
    world.change(changed(world.resource["spec"], AFTER[field]))
    assert touched(world.reconcile()) == LIVE_CHANGES[field]


@pytest.mark.parametrize("field", [key for key in AFTER if effect_of(key) is Effect.GATEWAY and key != COMES])
def test_a_change_of_the_gateway_writes_its_deployment_and_config_map_only(field: str) -> None:
    world = running(field)
    world.change(changed(world.resource["spec"], AFTER[field]))
    plans = world.reconcile()
    assert {name.partition("/")[0] for name in touched(plans)} == {"Deployment", "ConfigMap"}


@pytest.mark.parametrize("field", [field for field in AFTER if effect_of(field) is Effect.RANKS])
def test_a_change_of_the_ranks_leaves_what_it_is_not_about(field: str) -> None:
    world = running(field)
    world.change(changed(world.resource["spec"], AFTER[field]))
    kinds = {name.partition("/")[0] for name in touched(world.reconcile())}
    assert {"Deployment", "ConfigMap", "Secret", "StatefulSet"} <= kinds
    assert not kinds & UNTOUCHED - MORE_PORTS.get(field, set())


@pytest.mark.parametrize("field", REFUSED)
def test_a_change_that_cannot_be_served_is_refused(field: str) -> None:
    world = running(field)
    world.change(changed(world.resource["spec"], REFUSED[field]))
    todo = world.plan()
    assert todo.idle
    assert todo.refusal_reason == "InvalidSpec"


def pod_specs(world: OperatorWorld, role: str) -> list[Any]:
    return [
        pod["spec"]
        for _, pod in sorted(world.pods.items())
        if pod["metadata"]["labels"].get("heteroinference.io/role") == role
    ]


@pytest.mark.parametrize("field", [field for field in AFTER if effect_of(field) is not Effect.NONE])
def test_rank_pods_differ_only_by_what_is_theirs(field: str) -> None:
    world = running(field)
    was = pod_specs(world, ROLE_RANK)
    world.change(changed(world.resource["spec"], AFTER[field]))
    world.reconcile()
    if effect_of(field) is Effect.GATEWAY:
        assert pod_specs(world, ROLE_RANK) == was
