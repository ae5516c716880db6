"""Every invalid resource is refused, by the API server or by the operator, in the same words and without traces."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.chart_rights import operators_of
from tests.support.invalid_resources import INVALID, Document, InvalidResource
from tests.support.kube.client import Client, Object
from tests.support.kube.cluster import Cluster
from tests.support.kube.errors import ApiError
from tests.support.kube.versions import Version
from tests.support.operator_process import OperatorProcess

KIND = "HeteroInference"
CEL_SINCE = Version(1, 25, 0)
REPORT_TIMEOUT_S = 30.0
OWNED_KINDS = ("StatefulSet", "Deployment", "Service", "ConfigMap", "Secret", "ServiceAccount", "NetworkPolicy", "Pod")
BY_SCHEMA = [case for case in INVALID if case.caught_by == "schema"]
BY_RULES = [case for case in INVALID if case.caught_by in ("rule", "transition")]
PASSING = [case for case in INVALID if case.caught_by == "operator"]


@pytest.fixture(scope="module")
def home(cluster: Cluster, client: Client) -> str:
    """A namespace for all resources of this file: one operator watches it."""
    return cluster.create_namespace(client, "invalid")


@pytest.fixture(scope="module")
def operator(
    cluster: Cluster, client: Client, home: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OperatorProcess]:
    folder = tmp_path_factory.mktemp("operator")
    with operators_of(client, home) as group:
        kubeconfig = cluster.kubeconfig(cluster.user(f"operator-{home}", groups=[group]), namespace=home)
        with OperatorProcess(kubeconfig, folder, namespaces=home, lease_namespace=home) as running:
            running.wait_leading()
            yield running


def placed(document: Document, namespace: str, name: str | None = None) -> Document:
    metadata = {**document["metadata"], "namespace": namespace}
    return copy.deepcopy(document) | {"metadata": metadata | ({"name": name} if name else {})}


def accepted_condition(client: Client, namespace: str, name: str, *, generation: int = 1) -> Object:
    """The condition Accepted, once it is told about that generation."""

    def told(found: Object) -> bool:
        return bool(found.get("status", {}).get("observedGeneration", 0) >= generation)

    found = client.wait_for(KIND, name, namespace, until=told, timeout_s=REPORT_TIMEOUT_S)
    (condition,) = [item for item in found["status"]["conditions"] if item["type"] == "Accepted"]
    return dict(condition)


def owned_by(client: Client, namespace: str, name: str) -> list[tuple[str, str]]:
    labels = f"heteroinference.io/name={name}"
    return [
        (kind, item["metadata"]["name"])
        for kind in OWNED_KINDS
        for item in client.list_all(kind, namespace, labels=labels)
    ]


def without_places(text: str) -> str:
    """Old servers leave the places in lists out of paths."""
    return re.sub(r"\[\d+\]", "", text)


def knows_cel(cluster: Cluster) -> bool:
    return cluster.version >= CEL_SINCE


@pytest.mark.parametrize("case", BY_SCHEMA, ids=lambda case: case.name)
def test_any_api_server_refuses_what_breaks_the_schema(client: Client, namespace: str, case: InvalidResource) -> None:
    with pytest.raises(ApiError) as refusal:
        client.create(placed(case.document, namespace))
    assert refusal.value.code == 422
    # Of a repeated key a server names the whole item.
    path = case.path.removesuffix(".name") if "Duplicate" in refusal.value.message else case.path
    assert without_places(path) in without_places(refusal.value.message)


@pytest.mark.parametrize("case", BY_RULES, ids=lambda case: case.name)
def test_a_broken_rule_is_told_in_the_same_words_by_server_or_operator(
    cluster: Cluster, client: Client, home: str, operator: OperatorProcess, case: InvalidResource
) -> None:
    name = f"r-{case.name}"
    document = placed(case.document, home, name)
    stored = None if case.old is None else client.create(placed(case.old, home, name))
    if stored is not None:
        accepted_condition(client, home, name)
    before = owned_by(client, home, name)
    if knows_cel(cluster):
        with pytest.raises(ApiError) as refusal:
            client.create_or_replace(document)
        assert case.message in refusal.value.message
        return
    # Not applied: pools are merged by name, so one that an apply leaves out would stay.
    generation = client.create_or_replace(document)["metadata"]["generation"]
    condition = accepted_condition(client, home, name, generation=generation)
    assert (condition["status"], condition["reason"]) == ("False", "InvalidSpec")
    assert f"{case.path}: {case.message}" in condition["message"]
    now = owned_by(client, home, name)
    assert set(before) <= set(now)
    assert {kind for kind, _ in set(now) - set(before)} <= {"Pod"}, "workloads of before may have made more pods"


@pytest.mark.parametrize("case", PASSING, ids=lambda case: case.name)
def test_what_no_schema_can_say_is_told_by_the_operator(
    client: Client, home: str, operator: OperatorProcess, case: InvalidResource
) -> None:
    client.create(placed(case.document, home, case.name))
    condition = accepted_condition(client, home, case.name)
    assert (condition["status"], condition["reason"]) == ("False", "InvalidSpec")
    assert case.path in condition["message"]
    assert case.message in condition["message"]
    assert owned_by(client, home, case.name) == []


def test_a_repaired_resource_is_taken_up(client: Client, home: str, operator: OperatorProcess) -> None:
    case = next(case for case in INVALID if case.caught_by == "operator")
    client.create(placed(case.document, home, "repaired"))
    assert accepted_condition(client, home, "repaired")["status"] == "False"
    found: dict[str, Any] = client.patch(KIND, "repaired", {"spec": {"scheduling": {"nodeSelector": None}}}, home)
    condition = accepted_condition(client, home, "repaired", generation=found["metadata"]["generation"])
    assert condition["status"] == "True"
    client.wait_for("StatefulSet", "repaired-cpu", home)
