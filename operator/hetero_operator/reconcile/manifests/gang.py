"""All rank pods at once, or none: what Kueue and Volcano are told. The gateway is never part of a gang.

Source: Kueue's plain pod groups (label and annotations on pods; `pod-group-serving` tells that pods that ended are
made anew), Volcano's PodGroup of scheduling.volcano.sh/v1beta1.
"""

from __future__ import annotations

from typing import Any, Final

from hetero_api.contract import ROLE_RANK
from hetero_api.spec import HeteroInferenceSpec
from hetero_api.spec_cluster import GangScheduler
from hetero_operator.reconcile.manifests.rendering import Rendering, manifest

POD_GROUP: Final = ("scheduling.volcano.sh/v1beta1", "PodGroup")
_VOLCANO_GROUP_ANNOTATION: Final = "scheduling.k8s.io/group-name"
_VOLCANO_SCHEDULER: Final = "volcano"
_KUEUE_QUEUE_LABEL: Final = "kueue.x-k8s.io/queue-name"
_KUEUE_GROUP_LABEL: Final = "kueue.x-k8s.io/pod-group-name"
_KUEUE_COUNT_ANNOTATION: Final = "kueue.x-k8s.io/pod-group-total-count"
_KUEUE_SERVING_ANNOTATION: Final = "kueue.x-k8s.io/pod-group-serving"


def pod_groups(rendering: Rendering) -> list[dict[str, Any]]:
    """Volcano's PodGroup, when Volcano is asked for."""
    gang = rendering.spec.scheduling.gang
    if gang.scheduler != GangScheduler.VOLCANO:
        return []
    spec: dict[str, Any] = {"minMember": rank_pods(rendering.spec)}
    if gang.queue:
        spec["queue"] = gang.queue
    if rendering.spec.scheduling.priority_class_name:
        spec["priorityClassName"] = rendering.spec.scheduling.priority_class_name
    return [manifest(rendering, POD_GROUP, rendering.names.pod_group, component=ROLE_RANK, spec=spec)]


def gang_labels(rendering: Rendering) -> dict[str, str]:
    """Labels of rank pods."""
    gang = rendering.spec.scheduling.gang
    if gang.scheduler != GangScheduler.KUEUE or gang.queue is None:
        return {}
    group = rendering.names.queued_group(rendering.revisions.ranks)
    return {_KUEUE_QUEUE_LABEL: gang.queue, _KUEUE_GROUP_LABEL: group}


def gang_annotations(rendering: Rendering) -> dict[str, str]:
    """Annotations of rank pods."""
    match rendering.spec.scheduling.gang.scheduler:
        case GangScheduler.KUEUE:
            count = str(rank_pods(rendering.spec))
            return {_KUEUE_COUNT_ANNOTATION: count, _KUEUE_SERVING_ANNOTATION: "true"}
        case GangScheduler.VOLCANO:
            return {_VOLCANO_GROUP_ANNOTATION: rendering.names.pod_group}
        case GangScheduler.NONE:
            return {}


def rank_scheduler(spec: HeteroInferenceSpec) -> str | None:
    """Scheduler of rank pods: the user's; else Volcano's own where it gathers them; None: the cluster's default."""
    volcano = spec.scheduling.gang.scheduler == GangScheduler.VOLCANO
    return spec.scheduling.scheduler_name or (_VOLCANO_SCHEDULER if volcano else None)


def rank_pods(spec: HeteroInferenceSpec) -> int:
    """Rank pods over all pools."""
    return sum(pool.pods for pool in spec.pools)
