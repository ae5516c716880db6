"""The pods of ranks and their nodes, and why a pod is not ready: the first thing that went wrong on its way to ready.

GPU pools have the low ranks, then CPU pools, each pod its share in order.

A kubelet that has just been started says for some seconds that its node is not ready, and the control plane then takes
its pods out of Services, while all of them run on. So a node's own word is believed at once about pods that nobody
hears from, and about a pod that the gateway talks to only when it stands for longer than such a start takes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from hetero_api.contract import LABEL_ROLE, ROLE_RANK
from hetero_api.spec import HeteroInferenceSpec
from hetero_api.spec_pools import PoolSpec
from hetero_operator.reconcile.inventory import is_leaving, label_of
from hetero_operator.reconcile.model import Object, Observed
from hetero_operator.reconcile.names import RANK_CONTAINER, Names
from hetero_operator.reconcile.rank_sets import ONE_POD, is_rank_container, one_pod_container
from hetero_operator.reconcile.status.containers import (
    Ending,
    Surroundings,
    Warnings,
    init_trouble,
    main_trouble,
    scheduling_warning,
)
from hetero_operator.reconcile.status.reasons import Level, Reason, Trouble, absent, broken
from hetero_operator.reconcile.status.text import parsed_time, steady

_ENDED_PHASES: Final = ("Failed", "Succeeded")
_EVICTED: Final = frozenset({"Evicted", "Preempting", "Preempted", "Shutdown", "NodeShutdown", "Terminated"})
_NODE_LOST: Final = "NodeLost"
_REJECTED: Final = frozenset(
    {
        "UnexpectedAdmissionError", "NodeAffinity", "SMTAlignmentError", "InvalidNodeInfo", "AppArmor",
        "PodOSNotSupported",
    }
)  # fmt: skip
_OUT_OF: Final = "OutOf"
"""Begins the reason of a pod whose node has too little of something: OutOfcpu, OutOfnvidia.com/gpu."""
_REJECTION_PREFIX: Final = "Pod was rejected: "
PASSING: Final = timedelta(seconds=40)
"""As long as the control plane waits, by default, for a node that says nothing."""


def status_of(pod: Object) -> Mapping[str, Any]:
    """Return a pod's status, empty when it has none."""
    return pod.get("status") or {}


def node_of(pod: Object) -> str:
    """Return the name of the pod's node, "" when it has none."""
    return str((pod.get("spec") or {}).get("nodeName") or "")


def condition(pod: Object, kind: str) -> Mapping[str, Any]:
    """Return one of its conditions, empty when it has none of that type."""
    conditions: Sequence[Mapping[str, Any]] = status_of(pod).get("conditions") or ()
    return next((item for item in conditions if item.get("type") == kind), {})


def is_ready(pod: Object) -> bool:
    """Return whether its kubelet calls it ready, and it is not being deleted."""
    return not is_leaving(pod) and not has_ended(pod) and condition(pod, "Ready").get("status") == "True"


def has_ended(pod: Object) -> bool:
    """Return whether it has ended as a whole and will not run again."""
    return status_of(pod).get("phase") in _ENDED_PHASES


def failed_by_itself(pod: Object) -> bool:
    """Return whether it has failed by its own fault, and was neither evicted nor deleted.

    Containers of a rank pod are restarted for ever, so its kubelet gives a reason where it gives the pod up; a pod that
    somebody deleted ends without one.
    """
    reason = str(status_of(pod).get("reason") or "")
    was_disrupted = condition(pod, "DisruptionTarget").get("status") == "True"
    return has_ended(pod) and reason not in {"", _NODE_LOST, *_EVICTED} and not was_disrupted


def is_up(pod: Object, container: str) -> bool:
    """Return whether its main container runs."""
    return not has_ended(pod) and "running" in (container_status(pod, container).get("state") or {})


def container_status(pod: Object, name: str) -> Mapping[str, Any]:
    """Return the status of a container, empty before its kubelet reported any."""
    statuses: Sequence[Mapping[str, Any]] = status_of(pod).get("containerStatuses") or ()
    return next((item for item in statuses if item.get("name") == name), {})


def latest_ending(pod: Object, container: str) -> Ending | None:
    """Return how its main container ended last, None when it never did."""
    status = container_status(pod, container)
    return Ending.from_state(status.get("state") or {}) or Ending.from_state(status.get("lastState") or {})


def pod_trouble(pod: Object, around: Surroundings, *, main: str, loss: NodeLoss | None) -> Trouble | None:
    """Return why a pod is not ready, None when it is. `main` is the container that the pod is for."""
    if loss is not None and not (around.is_joined and loss.may_pass(around.now)):
        return broken(Reason.NODE_LOST, str(loss))
    if has_ended(pod):
        return end_trouble(pod, main)
    if is_leaving(pod):
        return absent(Reason.POD_TERMINATING, "is being deleted")
    if not node_of(pod):
        return _unbound_trouble(pod, around.warnings)
    return _container_trouble(pod, around, main) or _unready_trouble(pod, loss, main)


def end_trouble(pod: Object, main: str) -> Trouble:
    """Return why a pod has ended as a whole."""
    status = status_of(pod)
    reason, said = str(status.get("reason") or ""), steady(str(status.get("message") or ""))
    said = said.removeprefix(_REJECTION_PREFIX) or reason
    if reason == "TopologyAffinityError":
        return broken(Reason.TOPOLOGY_AFFINITY_ERROR, f"the node refused the pod: {reason}: {said}")
    if reason in _REJECTED or reason.startswith(_OUT_OF):
        return broken(Reason.POD_REJECTED, f"the node refused the pod: {reason}: {said}")
    if reason in _EVICTED:
        return broken(Reason.POD_EVICTED, f"{reason}: {said}")
    if reason == _NODE_LOST:
        return broken(Reason.NODE_LOST, said)
    ending = latest_ending(pod, main)
    if reason or ending is None:
        return broken(Reason.POD_FAILED, f"{reason}: {said}" if reason else "the pod ended, and nobody says why")
    return broken(Reason.RANK_OUT_OF_MEMORY if ending.is_out_of_memory else Reason.RANK_EXITED, str(ending))


def _unbound_trouble(pod: Object, warnings: Warnings) -> Trouble:
    scheduled = condition(pod, "PodScheduled")
    said = steady(str(scheduled.get("message") or ""))
    if scheduled.get("reason") == "SchedulingGated":
        return absent(Reason.SCHEDULING_GATED, said or "is held back from scheduling")
    if scheduled.get("status") != "False":
        said = scheduling_warning(warnings)
    if said or scheduled.get("status") == "False":
        return broken(Reason.RANK_UNSCHEDULABLE, said or "no node fits")
    return absent(Reason.STARTING, "waits for a node")


def _container_trouble(pod: Object, around: Surroundings, main: str) -> Trouble | None:
    """Return the worst trouble of the init containers, in order; else of the main container; else of the others.

    Containers for other ranks have troubles of their own.
    """
    status = status_of(pod)
    inits: Collection[Mapping[str, Any]] = status.get("initContainerStatuses") or ()
    for item in inits:
        found = init_trouble(item, around)
        if found is not None:
            return found
    siblings = [item.get("name") for item in _siblings(pod, main)]
    statuses = [item for item in status.get("containerStatuses") or () if item.get("name") not in siblings]
    statuses.sort(key=lambda item: item.get("name") != main)
    if not statuses:
        # Its kubelet has not said anything yet; warnings may.
        return main_trouble({"state": {"waiting": {}}}, around)
    troubles = [found for item in statuses if (found := main_trouble(item, around)) is not None]
    return min(troubles, key=lambda found: found.level, default=None)


def _siblings(pod: Object, main: str) -> list[Mapping[str, Any]]:
    """Return the statuses of containers for other ranks."""
    statuses: Collection[Mapping[str, Any]] = status_of(pod).get("containerStatuses") or ()
    return [item for item in statuses if item.get("name") != main and is_rank_container(str(item.get("name")))]


def _unready_trouble(pod: Object, loss: NodeLoss | None, main: str) -> Trouble | None:
    """Return the trouble of a pod that is not ready, with containers that are: a gate, or a starting kubelet."""
    if condition(pod, "Ready").get("status") == "True":
        return None
    if loss is None and not all(item.get("ready") for item in _siblings(pod, main)):
        return None  # the rank that is not ready has it as its own
    said = str(loss) if loss is not None else steady(str(condition(pod, "Ready").get("message") or ""))
    return Trouble(Level.UNREADY, Reason.RANK_NOT_READY, f"is not ready: {said}" if said else "is not ready")


@dataclass(frozen=True, slots=True)
class ExpectedPod:
    """A rank pod that has to be there, or one of the containers of the one pod of all ranks."""

    name: str
    pool: str
    first_rank: int
    num_ranks: int
    rank_set: str
    """Name of the set that the pod is of."""
    container: str = RANK_CONTAINER
    """Name of the ranks' container in the pod."""

    @property
    def ranks(self) -> range:
        """The ranks in it."""
        return range(self.first_rank, self.first_rank + self.num_ranks)

    def subject(self, node: str = "") -> str:
        """Return its ranks, name and node, as messages begin."""
        last = self.first_rank + self.num_ranks - 1
        ranks = f"rank {self.first_rank}" if self.num_ranks == 1 else f"ranks {self.first_rank}-{last}"
        return f"{ranks} (pod {self.name}, node {node})" if node else f"{ranks} (pod {self.name})"


def expected_pods(names: Names, spec: HeteroInferenceSpec) -> tuple[ExpectedPod, ...]:
    """Return all rank pods in rank order; of the one pod of all ranks, its containers."""
    pods: list[ExpectedPod] = []
    rank = 0
    for pool in spec.pools_in_rank_order:
        for ordinal in range(pool.pods):
            pods.append(_expected_pod(names, spec, pool, ordinal, first_rank=rank))
            rank += pool.ranks_per_pod
    return tuple(pods)


def _expected_pod(
    names: Names, spec: HeteroInferenceSpec, pool: PoolSpec, ordinal: int, *, first_rank: int
) -> ExpectedPod:
    num_ranks = pool.ranks_per_pod
    if not spec.is_one_pod:
        name = f"{names.rank_set(pool.name)}-{ordinal}"
        return ExpectedPod(name, pool.name, first_rank, num_ranks, pool.name)
    name, container = f"{names.rank_set(ONE_POD)}-0", one_pod_container(first_rank)
    return ExpectedPod(name, pool.name, first_rank, num_ranks, ONE_POD, container)


def rank_pods(observed: Observed) -> dict[str, Object]:
    """Return the existing pods of ranks, by name."""
    return {pod["metadata"]["name"]: pod for pod in observed.pods if label_of(pod, LABEL_ROLE) == ROLE_RANK}


@dataclass(frozen=True, slots=True)
class NodeLoss:
    """A node that is gone or not ready."""

    node: str
    since: datetime | None
    """None: there is no such node."""
    words: str
    by_itself: bool = False
    """Whether its kubelet says so, and runs."""

    @property
    def certain_at(self) -> datetime | None:
        """From when on it is no start of a kubelet any more; None: it never was one."""
        return self.since + PASSING if self.by_itself and self.since is not None else None

    def may_pass(self, now: datetime) -> bool:
        """Return whether it may be no more than the start of a kubelet."""
        return self.certain_at is not None and now < self.certain_at

    def __str__(self) -> str:
        return f"node {self.node} {self.words}"


def node_loss(name: str, nodes: Mapping[str, Object | None]) -> NodeLoss | None:
    """Return the problem of a node, None when it is ready or nothing is known about it."""
    if not name or name not in nodes:
        return None
    node = nodes[name]
    if node is None:
        return NodeLoss(name, None, "does not exist")
    conditions = (node.get("status") or {}).get("conditions") or ()
    ready = next((item for item in conditions if item.get("type") == "Ready"), None)
    since = parsed_time(ready.get("lastTransitionTime")) if ready else None
    if ready is None or since is None or ready.get("status") == "True":
        return None
    said = steady(str(ready.get("message") or ready.get("reason") or ""))
    by_itself = ready.get("status") != "Unknown"
    state = "is not ready" if by_itself else "does not answer"
    return NodeLoss(name, since, f"{state}: {said}" if said else state, by_itself)
