"""Pod statuses as kubelets and schedulers write them, for tests that need no API server.

Taken from pods of Kubernetes 1.20 to 1.35. Each function gives a whole `status`; times are `at`, as text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Status = dict[str, Any]

PULL_ERROR = (
    'rpc error: code = NotFound desc = failed to pull and unpack image "docker.io/library/nope:1": failed to resolve '
    'reference "docker.io/library/nope:1": docker.io/library/nope:1: not found'
)
UNSCHEDULABLE = (
    "0/3 nodes are available: 1 node(s) had untolerated taint {node-role.kubernetes.io/control-plane: }, 2 "
    "Insufficient cpu. preemption: 0/3 nodes are available: 3 Preemption is not helpful for scheduling."
)
QUOTA = (
    'create Pod x-cpu-0 in StatefulSet x-cpu failed error: pods "x-cpu-0" is forbidden: exceeded quota: team, '
    "requested: requests.cpu=4, used: requests.cpu=62, limited: requests.cpu=64"
)
AT = "2030-01-01T00:00:00Z"


def unscheduled(at: str = AT) -> Status:
    """Just created; no scheduler has looked at it."""
    return {"phase": "Pending", "qosClass": "Guaranteed"}


def unschedulable(message: str = UNSCHEDULABLE, *, reason: str = "Unschedulable", at: str = AT) -> Status:
    scheduled = _condition("PodScheduled", "False", at, reason, message)
    return {"phase": "Pending", "conditions": [scheduled], "qosClass": "Guaranteed"}


def creating(container: str = "rank", at: str = AT) -> Status:
    """Bound; nothing of it has been made yet."""
    return _pending(at, _waiting(container, "ContainerCreating"))


def waiting(container: str, reason: str, message: str = "", at: str = AT, **more: Any) -> Status:
    """A container that cannot be made, for a reason."""
    return _pending(at, {**_waiting(container, reason, message), **more})


def running(container: str = "rank", *, ready: bool = True, at: str = AT, **more: Any) -> Status:
    """Everything runs."""
    status = {**_container(container, {"running": {"startedAt": at}}), "ready": ready, "started": True, **more}
    return {
        "phase": "Running",
        "conditions": _conditions(at, ready=ready),
        "hostIP": "192.168.1.4",
        "podIP": "10.244.1.7",
        "podIPs": [{"ip": "10.244.1.7"}],
        "startTime": at,
        "containerStatuses": [status],
        "qosClass": "Guaranteed",
    }


def terminated(
    container: str = "rank",
    *,
    exit_code: int,
    message: str = "",
    reason: str = "Error",
    restarts: int = 0,
    at: str = AT,
) -> Status:
    """It has ended just now."""
    state = ended(exit_code, message, reason, at)
    return {**running(container, ready=False, at=at), "containerStatuses": [_container(container, state, restarts)]}


def crash_loop(
    container: str = "rank", *, exit_code: int, message: str = "", reason: str = "Error", restarts: int, at: str = AT
) -> Status:
    """It waits to be started again."""
    pod = "x-cpu-0_models(6e1ad34f-7f1f-4c64-8d27-02a1b0a2a8a1)"
    said = f"back-off 40s restarting failed container={container} pod={pod}"
    status = {
        **_waiting(container, "CrashLoopBackOff", said),
        "lastState": ended(exit_code, message, reason, at),
        "restartCount": restarts,
    }
    return {**running(container, ready=False, at=at), "containerStatuses": [status]}


def restarted(
    container: str = "rank",
    *,
    exit_code: int,
    message: str = "",
    reason: str = "Error",
    restarts: int,
    ready: bool = False,
    at: str = AT,
) -> Status:
    """It runs again after an end."""
    last = ended(exit_code, message, reason, at)
    return running(container, ready=ready, at=at, lastState=last, restartCount=restarts)


def init(state: Mapping[str, Any], *, last: Mapping[str, Any] | None = None, restarts: int = 0, at: str = AT) -> Status:
    """The init container that fetches the model is in a state."""
    first = {**_container("model", dict(state), restarts), "lastState": dict(last or {})}
    return {**_pending(at, _waiting("rank", "PodInitializing"), initialized=False), "initContainerStatuses": [first]}


def together(*pods: Status) -> Status:
    """One pod with the containers of several; it is ready when all are."""
    containers = [item for pod in pods for item in pod["containerStatuses"]]
    ready = all(item["ready"] for item in containers)
    return {**running(ready=ready), "containerStatuses": containers}


def rejected(reason: str, message: str, at: str = AT) -> Status:
    """The node refused it, or drove it out: newer kubelets write how the containers ended, too, and wrongly."""
    unknown = ended(137, "The container could not be located when the pod was terminated", "ContainerStatusUnknown", at)
    return {
        "phase": "Failed",
        "reason": reason,
        "message": message,
        "startTime": at,
        "containerStatuses": [_container("rank", unknown)],
        "qosClass": "Guaranteed",
    }


def ended(exit_code: int, message: str = "", reason: str = "Error", at: str = AT) -> dict[str, Any]:
    """State of a container that ended."""
    state: dict[str, Any] = {"exitCode": exit_code, "reason": reason, "startedAt": at, "finishedAt": at}
    if message:
        state["message"] = message
    return {"terminated": {**state, "containerID": "containerd://" + "5a" * 32}}


def node(ready: str, *, message: str = "", at: str = AT) -> dict[str, Any]:
    """A Node whose Ready condition is "True", "False" or "Unknown"."""
    messages = {
        "True": "kubelet is posting ready status",
        "False": "container runtime is down",
        "Unknown": "Kubelet stopped posting node status.",
    }
    condition = _condition("Ready", ready, at, "NodeStatusUnknown", message or messages[ready])
    pressure = _condition("MemoryPressure", "False", at, "KubeletHasSufficientMemory")
    status = {"conditions": [pressure, condition]}
    return {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n"}, "status": status}


def _pending(at: str, container: Status, *, initialized: bool = True) -> Status:
    return {
        "phase": "Pending",
        "conditions": _conditions(at, ready=False, initialized=initialized),
        "hostIP": "192.168.1.4",
        "startTime": at,
        "containerStatuses": [container],
        "qosClass": "Guaranteed",
    }


def _waiting(container: str, reason: str, message: str = "") -> Status:
    state = {"reason": reason, "message": message} if message else {"reason": reason}
    return {**_container(container, {"waiting": state}), "started": False}


def _container(name: str, state: Mapping[str, Any], restarts: int = 0) -> Status:
    return {
        "name": name,
        "image": "registry.example/hetero-cpu:0.1.0",
        "imageID": "",
        "ready": False,
        "restartCount": restarts,
        "state": dict(state),
        "lastState": {},
    }


def _conditions(at: str, *, ready: bool, initialized: bool = True) -> list[Status]:
    unready = ("ContainersNotReady", "containers with unready status: [rank]")
    why = ("", "") if ready else unready
    return [
        _condition("Initialized", str(initialized), at),
        _condition("Ready", str(ready), at, *why),
        _condition("ContainersReady", str(ready), at, *why),
        _condition("PodScheduled", "True", at),
    ]


def _condition(kind: str, status: str, at: str, reason: str = "", message: str = "") -> Status:
    told = {"reason": reason, "message": message} if reason else {}
    return {"type": kind, "status": status, "lastTransitionTime": at, "lastProbeTime": None, **told}
