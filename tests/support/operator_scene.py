"""A namespace with operators of its own: they look after nothing else, and elect their leader there.

So tests on one API server are no concern of one another. Each replica is a user of its own, so that the audit log tells
who wrote what. They may do what the chart allows its operator, and nothing else (chart_rights.py).

    with Scene.of(cluster, client) as scene, scene.operator() as operator:
        scene.apply("x", {"pools.0.ranks": 3})
        owned = scene.owned.wait_settled("x")["x"]
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hetero_api.contract import KIND
from tests.support.chart_rights import operators_of
from tests.support.hetero_resources import resource
from tests.support.kube.audit import Call
from tests.support.kube.autopilot import Autopilot
from tests.support.kube.client import Client, Object, condition
from tests.support.kube.cluster import Cluster, discard_namespace
from tests.support.kube.fault_proxy import FaultProxy
from tests.support.kube.kubeconfigs import Credentials
from tests.support.kube.nodes import ready_condition
from tests.support.kube.polling import poll
from tests.support.operator_process import OperatorProcess
from tests.support.owned_objects import OwnedObjects

NODE: Final = "node"
"""Where Kubelet and Autopilot put pods. It is shared by all scenes of a cluster, and stays."""
QUIET_S: Final = 3.0
QUIET_TIMEOUT_S: Final = 60.0
CONDITION_TIMEOUT_S: Final = 30.0
RECONCILES: Final = "hetero_operator_reconciles_total"


@dataclass(frozen=True, slots=True)
class Scene:
    """One namespace of a cluster."""

    cluster: Cluster
    client: Client
    """The administrator's."""
    namespace: str
    owned: OwnedObjects
    operators: str
    """The group of its operators, to which the chart's rights are given."""

    @classmethod
    @contextmanager
    def of(cls, cluster: Cluster, client: Client) -> Iterator[Scene]:
        """A new namespace of a cluster that others use, too: it ends with the scene."""
        namespace = cluster.create_namespace(client)
        try:
            with cls._within(cluster, client, namespace) as scene:
                yield scene
        finally:
            discard_namespace(client, namespace, [KIND])

    @classmethod
    @contextmanager
    def alone(cls, cluster: Cluster) -> Iterator[Scene]:
        """A new namespace of a cluster of the test's own: it goes with that, and no slow server empties it."""
        with cluster.client() as client, cls._within(cluster, client, cluster.create_namespace(client)) as scene:
            yield scene

    @classmethod
    @contextmanager
    def _within(cls, cluster: Cluster, client: Client, namespace: str) -> Iterator[Scene]:
        with operators_of(client, namespace) as group:
            yield cls(cluster, client, namespace, OwnedObjects(client, namespace), group)

    def user(self, replica: str = "operator") -> str:
        """The name that the API server knows a replica by."""
        return f"{replica}-{self.namespace}"

    def credentials(self, replica: str = "operator") -> Credentials:
        return self.cluster.user(self.user(replica), groups=[self.operators])

    @contextmanager
    def operator(
        self, replica: str = "operator", *, through: FaultProxy | None = None, settings: Mapping[str, str] | None = None
    ) -> Iterator[OperatorProcess]:
        """An operator that leads; `through` a proxy, it has the proxy's credentials."""
        operator = self.new_operator(replica, through=through, settings=settings)
        with operator:
            operator.wait_leading()
            yield operator

    def new_operator(
        self, replica: str = "operator", *, through: FaultProxy | None = None, settings: Mapping[str, str] | None = None
    ) -> OperatorProcess:
        """An operator that was not started yet."""
        if through is None:
            kubeconfig = self.cluster.kubeconfig(self.credentials(replica))
        else:
            kubeconfig = self.cluster.kubeconfig(Credentials(), server=through.url)
        own = {"namespaces": self.namespace, "lease_namespace": self.namespace}
        return OperatorProcess(kubeconfig, self.folder(), **{**own, **(settings or {})})

    def folder(self) -> Path:
        """A new one, for a log."""
        parent = self.cluster.folder / "operators"
        parent.mkdir(exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=f"{self.namespace}-", dir=parent))

    @contextmanager
    def proxy(self, replica: str = "operator") -> Iterator[FaultProxy]:
        """A proxy between a replica and the API server."""
        with FaultProxy(self.cluster, credentials=self.credentials(replica)) as proxy:
            yield proxy

    def add_node(self, name: str = NODE) -> None:
        """A node that is ready, for pods that a test binds: the operator takes away what is on a node that is not."""
        self.client.apply({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}})
        self.client.patch_status("Node", name, {"conditions": [ready_condition("True")]})

    @contextmanager
    def autopilot(self) -> Iterator[Autopilot]:
        """Every pod runs and becomes ready, until the end."""
        self.add_node()
        with Autopilot(self.client, self.namespace, node=NODE) as autopilot:
            yield autopilot

    def apply(self, name: str, changes: Mapping[str, Any] | None = None) -> Object:
        """A resource with hetero_resources.SPEC, changed."""
        return self.client.apply(resource(name, self.namespace, changes))

    def writes(self, *, since: int, replica: str = "operator") -> list[Call]:
        """What a replica wrote since a mark of the audit log, but for its Lease."""
        calls = self.cluster.audit.writes_of(self.user(replica), since=since)
        return [call for call in calls if call.resource != "leases"]

    def wait_quiet(self, *, replica: str = "operator", quiet_s: float = QUIET_S) -> None:
        """Until a replica has written nothing for a while."""
        mark, last = self.cluster.audit.mark(), time.monotonic()
        seen: list[Call] = []

        def probe() -> bool:
            nonlocal mark, last
            written = self.writes(since=mark, replica=replica)
            if written:
                mark, last, seen[:] = self.cluster.audit.mark(), time.monotonic(), written
            return time.monotonic() - last >= quiet_s

        last_calls = lambda: f"writes go on: {[str(call) for call in seen]}"  # noqa: E731
        poll(probe, timeout_s=QUIET_TIMEOUT_S, interval_s=0.25, describe=last_calls)

    def wait_for_condition(
        self, name: str, type: str, status: str, *, reason: str | None = None, timeout_s: float = CONDITION_TIMEOUT_S
    ) -> Object:
        """The condition of a resource, once it has this status (and reason)."""

        def holds(found: Object) -> bool:
            told = condition(found, type) or {}
            return told.get("status") == status and reason in (None, told.get("reason"))

        found = self.client.wait_for(KIND, name, self.namespace, until=holds, timeout_s=timeout_s)
        return condition(found, type) or {}

    def reconcile_again(self, operator: OperatorProcess) -> None:
        """Have an operator look at every resource once more, and wait until it has: something of each is changed that
        means nothing to it."""
        before = operator.metric(RECONCILES)
        names = [found["metadata"]["name"] for found in self.client.list_all(KIND, self.namespace)]
        for name in names:
            nudge = {"metadata": {"annotations": {"example.com/nudge": str(time.monotonic())}}}
            self.client.patch(KIND, name, nudge, self.namespace)
        operator.wait_metric(RECONCILES, lambda value: value >= before + len(names))
