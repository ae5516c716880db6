"""What a change of each field of the spec does to what runs: one row a field.

A row starts from hetero_resources.SPEC of one rank, with `base` set on it, and then sets its field to `new`. What that
does to objects besides the workloads, and to what is made for each revision, stands in `more`; `shows` is a text that
the workloads have after the change and did not have before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

from tests.support.hetero_resources import ABSENT


class Restarts(Enum):
    """Which pods are made anew."""

    RANKS = "all rank pods and the gateway's"
    GATEWAY = "the gateway's pod"
    NOTHING = "none"
    ENDS = "none: all pods end"
    REFUSED = "none: the change is refused"


@dataclass(frozen=True, slots=True)
class Change:
    """One field of the spec. Fields of lists are changed in the first item."""

    new: Any
    restarts: Restarts
    base: Mapping[str, Any] = field(default_factory=dict)
    more: Mapping[str, str] = field(default_factory=dict)
    shows: str = ""
    needs: str = ""
    """A kind that the cluster must have; without it the change is refused."""
    at: str = ""
    """Where `new` is set, when that is not the field itself."""


RANKS, GATEWAY, NOTHING, ENDS, REFUSED = Restarts
_GPU_POOL: Final = [{"name": "gpu", "type": "GPU", "ranks": 2, "ranksPerPod": 2, "gpu": {"coresPerRank": 2}}]
_GPU: Final = {"pools": _GPU_POOL}
_BOTH: Final = {"pools": [*_GPU_POOL, {"name": "cpu", "type": "CPU", "ranks": 1}]}
_POLICIES: Final = {"NetworkPolicy/NAME-ranks": "changed", "NetworkPolicy/NAME-gateway": "changed"}
_MONITOR: Final = {"PodMonitor/NAME": "changed"}
_CLIENT_SERVICE: Final = {"Service/NAME": "changed"}
_TWO_RANKS: Final = {"pools.0.ranks": 2}
_TAINT: Final = {"key": "example.com/a", "operator": "Equal", "value": "one", "effect": "NoExecute"}
_FILES: Final = {"name": "ca", "mountPath": "/etc/ssl/own"}
_POOL_FILES: Final = {"pools.0.volumes": [{**_FILES, "secretName": "one"}]}
_GATEWAY_FILES: Final = {"gateway.volumes": [{**_FILES, "secretName": "one"}]}
_HUGE: Final = {"pools.0.cpu.hugepages": {"size": "2Mi", "perRank": "1Gi"}}
_KUEUE: Final = {"scheduling.gang": {"scheduler": "Kueue", "queue": "small"}}


def _tolerations(at: str, restarts: Restarts) -> dict[str, Change]:
    base, item = {f"{at}.tolerations": [_TAINT]}, f"{at}.tolerations.0"
    own = {f"{at}.tolerations": [{**_TAINT, "tolerationSeconds": 5}]}
    return {
        "key": Change("example.com/b", restarts, base, at=f"{item}.key", shows='"key": "example.com/b"'),
        "operator": Change(
            [{"key": "example.com/a", "operator": "Exists", "effect": "NoExecute"}],
            restarts,
            base,
            at=f"{at}.tolerations",
        ),
        "value": Change("two", restarts, base, at=f"{item}.value", shows='"value": "two"'),
        "effect": Change("NoSchedule", restarts, base, at=f"{item}.effect", shows='"effect": "NoSchedule"'),
        "tolerationSeconds": Change(
            7, restarts, own, at=f"{item}.tolerationSeconds", shows='"tolerationSeconds": 7'
        ),
    }  # fmt: skip


_ROUTED: Final = {"router.type": "SMG"}
_ROUTER_KEYS: Final = {
    **_ROUTED, "router.cacheIsolation": "Shared", "router.keysSecretRef": {"name": "one"},
}  # fmt: skip
_ROUTER: Final = {"Deployment/NAME-router": "changed"}
_ROUTER_COMES: Final = {
    "Deployment/NAME-router": "made", "Service/NAME-router": "made", "Service/NAME-engines": "made",
    "ServiceAccount/NAME-router": "made", "Role/NAME-router": "made", "RoleBinding/NAME-router": "made",
    "NetworkPolicy/NAME-router": "made", "NetworkPolicy/NAME-gateway": "changed",
}  # fmt: skip
_POOLED: Final = {"router.type": "InferencePool", "router.endpointPickerRef": {"name": "picker"}}
_POOL: Final = {"InferencePool/NAME": "changed"}
_ADAPTERS: Final[Mapping[str, Any]] = {
    "engine.adapters.maxLoaded": 1, "engine.adapters.roots": ["/a"],
    "engine.adapters.load": [{"name": "x", "directory": "/a/x"}],
}  # fmt: skip
CHANGES: Final[Mapping[str, Change]] = {
    # --- model
    "model.uri": Change("pvc://models/one", RANKS, more=_POLICIES, shows='"claimName": "models"'),
    "model.revision": Change("v2", RANKS, {"model.revision": "v1"}, shows='"--revision", "v2"'),
    "model.dtype": Change("float32", GATEWAY),
    "model.quantization": Change("int8", GATEWAY),
    "model.quantizationGroupSize": Change(64, GATEWAY, {"model.quantization": "int4"}),
    "model.maxModelLen": Change(512, GATEWAY),
    "model.tokenSecretRef.name": Change(
        "other", RANKS, {"model.tokenSecretRef.name": "hub"}, shows='"secretName": "other"'
    ),
    "model.tokenSecretRef.key": Change(
        "hf", RANKS, {"model.tokenSecretRef.name": "hub"}, shows='"key": "hf"'
    ),
    "model.cache.claimName": Change("cache", RANKS, shows='"claimName": "cache"'),
    "model.cache.hostPath": Change("/var/cache/models", RANKS, shows='"path": "/var/cache/models"'),
    # --- pools
    "pools.name": Change("other", REFUSED, at="pools.0.name"),
    "pools.type": Change(
        [{"name": "cpu", "type": "GPU", "ranks": 1}], REFUSED, at="pools"
    ),
    "pools.ranks": Change(3, RANKS, at="pools.0.ranks"),
    "pools.ranksPerPod": Change(2, RANKS, _TWO_RANKS, at="pools.0.ranksPerPod", shows='"--ranks-per-pod", "2"'),
    "pools.gpu.devices": Change([4, 1], RANKS, _GPU, at="pools.0.gpu.devices", shows='"--cuda-devices", "1,0"'),
    "pools.gpu.coresPerRank": Change(4, RANKS, _GPU, at="pools.0.gpu.coresPerRank", shows='"--threads-per-rank", "4"'),
    "pools.gpu.memoryPerRank": Change("8Gi", RANKS, _GPU, at="pools.0.gpu.memoryPerRank", shows='"memory": "17Gi"'),
    "pools.gpu.runtimeClassName": Change(
        "nvidia", RANKS, _GPU, at="pools.0.gpu.runtimeClassName", shows='"runtimeClassName": "nvidia"'
    ),
    "pools.gpu.resourceName": Change(
        "amd.com/gpu", RANKS, _GPU, at="pools.0.gpu.resourceName", shows='"amd.com/gpu": "2"'
    ),
    "pools.cpu.coresPerRank": Change(2, RANKS, at="pools.0.cpu.coresPerRank", shows='"--threads-per-rank", "2"'),
    "pools.cpu.memoryPerRank": Change("2Gi", RANKS, at="pools.0.cpu.memoryPerRank", shows='"memory": "3Gi"'),
    "pools.cpu.hugepages.size": Change("1Gi", RANKS, _HUGE, at="pools.0.cpu.hugepages.size", shows="hugepages-1Gi"),
    "pools.cpu.hugepages.perRank": Change(
        "2Gi", RANKS, _HUGE, at="pools.0.cpu.hugepages.perRank", shows='"hugepages-2Mi": "2Gi"'
    ),
    "pools.cpu.numa.policy": Change(
        "Required", RANKS, at="pools.0.cpu.numa.policy", shows='"--numa-policy", "Required"'
    ),
    "pools.cpu.numa.claim.deviceClassName": Change(
        "dra.cpu", RANKS, at="pools.0.cpu.numa.claim.deviceClassName", needs="resource.k8s.io/v1/ResourceClaimTemplate",
        more={"ResourceClaimTemplate/NAME-cpu-RANKS": "made"},
    ),
    "pools.env": Change({"HTTPS_PROXY": "http://p"}, RANKS, at="pools.0.env", shows='"value": "http://p"'),
    "pools.volumes.name": Change(
        "other", RANKS, _POOL_FILES, at="pools.0.volumes.0.name", shows='"user-other"'
    ),
    "pools.volumes.mountPath": Change(
        "/etc/ssl/other", RANKS, _POOL_FILES, at="pools.0.volumes.0.mountPath", shows='"mountPath": "/etc/ssl/other"'
    ),
    "pools.volumes.secretName": Change(
        "two", RANKS, _POOL_FILES, at="pools.0.volumes.0.secretName", shows='"secretName": "two"'
    ),
    "pools.volumes.configMapName": Change(
        [{**_FILES, "configMapName": "two"}], RANKS, at="pools.0.volumes", shows='"user-ca"'
    ),
    "pools.volumes.claimName": Change(
        [{**_FILES, "claimName": "two"}], RANKS, at="pools.0.volumes", shows='"user-ca"'
    ),
    "pools.podTemplate": Change(
        {"spec": {"dnsPolicy": "Default"}}, RANKS, at="pools.0.podTemplate", shows='"dnsPolicy": "Default"'
    ),
    "pools.sharedMemory": Change("2Gi", RANKS, at="pools.0.sharedMemory", shows='"sizeLimit": "2Gi"'),
    "pools.scheduling.nodeSelector": Change(
        {"disk": "fast"}, RANKS, at="pools.0.scheduling.nodeSelector", shows='"disk": "fast"'
    ),
    **{f"pools.scheduling.tolerations.{k}": v for k, v in _tolerations("pools.0.scheduling", RANKS).items()},
    "topology.colocate": Change(
        "Pod", RANKS, shows='"name": "rank-0"',
        more={"StatefulSet/NAME-cpu": "gone", "StatefulSet/NAME-ranks": "made"},
    ),
    # --- placement and engine
    "placement.mode": Change("Layer", GATEWAY),
    "placement.shares.attention": Change([2, 1], GATEWAY, _TWO_RANKS),
    "placement.shares.mlp": Change([2, 1], GATEWAY, _TWO_RANKS),
    "placement.shares.vocabulary": Change([2, 1], GATEWAY, _TWO_RANKS),
    "placement.workload.promptTokens": Change(64, GATEWAY),
    "placement.workload.outputTokens": Change(64, GATEWAY),
    "placement.workload.concurrency": Change(4, GATEWAY),
    "placement.experts": Change("Slices", GATEWAY),
    "placement.rebalanceExperts": Change(False, GATEWAY),
    "exchange.kind": Change("Gloo", GATEWAY),
    "exchange.hostPath": Change("/dev/shm", RANKS, shows='"hostPath": {"path": "/dev/shm", "type": "Directory"}'),
    "engine.maxNumSeqs": Change(8, GATEWAY),
    "engine.maxNumBatchedTokens": Change(256, GATEWAY),
    "engine.blockSize": Change(32, GATEWAY),
    "engine.cacheLayout": Change("Contiguous", GATEWAY),
    "engine.gpuMemoryUtilization": Change(0.5, GATEWAY),
    "engine.kvCacheMemoryBytes": Change("256Mi", GATEWAY),
    "engine.kvCacheDtype": Change("bfloat16", GATEWAY),
    "engine.enablePrefixCaching": Change(False, GATEWAY),
    "engine.overlapScheduling": Change(False, GATEWAY),
    "engine.enforceEager": Change(True, GATEWAY),
    "engine.batchInvariant": Change(True, GATEWAY),
    "engine.expertDeferral": Change(1, GATEWAY, _BOTH),
    "engine.expertStreaming": Change(256, GATEWAY, _BOTH),
    "engine.samplingDefaults": Change("None", GATEWAY),
    "engine.adapters.maxLoaded": Change(2, GATEWAY),
    "engine.adapters.maxRank": Change(32, GATEWAY),
    "engine.adapters.roots": Change(["/a"], GATEWAY),
    "engine.adapters.load.name": Change(
        [{"name": "y", "directory": "/a/x"}], GATEWAY, base=_ADAPTERS, at="engine.adapters.load"
    ),
    "engine.adapters.load.directory": Change(
        [{"name": "x", "directory": "/a/y"}], GATEWAY, base=_ADAPTERS, at="engine.adapters.load"
    ),
    "engine.adapters.load.uri": Change(
        [{"name": "x", "uri": "pvc://models/two"}], RANKS,
        base={"engine.adapters": {"maxLoaded": 1, "load": [{"name": "x", "uri": "pvc://models/one"}]}},
        at="engine.adapters.load", shows='"subPath": "two"',
    ),
    "engine.adapters.experts": Change(True, GATEWAY),
    "engine.adapters.overHttp": Change(True, GATEWAY),
    "engine.speculative.kind": Change("Auto", GATEWAY),
    "engine.speculative.maxTokens": Change(4, GATEWAY),
    "engine.speculative.draft.ranks": Change(
        "All", GATEWAY, {"engine.speculative": {"kind": "Draft", "draft": {"uri": "pvc://models/one"}}},
    ),
    "engine.speculative.draft.uri": Change(
        "pvc://models/two", RANKS, {"engine.speculative": {"kind": "Draft", "draft": {"uri": "pvc://models/one"}}},
        shows='"subPath": "two"',
    ),
    # --- gateway
    "gateway.http.toolCallFormat": Change("Hermes", GATEWAY),
    "gateway.http.strictFields": Change(True, GATEWAY),
    "gateway.http.corsOrigins": Change(["https://chat.example"], GATEWAY),
    "gateway.http.page": Change(False, GATEWAY),
    "gateway.service.type": Change(
        "NodePort", NOTHING, {"gateway.auth": {"mode": "None"}},
        more={**_CLIENT_SERVICE, "NetworkPolicy/NAME-gateway": "changed"},
    ),
    "gateway.service.port": Change(8443, NOTHING, more=_CLIENT_SERVICE),
    "gateway.service.httpPort": Change(8080, NOTHING, more=_CLIENT_SERVICE),
    "gateway.service.annotations": Change({"example.com/balancer": "internal"}, NOTHING, more=_CLIENT_SERVICE),
    "gateway.maxQueuedRequests": Change(5, GATEWAY),
    "gateway.tlsSecretName": Change("front-door", REFUSED),
    "gateway.authTokenSecretRef.name": Change("one", REFUSED),
    "gateway.authTokenSecretRef.key": Change(
        {"name": "one", "key": "bearer"}, REFUSED, at="gateway.authTokenSecretRef"
    ),
    "gateway.tls.secretName": Change(
        "two", GATEWAY, {"gateway.tls": {"secretName": "one"}}, shows='"secretName": "two"'
    ),
    "gateway.tls.clientCASecretName": Change(
        "two", GATEWAY, {"gateway.tls": {"secretName": "one"}}, shows='"secretName": "two"'
    ),
    "gateway.tls.dnsNames": Change(["a.example"], GATEWAY, {"gateway.tls": {"secretName": "one"}}),
    "gateway.auth.mode": Change({"mode": "None"}, NOTHING, at="gateway.auth"),
    "gateway.auth.keysSecretRef.name": Change(
        "two", GATEWAY, {"gateway.auth": {"keysSecretRef": {"name": "one"}}}, shows='"secretName": "two"'
    ),
    "gateway.auth.keysSecretRef.key": Change(
        "b.yaml", GATEWAY, {"gateway.auth": {"keysSecretRef": {"name": "one"}}}, shows='"key": "b.yaml"'
    ),
    "gateway.resources.cpuMillis": Change(2500, GATEWAY, shows='"cpu": "2500m"'),
    "gateway.resources.memory": Change("5Gi", GATEWAY, shows='"memory": "5Gi"'),
    "gateway.env": Change({"HTTPS_PROXY": "http://p"}, GATEWAY, at="gateway.env", shows='"value": "http://p"'),
    "gateway.volumes.name": Change(
        "other", GATEWAY, _GATEWAY_FILES, at="gateway.volumes.0.name", shows='"user-other"'
    ),
    "gateway.volumes.mountPath": Change(
        "/etc/ssl/other", GATEWAY, _GATEWAY_FILES, at="gateway.volumes.0.mountPath",
        shows='"mountPath": "/etc/ssl/other"',
    ),
    "gateway.volumes.secretName": Change(
        "two", GATEWAY, _GATEWAY_FILES, at="gateway.volumes.0.secretName", shows='"secretName": "two"'
    ),
    "gateway.volumes.configMapName": Change(
        [{**_FILES, "configMapName": "two"}], GATEWAY, at="gateway.volumes", shows='"user-ca"'
    ),
    "gateway.volumes.claimName": Change(
        [{**_FILES, "claimName": "two"}], GATEWAY, at="gateway.volumes", shows='"user-ca"'
    ),
    "gateway.podTemplate": Change(
        {"spec": {"dnsPolicy": "Default"}}, GATEWAY, at="gateway.podTemplate", shows='"dnsPolicy": "Default"'
    ),
    "gateway.drainTimeoutSeconds": Change(100, GATEWAY, shows='"terminationGracePeriodSeconds": 130'),
    # --- recovery
    "recovery.rendezvousTimeoutSeconds": Change(30, GATEWAY),
    "recovery.startupTimeoutSeconds": Change(60, RANKS),
    "recovery.stepTimeoutSeconds": Change(10, GATEWAY),
    "recovery.maxRestarts": Change(9, NOTHING),
    "recovery.windowSeconds": Change(120, NOTHING),
    "recovery.nodeLostTimeoutSeconds": Change(20, NOTHING),
    # --- scheduling
    "scheduling.schedulerName": Change("numa-aware", RANKS, shows='"schedulerName": "numa-aware"'),
    "scheduling.priorityClassName": Change("urgent", RANKS, shows='"priorityClassName": "urgent"'),
    "scheduling.nodeSelector": Change({"zone": "a"}, RANKS, shows='"zone": "a"'),
    **{f"scheduling.tolerations.{k}": v for k, v in _tolerations("scheduling", RANKS).items()},
    "scheduling.topology.key": Change(
        "rack", RANKS, {"scheduling.topology.key": "zone"}, shows='"topologyKey": "rack"'
    ),
    "scheduling.topology.policy": Change(
        "Required", RANKS, {"scheduling.topology.key": "zone"}, shows="requiredDuringSchedulingIgnoredDuringExecution"
    ),
    "scheduling.replicaSpread.key": Change(
        "rack", RANKS, {"scheduling.replicaSpread.key": "zone"}, shows='"topologyKey": "rack"'
    ),
    "scheduling.replicaSpread.policy": Change(
        "Required", RANKS, {"scheduling.replicaSpread.key": "zone"},
        shows="requiredDuringSchedulingIgnoredDuringExecution",
    ),
    "scheduling.gang.scheduler": Change(
        "Volcano", RANKS, needs="scheduling.volcano.sh/v1beta1/PodGroup", more={"PodGroup/NAME": "made"},
        shows='"schedulerName": "volcano"',
    ),
    "scheduling.gang.queue": Change("large", RANKS, _KUEUE, shows='"kueue.x-k8s.io/queue-name": "large"'),
    # --- images
    "images.gpuWorker": Change("example.com/gpu:2", RANKS, _GPU, shows='"image": "example.com/gpu:2"'),
    "images.cpuWorker": Change("example.com/cpu:2", RANKS, shows='"image": "example.com/cpu:2"'),
    "images.gateway": Change("example.com/gateway:2", GATEWAY, shows='"image": "example.com/gateway:2"'),
    "images.router": Change("example.com/router:2", NOTHING, _ROUTED, more=_ROUTER),
    "images.pullPolicy": Change("Always", RANKS, shows='"imagePullPolicy": "Always"'),
    "images.pullSecrets": Change(["registry"], RANKS, shows='"imagePullSecrets": [{"name": "registry"}]'),
    # --- what surrounds the pods
    "podMetadata.labels": Change({"team": "blue"}, RANKS, shows='"team": "blue"'),
    "podMetadata.annotations": Change({"example.com/owner": "blue"}, RANKS, shows='"example.com/owner": "blue"'),
    "networkPolicy.enabled": Change(
        False, NOTHING, more={"NetworkPolicy/NAME-ranks": "gone", "NetworkPolicy/NAME-gateway": "gone"}
    ),
    "networkPolicy.clientsFrom": Change(
        "All", NOTHING, {"gateway.auth": {"mode": "None"}}, more={"NetworkPolicy/NAME-gateway": "changed"}
    ),
    "networkPolicy.metricsFrom": Change(["monitoring"], NOTHING, more=_POLICIES),
    "networkPolicy.allowModelEgress": Change(False, NOTHING, more=_POLICIES),
    "disruptionBudget.enabled": Change(True, NOTHING, more={"PodDisruptionBudget/NAME-ranks": "made"}),
    "monitoring.podMonitor": Change(False, NOTHING, more={"PodMonitor/NAME": "gone"}),
    "monitoring.intervalSeconds": Change(5, NOTHING, more=_MONITOR),
    "monitoring.labels": Change({"release": "prometheus"}, NOTHING, more=_MONITOR),
    "monitoring.keySecretRef.name": Change(
        "two", NOTHING, {"monitoring.keySecretRef": {"name": "one"}}, more=_MONITOR
    ),
    "monitoring.keySecretRef.key": Change(
        "key", NOTHING, {"monitoring.keySecretRef": {"name": "one"}}, more=_MONITOR
    ),
    "suspend": Change(True, ENDS),
    "replicas": Change(0, ENDS),
    "rollout.strategy": Change("Recreate", NOTHING),
    "rollout.maxUnavailable": Change(2, NOTHING),
    "rollout.maxSurge": Change(1, NOTHING),
    "idle.sleepAfterSeconds": Change(300, GATEWAY),
    "idle.level": Change(2, GATEWAY),
    "idle.responder.enabled": Change(True, NOTHING),
    "idle.responder.retryAfterSeconds": Change(60, NOTHING),
    # --- the router
    "router.type": Change("SMG", GATEWAY, more=_ROUTER_COMES),
    "router.policy": Change("LeastLoad", NOTHING, _ROUTED, more=_ROUTER),
    "router.cacheIsolation": Change("Shared", GATEWAY, _ROUTED),
    "router.port": Change(443, NOTHING, _ROUTED, more={"Service/NAME-router": "changed"}),
    "router.replicas": Change(3, NOTHING, _ROUTED, more=_ROUTER),
    "router.resources.cpuMillis": Change(500, NOTHING, _ROUTED, more=_ROUTER),
    "router.resources.memory": Change("1Gi", NOTHING, _ROUTED, more=_ROUTER),
    "router.keysSecretRef.name": Change("two", NOTHING, _ROUTER_KEYS, more=_ROUTER),
    "router.keysSecretRef.key": Change("other", NOTHING, _ROUTER_KEYS, more=_ROUTER),
    "router.tlsSecretName": Change("router-tls", NOTHING, _ROUTED, more=_ROUTER),
    "router.endpointPickerRef.name": Change("other", NOTHING, _POOLED, more=_POOL),
    "router.endpointPickerRef.port": Change(9003, NOTHING, _POOLED, more=_POOL),
    "router.endpointPickerRef.failureMode": Change("FailOpen", NOTHING, _POOLED, more=_POOL),
}  # fmt: skip

BACK_TO_DEFAULT: Final[Mapping[str, Change]] = {
    "images.cpuWorker": Change(ABSENT, RANKS, {"images.cpuWorker": "example.com/cpu:2"}),
    "engine.maxNumSeqs": Change(ABSENT, GATEWAY, {"engine.maxNumSeqs": 8}),
    "disruptionBudget.enabled": Change(
        ABSENT, NOTHING, {"disruptionBudget.enabled": True}, more={"PodDisruptionBudget/NAME-ranks": "gone"}
    ),
    "engine.blockSize": Change(16, NOTHING),
    "gateway.service.annotations": Change(
        {"example.com/a": "1"},
        NOTHING,
        {"gateway.service.annotations": {"example.com/a": "1", "example.com/b": "2"}},
        more=_CLIENT_SERVICE,
    ),
}
"""Fields that are left out again, a map that loses a key, and a field that is set to what it is by default."""
