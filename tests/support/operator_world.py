"""A little cluster in memory for the operator's pure side: it stores what plans apply and plays the controllers.

It shows objects as an API server does: with uids, generations, and defaults filled in. Controllers move only when a
test lets them, so every order of events can be told.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from hetero_api.contract import LABEL_NAME, LABEL_ROLE
from hetero_operator.reconcile.inventory import ObjectKey
from hetero_operator.reconcile.model import (
    Capabilities,
    Deletion,
    GatewayReport,
    Object,
    Observed,
    Plan,
    Policy,
    RenderOptions,
)
from hetero_operator.reconcile.plan import plan
from hetero_operator.reconcile.revision import digest
from tests.support.kube_defaults import copied, with_defaults
from tests.support.render_cases import OPEN, OPTIONS, PLAIN

_TOKEN = "dG9rZW4="


@dataclass
class OperatorWorld:
    """One resource, its objects and its pods."""

    resource: dict[str, Any]
    capabilities: Capabilities = PLAIN
    options: RenderOptions = OPTIONS
    policy: Policy = OPEN
    now: datetime = datetime(2030, 1, 1, tzinfo=UTC)
    objects: dict[ObjectKey, dict[str, Any]] = field(default_factory=dict)
    pods: dict[str, dict[str, Any]] = field(default_factory=dict)
    failed_pods: list[dict[str, Any]] = field(default_factory=list)
    nodes: dict[str, Object | None] = field(default_factory=dict)
    gateways: dict[int, GatewayReport] = field(default_factory=dict)
    """By the ordinal of the replica."""
    _serial: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def observe(self) -> Observed:
        """What the operator would see now; a copy."""
        return Observed(
            resource=copied(self.resource),
            owned=copied(list(self.objects.values())),
            pods=copied([pod for pod in self.pods.values() if LABEL_NAME in pod["metadata"]["labels"]]),
            failed_pods=copied(self.failed_pods),
            now=self.now,
            nodes=dict(self.nodes),
            gateway=self.gateways.get(0),
            gateways={ordinal: report for ordinal, report in self.gateways.items() if ordinal},
            capabilities=self.capabilities,
            options=self.options,
            policy=self.policy,
        )

    def plan(self) -> Plan:
        return plan(self.observe())

    def act(self, todo: Plan) -> None:
        """Does what a plan says."""
        for secret in todo.create:
            data = dict.fromkeys(secret.generated_keys, _TOKEN)
            if secret.renews:
                del self.objects[ObjectKey.from_object(secret.manifest)]
            self._store({**secret.manifest, "data": data})
        for item in todo.apply:
            self._store(item)
        for deletion in todo.delete:
            self._delete(deletion)

    def act_partly(self, todo: Plan, *, calls: int) -> None:
        """Does the first calls of a plan, and is killed then."""
        create, rest = todo.create[:calls], max(0, calls - len(todo.create))
        apply, rest = todo.apply[:rest], max(0, rest - len(todo.apply))
        self.act(Plan(create=create, apply=apply, delete=todo.delete[:rest]))

    def reconcile(self, *, rounds: int = 8) -> list[Plan]:
        """Plans, acts and lets the controllers move until nothing is left to do; every plan that was not idle."""
        done: list[Plan] = []
        for _ in range(rounds):
            todo = self.plan()
            if todo.idle:
                return done
            done.append(todo)
            self.act(todo)
            self.run_controllers()
            self.now += timedelta(seconds=1)
        raise AssertionError(f"still not idle after {rounds} rounds: {done[-1]}")

    def change(self, spec: Mapping[str, Any]) -> None:
        """The user writes another spec."""
        self.resource["spec"] = copied(dict(spec))
        self.resource["metadata"]["generation"] += 1

    def uids(self, role: str) -> set[str]:
        """Uids of the pods of a role."""
        pods = (pod["metadata"] for pod in self.pods.values())
        return {metadata["uid"] for metadata in pods if metadata["labels"].get(LABEL_ROLE) == role}

    def of_kind(self, kind: str) -> dict[str, dict[str, Any]]:
        """Objects of a kind by name."""
        return {key.name: item for key, item in self.objects.items() if key.kind == kind}

    def run_controllers(self) -> None:
        """StatefulSets and Deployments get the pods that they ask for; collected are the pods of those deleted."""
        wanted: dict[str, Object] = {}
        for item in self.objects.values():
            if item["kind"] == "StatefulSet":
                item["status"] = {"observedGeneration": item["metadata"]["generation"]}
                name = item["metadata"]["name"]
                wanted |= {f"{name}-{ordinal}": item for ordinal in range(item["spec"]["replicas"])}
            elif item["kind"] == "Deployment" and item["spec"]["replicas"]:
                wanted[f"{item['metadata']['name']}-{digest(item['spec']['template'], 10)}"] = item
        self.pods = {name: pod for name, pod in self.pods.items() if name in wanted}
        for name, owner in wanted.items():
            if name not in self.pods:
                self.pods[name] = self._pod(name, owner["spec"]["template"])

    def _pod(self, name: str, template: Mapping[str, Any]) -> dict[str, Any]:
        metadata = {**copied(template["metadata"]), "name": name, "namespace": "models", "uid": self._uid()}
        status = {"phase": "Running", "startTime": self._time()}
        return {
            "apiVersion": "v1", "kind": "Pod", "metadata": {**metadata, "creationTimestamp": self._time()},
            "spec": copied(template["spec"]), "status": status,
        }  # fmt: skip

    def _store(self, item: Mapping[str, Any]) -> None:
        stored = with_defaults(item)
        live = self.objects.get(ObjectKey.from_object(stored))
        if live is None:
            stored["metadata"] |= {"uid": self._uid(), "generation": 1, "creationTimestamp": self._time()}
        else:
            same = live.get("spec") == stored.get("spec")
            kept = {key: live["metadata"][key] for key in ("uid", "creationTimestamp")}
            stored["metadata"] |= {**kept, "generation": live["metadata"]["generation"] + (not same)}
            if "status" in live:
                stored["status"] = live["status"]
        self.objects[ObjectKey.from_object(stored)] = stored

    def _delete(self, deletion: Deletion) -> None:
        if deletion.ref.kind == "Pod":
            assert self.pods[deletion.ref.name]["metadata"]["uid"] == deletion.uid
            del self.pods[deletion.ref.name]
            return
        group = deletion.ref.api_version.rpartition("/")[0]
        key = ObjectKey(group, deletion.ref.kind, deletion.ref.name)
        assert self.objects[key]["metadata"]["uid"] == deletion.uid
        del self.objects[key]

    def _uid(self) -> str:
        return f"10000000-0000-4000-8000-{next(self._serial):012d}"

    def _time(self) -> str:
        return self.now.strftime("%Y-%m-%dT%H:%M:%SZ")
