"""Pods on dead nodes: nobody else takes them away, because no kubelet is there to say that they have ended.

A StatefulSet never makes a pod anew while the old one may still run, so a rank on a dead node stays lost until somebody
forces the old pod out. The operator does, for a Node that has been not ready for `nodeLostTimeoutSeconds` or is gone,
and for no other reason. Should the old rank live on unseen, its epoch has ended: the gateway refuses what it says.

A rank that the gateway talks to is alive, whatever is known about its node, and its place would be refused to another:
it stays. So does a gateway that answers.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta

from hetero_api.contract import LABEL_ROLE, ROLE_GATEWAY
from hetero_api.spec import HeteroInferenceSpec
from hetero_operator.reconcile.model import Deletion, Object, ObjectRef, Observed
from hetero_operator.reconcile.ownership import label_of
from hetero_operator.reconcile.status.nodes import NodeLoss, node_loss
from hetero_operator.reconcile.status.pods import node_of


def deletions(observed: Observed, spec: HeteroInferenceSpec) -> tuple[Deletion, ...]:
    """Pods to force out now: grace period 0, and only if the pod is still the one that was seen."""
    return tuple(
        Deletion(
            ObjectRef("v1", "Pod", pod["metadata"]["name"]), uid=pod["metadata"]["uid"], reason=str(loss),
            grace_period_s=0,
        )
        for pod, loss in _stranded(observed)
        if (due := _due(loss, spec)) is None or due <= observed.now
    )  # fmt: skip


def next_deletion(observed: Observed, spec: HeteroInferenceSpec) -> datetime | None:
    """When the next pod's time is over; None when no node is on its way out."""
    times = (_due(loss, spec) for _, loss in _stranded(observed))
    return min((time for time in times if time is not None and time > observed.now), default=None)


def _stranded(observed: Observed) -> Iterator[tuple[Object, NodeLoss]]:
    """Pods on nodes that are gone or not ready, by name, but those that show signs of life."""
    for pod in sorted(observed.pods, key=lambda pod: str(pod["metadata"]["name"])):
        loss = node_loss(node_of(pod), observed.nodes)
        if loss is not None and not _is_alive(pod, observed):
            yield pod, loss


def _due(loss: NodeLoss, spec: HeteroInferenceSpec) -> datetime | None:
    """When a pod on that node may be forced out; None: at any time."""
    timeout = timedelta(seconds=spec.recovery.node_lost_timeout_seconds)
    return None if loss.since is None else loss.since + timeout


def _is_alive(pod: Object, observed: Observed) -> bool:
    """Whether the pod was heard from, through the gateway, in this very look."""
    report = observed.gateway
    if report is None or report.error:
        return False
    name = pod["metadata"]["name"]
    if label_of(pod, LABEL_ROLE) == ROLE_GATEWAY:
        return bool(report.pod == name)
    return any(rank.pod == name and rank.joined for rank in report.ranks)
