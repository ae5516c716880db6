"""The operator's roles are enough and have nothing to spare: with each single verb taken away, something fails.

What fails is always something that a user would see: a step of the tour (tests/support/operator_tour.py), an operator
that does not lead, or one that says that it is not ready. A 403 in a log is not counted.

Each right is taken away in a namespace of its own, so that mutants do not know of one another. Where the others can go
on, one operator looks after all their namespaces; for a right without which it cannot see the cluster or lead, there is
an operator with an account of its own.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.cluster.conftest import StartControlPlane
from tests.support.helm import Helm, Object
from tests.support.kube.client import Client, is_established
from tests.support.kube.cluster import Cluster
from tests.support.kube.nodes import ready_condition
from tests.support.kube.tools import find_helm
from tests.support.operator_process import OperatorProcess
from tests.support.operator_tour import NODE, Pace, Tour
from tests.support.stand_in_crds import POD_GROUP, POD_MONITOR, RESOURCE_CLAIM_TEMPLATE, inference_pool

RBAC = "rbac.authorization.k8s.io"
ACCOUNT = "operator"
LEASE = "hetero-heteroinference-operator"
"""As the chart names it, for a release named as below; its role is limited to this name."""
OPERATORS_AT_ONCE = 14
LEADING_TIMEOUT_S = 45.0
"""From the start of a process, beside others that start."""
READY_TIMEOUT_S = 10.0
"""For an operator that leads already, which takes longer than to list everything."""
STAY_READY_S = 1.0


class Right(NamedTuple):
    """One verb on one resource. `role` is which of the chart's roles grants it."""

    role: str
    group: str
    resource: str
    verb: str
    names: tuple[str, ...] = ()
    """Objects that it is limited to; none: no limit."""

    def __str__(self) -> str:
        return f"{self.verb} {self.resource}" + (f".{self.group}" if self.group else "")

    @property
    def blinding(self) -> bool:
        """Whether an operator without it sees less of the cluster, or cannot lead: then others cannot share it."""
        return self.role != "work" or (self.verb in ("list", "watch") and self.resource != "events")


@dataclass(frozen=True, slots=True)
class Roles:
    """The chart's roles, flattened, without what belongs to users."""

    rights: Sequence[Right]

    @classmethod
    def of(cls, objects: Sequence[Object]) -> Roles:
        found = {_purpose(one): one["rules"] for one in objects if one["kind"] in ("Role", "ClusterRole")}
        return cls([right for role, rules in found.items() if role for right in _rights(role, rules)])

    def granting(self, role: str, without: Right | None) -> list[Object]:
        """Rules of one role, with one right taken away."""
        return [
            {
                "apiGroups": [right.group],
                "resources": [right.resource],
                "resourceNames": list(right.names),
                "verbs": [right.verb],
            }
            for right in self.rights
            if right.role == role and right != without
        ]


def _purpose(role: Object) -> str:
    """What a role of the chart is for; "" for those of users."""
    name = role["metadata"]["name"]
    if role["kind"] == "Role":
        return "election" if name.endswith("-election") else "work"
    return "nodes" if name.endswith(":nodes") else ""


def _rights(role: str, rules: Sequence[Object]) -> Iterator[Right]:
    for rule in rules:
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                names = tuple(rule.get("resourceNames", ()))
                yield from (Right(role, group, resource, verb, names) for verb in rule["verbs"])


def chart_roles(folder: Path) -> Roles:
    helm = Helm(find_helm(4), folder, major=4)
    return Roles.of(helm.template({"watchNamespaces": ["any"]}, release="hetero"))


class Ground:
    """A control plane with every API that the operator knows, and namespaces with mutated roles in it."""

    def __init__(self, cluster: Cluster, client: Client, roles: Roles, folder: Path) -> None:
        self.cluster = cluster
        self.client = client
        self.roles = roles
        self._folder = folder

    def new_namespace(self, without: Right | None, *, account_namespace: str | None = None) -> str:
        """A namespace in which an account, of it or of another, may do what the chart allows but for one right."""
        namespace = self.cluster.create_namespace(self.client)
        home = account_namespace or namespace
        if home == namespace:
            self._account(namespace)
            self._grant("election", without, namespace=namespace, home=home)
            self._grant("nodes", without, namespace=None, home=home)
        self._grant("work", without, namespace=namespace, home=home)
        return namespace

    def operator(self, home: str, namespaces: Sequence[str]) -> OperatorProcess:
        """One that has the account of a namespace."""
        kubeconfig = self.cluster.kubeconfig(self.cluster.service_account(ACCOUNT, home))
        settings = {"namespaces": ",".join(namespaces), "own_namespace": home, "lease_name": LEASE}
        return OperatorProcess(kubeconfig, self._folder / home, resync_seconds="3600", **settings)

    def _account(self, namespace: str) -> None:
        metadata = {"name": ACCOUNT, "namespace": namespace}
        self.client.create({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata})

    def _grant(self, role: str, without: Right | None, *, namespace: str | None, home: str) -> None:
        kind = "Role" if namespace else "ClusterRole"
        metadata: Object = {"name": f"{role}-{home}", **({"namespace": namespace} if namespace else {})}
        rules = self.roles.granting(role, without)
        self.client.create({"apiVersion": f"{RBAC}/v1", "kind": kind, "metadata": metadata, "rules": rules})
        self.client.create(
            {
                "apiVersion": f"{RBAC}/v1",
                "kind": f"{kind}Binding",
                "metadata": metadata,
                "roleRef": {"apiGroup": RBAC, "kind": kind, "name": metadata["name"]},
                "subjects": [{"kind": "ServiceAccount", "name": ACCOUNT, "namespace": home}],
            }
        )


@pytest.fixture
def ground(start_control_plane: StartControlPlane, tmp_path: Path) -> Iterator[Ground]:
    cluster = start_control_plane().cluster
    with cluster.client() as client:
        for crd in (POD_MONITOR, POD_GROUP, RESOURCE_CLAIM_TEMPLATE, inference_pool(cluster.version)):
            if not client.discovery.has(crd["spec"]["names"]["kind"]):
                client.create(crd)
                client.wait_for("CustomResourceDefinition", crd["metadata"]["name"], until=is_established)
        client.create({"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE}})
        client.patch_status("Node", NODE, {"conditions": [ready_condition("True")]})
        yield Ground(cluster, client, chart_roles(tmp_path / "helm"), tmp_path / "operators")


@pytest.mark.minutes(5)
@pytest.mark.timeout(1800)
def test_the_roles_are_enough_and_each_right_is_needed(ground: Ground) -> None:
    blinding = [right for right in ground.roles.rights if right.blinding]
    others = [right for right in ground.roles.rights if not right.blinding]
    for outcomes in (outcomes_together(ground, others), outcomes_apart(ground, blinding)):
        assert outcomes.pop(None) == "", "with all rights the tour must succeed"
        assert [str(right) for right, went_wrong in outcomes.items() if not went_wrong] == []


def outcomes_together(ground: Ground, rights: Sequence[Right]) -> dict[Right | None, str]:
    """What goes wrong without each right, and (None) with all, under one operator; "" when nothing does."""
    home = ground.new_namespace(None)
    places: dict[Right | None, str] = {None: home}
    places |= {right: ground.new_namespace(right, account_namespace=home) for right in rights}
    pace = Pace()
    with ground.operator(home, list(places.values())) as operator, ThreadPoolExecutor(len(places)) as pool:
        operator.wait_leading()
        stay_ready(operator)
        tours = {right: pool.submit(tour, ground, place, right, pace) for right, place in places.items()}
        return {right: made.result() for right, made in tours.items()}


def outcomes_apart(ground: Ground, rights: Sequence[Right]) -> dict[Right | None, str]:
    """What goes wrong without each right, and (None) with all, an operator for each."""
    every, pace = [None, *rights], Pace()
    with ThreadPoolExecutor(OPERATORS_AT_ONCE) as pool:
        return dict(zip(every, pool.map(lambda right: outcome_alone(ground, right, pace), every), strict=True))


def outcome_alone(ground: Ground, without: Right | None, pace: Pace) -> str:
    """The same, of an operator that has its own account and namespace."""
    namespace = ground.new_namespace(without)
    with ground.operator(namespace, [namespace]) as operator:
        try:
            operator.wait_metric("hetero_operator_leader", lambda leads: leads == 1, timeout_s=LEADING_TIMEOUT_S)
            operator.wait_ready(timeout_s=READY_TIMEOUT_S)
            stay_ready(operator)
        except AssertionError as failure:
            return str(failure)
        went_wrong = tour(ground, namespace, without, pace)
        return went_wrong or ("" if operator.leading() else "does not lead any more")


def tour(ground: Ground, namespace: str, without: Right | None, pace: Pace) -> str:
    """What went wrong in a namespace; "" when nothing did."""
    with ground.cluster.client() as client:
        return Tour(client, namespace, pace, entitled=without is None).run()


def stay_ready(operator: OperatorProcess) -> None:
    """Fails unless the operator says for a while that it is ready."""
    end = time.monotonic() + STAY_READY_S
    while time.monotonic() < end:
        assert operator.ready(), "is not ready all the time"
