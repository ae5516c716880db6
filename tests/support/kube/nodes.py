"""Nodes that do not exist: a Node object with capacity and a heartbeat is all that the scheduler and the node
controller ever see of one. So pods are bound to 64 cores or 8 GPUs on a machine of two cores.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from datetime import UTC, datetime
from types import TracebackType
from typing import Self

from tests.support.kube.client import Client, Object
from tests.support.kube.errors import NotFound

LEASES = "kube-node-lease"
HEARTBEAT_S = 1.0
LEASE_S = 40
GPU = "nvidia.com/gpu"


class FakeNodes:
    """Adds nodes and keeps their Leases fresh while entered; deletes them at the end."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._alive: set[str] = set()
        self._all: set[str] = set()
        self._stopping = threading.Event()
        self._heart = threading.Thread(target=self._beat, name="node-heartbeats", daemon=True)

    def add(
        self,
        name: str,
        *,
        cpu: int = 64,
        memory: str = "256Gi",
        gpus: int = 0,
        pods: int = 110,
        labels: Mapping[str, str] | None = None,
        resources: Mapping[str, str] | None = None,
    ) -> Object:
        """A Ready node. `resources` are further ones, as {"hugepages-1Gi": "64Gi"}."""
        capacity = {"cpu": str(cpu), "memory": memory, "pods": str(pods), **(resources or {})}
        if gpus:
            capacity[GPU] = str(gpus)
        labels = {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux", **(labels or {})}
        self._client.apply({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}})
        self._all.add(name)
        self._renew(name)
        self._alive.add(name)
        status = {"capacity": capacity, "allocatable": capacity, "conditions": [ready_condition("True")]}
        return self._client.patch_status("Node", name, status)

    def set_ready(self, name: str, ready: bool) -> None:
        """As the node's kubelet says of itself ("False"); the node stays in touch."""
        self._client.patch_status("Node", name, {"conditions": [ready_condition(str(ready))]})

    def lose(self, name: str, *, say_so: bool = True) -> None:
        """The node falls silent. `say_so`: write what the node controller would write after its grace period."""
        self._alive.discard(name)
        if say_so:
            self._client.patch_status("Node", name, {"conditions": [ready_condition("Unknown")]})

    def recover(self, name: str) -> None:
        """A lost node is back."""
        self._renew(name)
        self._alive.add(name)
        self.set_ready(name, True)

    def remove(self, name: str) -> None:
        """The node is gone for good."""
        self._alive.discard(name)
        self._all.discard(name)
        self._client.delete("Node", name)
        self._client.delete("Lease", name, LEASES)

    def start(self) -> None:
        self._heart.start()

    def stop(self) -> None:
        self._stopping.set()
        self._heart.join()
        for name in sorted(self._all):
            self.remove(name)

    def _beat(self) -> None:
        while not self._stopping.wait(HEARTBEAT_S):
            for name in sorted(self._alive):
                self._renew(name)

    def _renew(self, name: str) -> None:
        spec = {"holderIdentity": name, "leaseDurationSeconds": LEASE_S, "renewTime": _now(micro=True)}
        try:
            self._client.patch("Lease", name, {"spec": spec}, LEASES)
        except NotFound:
            metadata = {"name": name, "namespace": LEASES}
            lease = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": spec}
            self._client.apply(lease)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def ready_condition(status: str) -> Object:
    """A Node's Ready condition: "True", "False" or "Unknown"."""
    reasons = {"True": "KubeletReady", "False": "KubeletNotReady", "Unknown": "NodeStatusUnknown"}
    messages = {
        "True": "kubelet is posting ready status",
        "False": "container runtime is down",
        "Unknown": "Kubelet stopped posting node status.",
    }
    return {
        "type": "Ready",
        "status": status,
        "reason": reasons[status],
        "message": messages[status],
        "lastHeartbeatTime": _now(),
        "lastTransitionTime": _now(),
    }


def _now(*, micro: bool = False) -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ" if micro else "%Y-%m-%dT%H:%M:%SZ")
