"""Plays the kubelet (and the scheduler, where none runs) for the pods of one namespace: writes the status, with the
reasons and messages, that a real one writes.

Each method puts one pod into one state and returns it. `Autopilot` does it for all pods in the background.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from tests.support.kube.client import Client, Object

ContainerState = dict[str, Any]

PULL_MESSAGE = 'Back-off pulling image "{image}"'
CRASH_MESSAGE = "back-off 40s restarting failed container={container} pod={pod}_{namespace}({uid})"
TOPOLOGY_MESSAGE = "Pod Resources cannot be allocated with Topology locality"
FIRST_HOST = 2


class Kubelet:
    """The kubelet of every node, for the pods of `namespace`."""

    def __init__(self, client: Client, namespace: str) -> None:
        self._client = client
        self._namespace = namespace
        self._addresses: dict[str, str] = {}

    def bind(self, pod: str, node: str = "node") -> Object:
        """As the scheduler does, through the binding subresource; no Node object is needed."""
        if not self._pod(pod)["spec"].get("nodeName"):
            binding = {
                "apiVersion": "v1",
                "kind": "Binding",
                "metadata": {"name": pod},
                "target": {"apiVersion": "v1", "kind": "Node", "name": node},
            }
            path = f"/api/v1/namespaces/{self._namespace}/pods/{pod}/binding"
            self._client.request("POST", path, binding)
        return self._pod(pod)

    def unschedulable(self, pod: str, message: str = "0/2 nodes are available: 2 Insufficient cpu.") -> Object:
        """The scheduler found no node."""
        condition = _condition("PodScheduled", "False", "Unschedulable", message)
        return self._write(pod, {"phase": "Pending", "conditions": [condition]})

    def run(self, pod: str, *, node: str = "node", ready: bool = True, restarts: int = 0) -> Object:
        """Bound, init containers done, everything running; ready or not yet."""
        self.bind(pod, node)
        found = self._pod(pod)
        states = {name: _container_status(found, name, _running(), ready, restarts) for name in _names(found)}
        return self._write(
            pod,
            {
                "phase": "Running",
                "conditions": _conditions(initialized=True, ready=ready),
                "podIP": self._address(pod),
                "podIPs": [{"ip": self._address(pod)}],
                "hostIP": "192.168.0.1",
                "startTime": now(),
                "initContainerStatuses": self._finished_inits(found),
                "containerStatuses": list(states.values()),
            },
        )

    def creating(self, pod: str, *, node: str = "node") -> Object:
        """Bound; the containers are being made."""
        return self._waiting(pod, {}, node=node, initialized=True)

    def image_pull_back_off(
        self, pod: str, message: str | None = None, *, container: str | None = None, node: str = "node"
    ) -> Object:
        """The image cannot be pulled."""
        name, found = self._container(pod, container)
        text = message or PULL_MESSAGE.format(image=_spec(found, name)["image"])
        state = {"waiting": {"reason": "ImagePullBackOff", "message": text}}
        return self._waiting(pod, {name: {"state": state}}, node=node)

    def crash_loop(
        self,
        pod: str,
        *,
        exit_code: int = 1,
        message: str = "",
        reason: str = "Error",
        restarts: int = 3,
        container: str | None = None,
        node: str = "node",
    ) -> Object:
        """The container ended (`message`: its termination message) and waits to be started again.

        `reason="OOMKilled", exit_code=137` for a kill by the kernel.
        """
        name, found = self._container(pod, container)
        text = CRASH_MESSAGE.format(container=name, pod=pod, namespace=self._namespace, uid=found["metadata"]["uid"])
        status = {
            "state": {"waiting": {"reason": "CrashLoopBackOff", "message": text}},
            "lastState": _terminated(exit_code, reason, message),
            "restartCount": restarts,
        }
        return self._waiting(pod, {name: status}, node=node, phase="Running")

    def terminated(
        self,
        pod: str,
        *,
        exit_code: int = 1,
        message: str = "",
        reason: str = "Error",
        restarts: int = 0,
        container: str | None = None,
        node: str = "node",
    ) -> Object:
        """The container has ended just now; the pod is not ready."""
        name, _ = self._container(pod, container)
        status = {"state": _terminated(exit_code, reason, message), "restartCount": restarts}
        return self._waiting(pod, {name: status}, node=node, phase="Running")

    def topology_affinity_error(self, pod: str, message: str = TOPOLOGY_MESSAGE, *, node: str = "node") -> Object:
        """The node's Topology Manager refused the pod, which has failed for good."""
        return self.fail(pod, "TopologyAffinityError", message, node=node)

    def fail(self, pod: str, reason: str, message: str, *, node: str = "node") -> Object:
        """The pod as a whole failed: Evicted, UnexpectedAdmissionError, NodeLost, …"""
        self.bind(pod, node)
        return self._write(pod, {"phase": "Failed", "reason": reason, "message": message, "startTime": now()})

    def init_failing(
        self, pod: str, *, exit_code: int = 1, message: str = "", restarts: int = 2, node: str = "node"
    ) -> Object:
        """The first init container fails again and again; the others wait for it."""
        found = self.bind(pod, node)
        names = [one["name"] for one in found["spec"].get("initContainers", [])]
        waiting = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 20s restarting failed container"}}
        first = _container_status(found, names[0], waiting, False, restarts)
        first["lastState"] = _terminated(exit_code, "Error", message)
        others = [_container_status(found, name, _blocked(), False, 0) for name in names[1:]]
        return self._waiting(pod, {}, node=node, inits=[first, *others])

    def init_running(self, pod: str, *, node: str = "node") -> Object:
        """The first init container works, as one that downloads a model does."""
        found = self.bind(pod, node)
        names = [one["name"] for one in found["spec"].get("initContainers", [])]
        first = _container_status(found, names[0], _running(), False, 0)
        others = [_container_status(found, name, _blocked(), False, 0) for name in names[1:]]
        return self._waiting(pod, {}, node=node, inits=[first, *others])

    def finish_deletions(self) -> list[str]:
        """Remove the pods that wait for their kubelet to say that they have ended; their names."""
        names = [
            pod["metadata"]["name"]
            for pod in self._client.list_all("Pod", self._namespace)
            if pod["metadata"].get("deletionTimestamp")
        ]
        for name in names:
            self._client.delete("Pod", name, self._namespace, grace_s=0)
        return names

    def event(
        self, pod: str, reason: str, message: str, *, type: str = "Warning", component: str = "kubelet"
    ) -> Object:
        """An Event about a pod, as FailedMount, FailedScheduling, BackOff or Unhealthy."""
        found = self._pod(pod)
        return self._client.create(
            {
                "apiVersion": "v1",
                "kind": "Event",
                "metadata": {"name": f"{pod}.{uuid.uuid4().hex[:16]}", "namespace": self._namespace},
                "involvedObject": {
                    "apiVersion": "v1",
                    "kind": "Pod",
                    "name": pod,
                    "namespace": self._namespace,
                    "uid": found["metadata"]["uid"],
                },
                "type": type,
                "reason": reason,
                "message": message,
                "source": {"component": component},
                "firstTimestamp": now(),
                "lastTimestamp": now(),
                "count": 1,
            }
        )

    def _waiting(
        self,
        pod: str,
        statuses: Mapping[str, Object],
        *,
        node: str,
        phase: str = "Pending",
        initialized: bool | None = None,
        inits: Sequence[Object] | None = None,
    ) -> Object:
        """Not ready; containers of which `statuses` says nothing are being made, or wait for the init containers."""
        found = self.bind(pod, node)
        done = inits is None if initialized is None else initialized
        blocked = {"waiting": {"reason": "ContainerCreating"}} if done else _blocked()
        containers = [
            {**_container_status(found, name, blocked, False, 0), **statuses.get(name, {})} for name in _names(found)
        ]
        return self._write(
            pod,
            {
                "phase": phase,
                "conditions": _conditions(initialized=done, ready=False),
                "startTime": now(),
                "initContainerStatuses": self._finished_inits(found) if inits is None else list(inits),
                "containerStatuses": containers,
            },
        )

    def _finished_inits(self, found: Object) -> list[Object]:
        names = [one["name"] for one in found["spec"].get("initContainers", [])]
        return [_container_status(found, name, _terminated(0, "Completed", ""), True, 0) for name in names]

    def _container(self, pod: str, name: str | None) -> tuple[str, Object]:
        found = self._pod(pod)
        return name or _names(found)[0], found

    def _pod(self, name: str) -> Object:
        return self._client.get("Pod", name, self._namespace)

    def _write(self, pod: str, status: Object) -> Object:
        return self._client.patch_status("Pod", pod, status, self._namespace)

    def _address(self, pod: str) -> str:
        # The local kernel refuses connections to it at once. Packets to other networks may be dropped, and the operator
        # then waits seconds for each gateway. Played gateways have addresses from 127.1 to 127.254.
        number = FIRST_HOST + len(self._addresses)
        return self._addresses.setdefault(pod, f"127.255.{number >> 8}.{number & 255}")


def now() -> str:
    """As Kubernetes writes times."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _names(pod: Object) -> list[str]:
    return [one["name"] for one in pod["spec"]["containers"]]


def _spec(pod: Object, name: str) -> Object:
    every: list[Object] = [*pod["spec"]["containers"], *pod["spec"].get("initContainers", [])]
    return next(one for one in every if one["name"] == name)


def _container_status(pod: Object, name: str, state: ContainerState, ready: bool, restarts: int) -> Object:
    image = _spec(pod, name)["image"]
    return {
        "name": name,
        "state": state,
        "lastState": {},
        "ready": ready,
        "started": "running" in state,
        "restartCount": restarts,
        "image": image,
        "imageID": "",
    }


def _running() -> ContainerState:
    return {"running": {"startedAt": now()}}


def _blocked() -> ContainerState:
    return {"waiting": {"reason": "PodInitializing"}}


def _terminated(exit_code: int, reason: str, message: str) -> ContainerState:
    ended = {"exitCode": exit_code, "reason": reason, "message": message, "startedAt": now(), "finishedAt": now()}
    return {"terminated": ended}


def _condition(type: str, status: str, reason: str = "", message: str = "") -> Object:
    return {"type": type, "status": status, "reason": reason, "message": message, "lastTransitionTime": now()}


def _conditions(*, initialized: bool, ready: bool) -> list[Object]:
    unready = "" if ready else "ContainersNotReady"
    return [
        _condition("Initialized", str(initialized)),
        _condition("Ready", str(ready), unready),
        _condition("ContainersReady", str(ready), unready),
        _condition("PodScheduled", "True"),
    ]
