"""Objects of kinds that a server may lack: claim templates, PodGroups, disruption budgets, PodMonitors, InferencePools.

ResourceClaimTemplates take cores through Dynamic Resource Allocation instead of the kubelet's CPU manager. Source: the
API `resource.k8s.io/v1`, and kubernetes-sigs/dra-driver-cpu in its default mode, where a device is a NUMA node and its
cores are capacity: a request for n cores is served by one node. A claim must not be shared between containers, so only
the rank's container names it. The cores are in its plain requests too, because the scheduler would count them twice
otherwise. A template can never be changed: there is one for each revision, and an existing one is kept.

Gangs start all rank pods at once, or none; the gateway is never part of one. Source: Kueue's plain pod groups (label
and annotations on pods; `pod-group-serving` says that pods that ended are created again), Volcano's PodGroup of
scheduling.volcano.sh/v1beta1.

An InferencePool (kubernetes-sigs/gateway-api-inference-extension, inference.networking.k8s.io/v1) makes the gateways of
all replicas a backend of the Gateway API. Its endpoint picker scrapes `/metrics` at the pool's port, and learns the
names of metrics from a label of the pods.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from hetero_api.contract import (
    COMPONENT_ROUTER,
    HTTP_PORT,
    LABEL_NAME,
    LABEL_POOL,
    LABEL_REVISION,
    LABEL_ROLE,
    ROLE_GATEWAY,
    ROLE_RANK,
)
from hetero_api.spec import HeteroInferenceSpec
from hetero_api.spec_cluster import GangScheduler
from hetero_api.spec_pools import PoolSpec
from hetero_operator.reconcile.manifests.rendering import (
    Rendering,
    group_selector,
    manifest,
    role_selector,
    router_selector,
)
from hetero_operator.reconcile.model import Object
from hetero_operator.reconcile.rank_sets import health_ports, num_rank_pods

RESOURCE_CLAIM_TEMPLATE: Final = ("resource.k8s.io/v1", "ResourceClaimTemplate")
CLAIM_NAME: Final = "cores"
"""Name of the claim within a pod; containers that share a pod number theirs."""
_CORES_CAPACITY: Final = "dra.cpu/cpu"
"""The driver's name for the number of cores of a device."""
POD_GROUP: Final = ("scheduling.volcano.sh/v1beta1", "PodGroup")
_VOLCANO_GROUP_ANNOTATION: Final = "scheduling.k8s.io/group-name"
_VOLCANO_SCHEDULER: Final = "volcano"
_KUEUE_QUEUE_LABEL: Final = "kueue.x-k8s.io/queue-name"
_KUEUE_GROUP_LABEL: Final = "kueue.x-k8s.io/pod-group-name"
_KUEUE_COUNT_ANNOTATION: Final = "kueue.x-k8s.io/pod-group-total-count"
_KUEUE_SERVING_ANNOTATION: Final = "kueue.x-k8s.io/pod-group-serving"
_UNHEALTHY_POLICY_SINCE: Final = (1, 27)
_BUDGET_KINDS: Final = (("policy/v1", "PodDisruptionBudget"), ("policy/v1beta1", "PodDisruptionBudget"))
"""Newest first; both spell what we use alike."""
_ALL_PODS: Final = "100%"
POD_MONITOR: Final = ("monitoring.coreos.com/v1", "PodMonitor")
INFERENCE_POOL: Final = ("inference.networking.k8s.io/v1", "InferencePool")
_ENGINE_TYPE_LABEL: Final = "inference.networking.k8s.io/engine-type"
_METRICS_LIKE: Final = "vllm"
"""The engine whose names our metrics have, as endpoint pickers call it."""


def claim_templates(rendering: Rendering, stored: Mapping[str, Object]) -> list[dict[str, Any]]:
    """Return a template for each pool that takes its cores by a claim; `stored` are the existing ones, by name."""
    return [_claim_template(rendering, pool, stored) for pool in rendering.spec.pools if device_class(pool)]


def device_class(pool: PoolSpec) -> str:
    """Return the DeviceClass that a pool's cores are claimed from, "" when they are not claimed."""
    claim = pool.cpu_or_default.numa.claim if pool.cpu else None
    return claim.device_class_name if claim else ""


def _claim_template(rendering: Rendering, pool: PoolSpec, stored: Mapping[str, Object]) -> dict[str, Any]:
    revision = rendering.revisions.ranks
    name = rendering.names.claim_template(pool.name, revision)
    requests = [_core_request(pool, local_rank) for local_rank in range(pool.ranks_per_pod)]
    # It can never be changed. The server adds empty metadata beside the claim's spec, which are not ours to write.
    claim = stored[name]["spec"]["spec"] if name in stored else {"devices": {"requests": requests}}
    labels = {LABEL_POOL: pool.name, LABEL_REVISION: revision}
    return manifest(rendering, RESOURCE_CLAIM_TEMPLATE, name, component=ROLE_RANK, labels=labels, spec={"spec": claim})


def _core_request(pool: PoolSpec, local_rank: int) -> dict[str, Any]:
    """Return the request for the cores of one rank, all of one NUMA node."""
    return {
        "name": f"rank-{local_rank}",
        "exactly": {
            "deviceClassName": device_class(pool),
            "allocationMode": "ExactCount",
            "count": 1,
            "capacity": {"requests": {_CORES_CAPACITY: str(pool.cpu_or_default.cores_per_rank)}},
        },
    }


def pod_groups(rendering: Rendering) -> list[dict[str, Any]]:
    """Return Volcano's PodGroup, when Volcano is asked for."""
    gang = rendering.spec.scheduling.gang
    if gang.scheduler != GangScheduler.VOLCANO:
        return []
    spec: dict[str, Any] = {"minMember": num_rank_pods(rendering.spec)}
    if gang.queue:
        spec["queue"] = gang.queue
    if rendering.spec.scheduling.priority_class_name:
        spec["priorityClassName"] = rendering.spec.scheduling.priority_class_name
    return [manifest(rendering, POD_GROUP, rendering.names.group, component=ROLE_RANK, spec=spec)]


def gang_labels(rendering: Rendering) -> dict[str, str]:
    """Return the gang scheduler's labels of rank pods."""
    gang = rendering.spec.scheduling.gang
    if gang.scheduler != GangScheduler.KUEUE or gang.queue is None:
        return {}
    group = rendering.names.queued_group(rendering.revisions.ranks)
    return {_KUEUE_QUEUE_LABEL: gang.queue, _KUEUE_GROUP_LABEL: group}


def gang_annotations(rendering: Rendering) -> dict[str, str]:
    """Return the gang scheduler's annotations of rank pods."""
    match rendering.spec.scheduling.gang.scheduler:
        case GangScheduler.KUEUE:
            count = str(num_rank_pods(rendering.spec))
            return {_KUEUE_COUNT_ANNOTATION: count, _KUEUE_SERVING_ANNOTATION: "true"}
        case GangScheduler.VOLCANO:
            return {_VOLCANO_GROUP_ANNOTATION: rendering.names.group}
        case GangScheduler.NONE:
            return {}


def rank_scheduler(spec: HeteroInferenceSpec) -> str | None:
    """Return the scheduler of rank pods: the user's, else Volcano's own for its gangs, None: the cluster's default."""
    volcano = spec.scheduling.gang.scheduler == GangScheduler.VOLCANO
    return spec.scheduling.scheduler_name or (_VOLCANO_SCHEDULER if volcano else None)


def disruption_budgets(rendering: Rendering, *, others_serve: bool | None) -> list[dict[str, Any]]:
    """Return a replica's budget in the newest version that the cluster has; none when the user wants none.

    It lets pods go while all other replicas serve. The ready ranks of a replica that is alone (None) never go.
    """
    selector = group_selector(rendering, ROLE_RANK)
    if others_serve is not None:
        del selector[LABEL_ROLE]
    most = _ALL_PODS if others_serve else 0
    return _budgets(rendering, rendering.names.ranks, component=ROLE_RANK, selector=selector, most=most)


def router_budgets(rendering: Rendering) -> list[dict[str, Any]]:
    """Return the budget of the router's pods, which go one at a time; none when the user wants none."""
    selector = router_selector(rendering)
    return _budgets(rendering, rendering.names.router, component=COMPONENT_ROUTER, selector=selector, most=1)


def _budgets(
    rendering: Rendering, name: str, *, component: str, selector: dict[str, str], most: int | str
) -> list[dict[str, Any]]:
    kinds = [kind for kind in _BUDGET_KINDS if rendering.capabilities.has(*kind)]
    if not rendering.spec.disruption_budget.enabled or not kinds:
        return []
    knows_policy = rendering.capabilities.version >= _UNHEALTHY_POLICY_SINCE
    # A pod that is not ready serves nobody, and would keep its node from being drained for as long as it is broken.
    unhealthy = {"unhealthyPodEvictionPolicy": "AlwaysAllow"} if knows_policy else {}
    spec = {"maxUnavailable": most, "selector": {"matchLabels": selector}, **unhealthy}
    return [manifest(rendering, kinds[0], name, component=component, spec=spec)]


def pod_monitors(rendering: Rendering) -> list[dict[str, Any]]:
    """Return a PodMonitor of the gateway's and the ranks' metrics; none where it is not wanted or not known."""
    monitoring = rendering.spec.monitoring
    if not monitoring.pod_monitor or not rendering.capabilities.has(*POD_MONITOR):
        return []
    interval = f"{monitoring.interval_seconds}s"
    secret = monitoring.key_secret_ref
    shown: dict[str, Any] = {}
    if secret is not None:
        # Of the gateway alone: ranks ask for nothing, and need not know the key.
        credentials = {"name": secret.name, "key": secret.key}
        shown = {"metrics": {"authorization": {"type": "Bearer", "credentials": credentials}}}
    ports = ["metrics", *health_ports(rendering.spec)]
    spec = {
        "selector": {"matchLabels": {LABEL_NAME: rendering.names.resource}},
        "podTargetLabels": [LABEL_NAME, LABEL_ROLE, LABEL_POOL],
        "podMetricsEndpoints": [
            {"port": port, "path": "/metrics", "interval": interval, **shown.get(port, {})} for port in ports
        ],
    }
    return [
        manifest(
            rendering, POD_MONITOR, rendering.names.resource, component=ROLE_GATEWAY, labels=monitoring.labels,
            spec=spec,
        )
    ]  # fmt: skip


def inference_pools(rendering: Rendering) -> list[dict[str, Any]]:
    """Return the InferencePool of all gateways; none where it is not asked for or not known."""
    picker = rendering.spec.router.endpoint_picker_ref
    if picker is None or not rendering.capabilities.has(*INFERENCE_POOL):
        return []
    spec = {
        "selector": {"matchLabels": role_selector(rendering, ROLE_GATEWAY)},
        "targetPorts": [{"number": HTTP_PORT}],
        "endpointPickerRef": {
            "name": picker.name,
            "port": {"number": picker.port},
            "failureMode": picker.failure_mode.value,
        },
    }
    return [manifest(rendering, INFERENCE_POOL, rendering.names.resource, component=ROLE_GATEWAY, spec=spec)]


def pool_labels(spec: HeteroInferenceSpec) -> dict[str, str]:
    """Return the labels by which an endpoint picker knows how to read the metrics of a gateway's pod."""
    return {_ENGINE_TYPE_LABEL: _METRICS_LIKE} if spec.has_inference_pool else {}
