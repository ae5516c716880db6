"""The HeteroInference resource as types: the only source of its schema, defaults and messages.

The operator, the gateway and the local launcher read manifests through these models; the CRD and the
reference page are generated from them. Field names are Python's here and camelCase in YAML. Use
`hetero_api.manifest.load_manifest` to read a file: it turns every problem into `path: message`.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from hetero_api.contract import API_VERSION, GROUP, HTTP_PORT, INFERENCE_PORT, KIND
from hetero_api.numa_policy import NumaPolicy
from hetero_api.placement_mode import SHARE_KINDS, PlacementMode
from hetero_api.rules import Reason, Rule, TransitionRule
from hetero_api.spec_cluster import (
    DisruptionBudgetSpec,
    ImagesSpec,
    MonitoringSpec,
    NetworkPolicySpec,
    PodMetadataSpec,
    ResourcesSpec,
    SchedulingSpec,
    leaves_ours_alone,
)
from hetero_api.spec_model import URI_SCHEMES, DType, ModelCache, ModelSpec, Quantization, SecretKeyRef
from hetero_api.spec_pools import (
    MAX_POOLS,
    MAX_RANKS,
    CpuSpec,
    GpuSpec,
    NumaSpec,
    Pools,
    PoolSpec,
    PoolType,
)
from hetero_api.spec_types import (
    MAX_NAME_LENGTH,
    Annotations,
    Bytes,
    HostFolder,
    Name,
    ObjectName,
    SpecEnum,
    SpecModel,
    field_error,
    spelled,
)

__all__ = [
    "MAX_NAME_LENGTH",
    "MAX_POOLS",
    "MAX_RANKS",
    "SHARE_KINDS",
    "URI_SCHEMES",
    "CacheLayout",
    "CpuSpec",
    "DType",
    "EngineSpec",
    "ExchangeKind",
    "ExchangeSpec",
    "GatewaySpec",
    "GpuSpec",
    "HeteroInference",
    "HeteroInferenceSpec",
    "Metadata",
    "ModelCache",
    "ModelSpec",
    "NumaPolicy",
    "NumaSpec",
    "PlacementMode",
    "PlacementShares",
    "PlacementSpec",
    "PoolSpec",
    "PoolType",
    "Quantization",
    "RecoverySpec",
    "SecretKeyRef",
    "ServiceSpec",
    "WorkloadSpec",
    "field_error",
]


def _gives_something(kind: str) -> Rule:
    return Rule(
        kind,
        f"!has(self.{kind}) || self.{kind}.exists(weight, weight > 0.0)",
        "must give something to at least one rank",
        lambda shares: getattr(shares, kind) is None or sum(getattr(shares, kind)) > 0,
    )


_RANKS_TOGETHER: Final = "self.pools.map(pool, pool.ranks).sum()"


def _one_weight_a_rank(kind: str) -> Rule:
    field = f"self.placement.shares.{kind}"

    def holds(spec: HeteroInferenceSpec) -> bool:
        weights: list[float] | None = getattr(spec.placement.shares, kind)
        return weights is None or len(weights) == spec.world_size

    return Rule(
        f"placement.shares.{kind}",
        f"!has({field}) || size({field}) == {_RANKS_TOGETHER}",
        "must hold one weight for each rank of all pools",
        holds,
    )


_Weights = Annotated[list[Annotated[float, Field(ge=0, le=1e6)]], Field(min_length=1, max_length=MAX_RANKS)]


class PlacementShares(SpecModel):
    """How much of each kind each rank owns: one weight a rank, in rank order; 0 means nothing.

    Whole units are dealt by largest remainder: weights [2, 1] of 3 KV heads give 2 and 1.
    """

    rules: ClassVar[tuple[Rule, ...]] = tuple(_gives_something(kind) for kind in SHARE_KINDS)

    attention: Annotated[
        _Weights | None, Field(description="Weights for KV heads, one a rank; 0: none. Default: computed.")
    ] = None
    mlp: Annotated[
        _Weights | None, Field(description="Weights for MLP columns, one a rank; 0: none. Default: computed.")
    ] = None
    vocabulary: Annotated[
        _Weights | None, Field(description="Weights for vocabulary rows, one a rank; 0: none. Default: computed.")
    ] = None


class WorkloadSpec(SpecModel):
    """The load that a placement is chosen for, and predictions are told for."""

    prompt_tokens: Annotated[int, Field(ge=1, le=10_000_000, description="Tokens of a prompt.")] = 512
    output_tokens: Annotated[int, Field(ge=1, le=10_000_000, description="Tokens of an output.")] = 128
    concurrency: Annotated[int, Field(ge=1, le=4096, description="Requests at a time.")] = 1


class PlacementSpec(SpecModel):
    """How the model is spread over the ranks."""

    mode: Annotated[
        PlacementMode,
        spelled(PlacementMode),
        Field(
            description="Auto: the way that is predicted to be fastest, by what ranks measured; it may leave ranks "
            "idle. Tensor: every layer is split over ranks. Layer: ranks hold whole layers. GpuOnly: CPU ranks hold "
            "nothing."
        ),
    ] = PlacementMode.AUTO
    shares: Annotated[
        PlacementShares,
        Field(
            description="What each rank owns, where that is not to be computed. In mode Layer attention and mlp are "
            "weights for whole layers (if both are given, equal), and vocabulary does not apply."
        ),
    ] = PlacementShares()
    workload: Annotated[
        WorkloadSpec, Field(description="The load that mode and shares are chosen for, where they are computed.")
    ] = WorkloadSpec()
    rebalance_experts: Annotated[
        bool,
        Field(
            description="While nothing is served, move experts that were often chosen to the ranks that are fastest "
            "with them."
        ),
    ] = True


class ExchangeKind(SpecEnum):
    """Way of ranks to exchange tensors in host memory."""

    AUTO = "Auto"
    SHARED_MEMORY = "SharedMemory"
    GLOO = "Gloo"


class ExchangeSpec(SpecModel):
    """How ranks exchange tensors in host memory."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "hostPath",
            "self.kind != 'Gloo' || !has(self.hostPath)",
            "is of no use with kind Gloo; leave it out",
            lambda exchange: exchange.kind != ExchangeKind.GLOO or exchange.host_path is None,
            Reason.FORBIDDEN,
        ),
    )

    kind: Annotated[
        ExchangeKind,
        spelled(ExchangeKind),
        Field(
            description="Auto: shared memory where all ranks have it in common, else Gloo. SharedMemory: nothing else; "
            "ranks that have none in common do not serve. Gloo: over the network, always."
        ),
    ] = ExchangeKind.AUTO
    host_path: Annotated[
        HostFolder | None,
        Field(
            description="Folder in the memory of each node, e.g. /dev/shm, that becomes /dev/shm of all rank pods: "
            "pods of one node then share memory, where each has its own by default. It must exist, and pods must be "
            "allowed to write to it. Pod Security levels Baseline and Restricted forbid such volumes. Of use where "
            "pods share nodes: scheduling.topology with key kubernetes.io/hostname brings them together."
        ),
    ] = None


class CacheLayout(SpecEnum):
    """Layout of the KV cache."""

    PAGED = "Paged"
    """Blocks of blockSize positions, shared between requests with equal prefixes."""
    CONTIGUOUS = "Contiguous"
    """One block a sequence, as long as the longest sequence: nothing is shared."""


class EngineSpec(SpecModel):
    """Bounds and sizes of the engine."""

    max_num_seqs: Annotated[int, Field(ge=1, le=4096, description="Most sequences in one step.")] = 64
    max_num_batched_tokens: Annotated[
        int,
        Field(ge=1, le=131_072, description="Most tokens in one step: longer prompts are computed in chunks."),
    ] = 512
    block_size: Annotated[
        int, Field(ge=1, le=512, description="Token positions a KV block. Contiguous caches do not use it.")
    ] = 16
    cache_layout: Annotated[
        CacheLayout,
        spelled(CacheLayout),
        Field(
            description="Paged: blocks of blockSize positions, shared between requests with equal prefixes. "
            "Contiguous: one block a sequence, as long as model.maxModelLen; nothing is shared."
        ),
    ] = CacheLayout.PAGED
    gpu_memory_utilization: Annotated[
        float, Field(gt=0, le=1, description="Share of a GPU's memory that its rank may use.")
    ] = 0.9
    kv_cache_memory_bytes: Annotated[
        Bytes | None,
        Field(description="KV cache a rank, e.g. 4Gi. Default: what memory leaves after the weights."),
    ] = None
    enable_prefix_caching: Annotated[bool, Field(description="Reuse KV blocks of equal prefixes.")] = True
    overlap_scheduling: Annotated[
        bool, Field(description="Send a step to the ranks while they still compute the one before.")
    ] = True
    enforce_eager: Annotated[bool, Field(description="Never capture CUDA graphs.")] = False
    batch_invariant: Annotated[
        bool,
        Field(
            description="A request gets the same numbers to the last bit, and so the same tokens, whatever else is "
            "computed with it, and whether its prompt is computed whole, in chunks or found in the cache. It takes "
            "more time, on GPUs needs Triton, and leaves experts where they are (placement.rebalanceExperts)."
        ),
    ] = False


class ServiceSpec(SpecModel):
    """The Service that clients dial; locally, the address that the gateway listens on."""

    rules: ClassVar[tuple[Rule, ...]] = (
        leaves_ours_alone("annotations"),
        Rule(
            "httpPort",
            "self.httpPort != self.port",
            "must differ from port",
            lambda service: service.http_port != service.port,
        ),
    )

    type: Annotated[Literal["ClusterIP", "NodePort", "LoadBalancer"], Field(description="Type of the Service.")] = (
        "ClusterIP"
    )
    port: Annotated[int, Field(ge=1, le=65535, description="Port of hetero.v1.Inference.")] = INFERENCE_PORT
    http_port: Annotated[
        int, Field(ge=1, le=65535, description="Port of the OpenAI-compatible endpoint, over HTTP.")
    ] = HTTP_PORT
    annotations: Annotated[
        Annotations,
        Field(max_length=32, description="Annotations of the Service, e.g. for a cloud's load balancer."),
    ] = Field(default_factory=dict)


class GatewaySpec(SpecModel):
    """The front door."""

    service: Annotated[ServiceSpec, Field(description="How clients reach it.")] = ServiceSpec()
    max_queued_requests: Annotated[
        int, Field(ge=0, le=1_000_000, description="Most requests that wait; more are refused.")
    ] = 1024
    tls_secret_name: Annotated[
        ObjectName | None,
        Field(description="Secret with tls.crt and tls.key for the front door. Default: no TLS."),
    ] = None
    auth_token_secret_ref: Annotated[
        SecretKeyRef | None,
        Field(description="Secret with the bearer token that clients must show. Default: none is asked for."),
    ] = None
    resources: Annotated[ResourcesSpec, Field(description="Resources of the gateway's container.")] = ResourcesSpec()
    drain_timeout_seconds: Annotated[
        int, Field(ge=0, le=3600, description="How long a stopping gateway lets requests in flight finish.")
    ] = 60


class RecoverySpec(SpecModel):
    """Steps that are taken when a rank is lost."""

    rendezvous_timeout_seconds: Annotated[
        int, Field(ge=5, le=86_400, description="Longest wait for all ranks to meet and load.")
    ] = 600
    startup_timeout_seconds: Annotated[
        int,
        Field(ge=30, le=86_400, description="Longest time from a pod's start to its readiness, model fetch left out."),
    ] = 1800
    step_timeout_seconds: Annotated[
        int, Field(ge=1, le=3_600, description="Longest step before the ranks count as hung.")
    ] = 60
    max_restarts: Annotated[
        int,
        Field(ge=0, le=1000, description="Restarts of ranks within the window; beyond it they wait ever longer."),
    ] = 5
    window_seconds: Annotated[int, Field(ge=60, le=604_800, description="The window of maxRestarts.")] = 3600
    node_lost_timeout_seconds: Annotated[
        int, Field(ge=10, le=86_400, description="Wait before pods on a dead node are replaced.")
    ] = 300


class HeteroInferenceSpec(SpecModel):
    """Model, pools and engine that a user asks for."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "pools",
            f"{_RANKS_TOGETHER} <= {MAX_RANKS}",
            f"must hold at most {MAX_RANKS} ranks together",
            lambda spec: spec.world_size <= MAX_RANKS,
        ),
        *(_one_weight_a_rank(kind) for kind in SHARE_KINDS),
        Rule(
            "placement.mode",
            "self.placement.mode != 'GpuOnly' || self.pools.exists(pool, pool.type == 'GPU')",
            "GpuOnly needs a pool of type GPU",
            lambda spec: (
                spec.placement.mode != PlacementMode.GPU_ONLY or any(pool.type == PoolType.GPU for pool in spec.pools)
            ),
        ),
    )
    transitions: ClassVar[tuple[TransitionRule, ...]] = (
        TransitionRule(
            "pools",
            "size(self.pools) == size(oldSelf.pools) && "
            "self.pools.all(pool, oldSelf.pools.exists(old, old.name == pool.name))",
            "cannot be added, removed or renamed; make a new resource",
            lambda old, new: {pool.name for pool in old.pools} == {pool.name for pool in new.pools},
        ),
    )

    model: Annotated[ModelSpec, Field(description="Which model is served.")]
    pools: Pools
    placement: Annotated[PlacementSpec, Field(description="How the model is spread over the ranks.")] = PlacementSpec()
    exchange: Annotated[ExchangeSpec, Field(description="How ranks exchange tensors in host memory.")] = ExchangeSpec()
    engine: Annotated[EngineSpec, Field(description="Bounds and sizes of the engine.")] = EngineSpec()
    gateway: Annotated[GatewaySpec, Field(description="The front door.")] = GatewaySpec()
    recovery: Annotated[RecoverySpec, Field(description="What happens when a rank is lost.")] = RecoverySpec()
    scheduling: Annotated[SchedulingSpec, Field(description="Where Kubernetes may put the pods.")] = SchedulingSpec()
    images: Annotated[
        ImagesSpec, Field(description="Container images, where those of the installation are not wanted.")
    ] = ImagesSpec()
    pod_metadata: Annotated[PodMetadataSpec, Field(description="Labels and annotations of all pods.")] = (
        PodMetadataSpec()
    )
    network_policy: Annotated[NetworkPolicySpec, Field(description="Who may talk to the pods.")] = NetworkPolicySpec()
    disruption_budget: Annotated[DisruptionBudgetSpec, Field(description="Protection from evictions.")] = (
        DisruptionBudgetSpec()
    )
    monitoring: Annotated[MonitoringSpec, Field(description="What is offered to Prometheus.")] = MonitoringSpec()
    suspend: Annotated[bool, Field(description="true: keep the resource and what it owns, run no pods.")] = False
    replicas: Annotated[int, Field(ge=0, le=1, description="1, or 0 for no pods; `kubectl scale` sets it.")] = 1

    @property
    def world_size(self) -> int:
        """Ranks over all pools."""
        return sum(pool.ranks for pool in self.pools)

    @property
    def dtype_in_force(self) -> str:
        """The arithmetic type: Auto is bfloat16 where GPU ranks compute, float32 where only CPU ranks do."""
        if self.model.dtype != DType.AUTO:
            return str(self.model.dtype)
        has_gpus = any(pool.type == PoolType.GPU for pool in self.pools)
        return str(DType.BFLOAT16 if has_gpus else DType.FLOAT32)

    @property
    def pools_in_rank_order(self) -> tuple[PoolSpec, ...]:
        """GPU pools first, then CPU pools, each in the manifest's order."""
        return tuple(sorted(self.pools, key=lambda pool: pool.type != PoolType.GPU))


class Metadata(BaseModel):
    """The part of Kubernetes' metadata that matters here; the rest is kept by Kubernetes."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    name: Annotated[Name, Field(description="Name of the resource.")]
    namespace: Annotated[str | None, Field(max_length=63)] = None


class HeteroInference(SpecModel):
    """The whole resource."""

    api_version: Annotated[str, Field(description=f"{GROUP}/{API_VERSION}")]
    kind: Annotated[str, Field(description=KIND)]
    metadata: Metadata
    spec: HeteroInferenceSpec

    @model_validator(mode="after")
    def _our_kind(self) -> HeteroInference:
        if self.api_version != f"{GROUP}/{API_VERSION}":
            raise field_error("apiVersion", f"must be {GROUP}/{API_VERSION}, not {self.api_version!r}")
        if self.kind != KIND:
            raise field_error("kind", f"must be {KIND}, not {self.kind!r}")
        return self
