"""`kubectl auth can-i`, asked for everybody who gets rights of the chart or of the operator, and for every account that
they make: the answers are those of golden files.

The chart is installed for one tenant's namespace, and for all of them. Its operator, and users whom the tenant's roles
view and edit are bound to there, are asked about there, in another tenant's namespace and in the release's own. Of a
group it is the accounts of its pods, made by a real operator. `UPDATE_GOLDEN=1` writes the files again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.helm import Helm, Object
from tests.support.kube.client import Client
from tests.support.kube.cluster import Cluster, discard_namespace
from tests.support.kube.tools import find_helm
from tests.support.operator_scene import Scene

GOLDEN = Path(__file__).parents[1] / "data"
VERBS = ("get", "list", "watch", "create", "update", "patch", "delete", "deletecollection")
LETTERS = "glwcupdD"
RESOURCES = (
    "*.*",
    "heteroinferences.heteroinference.io", "heteroinferences/status.heteroinference.io",
    "heteroinferences/scale.heteroinference.io", "pods", "pods/exec", "pods/attach", "pods/portforward",
    "pods/ephemeralcontainers", "pods/eviction", "pods/log", "secrets", "configmaps", "services", "endpoints",
    "serviceaccounts", "serviceaccounts/token", "events", "nodes", "nodes/proxy", "namespaces",
    "persistentvolumeclaims", "persistentvolumes",
    "deployments.apps", "statefulsets.apps", "daemonsets.apps", "replicasets.apps", "jobs.batch",
    "networkpolicies.networking.k8s.io", "poddisruptionbudgets.policy",
    "podmonitors.monitoring.coreos.com", "podgroups.scheduling.volcano.sh", "resourceclaimtemplates.resource.k8s.io",
    "inferencepools.inference.networking.k8s.io",
    "leases.coordination.k8s.io", "roles.rbac.authorization.k8s.io", "rolebindings.rbac.authorization.k8s.io",
    "clusterroles.rbac.authorization.k8s.io", "clusterrolebindings.rbac.authorization.k8s.io",
    "customresourcedefinitions.apiextensions.k8s.io",
    "validatingadmissionpolicies.admissionregistration.k8s.io",
    "mutatingwebhookconfigurations.admissionregistration.k8s.io",
    "certificatesigningrequests.certificates.k8s.io",
)  # fmt: skip
POWERS = (
    "bind roles.rbac.authorization.k8s.io", "bind clusterroles.rbac.authorization.k8s.io",
    "escalate roles.rbac.authorization.k8s.io", "escalate clusterroles.rbac.authorization.k8s.io",
    "impersonate users", "impersonate groups", "impersonate serviceaccounts",
)  # fmt: skip
"""Verbs of one kind only, by which an account gets the rights of others."""


class Asked(NamedTuple):
    """Somebody, and the namespace that is asked about."""

    user: str
    place: str

    def __str__(self) -> str:
        return f"{self.user} in {self.place}"


@pytest.fixture
def namespaces(cluster: Cluster, client: Client) -> Iterator[dict[str, str]]:
    made = {place: cluster.create_namespace(client) for place in ("tenant", "other", "system")}
    yield made
    for name in made.values():
        discard_namespace(client, name)


@pytest.mark.parametrize("golden", ["chart_rights.txt", "chart_rights_everywhere.txt"])
def test_everybody_may_what_the_golden_file_says(
    client: Client, namespaces: dict[str, str], tmp_path: Path, golden: str
) -> None:
    is_everywhere = golden == "chart_rights_everywhere.txt"
    release = f"r-{namespaces['system']}"
    helm = Helm(find_helm(4), tmp_path / "helm", major=4)
    watched = [] if is_everywhere else [namespaces["tenant"]]
    objects = helm.template({"watchNamespaces": watched}, release=release, namespace=namespaces["system"])
    granted = [item for item in objects if item["kind"].endswith(("Role", "RoleBinding"))]
    users = {"operator": account_of(objects)}
    if not is_everywhere:  # the tenant's roles are the same
        granted += tenants(granted, namespaces["tenant"])
        users |= {user: f"{user}-{namespaces['tenant']}" for user in ("viewer", "editor")}
    try:
        for item in granted:
            client.create(item)
        found = table(client, users, namespaces)
    finally:
        for item in granted:
            client.delete(item["kind"], item["metadata"]["name"], item["metadata"].get("namespace"))
    compare(found, golden)


def test_accounts_of_a_group_may_what_the_golden_file_says(scene: Scene, namespaces: dict[str, str]) -> None:
    with scene.operator():
        scene.apply("x", {"router.type": "SMG", "replicas": 0, "idle.responder.enabled": True})
        scene.wait_for_condition("x", "Ready", "False", reason="ScaledToZero")
        scene.client.wait_for("ServiceAccount", "x-responder", scene.namespace)
        scene.wait_quiet(quiet_s=1.0)
        accounts = [item["metadata"]["name"] for item in scene.client.list_all("ServiceAccount", scene.namespace)]
        users = {name: account_user(scene.namespace, name) for name in accounts}
        places = {"its namespace": scene.namespace, "another": namespaces["other"]}
        compare(table(scene.client, users, places), "group_rights.txt")


def tenants(granted: Sequence[Object], namespace: str) -> list[Object]:
    """Bindings of the tenant's roles, as the cluster's own view and edit take them in."""
    bindings = []
    for user, suffixes in {"viewer": (":view",), "editor": (":view", ":edit")}.items():
        for suffix in suffixes:
            (role,) = [item["metadata"]["name"] for item in granted if item["metadata"]["name"].endswith(suffix)]
            metadata = {"name": f"{user}-{suffix[1:]}", "namespace": namespace}
            subject = {"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": f"{user}-{namespace}"}
            bindings.append(
                {
                    "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding", "metadata": metadata,
                    "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
                    "subjects": [subject],
                }
            )  # fmt: skip
    return bindings


def account_of(objects: Sequence[Object]) -> str:
    """The operator's user name: its account is the chart's only one, and the only one that the chart gives rights."""
    (account,) = [item["metadata"] for item in objects if item["kind"] == "ServiceAccount"]
    subjects = [subject for item in objects for subject in item.get("subjects", ())]
    assert {(subject["kind"], subject["namespace"], subject["name"]) for subject in subjects} == {
        ("ServiceAccount", account["namespace"], account["name"])
    }
    return account_user(account["namespace"], account["name"])


def account_user(namespace: str, name: str) -> str:
    return f"system:serviceaccount:{namespace}:{name}"


def compare(found: str, golden: str) -> None:
    file = GOLDEN / golden
    if os.environ.get("UPDATE_GOLDEN") == "1":
        file.write_text(found, encoding="utf-8")
    assert found == file.read_text(encoding="utf-8")


def table(client: Client, users: Mapping[str, str], places: Mapping[str, str]) -> str:
    """Who may what: a line for each resource, a letter for each verb, a column for each user and namespace."""
    columns = [Asked(user, place) for user in users for place in places]

    def answers(resource: str, verbs: Sequence[str]) -> list[list[bool]]:
        return [[can_i(client, users[who], verb, resource, places[place]) for verb in verbs] for who, place in columns]

    def row(resource: str) -> list[str]:
        return [
            "".join(letter if yes else "-" for letter, yes in zip(LETTERS, cell, strict=True))
            for cell in answers(resource, VERBS)
        ]

    def power(words: str) -> list[str]:
        verb, resource = words.split()
        return ["yes" if cell == [True] else "-" for cell in answers(resource, [verb])]

    with ThreadPoolExecutor(4) as pool:
        rows = dict(zip(RESOURCES, pool.map(row, RESOURCES), strict=True))
        rows |= dict(zip(POWERS, pool.map(power, POWERS), strict=True))
    width = max(map(len, rows))
    verbs = ", ".join(f"{letter} {verb}" for letter, verb in zip(LETTERS, VERBS, strict=True))
    lines = [f"# {verbs}", " | ".join([" " * width, *map(str, columns)])]
    for name, cells in rows.items():
        padded = (text.ljust(len(str(asked))) for text, asked in zip(cells, columns, strict=True))
        lines.append(" | ".join([name.ljust(width), *padded]))
    return "\n".join(line.rstrip() for line in lines) + "\n"


def can_i(client: Client, user: str, verb: str, resource: str, namespace: str) -> bool:
    """What `kubectl auth can-i VERB RESOURCE --as USER --namespace NAMESPACE` answers; accounts are in their groups."""
    name, _, group = resource.partition(".")
    name, _, subresource = name.partition("/")
    attributes = {
        "namespace": namespace, "verb": verb, "group": group, "resource": name, "subresource": subresource,
    }  # fmt: skip
    groups = ["system:authenticated"]
    if user.startswith("system:serviceaccount:"):
        groups += ["system:serviceaccounts", f"system:serviceaccounts:{user.split(':')[2]}"]
    review = {
        "apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview",
        "metadata": {}, "spec": {"user": user, "groups": groups, "resourceAttributes": attributes},
    }  # fmt: skip
    return bool(client.create(review)["status"]["allowed"])
