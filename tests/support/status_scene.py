"""A resource whose pods and gateway a test puts into any state, and what the operator then tells about it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

from hetero_api.contract import LABEL_ROLE, ROLE_GATEWAY
from hetero_api.group_state import GroupState
from hetero_api.v1.admin_pb2 import GetTopologyResponse, RankStatus
from hetero_api.v1.ranks_pb2 import EXCHANGE_KIND_SHM, DeviceReport, LayerShard, RankPlace, RankShard, UnitRange
from hetero_operator.reconcile.model import GatewayReport, Observed, Outcome, Plan, PodEvent, Report
from hetero_operator.reconcile.report import report
from tests.support import pod_statuses
from tests.support.operator_world import OperatorWorld
from tests.support.render_cases import resource_of

SPEC = """
model: {uri: hf://a/b}
pools:
- {name: cpu, type: CPU, ranks: 2, cpu: {coresPerRank: 4, memoryPerRank: 8Gi}}
- {name: gpu, type: GPU, ranks: 2, ranksPerPod: 2, gpu: {memoryPerRank: 8Gi}}
"""
"""Ranks 0 and 1 are GPU ranks of one pod, although their pool comes second; 2 and 3 are CPU ranks of a pod each."""
GATEWAY = "gateway"
"""Instead of the name of the gateway's pod, which nobody can guess."""


@dataclass
class StatusScene:
    """All objects are there and all pods wait for a scheduler, to begin with."""

    world: OperatorWorld
    gateway: GatewayReport | None = None
    events: dict[str, list[PodEvent]] = field(default_factory=dict)
    outcome: Outcome = field(default_factory=Outcome)

    @classmethod
    def of(cls, spec: str | Mapping[str, Any] = SPEC) -> StatusScene:
        world = OperatorWorld(resource_of("x", spec))
        world.reconcile()
        scene = cls(world)
        for name in world.pods:
            scene.put(name, pod_statuses.unscheduled(), node="")
        return scene

    @classmethod
    def serving(cls, spec: str | Mapping[str, Any] = SPEC) -> StatusScene:
        """Everything runs, and the gateway says so; told once."""
        scene = cls.of(spec)
        for name in scene.world.pods:
            scene.put(name, pod_statuses.running(scene.container(name)))
        scene.answer()
        scene.tell()
        return scene

    def pod(self, name: str) -> dict[str, Any]:
        """A pod by name, or GATEWAY."""
        if name != GATEWAY:
            return self.world.pods[name]
        pods = self.world.pods.values()
        return next(pod for pod in pods if pod["metadata"]["labels"][LABEL_ROLE] == ROLE_GATEWAY)

    def container(self, name: str) -> str:
        """Its main container."""
        return str(self.pod(name)["spec"]["containers"][0]["name"])

    def put(self, name: str, status: Mapping[str, Any], *, node: str = "n1") -> None:
        """A pod is in a state; `node` is "" for one that is not bound."""
        pod = self.pod(name)
        pod["status"] = dict(status)
        if node:
            pod["spec"]["nodeName"] = node
        else:
            pod["spec"].pop("nodeName", None)

    def warn(self, item: Mapping[str, Any], *events: tuple[str, str]) -> None:
        """The cluster recorded Warnings about a pod or a workload, newest first."""
        self.events[item["metadata"]["uid"]] = [PodEvent(*event) for event in events]

    def workload(self, kind: str, name: str) -> dict[str, Any]:
        return self.world.of_kind(kind)[name]

    def answer(self, **changes: Any) -> None:
        """The gateway answers; by default that all ranks serve."""
        name = self.pod(GATEWAY)["metadata"]["name"]
        said: dict[str, Any] = {
            "state": GroupState.READY, "epoch": 1, "ranks": self.ranks(), "placement_mode": "Tensor",
            "exchange": EXCHANGE_KIND_SHM, **changes,
        }  # fmt: skip
        report = {key: said.pop(key) for key in ("pod", "error", "serving") if key in said}
        group = GetTopologyResponse(**{**said, "state": said["state"].to_proto()})
        self.gateway = GatewayReport(**{"pod": name, "serving": True, **report}, group=group)

    def ranks(self, **changes: Any) -> tuple[RankStatus, ...]:
        """What the gateway says of all ranks; `changes` are those of `rank_status`."""
        pods = ["x-gpu-0", "x-gpu-0", "x-cpu-0", "x-cpu-1"]
        return tuple(rank_status(rank, pod, **changes) for rank, pod in enumerate(pods))

    def observe(self) -> Observed:
        return replace(self.world.observe(), gateway=self.gateway, pod_events=self.events)

    def report(self) -> Report:
        """What would be told now."""
        observed = self.observe()
        plan = self.world.plan()
        return report(observed, plan if plan.refusal else Plan(), self.outcome)

    def tell(self) -> Report:
        """Tells it: the next report knows of this one."""
        told = self.report()
        self.world.resource["status"] = json.loads(json.dumps(told.status))
        return told

    def pass_time(self, seconds: float) -> None:
        self.world.now += timedelta(seconds=seconds)


def rank_status(
    rank: int,
    pod: str,
    *,
    joined: bool = True,
    pinned: bool = True,
    pin_message: str = "",
    numa_nodes: Sequence[int] = (0,),
    allowed_cpus: int = 0,
    local_memory_percent: int | None = 99,
    weight_bytes: int = 10,
    kv_bytes: int = 0,
    vocabulary_rows: int = 0,
    **units: int,
) -> RankStatus:
    """What the gateway says of a rank; `units` are the sizes of a LayerShard's ranges."""
    device = DeviceReport(
        name="device", pinned=pinned, numa_nodes=numa_nodes, cpus=[0, 1, 2, 3], allowed_cpus=allowed_cpus
    )
    layer = LayerShard(**{name: UnitRange(end=count) for name, count in units.items()})
    return RankStatus(
        place=RankPlace(rank=rank, pool=pod[2:5], pod_name=pod, device=device),
        joined=joined,
        shard=RankShard(layers=[LayerShard(), layer], head_rows=UnitRange(end=vocabulary_rows)),
        pin_message=pin_message,
        local_memory_percent=local_memory_percent,
        weight_bytes=weight_bytes,
        kv_bytes=kv_bytes,
    )


def conditions(told: Report) -> dict[str, tuple[str, str]]:
    """Status and reason of every condition."""
    return {item["type"]: (item["status"], item["reason"]) for item in told.status["conditions"]}


def message(told: Report, kind: str) -> str:
    """A condition's message."""
    return str(next(item.get("message", "") for item in told.status["conditions"] if item["type"] == kind))


def events(told: Report) -> Sequence[tuple[str, str]]:
    """Type and reason of every Event."""
    return [(item.type, item.reason) for item in told.events]
