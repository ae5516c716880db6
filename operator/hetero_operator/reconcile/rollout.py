"""Recreate: the rank pods of old revisions go together, once every StatefulSet would make new ones.

Deleting a pod while its StatefulSet, as the controller saw it last, still has the old template brings the old pod
back. So this waits until each StatefulSet has the wanted template and its controller has seen that, and the plan that
writes the templates deletes nothing yet. The next look does.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from hetero_api.contract import LABEL_REVISION, LABEL_ROLE, ROLE_RANK
from hetero_api.spec import HeteroInferenceSpec
from hetero_operator.reconcile.inventory import STATEFUL_SET, Inventory
from hetero_operator.reconcile.model import Deletion, Object, ObjectRef
from hetero_operator.reconcile.names import Names
from hetero_operator.reconcile.ownership import is_leaving, label_of, template_label_of


def outdated_ranks(
    spec: HeteroInferenceSpec, names: Names, revision: str, *, inventory: Inventory, pods: Collection[Object]
) -> Iterator[Deletion]:
    """Deletions of all rank pods of other revisions; none before every pool is ready to make new ones."""
    workloads = (inventory.named(STATEFUL_SET, names.pool(pool.name), group="apps") for pool in spec.pools)
    if not all(workload is not None and _makes(workload, revision) for workload in workloads):
        return
    for pod in pods:
        old = label_of(pod, LABEL_REVISION)
        if label_of(pod, LABEL_ROLE) == ROLE_RANK and old != revision and not is_leaving(pod):
            reason = f"revision {revision} takes the place of {old}"
            yield Deletion(ObjectRef("v1", "Pod", pod["metadata"]["name"]), uid=pod["metadata"]["uid"], reason=reason)


def _makes(statefulset: Object, revision: str) -> bool:
    """Whether the StatefulSet's controller makes pods of the revision from now on."""
    observed = (statefulset.get("status") or {}).get("observedGeneration", 0)
    seen = observed >= statefulset["metadata"]["generation"]
    return bool(seen) and template_label_of(statefulset, LABEL_REVISION) == revision
