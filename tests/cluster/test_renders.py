"""What the operator renders, put to a real API server: every object is accepted, and looks then as we wanted it."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from hetero_operator.reconcile.differences import needs_apply
from hetero_operator.reconcile.model import Capabilities
from tests.support.kube.client import Client
from tests.support.kube.cluster import Cluster
from tests.support.kube.errors import NotFound
from tests.support.kube_defaults import with_defaults
from tests.support.operator_world import OperatorWorld
from tests.support.render_cases import (
    BUDGET,
    CLAIM_TEMPLATE,
    INFERENCE_POOL,
    OLD_BUDGET,
    POD_GROUP,
    POD_MONITOR,
    render_cases,
)

CASES = render_cases()
OPTIONAL_KINDS = (BUDGET, OLD_BUDGET, POD_MONITOR, POD_GROUP, CLAIM_TEMPLATE, INFERENCE_POOL)


def capabilities_of(cluster: Cluster, client: Client) -> Capabilities:
    """What the server under test offers."""
    served = frozenset(kind for kind in OPTIONAL_KINDS if serves(client, *kind))
    return Capabilities((cluster.version.major, cluster.version.minor), served)


def serves(client: Client, api_version: str, kind: str) -> bool:
    try:
        return client.discovery.has(f"{api_version}/{kind}")
    except NotFound:
        return False


def adapted(resource: dict[str, Any], capabilities: Capabilities) -> dict[str, Any]:
    """A copy that asks for nothing that the server cannot do, and so is not refused."""
    resource = copy.deepcopy(resource)
    spec = resource["spec"]
    if not capabilities.has(*POD_GROUP):
        spec.get("scheduling", {}).pop("gang", None)
    if not capabilities.has(*CLAIM_TEMPLATE):
        for pool in spec["pools"]:
            pool.get("cpu", {}).get("numa", {}).pop("claim", None)
    return resource


@pytest.mark.parametrize("name", CASES)
def test_the_api_server_accepts_every_object_and_shows_it_as_wanted(
    name: str, cluster: Cluster, client: Client, namespace: str
) -> None:
    capabilities = capabilities_of(cluster, client)
    resource = adapted(dict(CASES[name].resource), capabilities)
    resource["metadata"]["namespace"] = namespace
    todo = OperatorWorld(resource, capabilities).plan()
    assert todo.refusal == ()
    for secret in todo.create:
        client.create({**secret.manifest, "data": dict.fromkeys(secret.generated_keys, "eA==")}, dry_run=True)
    for item in todo.apply:
        stored = client.apply(dict(item), dry_run=True)
        assert not needs_apply(item, stored), f"{item['kind']} {item['metadata']['name']}: {stored}"


def test_amounts_of_any_size_are_shown_as_they_were_written(cluster: Cluster, client: Client, namespace: str) -> None:
    capabilities = capabilities_of(cluster, client)
    resource = adapted(dict(CASES["burstable"].resource), capabilities)
    resource["metadata"]["namespace"] = namespace
    for amount in ("2048Mi", "1536Mi", "3000M", "2500000k", "3.5Gi", "1073741825", "1Ti"):
        resource["spec"]["pools"][0] |= {"cpu": {"memoryPerRank": amount}, "sharedMemory": "1Gi"}
        resource["spec"]["gateway"] = {"resources": {"cpuMillis": 1500, "memory": amount}}
        for item in OperatorWorld(resource, capabilities).plan().apply:
            assert not needs_apply(item, client.apply(dict(item), dry_run=True)), amount


def test_the_stand_in_for_a_server_fills_in_nothing_that_a_real_one_does_not(
    cluster: Cluster, client: Client, namespace: str
) -> None:
    capabilities = capabilities_of(cluster, client)
    resource = adapted(dict(CASES["everything"].resource), capabilities)
    resource["metadata"]["namespace"] = namespace
    for item in OperatorWorld(resource, capabilities).plan().apply:
        stored = client.apply(dict(item), dry_run=True)
        played = with_defaults(item)
        for address in ("clusterIP", "clusterIPs"):
            if item["kind"] == "Service" and item["spec"].get("clusterIP") != "None":
                stored["spec"].pop(address, None), played["spec"].pop(address, None)
        if "spec" in item:
            assert lacks(stored["spec"], played["spec"]) == [], item["kind"]


def lacks(real: Any, played: Any, path: str = "") -> list[str]:
    """Paths that `played` has and `real` has not, or has otherwise."""
    if isinstance(played, dict):
        return [found for key in played for found in lacks((real or {}).get(key), played[key], f"{path}.{key}")]
    if isinstance(played, list):
        if len(real or ()) != len(played):
            return [path]
        return [found for a, b in zip(real, played, strict=True) for found in lacks(a, b, path)]
    return [] if real == played else [f"{path}: {real!r} is not {played!r}"]
