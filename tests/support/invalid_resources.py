"""HeteroInference resources that must be refused, and such that must not: what every judge of them is tested with.

Judges are the types (`hetero validate`, the operator), the CRD's schema, its CEL rules and a real API server. A case
tells who is the first to catch it: "schema" (any API server), "rule" and "transition" (API servers that know CEL; on
older ones the operator) or "operator" (no API server can, since a schema cannot bound a map's keys).
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import yaml

Document = dict[str, Any]
CaughtBy = Literal["schema", "rule", "transition", "operator"]

EXAMPLES: Final = Path(__file__).resolve().parents[2] / "examples"
ABSENT: Final = object()
"""As a value: leave the field out."""

BASE: Final[Document] = {
    "apiVersion": "heteroinference.io/v1alpha1",
    "kind": "HeteroInference",
    "metadata": {"name": "demo"},
    "spec": {
        "model": {"uri": "hf://org/model"},
        "pools": [
            {"name": "gpu", "type": "GPU", "ranks": 2, "ranksPerPod": 2},
            {"name": "cpu", "type": "CPU", "ranks": 2, "cpu": {"coresPerRank": 4, "memoryPerRank": "16Gi"}},
        ],
    },
}

_INFERENCE_POOL: Final = {"type": "InferencePool", "endpointPickerRef": {"name": "picker"}}


@dataclass(frozen=True, slots=True)
class InvalidResource:
    """`path` is the field at fault and `message` part of what is said about it, by `hetero validate`."""

    name: str
    document: Document
    path: str
    message: str
    caught_by: CaughtBy
    old: Document | None = None
    """What was stored before, for transitions."""


@dataclass(frozen=True, slots=True)
class ValidResource:
    """A resource that all judges accept."""

    name: str
    document: Document
    old: Document | None = None


def changed(changes: dict[str, Any], *, base: Document = BASE) -> Document:
    """A copy of `base` with fields set; a path is parts with slashes between, and numbers are places in lists."""
    document = copy.deepcopy(base)
    for path, value in changes.items():
        *parents, last = path.split("/")
        node: Any = document
        for part in parents:
            node = node[int(part)] if isinstance(node, list) else node.setdefault(part, {})
        if value is ABSENT:
            del node[last]
        else:
            node[last] = value
    return document


def _pool(name: str, **fields: Any) -> Document:
    return {"name": name, "type": "CPU", "ranks": 1} | fields


def _refused(caught_by: CaughtBy, name: str, changes: dict[str, Any], path: str, message: str) -> InvalidResource:
    return InvalidResource(name, changed(changes), path, message, caught_by)


def _by_schema() -> list[InvalidResource]:
    cases: list[tuple[str, dict[str, Any], str, str]] = [
        ("no-uri", {"spec/model": {"dtype": "auto"}}, "spec.model.uri", "is required"),
        ("no-pools", {"spec/pools": ABSENT}, "spec.pools", "is required"),
        ("empty-pools", {"spec/pools": []}, "spec.pools", "must not be empty"),
        (
            "seventeen-pools",
            {"spec/pools": [_pool(f"p{i}") for i in range(17)]},
            "spec.pools",
            "must have at most 16 entries",
        ),
        ("no-ranks", {"spec/pools/0/ranks": 0}, "spec.pools[0].ranks", "must be at least 1, not 0"),
        ("ranks-as-text", {"spec/pools/0/ranks": "2"}, "spec.pools[0].ranks", "must be a whole number, not '2'"),
        (
            "half-a-core",
            {"spec/pools/1/cpu/coresPerRank": 1.5},
            "spec.pools[1].cpu.coresPerRank",
            "must be a whole number, not 1.5",
        ),
        (
            "too-many-cores",
            {"spec/pools/1/cpu/coresPerRank": 2000},
            "spec.pools[1].cpu.coresPerRank",
            "must be at most 1024, not 2000",
        ),
        ("unknown-pool-type", {"spec/pools/0/type": "TPU"}, "spec.pools[0].type", "must be one of GPU, CPU, not 'TPU'"),
        ("pool-name-twice", {"spec/pools/1/name": "gpu"}, "spec.pools[1].name", "'gpu' is used by another pool"),
        ("pool-name-in-capitals", {"spec/pools/1/name": "CPU"}, "spec.pools[1].name", "must be of lower-case letters"),
        (
            "pool-name-too-long",
            {"spec/pools/1/name": "twelve-chars"},
            "spec.pools[1].name",
            "must have at most 11 characters, not 12",
        ),
        (
            "no-such-unit",
            {"spec/pools/1/cpu/memoryPerRank": "16GiB"},
            "spec.pools[1].cpu.memoryPerRank",
            "must be a quantity such as 16Gi, not '16GiB'",
        ),
        (
            "memory-as-number",
            {"spec/pools/1/cpu/memoryPerRank": 16},
            "spec.pools[1].cpu.memoryPerRank",
            "must be a quantity such as 16Gi, not 16",
        ),
        (
            "no-memory-at-all",
            {"spec/pools/1/cpu/memoryPerRank": "0Gi"},
            "spec.pools[1].cpu.memoryPerRank",
            "must be a quantity such as 16Gi",
        ),
        (
            "unknown-dtype",
            {"spec/model/dtype": "fp8"},
            "spec.model.dtype",
            "must be one of auto, float32, bfloat16, float16, not 'fp8'",
        ),
        ("too-many-replicas", {"spec/replicas": 33}, "spec.replicas", "must be at most 32, not 33"),
        ("suspend-as-text", {"spec/suspend": "maybe"}, "spec.suspend", "must be true or false"),
        ("engine-as-list", {"spec/engine": [1]}, "spec.engine", "must be a mapping"),
        ("name-with-a-dot", {"metadata/name": "my.model"}, "metadata.name", "must be of lower-case letters"),
        ("name-begins-with-digit", {"metadata/name": "3ranks"}, "metadata.name", "begin with a letter"),
        ("name-too-long", {"metadata/name": "n" * 41}, "metadata.name", "must have at most 40 characters, not 41"),
        (
            "unknown-scheme",
            {"spec/model/uri": "s3://bucket/model"},
            "spec.model.uri",
            "must start with one of hf://, pvc://, oci://, file://",
        ),
        (
            "no-gpu-memory",
            {"spec/engine/gpuMemoryUtilization": 0},
            "spec.engine.gpuMemoryUtilization",
            "must be more than 0",
        ),
        (
            "secret-name-with-blank",
            {"spec/gateway/tlsSecretName": "My Secret"},
            "spec.gateway.tlsSecretName",
            "must be a name of an object",
        ),
        (
            "unknown-service-type",
            {"spec/gateway/service/type": "Ingress"},
            "spec.gateway.service.type",
            "must be one of ClusterIP, NodePort, LoadBalancer, not 'Ingress'",
        ),
        ("port-zero", {"spec/gateway/service/port": 0}, "spec.gateway.service.port", "must be at least 1"),
        ("image-with-blank", {"spec/images/gateway": "my image"}, "spec.images.gateway", "must be an image such as"),
        (
            "relative-host-path",
            {"spec/model/cache/hostPath": "models"},
            "spec.model.cache.hostPath",
            "must be the absolute path",
        ),
        (
            "relative-exchange-folder",
            {"spec/exchange/hostPath": "dev/shm"},
            "spec.exchange.hostPath",
            "must be the absolute path",
        ),
        (
            "unknown-exchange",
            {"spec/exchange/kind": "RDMA"},
            "spec.exchange.kind",
            "must be one of Auto, SharedMemory, Tcp, Gloo, not 'RDMA'",
        ),
        ("no-devices", {"spec/pools/0/gpu/devices": []}, "spec.pools[0].gpu.devices", "must not be empty"),
        (
            "negative-device",
            {"spec/pools/0/gpu/devices": [0, -1]},
            "spec.pools[0].gpu.devices[1]",
            "must be at least 0, not -1",
        ),
        (
            "empty-prompts",
            {"spec/placement/workload/promptTokens": 0},
            "spec.placement.workload.promptTokens",
            "must be at least 1, not 0",
        ),
        (
            "node-selector-value",
            {"spec/scheduling/nodeSelector": {"zone": "no good"}},
            "spec.scheduling.nodeSelector.zone",
            "must be a label value",
        ),
        (
            "resource-without-domain",
            {"spec/pools/0/gpu/resourceName": "gpu"},
            "spec.pools[0].gpu.resourceName",
            "must be an extended resource such as nvidia.com/gpu",
        ),
        (
            "revision-with-dots",
            {"spec/model/revision": "main/../x"},
            "spec.model.revision",
            "must be a branch, a tag or a commit",
        ),
        (
            "unknown-taint-effect",
            {"spec/scheduling/tolerations": [{"operator": "Exists", "effect": "Never"}]},
            "spec.scheduling.tolerations[0].effect",
            "must be one of NoSchedule, PreferNoSchedule, NoExecute",
        ),
    ]
    return [_refused("schema", *case) for case in cases]


def _by_rules_of_the_model() -> list[InvalidResource]:
    only_hub = "is for hf:// models only; leave it out"
    cases: list[tuple[str, dict[str, Any], str, str]] = [
        (
            "hub-name-without-org",
            {"spec/model/uri": "hf://model"},
            "spec.model.uri",
            "must be written as hf://ORG/NAME or hf://ORG/NAME:VARIANT",
        ),
        (
            "hub-name-with-an-empty-variant",
            {"spec/model/uri": "hf://org/name:"},
            "spec.model.uri",
            "must be written as hf://ORG/NAME or hf://ORG/NAME:VARIANT",
        ),
        (
            "claim-in-capitals",
            {"spec/model/uri": "pvc://Models/x"},
            "spec.model.uri",
            "must be written as pvc://CLAIM or pvc://CLAIM/PATH",
        ),
        (
            "image-uri-with-blank",
            {"spec/model/uri": "oci://registry/my image"},
            "spec.model.uri",
            "must be written as oci://IMAGE or oci://IMAGE#/PATH",
        ),
        (
            "relative-file",
            {"spec/model/uri": "file://models/x"},
            "spec.model.uri",
            "must be written as file:///PATH, an absolute path on the node",
        ),
        (
            "uri-leads-upwards",
            {"spec/model/uri": "file:///models/../etc"},
            "spec.model.uri",
            "must not hold '..' in its path",
        ),
        (
            "revision-of-a-file",
            {"spec/model": {"uri": "file:///models/x", "revision": "main"}},
            "spec.model.revision",
            only_hub,
        ),
        (
            "token-for-a-claim",
            {"spec/model": {"uri": "pvc://models", "tokenSecretRef": {"name": "hub"}}},
            "spec.model.tokenSecretRef",
            only_hub,
        ),
        (
            "cache-for-an-image",
            {"spec/model": {"uri": "oci://registry/model:1", "cache": {"claimName": "cache"}}},
            "spec.model.cache",
            only_hub,
        ),
        (
            "groups-of-int8",
            {"spec/model": {"uri": "hf://org/model", "quantization": "int8", "quantizationGroupSize": 64}},
            "spec.model.quantizationGroupSize",
            "is for quantization: int4 only; leave it out",
        ),
        (
            "groups-of-48",
            {"spec/model": {"uri": "hf://org/model", "quantization": "int4", "quantizationGroupSize": 48}},
            "spec.model.quantizationGroupSize",
            "must be one of 32, 64, 128",
        ),
        (
            "two-caches",
            {"spec/model/cache": {"claimName": "cache", "hostPath": "/cache"}},
            "spec.model.cache.claimName",
            "set claimName or hostPath, not both",
        ),
    ]
    return [_refused("rule", *case) for case in cases]


def _by_rules_of_pools() -> list[InvalidResource]:
    cases: list[tuple[str, dict[str, Any], str, str]] = [
        (
            "gpu-settings-of-a-cpu-pool",
            {"spec/pools/1/gpu": {}},
            "spec.pools[1].gpu",
            "is for pools of type GPU; this pool's type is CPU",
        ),
        (
            "cpu-settings-of-a-gpu-pool",
            {"spec/pools/0/cpu": {}},
            "spec.pools[0].cpu",
            "is for pools of type CPU; this pool's type is GPU",
        ),
        (
            "too-few-devices",
            {"spec/pools/0/gpu": {"devices": [2]}},
            "spec.pools[0].gpu.devices",
            "must hold one device for each rank of a pod (ranksPerPod)",
        ),
        (
            "device-twice",
            {"spec/pools/0/gpu": {"devices": [1, 1]}},
            "spec.pools[0].gpu.devices",
            "must name every device once",
        ),
        ("uneven-pods", {"spec/pools/0/ranks": 3}, "spec.pools[0].ranks", "must be a multiple of ranksPerPod"),
        ("65-ranks", {"spec/pools/1/ranks": 63}, "spec.pools", "must hold at most 64 ranks together"),
        (
            "required-numa-without-memory",
            {"spec/pools/1/cpu": {"numa": {"policy": "Required"}}},
            "spec.pools[1].cpu.memoryPerRank",
            "is required when numa.policy is Required",
        ),
        (
            "claim-without-numa",
            {"spec/pools/1/cpu/numa": {"policy": "None", "claim": {"deviceClassName": "dra.cpu"}}},
            "spec.pools[1].cpu.numa.claim",
            "takes cores that policy None would not bind ranks to",
        ),
        (
            "half-a-huge-page",
            {"spec/pools/1/cpu/hugepages": {"size": "1Gi", "perRank": "1536Mi"}},
            "spec.pools[1].cpu.hugepages.perRank",
            "must be a multiple of size",
        ),
    ]
    return [_refused("rule", *case) for case in cases]


def _by_rules_of_one_pod() -> list[InvalidResource]:
    one_pod: dict[str, Any] = {"spec/topology": {"colocate": "Pod"}, "spec/pools/0/gpu": {"memoryPerRank": "8Gi"}}
    taint = {"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}
    cpu = {"coresPerRank": 4, "memoryPerRank": "16Gi"}
    pages = {size: {**cpu, "hugepages": {"size": size, "perRank": "4Gi"}} for size in ("2Mi", "1Gi")}
    memory, alike = "must each set gpu.memoryPerRank or cpu.memoryPerRank", "must have the same scheduling"
    cases: list[tuple[str, dict[str, Any], str, str]] = [
        (
            "one-pod-and-a-folder-of-the-node",
            {"spec/exchange": {"hostPath": "/dev/shm"}},
            "spec.exchange.hostPath",
            "must be left out: all ranks share the /dev/shm of their pod",
        ),
        ("one-pod-of-gpu-ranks-without-memory", {"spec/pools/0/gpu": {"coresPerRank": 4}}, "spec.pools", memory),
        ("one-pod-of-cpu-ranks-without-memory", {"spec/pools/1/cpu": {"coresPerRank": 4}}, "spec.pools", memory),
        ("one-pod-of-a-pool-without-settings", {"spec/pools/0/gpu": None}, "spec.pools", memory),
        ("one-pod-on-two-nodes", {"spec/pools/1/scheduling": {"nodeSelector": {"disk": "fast"}}}, "spec.pools", alike),
        (
            "one-pod-of-two-nodes-by-values",
            {
                "spec/pools/0/scheduling": {"nodeSelector": {"zone": "a"}},
                "spec/pools/1/scheduling": {"nodeSelector": {"zone": "b"}},
            },
            "spec.pools",
            alike,
        ),
        ("one-pod-of-two-tolerations", {"spec/pools/0/scheduling": {"tolerations": [taint]}}, "spec.pools", alike),
        (
            "one-pod-of-two-runtime-classes",
            {
                "spec/pools/0/gpu": {"memoryPerRank": "8Gi", "runtimeClassName": "nvidia"},
                "spec/pools/1/type": "GPU",
                "spec/pools/1/cpu": None,
                "spec/pools/1/gpu": {"memoryPerRank": "8Gi"},
            },
            "spec.pools",
            "must have one gpu.runtimeClassName",
        ),
        (
            "one-pod-of-two-page-sizes",
            {
                "spec/pools/0/gpu": None,
                "spec/pools/0/type": "CPU",
                "spec/pools/0/cpu": pages["2Mi"],
                "spec/pools/1/cpu": pages["1Gi"],
            },
            "spec.pools",
            "must have one cpu.hugepages.size",
        ),
    ]
    return [_refused("rule", name, {**one_pod, **changes}, path, message) for name, changes, path, message in cases]


def _by_rules_of_the_rest() -> list[InvalidResource]:
    taint = "spec/pools/0/scheduling/tolerations"
    cases: list[tuple[str, dict[str, Any], str, str]] = [
        (
            "adapted-experts-that-come-late",
            {"spec/engine": {"expertDeferral": 1, "adapters": {"experts": True}}},
            "spec.engine.adapters.experts",
            "does not go with expertDeferral: set one of them to its default",
        ),
        (
            "drafts-of-nothing",
            {"spec/engine/speculative": {"kind": "Draft"}},
            "spec.engine.speculative.draft",
            "is what kind Draft proposes with; give it the uri of a smaller model of the same tokenizer",
        ),
        (
            "draft-model-of-n-grams",
            {"spec/engine/speculative": {"kind": "NGram", "draft": {"uri": "hf://org/small"}}},
            "spec.engine.speculative.draft",
            "is for the kinds Draft and Auto; leave it out",
        ),
        (
            "drafts-on-gpus-that-are-not-there",
            {
                "spec/pools": [_pool("cpu")],
                "spec/engine/speculative": {"kind": "Draft", "draft": {"uri": "hf://org/small", "ranks": "GPU"}},
            },
            "spec.engine.speculative.draft.ranks",
            "names a kind of ranks that no pool has; take Auto, All or the other kind",
        ),
        (
            "relative-draft",
            {"spec/engine/speculative": {"kind": "Auto", "draft": {"uri": "file://small"}}},
            "spec.engine.speculative.draft.uri",
            "must be written as file:///PATH, an absolute path on the node",
        ),
        *(
            (
                f"adapter-{name}",
                {"spec/engine/adapters": {"maxLoaded": 1, "roots": ["/a"], "load": [{"name": "x", **where}]}},
                "spec.engine.adapters.load[0].uri",
                message,
            )
            for name, where, message in (
                ("of-nowhere", {}, "set uri or directory, and not both"),
                ("of-two-places", {"uri": "hf://org/x", "directory": "/a/x"}, "set uri or directory, and not both"),
                ("relative", {"uri": "file://x"}, "must be written as file:///PATH, an absolute path on the node"),
                ("in-gguf", {"uri": "pvc://claim/x.gguf"}, "must name a folder of safetensors files"),
                ("variant", {"uri": "hf://org/x:Q4_K_M"}, "must name a folder of safetensors files"),
            )
        ),
        (
            "too-few-shares",
            {"spec/placement/shares": {"mlp": [8, 8, 1]}},
            "spec.placement.shares.mlp",
            "must hold one weight for each rank of all pools",
        ),
        (
            "shares-of-nothing",
            {"spec/placement/shares": {"attention": [0, 0, 0, 0]}},
            "spec.placement.shares.attention",
            "must give something to at least one rank",
        ),
        (
            "gpu-only-without-gpus",
            {"spec/pools": [_pool("cpu")], "spec/placement/mode": "GpuOnly"},
            "spec.placement.mode",
            "GpuOnly needs a pool of type GPU",
        ),
        (
            "router-of-tenants-that-share-no-cache",
            {"spec/router": {"type": "SMG", "keysSecretRef": {"name": "tenants"}}},
            "spec.router.cacheIsolation",
            "must be Shared where keys tell tenants apart",
        ),
        (
            "router-before-gateways-with-keys",
            {"spec/router": {"type": "SMG"}, "spec/gateway/auth": {"keysSecretRef": {"name": "clients"}}},
            "spec.router.cacheIsolation",
            "must be Shared where keys tell tenants apart",
        ),
        (
            "router-without-a-network-policy",
            {"spec/router": {"type": "SMG"}, "spec/networkPolicy": {"enabled": False}},
            "spec.router.type",
            "needs networkPolicy.enabled, because gateways ask a router for nothing",
        ),
        (
            "keys-of-no-router",
            {"spec/router": {"keysSecretRef": {"name": "tenants"}}},
            "spec.router.keysSecretRef",
            "is for type SMG; leave it out",
        ),
        (
            "certificate-of-no-router",
            {"spec/router": {"tlsSecretName": "front"}},
            "spec.router.tlsSecretName",
            "is for type SMG; leave it out",
        ),
        (
            "keys-of-an-inference-pool",
            {"spec/router": {**_INFERENCE_POOL, "keysSecretRef": {"name": "tenants"}}},
            "spec.router.keysSecretRef",
            "is for type SMG; leave it out",
        ),
        (
            "inference-pool-without-a-picker",
            {"spec/router": {"type": "InferencePool"}},
            "spec.router.endpointPickerRef",
            "is required where type is InferencePool",
        ),
        (
            "picker-of-a-router",
            {"spec/router": {**_INFERENCE_POOL, "type": "SMG"}},
            "spec.router.endpointPickerRef",
            "is for type InferencePool; leave it out",
        ),
        (
            "inference-pool-with-certificates",
            {"spec/router": _INFERENCE_POOL, "spec/gateway/tls": {"secretName": "front"}},
            "spec.router.type",
            "InferencePool has no TLS to its pods",
        ),
        (
            "deferral-without-gpus",
            {"spec/pools": [_pool("cpu")], "spec/engine/expertDeferral": 1},
            "spec.engine.expertDeferral",
            "defers what CPU ranks compute for GPU ranks: it needs pools of both types",
        ),
        (
            "deferral-on-gpus-only",
            {"spec/placement/mode": "GpuOnly", "spec/engine/expertDeferral": 1},
            "spec.engine.expertDeferral",
            "defers what CPU ranks compute for GPU ranks: it needs pools of both types",
        ),
        (
            "streaming-without-gpus",
            {"spec/pools": [_pool("cpu")], "spec/engine/expertStreaming": 256},
            "spec.engine.expertStreaming",
            "brings experts of CPU ranks to a GPU rank: it needs pools of both types",
        ),
        (
            "streaming-in-batch-invariant-mode",
            {"spec/engine": {"expertStreaming": 256, "batchInvariant": True}},
            "spec.engine.expertStreaming",
            "brings experts of CPU ranks to a GPU rank: it needs pools of both types",
        ),
        (
            "kueue-without-queue",
            {"spec/scheduling/gang": {"scheduler": "Kueue"}},
            "spec.scheduling.gang.queue",
            "is required when scheduler is Kueue",
        ),
        (
            "queue-of-nobody",
            {"spec/scheduling/gang": {"queue": "team"}},
            "spec.scheduling.gang.queue",
            "is for the schedulers Kueue and Volcano",
        ),
        (
            "exists-with-value",
            {taint: [{"key": "gpu", "operator": "Exists", "value": "yes"}]},
            "spec.pools[0].scheduling.tolerations[0].value",
            "is of no use with operator Exists",
        ),
        (
            "equal-without-key",
            {taint: [{"value": "yes"}]},
            "spec.pools[0].scheduling.tolerations[0].operator",
            "must be Exists where key is left out",
        ),
        (
            "seconds-of-no-eviction",
            {taint: [{"key": "gpu", "operator": "Exists", "tolerationSeconds": 60}]},
            "spec.pools[0].scheduling.tolerations[0].effect",
            "must be NoExecute where tolerationSeconds is set",
        ),
        (
            "label-of-the-operator",
            {"spec/podMetadata/labels": {"heteroinference.io/role": "mine"}},
            "spec.podMetadata.labels",
            "must hold no key of heteroinference.io/ or app.kubernetes.io/",
        ),
        (
            "variable-of-the-operator",
            {"spec/pools/0/env": {"HETERO_HOME": "/"}},
            "spec.pools[0].env",
            "must hold none of HETERO_*, HOME, POD_IP, POD_NAME",
        ),
        (
            "variable-in-the-gateway",
            {"spec/gateway/env": {"POD_NAME": "mine"}},
            "spec.gateway.env",
            "must hold none of HETERO_*, HOME, POD_IP, POD_NAME",
        ),
        (
            "volume-of-nothing",
            {"spec/pools/0/volumes": [{"name": "ca", "mountPath": "/etc/ssl/own"}]},
            "spec.pools[0].volumes[0].name",
            "needs one of secretName, configMapName and claimName",
        ),
        (
            "volume-over-the-operators-files",
            {"spec/gateway/volumes": [{"name": "ca", "mountPath": "/etc/hetero/ca", "secretName": "ca"}]},
            "spec.gateway.volumes[0].mountPath",
            "must not be in /dev/shm, /etc/hetero, /tmp, /var/lib/hetero",
        ),
        (
            "a-rollout-that-cannot-begin",
            {"spec/rollout": {"maxUnavailable": 0}},
            "spec.rollout.maxUnavailable",
            "must be more than 0 where maxSurge is 0",
        ),
        (
            "annotation-of-the-operator",
            {"spec/gateway/service/annotations": {"heteroinference.io/applied": "x"}},
            "spec.gateway.service.annotations",
            "must hold no key of heteroinference.io/ or app.kubernetes.io/",
        ),
        (
            "folder-for-the-network",
            {"spec/exchange": {"kind": "Gloo", "hostPath": "/dev/shm"}},
            "spec.exchange.hostPath",
            "is of no use with kind Gloo; leave it out",
        ),
        (
            "folder-for-tcp",
            {"spec/exchange": {"kind": "Tcp", "hostPath": "/dev/shm"}},
            "spec.exchange.hostPath",
            "is of no use with kind Tcp; leave it out",
        ),
        (
            "one-port-for-both-doors",
            {"spec/gateway/service/port": 8000},
            "spec.gateway.service.httpPort",
            "must differ from port",
        ),
        (
            "keys-mode-without-keys",
            {"spec/gateway/auth": {"mode": "Keys"}},
            "spec.gateway.auth.keysSecretRef",
            "is required where mode is Keys",
        ),
        (
            "keys-nobody-asks-for",
            {"spec/gateway/auth": {"mode": "None", "keysSecretRef": {"name": "clients"}}},
            "spec.gateway.auth.keysSecretRef",
            "is of no use with mode None",
        ),
    ]
    return [_refused("rule", *case) for case in cases]


def _by_the_operator() -> list[InvalidResource]:
    cases: list[tuple[str, dict[str, Any], str, str]] = [
        (
            "node-selector-key",
            {"spec/scheduling/nodeSelector": {"my zone": "a"}},
            "spec.scheduling.nodeSelector",
            "key must be a label key",
        ),
        (
            "pod-label-key",
            {"spec/podMetadata/labels": {"/team": "a"}},
            "spec.podMetadata.labels",
            "key must be a label key",
        ),
    ]
    return [_refused("operator", *case) for case in cases]


def _by_transitions() -> list[InvalidResource]:
    no_pool_change = "cannot be added, removed or renamed; make a new resource"
    pools = BASE["spec"]["pools"]
    cases: list[tuple[str, dict[str, Any], str, str]] = [
        ("pool-renamed", {"spec/pools/1/name": "host"}, "spec.pools", no_pool_change),
        ("pool-added", {"spec/pools": [*pools, _pool("more")]}, "spec.pools", no_pool_change),
        ("pool-removed", {"spec/pools": pools[:1]}, "spec.pools", no_pool_change),
        (
            "pool-of-another-type",
            {"spec/pools": [pools[0], _pool("cpu", type="GPU")]},
            "spec.pools[1].type",
            "cannot be changed; make a new resource",
        ),
    ]
    return [
        InvalidResource(name, changed(changes), path, message, "transition", old=copy.deepcopy(BASE))
        for name, changes, path, message in cases
    ]


INVALID: Final = (
    *_by_schema(),
    *_by_rules_of_the_model(),
    *_by_rules_of_pools(),
    *_by_rules_of_one_pod(),
    *_by_rules_of_the_rest(),
    *_by_the_operator(),
    *_by_transitions(),
)

_EVERYTHING: Final[Document] = {
    "apiVersion": "heteroinference.io/v1alpha1",
    "kind": "HeteroInference",
    "metadata": {"name": "everything"},
    "spec": {
        "model": {
            "uri": "hf://org/model:Q4_K_M", "revision": "refs/pr/1", "dtype": "bfloat16", "quantization": "int4",
            "quantizationGroupSize": 64, "maxModelLen": 4096, "tokenSecretRef": {"name": "hub", "key": "token"},
            "cache": {"hostPath": "/var/models"},
        },
        "pools": [
            {
                "name": "gpu", "type": "GPU", "ranks": 4, "ranksPerPod": 2, "sharedMemory": "2Gi",
                "gpu": {
                    "devices": [0, 6], "coresPerRank": 4, "memoryPerRank": "32Gi", "runtimeClassName": "nvidia",
                    "resourceName": "nvidia.com/gpu",
                },
                "scheduling": {
                    "nodeSelector": {"accelerator": "h100"},
                    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
                },
            },
            {
                "name": "cpu", "type": "CPU", "ranks": 2, "ranksPerPod": 1,
                "cpu": {
                    "coresPerRank": 32, "memoryPerRank": "128Gi", "hugepages": {"size": "1Gi", "perRank": "2048Mi"},
                    "numa": {"policy": "Required", "claim": {"deviceClassName": "dra.cpu"}},
                },
            },
        ],
        "topology": {"colocate": "None"},
        "placement": {
            "mode": "Tensor", "shares": {"attention": [1, 1, 1, 1, 0, 0], "mlp": [8, 8, 8, 8, 0.5, 1]},
            "workload": {"promptTokens": 4000, "outputTokens": 1, "concurrency": 64},
            "experts": "Whole", "rebalanceExperts": False,
        },
        "exchange": {"kind": "SharedMemory", "hostPath": "/dev/shm/hetero"},
        "engine": {
            "maxNumSeqs": 32, "maxNumBatchedTokens": 1024, "blockSize": 32, "gpuMemoryUtilization": 0.85,
            "kvCacheMemoryBytes": "1.5Gi", "enablePrefixCaching": False, "overlapScheduling": False,
            "enforceEager": True, "batchInvariant": True, "expertDeferral": 2, "expertStreaming": 0,
        },
        "gateway": {
            "service": {"type": "LoadBalancer", "port": 443, "annotations": {"example.com/class": "any text"}},
            "tls": {"secretName": "front-tls", "clientCASecretName": "ca", "dnsNames": ["a.example"]},
            "maxQueuedRequests": 10, "auth": {"keysSecretRef": {"name": "clients"}},
            "resources": {"cpuMillis": 2000, "memory": "4Gi"}, "drainTimeoutSeconds": 30,
        },
        "recovery": {
            "rendezvousTimeoutSeconds": 60, "startupTimeoutSeconds": 900, "stepTimeoutSeconds": 30, "maxRestarts": 3,
            "windowSeconds": 600, "nodeLostTimeoutSeconds": 60,
        },
        "scheduling": {
            "schedulerName": "topo-aware", "priorityClassName": "high", "nodeSelector": {"kubernetes.io/os": "linux"},
            "tolerations": [{"operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 30}],
            "topology": {"key": "topology.kubernetes.io/zone", "policy": "Required"},
            "gang": {"scheduler": "Kueue", "queue": "team-a"},
        },
        "images": {
            "gpuWorker": "registry.example:5000/hetero/gpu:1.0", "cpuWorker": "hetero-cpu",
            "gateway": "hetero/gateway:1", "pullPolicy": "Always", "pullSecrets": ["registry"],
        },
        "podMetadata": {"labels": {"team": "search"}, "annotations": {"example.com/note": "any text"}},
        "networkPolicy": {"enabled": False, "metricsFrom": ["monitoring"], "allowModelEgress": False},
        "disruptionBudget": {"enabled": True},
        "monitoring": {"podMonitor": False, "intervalSeconds": 15, "labels": {"release": "prometheus"}},
        "suspend": True,
        "replicas": 0,
        "rollout": {"strategy": "RollingUpdate", "maxUnavailable": 0, "maxSurge": 1},
        "idle": {
            "sleepAfterSeconds": 300, "level": 2, "responder": {"enabled": True, "retryAfterSeconds": 60},
        },
        "router": {
            "type": "None", "policy": "RoundRobin", "cacheIsolation": "Shared", "port": 30000,
            "resources": {"cpuMillis": 500, "memory": "1Gi"},
        },
    },
}  # fmt: skip


def _valid() -> list[ValidResource]:
    cases: dict[str, dict[str, Any]] = {
        "base": {},
        "one-cpu-rank": {"spec/pools": [_pool("cpu")]},
        "64-ranks": {"spec/pools/1/ranks": 62},
        "longest-names": {"metadata/name": "n" * 40, "spec/pools/1/name": "p" * 11},
        "claim": {"spec/model/uri": "pvc://models"},
        "folder-of-a-claim": {"spec/model/uri": "pvc://models/llm/qwen3-8b"},
        "image-by-digest": {"spec/model/uri": f"oci://registry.example:5000/team/model@sha256:{'0a' * 32}"},
        "folder-of-an-image": {"spec/model/uri": "oci://registry.example/team/model:1.0#/opt/model"},
        "folder-on-nodes": {"spec/model/uri": "file:///srv/models/My Model..2/"},
        "nulls-count-as-absent": {"spec/placement": None, "spec/pools/0/gpu": None, "spec/model/dtype": None},
        "volcano": {"spec/scheduling/gang": {"scheduler": "Volcano"}},
        "huge-pages-of-2Mi": {"spec/pools/1/cpu/hugepages": {"perRank": "66Mi"}},
        "no-numa": {"spec/pools/1/cpu": {"numa": {"policy": "None"}}},
        "devices-with-gaps": {
            "spec/pools/0/ranks": 8,
            "spec/pools/0/ranksPerPod": 4,
            "spec/pools/0/gpu": {"devices": [0, 2, 4, 6]},
        },
        "exchange-on-nodes": {"spec/exchange": {"hostPath": "/dev/shm"}},
        "router": {"spec/router": {"type": "SMG"}},
        "inference-pool": {"spec/router": _INFERENCE_POOL, "spec/networkPolicy": {"enabled": False}},
        "inference-pool-of-tenants": {
            "spec/router": {
                **_INFERENCE_POOL,
                "endpointPickerRef": {"name": "a", "port": 443, "failureMode": "FailOpen"},
            },
            "spec/gateway/auth": {"keysSecretRef": {"name": "clients"}},
        },
        "router-of-tenants": {
            "spec/router": {"type": "SMG", "keysSecretRef": {"name": "tenants"}, "cacheIsolation": "Shared"}
        },
        "router-of-tenants-without-a-prefix-cache": {
            "spec/router": {"type": "SMG", "keysSecretRef": {"name": "tenants"}},
            "spec/engine/enablePrefixCaching": False,
        },
        "one-pod": {"spec/topology": {"colocate": "Pod"}, "spec/pools/0/gpu": {"memoryPerRank": "8Gi"}},
        "one-pod-with-equal-selectors": {
            "spec/topology": {"colocate": "Pod"},
            "spec/pools/0/gpu": {"memoryPerRank": "8Gi", "runtimeClassName": "nvidia"},
            "spec/pools/0/scheduling": {"nodeSelector": {"zone": "a", "disk": "fast"}, "tolerations": []},
            "spec/pools/1/scheduling": {"nodeSelector": {"disk": "fast", "zone": "a"}},
        },
        "whole-numbers-as-shares": {"spec/placement/shares": {"vocabulary": [1, 1, 0, 0]}},
    }
    documents = {name: changed(changes) for name, changes in cases.items()}
    documents["everything"] = copy.deepcopy(_EVERYTHING)
    for path in sorted(EXAMPLES.glob("*.yaml")):
        documents[f"example-{path.stem}"] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return [ValidResource(name, document) for name, document in documents.items()]


def _valid_transitions() -> list[ValidResource]:
    swapped = list(reversed(BASE["spec"]["pools"]))
    changes: dict[str, dict[str, Any]] = {
        "nothing-changed": {},
        "more-ranks": {"spec/pools/1/ranks": 4},
        "pools-in-another-order": {"spec/pools": swapped},
        "another-model": {"spec/model/uri": "hf://org/other"},
        "into-one-pod": {"spec/topology": {"colocate": "Pod"}, "spec/pools/0/gpu": {"memoryPerRank": "8Gi"}},
    }
    return [ValidResource(name, changed(change), old=copy.deepcopy(BASE)) for name, change in changes.items()]


VALID: Final = (*_valid(), *_valid_transitions())
