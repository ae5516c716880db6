"""One change for every field of the spec: from a resource that has it to the same with another value."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Final

from tests.support.render_cases import everything

GPU: Final = 0
CPU: Final = 1

_VOLCANO_FREE: Final = {"scheduling.gang": {"scheduler": "None"}}
_HUB_TOLERATION: Final = {"key": "a", "operator": "Equal", "value": "b", "effect": "NoExecute", "tolerationSeconds": 5}

_ROUTED: Final = {"router": {"type": "SMG", "keysSecretRef": {"name": "tenants"}}}
_POOLED: Final = {"router": {"type": "InferencePool", "endpointPickerRef": {"name": "picker"}}, "gateway.tls": None}
_FILES: Final = {"name": "ca", "mountPath": "/etc/ssl/own"}
BEFORE: Final[Mapping[str, Mapping[str, Any]]] = {
    "pools.volumes.name": {"pools.1.volumes": [{**_FILES, "secretName": "one"}]},
    "pools.volumes.mountPath": {"pools.1.volumes": [{**_FILES, "secretName": "one"}]},
    "pools.volumes.secretName": {"pools.1.volumes": [{**_FILES, "secretName": "one"}]},
    "pools.volumes.configMapName": {"pools.1.volumes": [{**_FILES, "secretName": "one"}]},
    "pools.volumes.claimName": {"pools.1.volumes": [{**_FILES, "secretName": "one"}]},
    "gateway.volumes.name": {"gateway.volumes": [{**_FILES, "secretName": "one"}]},
    "gateway.volumes.mountPath": {"gateway.volumes": [{**_FILES, "secretName": "one"}]},
    "gateway.volumes.secretName": {"gateway.volumes": [{**_FILES, "secretName": "one"}]},
    "gateway.volumes.configMapName": {"gateway.volumes": [{**_FILES, "secretName": "one"}]},
    "gateway.volumes.claimName": {"gateway.volumes": [{**_FILES, "secretName": "one"}]},
    "model.cache.hostPath": {"model.cache": {"hostPath": "/var/a"}},
    "model.quantizationGroupSize": {"model.quantization": "int4"},
    "exchange.hostPath": {"exchange.kind": "Auto"},
    "engine.speculative.draft.ranks": {"engine.speculative": {"kind": "Draft", "draft": {"uri": "file:///small"}}},
    "topology.colocate": {"pools.0.scheduling": {}},
    "gateway.auth.mode": {"gateway.auth": None},
    "scheduling.schedulerName": _VOLCANO_FREE,
    "images.router": _ROUTED,
    **{
        f"router.{field}": _ROUTED
        for field in (
            "policy",
            "cacheIsolation",
            "port",
            "replicas",
            "resources.cpuMillis",
            "resources.memory",
            "keysSecretRef.name",
            "keysSecretRef.key",
            "tlsSecretName",
        )
    },
    **{f"router.endpointPickerRef.{field}": _POOLED for field in ("name", "port", "failureMode")},
    **{
        f"{section}.tolerations.{field}": {f"{path}.tolerations": [_HUB_TOLERATION]}
        for section, path in (("scheduling", "scheduling"), ("pools.scheduling", "pools.0.scheduling"))
        for field in ("key", "operator", "value", "effect", "tolerationSeconds")
    },
}
"""What a resource with everything set needs otherwise, before a field can be changed."""

_TOLERATION_CHANGES: Final[Mapping[str, Mapping[str, Any]]] = {
    "key": {"key": "c"},
    "operator": {"operator": "Exists", "value": None},
    "value": {"value": "d"},
    "effect": {"effect": "NoSchedule", "tolerationSeconds": None},
    "tolerationSeconds": {"tolerationSeconds": 6},
}

AFTER: Final[Mapping[str, Mapping[str, Any]]] = {
    "model.uri": {"model.uri": "hf://Qwen/Qwen3-14B"},
    "model.revision": {"model.revision": "v2"},
    "model.dtype": {"model.dtype": "float32"},
    "model.quantization": {"model.quantization": "none"},
    "model.quantizationGroupSize": {"model.quantizationGroupSize": 64},
    "model.maxModelLen": {"model.maxModelLen": 8192},
    "model.tokenSecretRef.name": {"model.tokenSecretRef.name": "other"},
    "model.tokenSecretRef.key": {"model.tokenSecretRef.key": "other"},
    "model.cache.claimName": {"model.cache.claimName": "other"},
    "model.cache.hostPath": {"model.cache.hostPath": "/var/b"},
    "pools.ranks": {
        "pools.0.ranks": 2,
        "placement.shares": {kind: [1, 1, 1, 1] for kind in ("attention", "mlp", "vocabulary")},
    },
    "pools.ranksPerPod": {"pools.0.ranksPerPod": 4, "pools.0.gpu.devices": [0, 1, 2, 3]},
    "pools.gpu.devices": {"pools.0.gpu.devices": [1, 3]},
    "pools.gpu.coresPerRank": {"pools.0.gpu.coresPerRank": 5},
    "pools.gpu.memoryPerRank": {"pools.0.gpu.memoryPerRank": "33Gi"},
    "pools.gpu.runtimeClassName": {"pools.0.gpu.runtimeClassName": "other"},
    "pools.gpu.resourceName": {"pools.0.gpu.resourceName": "nvidia.com/gpu"},
    "pools.cpu.coresPerRank": {"pools.1.cpu.coresPerRank": 16},
    "pools.cpu.memoryPerRank": {"pools.1.cpu.memoryPerRank": "64Gi"},
    "pools.cpu.hugepages.size": {"pools.1.cpu.hugepages.size": "2Mi"},
    "pools.cpu.hugepages.perRank": {"pools.1.cpu.hugepages.perRank": "32Gi"},
    "pools.cpu.numa.policy": {"pools.1.cpu.numa.policy": "BestEffort"},
    "pools.cpu.numa.claim.deviceClassName": {"pools.1.cpu.numa.claim.deviceClassName": "other"},
    "pools.env": {"pools.1.env": {"HTTPS_PROXY": "http://proxy:3128"}},
    "pools.volumes.name": {"pools.1.volumes.0.name": "other"},
    "pools.volumes.mountPath": {"pools.1.volumes.0.mountPath": "/etc/ssl/other"},
    "pools.volumes.secretName": {"pools.1.volumes.0.secretName": "two"},
    "pools.volumes.configMapName": {"pools.1.volumes": [{**_FILES, "configMapName": "two"}]},
    "pools.volumes.claimName": {"pools.1.volumes": [{**_FILES, "claimName": "two"}]},
    "pools.podTemplate": {"pools.1.podTemplate": {"spec": {"dnsPolicy": "Default"}}},
    "pools.sharedMemory": {"pools.1.sharedMemory": "5Gi"},
    "pools.scheduling.nodeSelector": {"pools.1.scheduling.nodeSelector": {"disk": "ssd"}},
    **{
        f"pools.scheduling.tolerations.{field}": {
            f"pools.0.scheduling.tolerations.0.{key}": value for key, value in change.items()
        }
        for field, change in _TOLERATION_CHANGES.items()
    },
    "topology.colocate": {"topology.colocate": "Pod"},
    "placement.mode": {"placement.mode": "Auto"},
    "placement.shares.attention": {"placement.shares.attention": [2, 1, 1, 1, 0, 0]},
    "placement.shares.mlp": {"placement.shares.mlp": [9, 8, 8, 8, 1, 1]},
    "placement.shares.vocabulary": {"placement.shares.vocabulary": [2, 1, 1, 1, 0, 0]},
    "placement.workload.promptTokens": {"placement.workload.promptTokens": 1024},
    "placement.workload.outputTokens": {"placement.workload.outputTokens": 512},
    "placement.workload.concurrency": {"placement.workload.concurrency": 32},
    "placement.experts": {"placement.experts": "Auto"},
    "placement.rebalanceExperts": {"placement.rebalanceExperts": True},
    "exchange.kind": {"exchange.kind": "Auto"},
    "exchange.hostPath": {"exchange.hostPath": "/dev/shm"},
    "engine.maxNumSeqs": {"engine.maxNumSeqs": 64},
    "engine.maxNumBatchedTokens": {"engine.maxNumBatchedTokens": 2048},
    "engine.blockSize": {"engine.blockSize": 16},
    "engine.cacheLayout": {"engine.cacheLayout": "Contiguous"},
    "engine.gpuMemoryUtilization": {"engine.gpuMemoryUtilization": 0.8},
    "engine.kvCacheMemoryBytes": {"engine.kvCacheMemoryBytes": "5Gi"},
    "engine.kvCacheDtype": {"engine.kvCacheDtype": "bfloat16"},
    "engine.enablePrefixCaching": {"engine.enablePrefixCaching": True},
    "engine.overlapScheduling": {"engine.overlapScheduling": False},
    "engine.enforceEager": {"engine.enforceEager": False},
    "engine.batchInvariant": {"engine.batchInvariant": False},
    "engine.adapters.maxLoaded": {"engine.adapters.maxLoaded": 2},
    "engine.adapters.maxRank": {"engine.adapters.maxRank": 32},
    "engine.adapters.roots": {"engine.adapters.roots": ["/a"]},
    "engine.adapters.load.name": {
        "engine.adapters.maxLoaded": 1,
        "engine.adapters.roots": ["/a"],
        "engine.adapters.load": [{"name": "x", "directory": "/a/x"}],
    },
    "engine.adapters.load.directory": {
        "engine.adapters.maxLoaded": 1,
        "engine.adapters.roots": ["/a"],
        "engine.adapters.load": [{"name": "x", "directory": "/a/x"}],
    },
    "engine.adapters.load.uri": {
        "engine.adapters.maxLoaded": 1,
        "engine.adapters.load": [{"name": "x", "uri": "file:///a/x"}],
    },
    "engine.adapters.experts": {"engine.adapters.experts": True},
    "engine.adapters.overHttp": {"engine.adapters.overHttp": True},
    "engine.speculative.kind": {"engine.speculative.kind": "NGram"},
    "engine.speculative.draft.uri": {
        "engine.speculative.kind": "Draft",
        "engine.speculative.draft.uri": "file:///models/small",
    },
    "engine.speculative.draft.ranks": {"engine.speculative.draft.ranks": "All"},
    "engine.speculative.maxTokens": {"engine.speculative.maxTokens": 4},
    "engine.expertDeferral": {"engine.expertDeferral": 2},
    "engine.expertStreaming": {"engine.expertStreaming": 0},
    "gateway.service.type": {"gateway.service.type": "NodePort"},
    "gateway.service.port": {"gateway.service.port": 8443},
    "gateway.service.httpPort": {"gateway.service.httpPort": 8080},
    "gateway.service.annotations": {"gateway.service.annotations": {"example.com/internal": "false"}},
    "engine.samplingDefaults": {"engine.samplingDefaults": "None"},
    "gateway.http.toolCallFormat": {"gateway.http.toolCallFormat": "Hermes"},
    "gateway.http.strictFields": {"gateway.http.strictFields": True},
    "gateway.http.corsOrigins": {"gateway.http.corsOrigins": ["https://chat.example"]},
    "gateway.http.page": {"gateway.http.page": False},
    "gateway.maxQueuedRequests": {"gateway.maxQueuedRequests": 11},
    "gateway.tls.secretName": {"gateway.tls.secretName": "other"},
    "gateway.tls.clientCASecretName": {"gateway.tls.clientCASecretName": "other"},
    "gateway.tls.dnsNames": {"gateway.tls.dnsNames": ["other.example"]},
    "gateway.auth.mode": {"gateway.auth": {"mode": "None"}},
    "gateway.auth.keysSecretRef.name": {"gateway.auth.keysSecretRef.name": "other"},
    "gateway.auth.keysSecretRef.key": {"gateway.auth.keysSecretRef.key": "other.yaml"},
    "gateway.resources.cpuMillis": {"gateway.resources.cpuMillis": 3000},
    "gateway.resources.memory": {"gateway.resources.memory": "4Gi"},
    "gateway.env": {"gateway.env": {"HTTPS_PROXY": "http://proxy:3128"}},
    "gateway.volumes.name": {"gateway.volumes.0.name": "other"},
    "gateway.volumes.mountPath": {"gateway.volumes.0.mountPath": "/etc/ssl/other"},
    "gateway.volumes.secretName": {"gateway.volumes.0.secretName": "two"},
    "gateway.volumes.configMapName": {"gateway.volumes": [{**_FILES, "configMapName": "two"}]},
    "gateway.volumes.claimName": {"gateway.volumes": [{**_FILES, "claimName": "two"}]},
    "gateway.podTemplate": {"gateway.podTemplate": {"spec": {"dnsPolicy": "Default"}}},
    "gateway.drainTimeoutSeconds": {"gateway.drainTimeoutSeconds": 60},
    "recovery.rendezvousTimeoutSeconds": {"recovery.rendezvousTimeoutSeconds": 901},
    "recovery.startupTimeoutSeconds": {"recovery.startupTimeoutSeconds": 7200},
    "recovery.stepTimeoutSeconds": {"recovery.stepTimeoutSeconds": 31},
    "recovery.maxRestarts": {"recovery.maxRestarts": 3},
    "recovery.windowSeconds": {"recovery.windowSeconds": 700},
    "recovery.nodeLostTimeoutSeconds": {"recovery.nodeLostTimeoutSeconds": 130},
    "scheduling.schedulerName": {"scheduling.schedulerName": "numa-scheduler"},
    "scheduling.priorityClassName": {"scheduling.priorityClassName": "other"},
    "scheduling.nodeSelector": {"scheduling.nodeSelector": {"team": "other"}},
    **{
        f"scheduling.tolerations.{field}": {f"scheduling.tolerations.0.{key}": value for key, value in change.items()}
        for field, change in _TOLERATION_CHANGES.items()
    },
    "scheduling.topology.key": {"scheduling.topology.key": "example.com/rack"},
    "scheduling.topology.policy": {"scheduling.topology.policy": "Preferred"},
    "scheduling.replicaSpread.key": {"scheduling.replicaSpread": {"key": "example.com/rack"}},
    "scheduling.replicaSpread.policy": {"scheduling.replicaSpread": {"key": "example.com/rack", "policy": "Required"}},
    "scheduling.gang.scheduler": {"scheduling.gang.scheduler": "Kueue"},
    "scheduling.gang.queue": {"scheduling.gang.queue": "other"},
    "images.gpuWorker": {"images.gpuWorker": "other/gpu:1"},
    "images.cpuWorker": {"images.cpuWorker": "other/cpu:1"},
    "images.gateway": {"images.gateway": "other/gateway:1"},
    "images.router": {"images.router": "other/router:1"},
    "images.pullPolicy": {"images.pullPolicy": "Never"},
    "images.pullSecrets": {"images.pullSecrets": ["other"]},
    "podMetadata.labels": {"podMetadata.labels": {"cost-center": "43"}},
    "podMetadata.annotations": {"podMetadata.annotations": {"example.com/owner": "other"}},
    "networkPolicy.enabled": {"networkPolicy.enabled": False},
    "networkPolicy.clientsFrom": {"networkPolicy.clientsFrom": "Namespace"},
    "networkPolicy.metricsFrom": {"networkPolicy.metricsFrom": ["observability"]},
    "networkPolicy.allowModelEgress": {"networkPolicy.allowModelEgress": False},
    "disruptionBudget.enabled": {"disruptionBudget.enabled": False},
    "monitoring.podMonitor": {"monitoring.podMonitor": False},
    "monitoring.intervalSeconds": {"monitoring.intervalSeconds": 16},
    "monitoring.labels": {"monitoring.labels": {"release": "other"}},
    "monitoring.keySecretRef.name": {"monitoring.keySecretRef.name": "other"},
    "monitoring.keySecretRef.key": {"monitoring.keySecretRef.key": "other"},
    "suspend": {"suspend": True},
    "replicas": {"replicas": 0},
    "rollout.strategy": {"rollout.strategy": "Recreate"},
    "rollout.maxUnavailable": {"rollout.maxUnavailable": 2},
    "rollout.maxSurge": {"rollout.maxSurge": 1},
    "idle.sleepAfterSeconds": {"idle.sleepAfterSeconds": 300},
    "idle.level": {"idle.level": 2},
    "idle.responder.enabled": {"idle.responder.enabled": True},
    "idle.responder.retryAfterSeconds": {"idle.responder.retryAfterSeconds": 60},
    "router.type": {"router": {"type": "SMG", "keysSecretRef": {"name": "tenants"}}},
    "router.policy": {"router.policy": "RoundRobin"},
    "router.cacheIsolation": {"router.cacheIsolation": "Shared"},
    "router.port": {"router.port": 443},
    "router.replicas": {"router.replicas": 3},
    "router.resources.cpuMillis": {"router.resources.cpuMillis": 500},
    "router.resources.memory": {"router.resources.memory": "1Gi"},
    "router.keysSecretRef.name": {"router.keysSecretRef.name": "other"},
    "router.keysSecretRef.key": {"router.keysSecretRef.key": "other"},
    "router.tlsSecretName": {"router.tlsSecretName": "router-tls"},
    "router.endpointPickerRef.name": {"router.endpointPickerRef.name": "other"},
    "router.endpointPickerRef.port": {"router.endpointPickerRef.port": 9003},
    "router.endpointPickerRef.failureMode": {"router.endpointPickerRef.failureMode": "FailOpen"},
}
"""By field: what to set to change it. None takes a value away."""

REFUSED: Final[Mapping[str, Mapping[str, Any]]] = {
    "pools.name": {"pools.1.name": "other"},
    "pools.type": {"pools.1.type": "GPU", "pools.1.cpu": None},
    "gateway.tlsSecretName": {"gateway.tlsSecretName": "front-door"},
    "gateway.authTokenSecretRef.name": {"gateway.authTokenSecretRef.name": "clients"},
    "gateway.authTokenSecretRef.key": {"gateway.authTokenSecretRef": {"name": "clients", "key": "other"}},
}
"""Changes that are refused."""


def before(field: str) -> dict[str, Any]:
    """The resource that a field is changed in."""
    resource = everything()
    resource["spec"] = changed(resource["spec"], BEFORE.get(field, {}))
    return resource


def changed(spec: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a decoded spec with values set by path; numbers are indices of lists."""
    copied: dict[str, Any] = copy.deepcopy(dict(spec))
    for path, value in changes.items():
        *sections, last = path.split(".")
        holder: Any = copied
        for section in sections:
            holder = holder[int(section)] if isinstance(holder, list) else holder.setdefault(section, {})
        if value is None:
            del holder[last]
        else:
            holder[last] = value
    return copied
