"""Plans on a real API server with its own controllers: what is written once is never written again."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

from hetero_api.contract import FIELD_MANAGER, LABEL_NAME
from hetero_api.effects import Effect, effect_of
from hetero_operator.reconcile.model import Capabilities, Deletion, Observed, Plan
from hetero_operator.reconcile.plan import plan
from tests.cluster.test_renders import adapted, capabilities_of
from tests.support.kube.client import Client
from tests.support.kube.cluster import Cluster
from tests.support.kube.polling import poll
from tests.support.render_cases import OPEN, OPTIONS, RenderCase, render_cases
from tests.support.spec_changes import AFTER, changed

CASES = render_cases()
KINDS = (
    "Secret", "ServiceAccount", "ConfigMap", "Service", "apps/v1/StatefulSet", "apps/v1/Deployment",
    "networking.k8s.io/v1/NetworkPolicy",
)  # fmt: skip
CLUSTER_OBJECTS: tuple[dict[str, Any], ...] = (
    {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": "serving"}, "value": 1},
    {"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": {"name": "nvidia"}, "handler": "nvidia"},
)
"""What pods of the cases name; admission refuses them without."""
SETTLED_TIMEOUT_S = 60.0


class RealWorld:
    """A resource on a real API server; the calls of a plan are made by the test."""

    def __init__(self, case: RenderCase, cluster: Cluster, client: Client, namespace: str) -> None:
        self.client, self.namespace = client, namespace
        for item in CLUSTER_OBJECTS:
            client.apply(item)
        self.capabilities: Capabilities = capabilities_of(cluster, client)
        resource = adapted(dict(case.resource), self.capabilities)
        metadata = {"name": resource["metadata"]["name"], "namespace": namespace}
        self.resource = client.create({**resource, "metadata": metadata})

    def plan(self) -> Plan:
        name = self.resource["metadata"]["name"]
        self.resource = self.client.get("HeteroInference", name, self.namespace)
        return plan(
            Observed(
                resource=self.resource,
                owned=list(self._list(*KINDS, *self._optional())),
                pods=list(self._list("Pod")),
                failed_pods=(),
                now=datetime.now(UTC),
                capabilities=self.capabilities,
                options=OPTIONS,
                policy=OPEN,
            )
        )

    def act(self, todo: Plan) -> None:
        for secret in todo.create:
            data = dict.fromkeys(secret.generated_keys, "dG9rZW4=")
            self.client.create({**copy.deepcopy(dict(secret.manifest)), "data": data})
        for item in todo.apply:
            self.client.apply(dict(item), manager=FIELD_MANAGER)
        for deletion in todo.delete:
            self._delete(deletion)

    def settle(self) -> list[Plan]:
        """Plans and acts until the controllers have nothing to do and a plan is idle; all that were not."""
        done: list[Plan] = []

        def idle() -> bool:
            todo = self.plan()
            if not todo.idle:
                done.append(todo)
                self.act(todo)
            return todo.idle and self._controllers_rest()

        poll(idle, describe=lambda: f"not at rest after {len(done)} plans", timeout_s=SETTLED_TIMEOUT_S)
        return done

    def pods(self, role: str) -> set[str]:
        """Uids."""
        pods = self._list("Pod")
        return {pod["metadata"]["uid"] for pod in pods if pod["metadata"]["labels"]["heteroinference.io/role"] == role}

    def _controllers_rest(self) -> bool:
        workloads = list(self._list("apps/v1/StatefulSet", "apps/v1/Deployment"))
        wanted = sum(item["spec"]["replicas"] for item in workloads)
        pods = list(self._list("Pod"))
        seen = all(
            (item.get("status") or {}).get("observedGeneration") == item["metadata"]["generation"] for item in workloads
        )
        return seen and len(pods) == wanted and not any("deletionTimestamp" in pod["metadata"] for pod in pods)

    def _optional(self) -> list[str]:
        """Kinds that some clusters have: budgets of another version, and claims of devices."""
        return ["/".join(kind) for kind in sorted(self.capabilities.kinds)]

    def _list(self, *kinds: str) -> Iterator[dict[str, Any]]:
        selector = f"{LABEL_NAME}={self.resource['metadata']['name']}"
        for kind in kinds:
            yield from self.client.list_all(kind, self.namespace, labels=selector)

    def _delete(self, deletion: Deletion) -> None:
        reference = deletion.ref
        grace_s = 0 if reference.kind == "Pod" else None
        self.client.delete(f"{reference.api_version}/{reference.kind}", reference.name, self.namespace, grace_s=grace_s)


@pytest.mark.parametrize("name", ["everything", "kubernetes-1.20", "model-claim"])
def test_everything_is_written_once(name: str, cluster: Cluster, client: Client, namespace: str) -> None:
    world = RealWorld(CASES[name], cluster, client, namespace)
    plans = world.settle()
    assert len(plans) == 1
    assert len(plans[0].create) == 1


@pytest.mark.parametrize(
    "field", ["model.revision", "engine.maxNumSeqs", "gateway.service.type", "networkPolicy.enabled", "suspend"]
)
def test_a_change_is_rolled_out_by_the_real_controllers(
    field: str, cluster: Cluster, client: Client, namespace: str
) -> None:
    world = RealWorld(CASES["everything"], cluster, client, namespace)
    world.settle()
    ranks, gateway = world.pods("rank"), world.pods("gateway")
    resource = copy.deepcopy(world.resource)
    resource["spec"] = changed(resource["spec"], AFTER[field])
    client.replace(resource)
    world.settle()
    if field == "suspend":
        assert world.pods("rank") == world.pods("gateway") == set()
        return
    effect = effect_of(field)
    assert (world.pods("rank") == ranks) == (effect is not Effect.RANKS)
    assert (world.pods("gateway") == gateway) == (effect is Effect.NONE)
