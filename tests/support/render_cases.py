"""HeteroInference resources that between them use every field, each with a cluster to render them for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from hetero_operator.reconcile.model import Capabilities, Policy, RenderOptions

EXAMPLES: Final = Path(__file__).parents[2] / "examples"

OPTIONS: Final = RenderOptions(
    gateway_image="registry.example/hetero-gateway:0.1.0",
    cpu_worker_image="registry.example/hetero-cpu:0.1.0",
    gpu_worker_image="registry.example/hetero-gpu:0.1.0",
    operator_version="0.1.0",
    operator_namespace="hetero-system",
    router_image="registry.example/hetero-router:0.1.0",
)
OPEN: Final = Policy(allowed_host_paths=("/",))
"""Allows everything."""
UPGRADED: Final = RenderOptions(
    gateway_image="registry.example/hetero-gateway:0.2.0",
    cpu_worker_image="registry.example/hetero-cpu:0.2.0",
    gpu_worker_image="registry.example/hetero-gpu:0.2.0",
    operator_version="0.2.0",
    cluster_domain="elsewhere.local",
    operator_namespace="hetero-system",
    run_as_user=1000,
    router_image="registry.example/hetero-router:0.2.0",
)
"""A later version of the operator with other images."""

POD_MONITOR: Final = ("monitoring.coreos.com/v1", "PodMonitor")
INFERENCE_POOL: Final = ("inference.networking.k8s.io/v1", "InferencePool")
POD_GROUP: Final = ("scheduling.volcano.sh/v1beta1", "PodGroup")
CLAIM_TEMPLATE: Final = ("resource.k8s.io/v1", "ResourceClaimTemplate")
BUDGET: Final = ("policy/v1", "PodDisruptionBudget")
OLD_BUDGET: Final = ("policy/v1beta1", "PodDisruptionBudget")

PLAIN: Final = Capabilities((1, 33), frozenset({BUDGET}))
FULL: Final = Capabilities((1, 37), frozenset({BUDGET, POD_MONITOR, POD_GROUP, CLAIM_TEMPLATE, INFERENCE_POOL}))
OLD: Final = Capabilities((1, 20), frozenset({OLD_BUDGET}))
BARE: Final = Capabilities((1, 33), frozenset())

_EVERYTHING: Final = """
model:
  uri: hf://Qwen/Qwen3-8B
  revision: v1.1
  dtype: bfloat16
  quantization: int8
  maxModelLen: 16384
  tokenSecretRef: {name: hub, key: hf-token}
  cache: {claimName: model-cache}
pools:
- name: gpu
  type: GPU
  ranks: 4
  ranksPerPod: 2
  sharedMemory: 8Gi
  gpu: {devices: [0, 2], coresPerRank: 4, memoryPerRank: 32Gi, runtimeClassName: nvidia, resourceName: amd.com/gpu}
  scheduling:
    nodeSelector: {accelerator: mi300}
    tolerations:
    - {key: amd.com/gpu, operator: Exists, effect: NoSchedule}
- name: cpu
  type: CPU
  ranks: 2
  sharedMemory: 4Gi
  cpu:
    coresPerRank: 32
    memoryPerRank: 128Gi
    hugepages: {size: 1Gi, perRank: 64Gi}
    numa: {policy: Required, claim: {deviceClassName: dra.cpu}}
placement:
  mode: Tensor
  shares:
    attention: [1, 1, 1, 1, 0, 0]
    mlp: [8, 8, 8, 8, 1, 1]
    vocabulary: [1, 1, 1, 1, 0, 0]
  workload: {promptTokens: 2048, outputTokens: 256, concurrency: 16}
  experts: Slices
  rebalanceExperts: false
exchange: {kind: Gloo}
engine:
  maxNumSeqs: 128
  maxNumBatchedTokens: 1024
  blockSize: 32
  gpuMemoryUtilization: 0.85
  kvCacheMemoryBytes: 4Gi
  kvCacheDtype: auto
  enablePrefixCaching: false
  enforceEager: true
  batchInvariant: true
gateway:
  service: {type: LoadBalancer, port: 443, annotations: {example.com/internal: "true"}}
  maxQueuedRequests: 10
  tls: {secretName: front-tls, clientCASecretName: clients-ca, dnsNames: [llm.example]}
  auth: {mode: Keys, keysSecretRef: {name: clients, key: keys.yaml}}
  resources: {cpuMillis: 2500, memory: 3Gi}
  drainTimeoutSeconds: 120
recovery:
  rendezvousTimeoutSeconds: 900
  startupTimeoutSeconds: 3605
  stepTimeoutSeconds: 30
  maxRestarts: 2
  windowSeconds: 600
  nodeLostTimeoutSeconds: 120
scheduling:
  priorityClassName: serving
  nodeSelector: {team: llm}
  tolerations:
  - {key: node.kubernetes.io/not-ready, operator: Exists, effect: NoExecute, tolerationSeconds: 10}
  topology: {key: topology.kubernetes.io/zone, policy: Required}
  gang: {scheduler: Volcano, queue: serving}
images:
  gpuWorker: mirror.example/gpu@sha256:0000000000000000000000000000000000000000000000000000000000000000
  cpuWorker: mirror.example/cpu:1
  gateway: mirror.example/gateway:1
  pullPolicy: Always
  pullSecrets: [mirror]
podMetadata:
  labels: {cost-center: "42"}
  annotations: {example.com/owner: ml-platform}
networkPolicy: {enabled: true, metricsFrom: [monitoring], allowModelEgress: true}
disruptionBudget: {enabled: true}
monitoring:
  podMonitor: true
  intervalSeconds: 15
  labels: {release: prometheus}
  keySecretRef: {name: scraper, key: token}
suspend: false
replicas: 1
rollout: {strategy: RollingUpdate, maxUnavailable: 1, maxSurge: 0}
"""

_POOLS: Final = """
pools:
- {name: cpu, type: CPU, ranks: 2, cpu: {coresPerRank: 4, memoryPerRank: 8Gi}}
"""


_ONE_POD: Final = """
model: {uri: hf://a/b}
pools:
- name: cpu
  type: CPU
  ranks: 2
  cpu:
    coresPerRank: 8
    memoryPerRank: 16Gi
    hugepages: {size: 1Gi, perRank: 4Gi}
    numa: {policy: Required, claim: {deviceClassName: dra.cpu}}
  scheduling: &gpu-nodes
    nodeSelector: {accelerator: h100}
    tolerations: [{key: nvidia.com/gpu, operator: Exists, effect: NoSchedule}]
- name: gpu
  type: GPU
  ranks: 2
  ranksPerPod: 2
  sharedMemory: 2Gi
  gpu: {coresPerRank: 2, memoryPerRank: 8Gi, runtimeClassName: nvidia}
  scheduling: *gpu-nodes
- name: more
  type: CPU
  ranks: 2
  ranksPerPod: 2
  cpu: {coresPerRank: 4, memoryPerRank: 8Gi}
  scheduling: *gpu-nodes
topology: {colocate: Pod}
exchange: {kind: SharedMemory}
scheduling: {gang: {scheduler: Volcano}}
disruptionBudget: {enabled: true}
"""


_ROUTED: Final = f"""
model: {{uri: hf://a/b}}
{_POOLS}
gateway: {{auth: {{keysSecretRef: {{name: clients}}}}}}
router:
  type: SMG
  policy: LeastLoad
  cacheIsolation: Shared
  port: 443
  resources: {{cpuMillis: 500, memory: 1Gi}}
  keysSecretRef: {{name: tenants, key: keys}}
  tlsSecretName: routed-tls
replicas: 2
"""
_POOLED: Final = f"""
model: {{uri: hf://a/b}}
{_POOLS}
gateway: {{auth: {{keysSecretRef: {{name: clients}}}}}}
router: {{type: InferencePool, endpointPickerRef: {{name: picker, port: 9003, failureMode: FailOpen}}}}
replicas: 2
"""
_LEAST: Final = "{model: {uri: hf://a/b}, pools: [{name: cpu, type: CPU, ranks: 1}]}"


@dataclass(frozen=True, slots=True)
class RenderCase:
    """A resource and the cluster that it is rendered for."""

    resource: Mapping[str, Any]
    capabilities: Capabilities = PLAIN


def resource_of(name: str, spec: str | Mapping[str, Any], **metadata: Any) -> dict[str, Any]:
    """A HeteroInference as an API server stores it; `spec` decoded or as YAML."""
    return {
        "apiVersion": "heteroinference.io/v1alpha1",
        "kind": "HeteroInference",
        "metadata": {
            "name": name,
            "namespace": "models",
            "uid": f"00000000-0000-4000-8000-{abs(hash_of(name)):012d}",
            "generation": 1,
            "creationTimestamp": "2030-01-01T00:00:00Z",
            **metadata,
        },
        "spec": yaml.safe_load(spec) if isinstance(spec, str) else spec,
    }


def hash_of(name: str) -> int:
    """A small number that a name always gives."""
    return sum(ord(letter) * pow(31, index, 10**12) for index, letter in enumerate(name)) % 10**12


def everything() -> dict[str, Any]:
    """A resource with every field set, none to its default where another value makes sense."""
    return resource_of("everything", _EVERYTHING)


def one_pod() -> dict[str, Any]:
    """A resource whose pools, one of each type and one with claims and huge pages, are one pod."""
    return resource_of("together", _ONE_POD)


def render_cases() -> dict[str, RenderCase]:
    """Every case by the name of its golden file."""
    cases = {f"example-{path.stem}": RenderCase(_example(path), FULL) for path in sorted(EXAMPLES.glob("*.yaml"))}
    return cases | {
        "everything": RenderCase(everything(), FULL),
        "kubernetes-1.20": RenderCase(_case("old", "hf://a/b", "disruptionBudget: {enabled: true}"), OLD),
        "no-optional-apis": RenderCase(_case("bare", "hf://a/b", "disruptionBudget: {enabled: true}"), BARE),
        "model-claim": RenderCase(_case("claim", "pvc://models/qwen3/8b")),
        "model-folder": RenderCase(_case("folder", "file:///srv/models/qwen3-8b")),
        "model-image": RenderCase(_case("image", "oci://registry.example/models/qwen3:8b"), FULL),
        "model-image-copied": RenderCase(_case("copied", "oci://registry.example/models/qwen3:8b#/weights")),
        "model-hub-node-cache": RenderCase(_case("cached", "hf://a/b", cache="{hostPath: /var/cache/hetero}")),
        "kueue": RenderCase(_case("queued", "hf://a/b", "scheduling: {gang: {scheduler: Kueue, queue: serving}}")),
        "suspended": RenderCase(_case("suspended", "hf://a/b", "suspend: true")),
        "exchange-on-node": RenderCase(_case("shared", "hf://a/b", "exchange: {hostPath: /dev/shm}")),
        "burstable": RenderCase(resource_of("burstable", _LEAST)),
        "one-pod": RenderCase(one_pod(), FULL),
        "router": RenderCase(resource_of("routed", _ROUTED)),
        "inference-pool": RenderCase(resource_of("pooled", _POOLED), FULL),
    }  # fmt: skip


def _case(name: str, uri: str, extra: str = "", *, cache: str = "{}") -> dict[str, Any]:
    return resource_of(name, f"model: {{uri: '{uri}', cache: {cache}}}\n{_POOLS}\n{extra}\n")


def _example(path: Path) -> dict[str, Any]:
    document = yaml.safe_load(path.read_text(encoding="utf-8"))
    return resource_of(document["metadata"]["name"], document["spec"])
