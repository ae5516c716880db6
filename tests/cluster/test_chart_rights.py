"""`kubectl auth can-i`, asked for everybody whom the chart gives rights: the answers are those of a golden file.

The chart is installed for one tenant's namespace. Its operator, and users whom the tenant's roles view and edit are
bound to there, are asked about there, in another tenant's namespace and in the release's own. `UPDATE_GOLDEN=1` writes
the file again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.helm import Helm, Object
from tests.support.kube.client import Client
from tests.support.kube.cluster import Cluster, discard_namespace
from tests.support.kube.tools import find_helm

GOLDEN = Path(__file__).parents[1] / "data/chart_rights.txt"
VERBS = ("get", "list", "watch", "create", "update", "patch", "delete", "deletecollection")
LETTERS = "glwcupdD"
RESOURCES = (
    "heteroinferences.heteroinference.io", "heteroinferences/status.heteroinference.io",
    "heteroinferences/scale.heteroinference.io", "pods", "pods/exec", "pods/log", "secrets", "configmaps", "services",
    "serviceaccounts", "serviceaccounts/token", "events", "nodes", "namespaces", "persistentvolumeclaims",
    "deployments.apps", "statefulsets.apps", "networkpolicies.networking.k8s.io", "poddisruptionbudgets.policy",
    "podmonitors.monitoring.coreos.com", "podgroups.scheduling.volcano.sh", "resourceclaimtemplates.resource.k8s.io",
    "inferencepools.inference.networking.k8s.io",
    "leases.coordination.k8s.io", "roles.rbac.authorization.k8s.io", "rolebindings.rbac.authorization.k8s.io",
    "clusterroles.rbac.authorization.k8s.io", "customresourcedefinitions.apiextensions.k8s.io",
    "validatingadmissionpolicies.admissionregistration.k8s.io",
)  # fmt: skip


class Asked(NamedTuple):
    """A user, and the namespace that is asked about."""

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


def test_everybody_may_what_the_golden_file_says(client: Client, namespaces: dict[str, str], tmp_path: Path) -> None:
    release = f"r-{namespaces['system']}"
    helm = Helm(find_helm(4), tmp_path / "helm", major=4)
    objects = helm.template(
        {"watchNamespaces": [namespaces["tenant"]]}, release=release, namespace=namespaces["system"]
    )
    granted = [item for item in objects if item["kind"].endswith(("Role", "RoleBinding"))]
    granted += tenants(granted, namespaces["tenant"])
    try:
        for item in granted:
            client.create(item)
        found = table(client, account_of(granted), namespaces)
    finally:
        for item in granted:
            client.delete(item["kind"], item["metadata"]["name"], item["metadata"].get("namespace"))
    if os.environ.get("UPDATE_GOLDEN") == "1":
        GOLDEN.write_text(found, encoding="utf-8")
    assert found == GOLDEN.read_text(encoding="utf-8")


def tenants(granted: list[Object], namespace: str) -> list[Object]:
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


def account_of(granted: list[Object]) -> str:
    """The operator's user name."""
    accounts = (subject for item in granted for subject in item.get("subjects", ()))
    account = next(subject for subject in accounts if subject["kind"] == "ServiceAccount")
    return f"system:serviceaccount:{account['namespace']}:{account['name']}"


def table(client: Client, account: str, namespaces: dict[str, str]) -> str:
    """Who may what: a line for each resource, a letter for each verb, a column for each user and namespace."""
    users = {"operator": account} | {user: f"{user}-{namespaces['tenant']}" for user in ("viewer", "editor")}
    columns = [Asked(user, place) for user in users for place in namespaces]

    def cell(asked: Asked, resource: str) -> str:
        user, namespace = users[asked.user], namespaces[asked.place]
        answers = (can_i(client, user, verb, resource, namespace) for verb in VERBS)
        return "".join(letter if yes else "-" for letter, yes in zip(LETTERS, answers, strict=True))

    with ThreadPoolExecutor(4) as pool:
        rows = list(pool.map(lambda resource: [cell(asked, resource) for asked in columns], RESOURCES))
    width = max(map(len, RESOURCES))
    verbs = ", ".join(f"{letter} {verb}" for letter, verb in zip(LETTERS, VERBS, strict=True))
    lines = [f"# {verbs}", " | ".join([" " * width, *map(str, columns)])]
    for resource, cells in zip(RESOURCES, rows, strict=True):
        padded = (text.ljust(len(str(asked))) for text, asked in zip(cells, columns, strict=True))
        lines.append(" | ".join([resource.ljust(width), *padded]))
    return "\n".join(line.rstrip() for line in lines) + "\n"


def can_i(client: Client, user: str, verb: str, resource: str, namespace: str) -> bool:
    """What `kubectl auth can-i VERB RESOURCE --as USER --namespace NAMESPACE` answers."""
    name, _, group = resource.partition(".")
    name, _, subresource = name.partition("/")
    attributes = {
        "namespace": namespace, "verb": verb, "group": group, "resource": name, "subresource": subresource,
    }  # fmt: skip
    review = {
        "apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview",
        "metadata": {}, "spec": {"user": user, "resourceAttributes": attributes},
    }  # fmt: skip
    return bool(client.create(review)["status"]["allowed"])
