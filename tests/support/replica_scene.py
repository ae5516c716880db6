"""A resource of several replicas. Pods run as soon as they are made, gateways serve with all ranks of their spec."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, Final

import yaml

from hetero_api.contract import LABEL_REPLICA, LABEL_REVISION, LABEL_ROLE, ROLE_GATEWAY
from hetero_api.group_state import GroupState
from hetero_api.v1.admin_pb2 import GetTopologyResponse
from hetero_operator.reconcile.inventory import label_of
from hetero_operator.reconcile.model import Capabilities, GatewayReport, Object, Outcome, Plan, Report
from hetero_operator.reconcile.report import report
from hetero_operator.reconcile.status.situation import TO_BE_KNOWN
from tests.support import pod_statuses
from tests.support.operator_world import OperatorWorld
from tests.support.render_cases import PLAIN, resource_of
from tests.support.status_scene import rank_status

SPEC: Final = """
model: {uri: hf://a/b}
pools:
- {name: cpu, type: CPU, ranks: 2, cpu: {coresPerRank: 4, memoryPerRank: 8Gi}}
"""
MOST_ROUNDS: Final = 60


def replicated(number: int = 3, **fields: Any) -> dict[str, Any]:
    """A spec of so many replicas."""
    return {**yaml.safe_load(SPEC), "replicas": number, **fields}


@dataclass
class ReplicaScene:
    """A world in which everything works, but for replicas of revisions that are `broken`."""

    world: OperatorWorld
    broken: set[str] = field(default_factory=set)
    least_serving: int = 0
    """Fewest replicas that served at a time since it was set."""
    order: list[int] = field(default_factory=list)
    """Replicas that stopped serving since it was cleared."""

    @classmethod
    def of(cls, number: int = 3, *, capabilities: Capabilities = PLAIN, **fields: Any) -> ReplicaScene:
        """So many replicas, which serve, told once."""
        scene = cls(OperatorWorld(resource_of("x", replicated(number, **fields)), capabilities))
        scene.world.now += TO_BE_KNOWN  # pods say that they have been ready since the world began
        scene.settle()
        scene.watch()
        return scene

    def watch(self) -> None:
        """Count anew what serves."""
        self.least_serving, self.order = len(self.serving()), []

    def change(self, **fields: Any) -> None:
        self.world.change({**self.world.resource["spec"], **fields})

    def settle(self) -> None:
        """Until nothing is left to do; told at each step."""
        for _ in range(MOST_ROUNDS):
            todo = self.world.plan()
            self.tell(todo)
            self.world.act(todo)
            self.move()
            last = self.world.plan()
            if todo.idle and last.idle:
                self.tell(last)
                return
        raise AssertionError(f"never idle: {todo}")

    def move(self) -> None:
        """Controllers, kubelets and gateways do their part."""
        before = self.serving()
        self.world.run_controllers()
        self.world.gateways = dict(self._reports())
        for pod in self.world.pods.values():
            pod["status"] = self._pod_status(pod)
            pod["spec"]["nodeName"] = "n1"
        after = self.serving()
        self.order += sorted(before - after, reverse=True)
        self.least_serving = min(self.least_serving, len(after))
        self.world.now += timedelta(seconds=1)

    def _pod_status(self, pod: Object) -> dict[str, Any]:
        name = pod["spec"]["containers"][0]["name"]
        if label_of(pod, LABEL_ROLE) == ROLE_GATEWAY:
            return pod_statuses.running(name, ready=_ordinal(pod) in self.serving())
        if label_of(pod, LABEL_REVISION) in self.broken:
            return pod_statuses.crash_loop(name, exit_code=3, message="no such model", restarts=2)
        return pod_statuses.running(name)

    def _reports(self) -> Iterator[tuple[int, GatewayReport]]:
        for pod in self.world.pods.values():
            if label_of(pod, LABEL_ROLE) == ROLE_GATEWAY:
                ranks = self._ranks_of(pod)
                serves = len(ranks) == 2
                state = GroupState.READY if serves else GroupState.NEW
                statuses = [rank_status(rank, name, joined=serves) for rank, name in enumerate(ranks)]
                group = GetTopologyResponse(state=state.to_proto(), epoch=1, ranks=statuses)
                yield _ordinal(pod), GatewayReport(pod["metadata"]["name"], group=group, serving=serves)

    def _ranks_of(self, gateway: Object) -> list[str]:
        """Names of the ranks that a gateway talks to: of its replica and its revision, if that works."""
        revision = label_of(gateway, LABEL_REVISION)
        if revision in self.broken:
            return []
        return sorted(
            name
            for name, pod in self.world.pods.items()
            if _ordinal(pod) == _ordinal(gateway)
            and label_of(pod, LABEL_ROLE) != ROLE_GATEWAY
            and label_of(pod, LABEL_REVISION) == revision
        )

    def serving(self) -> set[int]:
        """Ordinals of replicas whose gateway serves."""
        return {ordinal for ordinal, told in self.world.gateways.items() if told.serving}

    def revisions(self) -> dict[int, str]:
        """Revision of each replica's gateway."""
        gateways = (pod for pod in self.world.pods.values() if label_of(pod, LABEL_ROLE) == ROLE_GATEWAY)
        return {_ordinal(pod): label_of(pod, LABEL_REVISION) for pod in gateways}

    def uids(self, ordinals: Collection[int]) -> dict[str, str]:
        """Uids of the pods of some replicas, by name."""
        pods = ((name, pod) for name, pod in self.world.pods.items() if _ordinal(pod) in ordinals)
        return {name: pod["metadata"]["uid"] for name, pod in pods}

    def tell(self, todo: Plan | None = None) -> Report:
        """What is told now; the next report knows of it."""
        told = report(self.world.observe(), todo or Plan(), Outcome())
        self.world.resource["status"] = json.loads(json.dumps(told.status))
        return told

    def status(self) -> Mapping[str, Any]:
        """The status that was told last."""
        found: Mapping[str, Any] = self.world.resource["status"]
        return found

    def condition(self, kind: str, *, ordinal: int | None = None) -> Mapping[str, Any]:
        """A condition of the whole, or of one replica."""
        told = self.status() if ordinal is None else self.group(ordinal)
        return next(item for item in told["conditions"] if item["type"] == kind)

    def group(self, ordinal: int) -> Mapping[str, Any]:
        """The status of one replica."""
        return next(item for item in self.status()["groups"] if item["ordinal"] == ordinal)


def copy_of(scene: ReplicaScene) -> ReplicaScene:
    """Another scene in the same state."""
    world = scene.world
    observed = world.observe()
    twin = replace(
        world,
        resource=dict(observed.resource),
        objects={key: json.loads(json.dumps(item)) for key, item in world.objects.items()},
        pods={name: json.loads(json.dumps(pod)) for name, pod in world.pods.items()},
        gateways=dict(world.gateways),
    )
    return replace(scene, world=twin, broken=set(scene.broken), order=list(scene.order))


def _ordinal(pod: Object) -> int:
    return int(label_of(pod, LABEL_REPLICA) or 0)
