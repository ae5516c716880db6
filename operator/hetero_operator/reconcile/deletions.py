"""Objects to delete: pods on dead nodes, rank pods of old revisions, and objects that are no longer wanted.

Dead nodes: a StatefulSet never creates a pod again while the old one may still run, so a rank on a dead node stays lost
until somebody forces the old pod out. The operator does, for a Node that has been not ready for
`nodeLostTimeoutSeconds` or is gone, and for no other reason. Should the old rank live on unseen, its epoch has ended:
the gateway refuses its messages. A rank that the gateway talks to is alive, whatever is known about its node, and its
place would be refused to another: it stays. So does a gateway that answers.

Old revisions (Recreate): all their rank pods go together. A pod that is deleted while its StatefulSet, as the
controller last saw it, still has the old template comes back. So this waits until each StatefulSet has the wanted
template and its controller has seen it; the plan that writes the templates deletes nothing yet.

Superseded objects: an old Secret, ConfigMap or ResourceClaimTemplate stays until no pod and no workload is of its
revision, for a pod that is created again at that moment could not start without it. The ConfigMap goes after the
Secret: Secrets are never listed but read by name, and once all pods are gone nothing else says that there was one of
that revision.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from datetime import datetime, timedelta
from typing import Final

from hetero_api.contract import LABEL_GATEWAY_REVISION, LABEL_REVISION, LABEL_ROLE, ROLE_GATEWAY, ROLE_RANK
from hetero_api.spec import HeteroInferenceSpec
from hetero_operator.reconcile.inventory import (
    CLAIM_TEMPLATE,
    CONFIG_MAP,
    SECRET,
    STATEFUL_SET,
    Inventory,
    ObjectKey,
    is_leaving,
    label_of,
    template_label_of,
)
from hetero_operator.reconcile.model import Deletion, Object, ObjectRef, Observed
from hetero_operator.reconcile.names import Names
from hetero_operator.reconcile.rank_sets import rank_sets
from hetero_operator.reconcile.status.pods import NodeLoss, has_ended, node_loss, node_of

_REVISION_LABELS: Final[Mapping[str, str]] = {
    SECRET: LABEL_REVISION,
    CONFIG_MAP: LABEL_GATEWAY_REVISION,
    CLAIM_TEMPLATE: LABEL_REVISION,
}
"""Kinds that there is one of for each revision, and the label that says which."""


def lost_pods(observed: Observed, spec: HeteroInferenceSpec) -> tuple[Deletion, ...]:
    """Return the pods to force out now: grace period 0, and only if the pod is still the one that was seen."""
    return tuple(
        _deletion(pod, str(loss), grace_period_s=0)
        for pod, loss in _stranded(observed)
        if (due := _due(loss, spec)) is None or due <= observed.now
    )


def next_lost_pod(observed: Observed, spec: HeteroInferenceSpec) -> datetime | None:
    """Return when the next pod's time is over, None when no node is being lost."""
    times = (_due(loss, spec) for _, loss in _stranded(observed))
    return min((time for time in times if time is not None and time > observed.now), default=None)


def _stranded(observed: Observed) -> Iterator[tuple[Object, NodeLoss]]:
    """Yield pods on nodes that are gone or not ready, by name, except those that show signs of life."""
    for pod in sorted(observed.pods, key=lambda pod: str(pod["metadata"]["name"])):
        loss = node_loss(node_of(pod), observed.nodes)
        if loss is not None and not _is_alive(pod, observed):
            yield pod, loss


def _due(loss: NodeLoss, spec: HeteroInferenceSpec) -> datetime | None:
    """Return when a pod on that node may be forced out, None: at any time."""
    timeout = timedelta(seconds=spec.recovery.node_lost_timeout_seconds)
    return None if loss.since is None else loss.since + timeout


def _is_alive(pod: Object, observed: Observed) -> bool:
    """Return whether the gateway reported the pod in this very look."""
    report = observed.gateway
    if report is None or report.error:
        return False
    name = pod["metadata"]["name"]
    if label_of(pod, LABEL_ROLE) == ROLE_GATEWAY:
        return bool(report.pod == name)
    return any(rank.place.pod_name == name and rank.joined for rank in report.group.ranks)


def outdated_ranks(
    spec: HeteroInferenceSpec, names: Names, revision: str, *, inventory: Inventory, pods: Collection[Object]
) -> Iterator[Deletion]:
    """Yield deletions of all rank pods of other revisions; none before every set is ready to create new ones."""
    workloads = (inventory.named(STATEFUL_SET, names.rank_set(ranks.name), group="apps") for ranks in rank_sets(spec))
    if not all(workload is not None and _makes(workload, revision) for workload in workloads):
        return
    for pod in pods:
        old = label_of(pod, LABEL_REVISION)
        if label_of(pod, LABEL_ROLE) == ROLE_RANK and old != revision and not is_leaving(pod):
            yield _deletion(pod, f"revision {revision} takes the place of {old}")


def _makes(statefulset: Object, revision: str) -> bool:
    """Return whether the StatefulSet's controller creates pods of the revision from now on."""
    observed = (statefulset.get("status") or {}).get("observedGeneration", 0)
    seen = observed >= statefulset["metadata"]["generation"]
    return bool(seen) and template_label_of(statefulset, LABEL_REVISION) == revision


def superseded(inventory: Inventory, wanted: Collection[ObjectKey], pods: Collection[Object]) -> Iterator[Deletion]:
    """Yield deletions of the resource's own objects that are not wanted, and that nothing needs any more."""
    for key, item in sorted(inventory.own.items()):
        if key in wanted or is_leaving(item):
            continue
        label = _REVISION_LABELS.get(key.kind)
        if label is None:
            yield _deletion(item, "it is no longer asked for")
        elif label_of(item, label) not in _revisions_in_use(inventory, pods, label) and not _tells_of_secret(
            item, inventory, wanted
        ):
            yield _deletion(item, "nothing runs of its revision any more")


def _revisions_in_use(inventory: Inventory, pods: Collection[Object], label: str) -> set[str]:
    of_pods = {label_of(pod, label) for pod in pods if not has_ended(pod)}
    of_workloads = {template_label_of(workload, label) for workload in inventory.workloads()}
    return of_pods | of_workloads


def _tells_of_secret(item: Object, inventory: Inventory, wanted: Collection[ObjectKey]) -> bool:
    """Return whether an object is a ConfigMap of the same old revision as a Secret that still exists."""
    revision = label_of(item, LABEL_REVISION)
    return item["kind"] == CONFIG_MAP and any(
        ObjectKey.from_object(secret) not in wanted and label_of(secret, LABEL_REVISION) == revision
        for secret in inventory.of_kind(SECRET)
    )


def _deletion(item: Object, reason: str, *, grace_period_s: int | None = None) -> Deletion:
    ref = ObjectRef.from_object(item)
    return Deletion(ref, uid=item["metadata"]["uid"], reason=reason, grace_period_s=grace_period_s)
