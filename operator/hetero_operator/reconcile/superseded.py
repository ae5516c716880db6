"""What has had its day: objects of old revisions, and optional ones that are no longer wanted.

An old Secret, ConfigMap or ResourceClaimTemplate stays until no pod and no workload is of its revision, for a pod that
is made anew at that moment could not start without it. The ConfigMap goes after the Secret: Secrets are never listed
but asked for by name, and once all pods are gone nothing else tells that there was one of that revision.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Final

from hetero_api.contract import LABEL_GATEWAY_REVISION, LABEL_REVISION
from hetero_operator.reconcile.inventory import CLAIM_TEMPLATE, CONFIG_MAP, SECRET, Inventory
from hetero_operator.reconcile.model import Deletion, Object, ObjectRef
from hetero_operator.reconcile.ownership import ObjectKey, is_leaving, label_of, template_label_of

_REVISION_LABELS: Final[Mapping[str, str]] = {
    SECRET: LABEL_REVISION,
    CONFIG_MAP: LABEL_GATEWAY_REVISION,
    CLAIM_TEMPLATE: LABEL_REVISION,
}
"""Kinds that there is one of for each revision, and the label that says which."""


def superseded(inventory: Inventory, wanted: Collection[ObjectKey], pods: Collection[Object]) -> Iterator[Deletion]:
    """Deletions of the resource's own objects that are not among the wanted, and that nothing needs any more."""
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
    of_pods = {label_of(pod, label) for pod in pods}
    of_workloads = {template_label_of(workload, label) for workload in inventory.workloads()}
    return of_pods | of_workloads


def _tells_of_secret(item: Object, inventory: Inventory, wanted: Collection[ObjectKey]) -> bool:
    """Whether an object is a ConfigMap of the same old revision as a Secret that is still there."""
    revision = label_of(item, LABEL_REVISION)
    return item["kind"] == CONFIG_MAP and any(
        ObjectKey.of(secret) not in wanted and label_of(secret, LABEL_REVISION) == revision
        for secret in inventory.of_kind(SECRET)
    )


def _deletion(item: Object, reason: str) -> Deletion:
    return Deletion(ObjectRef.of(item), uid=item["metadata"]["uid"], reason=reason)
