"""The HeteroInference resource as types: the only source of its schema, defaults and messages.

The operator, the gateway and the local launcher read manifests through these models; the CRD and the
reference page are generated from them. Field names are Python's here and camelCase in YAML. Use
`hetero_api.manifest.load_manifest` to read a file: it turns every problem into `path: message`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Final, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    StringConstraints,
    WithJsonSchema,
    model_validator,
)
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticCustomError

from hetero_api import quantity
from hetero_api.contract import API_VERSION, GROUP, INFERENCE_PORT, KIND
from hetero_api.errors import QuantityError

MAX_RANKS: Final = 64
MAX_NAME_LENGTH: Final = 40
URI_SCHEMES: Final = ("hf", "pvc", "oci", "file")


def field_error(path: str, message: str) -> PydanticCustomError:
    """A validation error about a field below the model that raises it; `path` as in YAML, e.g. "cpu.numa"."""
    return PydanticCustomError("field", "{message}", {"message": message, "path": path})


def _to_bytes(value: Any) -> int:
    try:
        return quantity.parse_bytes(value)
    except QuantityError as error:
        raise PydanticCustomError("quantity", "{message}", {"message": str(error)}) from error


Bytes = Annotated[
    int,
    BeforeValidator(_to_bytes),
    PlainSerializer(quantity.format_bytes, return_type=str),
    WithJsonSchema({"type": "string", "pattern": quantity.PATTERN}),
]
"""Memory as a Kubernetes quantity in YAML, whole bytes in Python."""

Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=MAX_NAME_LENGTH)]
"""A DNS label."""


class _Model(BaseModel):
    model_config = ConfigDict(
        alias_generator=to_camel, validate_by_name=True, validate_by_alias=True,
        extra="forbid", frozen=True, strict=True,
    )  # fmt: skip


class _LaxEnum(StrEnum):
    """An enumeration that YAML spells as its value."""


def _enum(kind: type[StrEnum]) -> BeforeValidator:
    def parse(value: Any) -> StrEnum:
        try:
            return kind(value)
        except ValueError:
            names = ", ".join(kind)
            message = f"must be one of {names}, not {value!r}"
            raise PydanticCustomError("enum_name", "{message}", {"message": message}) from None

    return BeforeValidator(parse)


class DType(_LaxEnum):
    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class PoolType(_LaxEnum):
    GPU = "GPU"
    CPU = "CPU"


class NumaPolicy(_LaxEnum):
    REQUIRED = "Required"
    BEST_EFFORT = "BestEffort"
    NONE = "None"


class PlacementMode(_LaxEnum):
    AUTO = "Auto"
    TENSOR = "Tensor"
    LAYER = "Layer"
    GPU_ONLY = "GpuOnly"


class Quantization(_LaxEnum):
    NONE = "none"
    INT8 = "int8"
    INT4 = "int4"


class SecretKeyRef(_Model):
    """A key of a Secret in the resource's namespace."""

    name: Annotated[str, Field(min_length=1, max_length=253, description="Name of the Secret.")]
    key: Annotated[str, Field(min_length=1, max_length=253, description="Key within it.")] = "token"


class ModelCache(_Model):
    """Where pods keep fetched model files, so that a node fetches a model once."""

    claim_name: Annotated[
        str | None, Field(max_length=253, description="PersistentVolumeClaim that holds the cache.")
    ] = None
    host_path: Annotated[
        str | None,
        Field(max_length=4096, pattern="^/", description="Folder on the node that holds the cache."),
    ] = None

    @model_validator(mode="after")
    def _one(self) -> ModelCache:
        if self.claim_name and self.host_path:
            raise field_error("claimName", "set claimName or hostPath, not both")
        return self


def _check_uri(uri: str) -> str:
    scheme, separator, rest = uri.partition("://")
    if not separator or scheme not in URI_SCHEMES or not rest:
        schemes = ", ".join(f"{s}://" for s in URI_SCHEMES)
        raise PydanticCustomError(
            "uri", "{message}", {"message": f"must start with one of {schemes} and name a model, not {uri!r}"}
        )
    return uri


class ModelSpec(_Model):
    """Which model is served."""

    uri: Annotated[
        str,
        AfterValidator(_check_uri),
        Field(
            max_length=1024,
            description="Where the model is: hf://ORG/NAME (Hugging Face Hub), pvc://CLAIM/PATH, "
            "oci://IMAGE, or file:///PATH on the node.",
        ),
    ]
    revision: Annotated[
        str | None, Field(max_length=128, description="Branch, tag or commit of a Hub model. Default: main.")
    ] = None
    dtype: Annotated[
        DType,
        _enum(DType),
        Field(description="Arithmetic type. auto: bfloat16 on GPUs, float32 where only CPUs take part."),
    ] = DType.AUTO
    quantization: Annotated[
        Quantization,
        _enum(Quantization),
        Field(description="Width that weights are stored in: none, int8, int4."),
    ] = Quantization.NONE
    max_model_len: Annotated[
        int | None,
        Field(
            ge=16,
            le=10_485_760,
            description="Longest prompt plus completion, in tokens. Default: the model's own.",
        ),
    ] = None
    token_secret_ref: Annotated[SecretKeyRef | None, Field(description="Secret with the token for a gated model.")] = (
        None
    )
    cache: Annotated[ModelCache, Field(description="Where fetched model files are kept.")] = ModelCache()


class GpuSpec(_Model):
    """What a rank of a GPU pool gets."""

    resource_name: Annotated[
        str, Field(min_length=1, max_length=253, description="Extended resource that a GPU is requested by.")
    ] = "nvidia.com/gpu"


class NumaSpec(_Model):
    """How strictly a CPU rank is bound to one NUMA node."""

    policy: Annotated[
        NumaPolicy,
        _enum(NumaPolicy),
        Field(
            description="Required: a rank that cannot be bound to cores and memory of one node does not start. "
            "BestEffort: it starts and says what it got. None: it is not bound, and cores may be shared."
        ),
    ] = NumaPolicy.BEST_EFFORT


class CpuSpec(_Model):
    """What a rank of a CPU pool gets."""

    cores_per_rank: Annotated[int, Field(ge=1, le=1024, description="Whole cores a rank; one thread runs on each.")] = 1
    memory_per_rank: Annotated[
        Bytes | None,
        Field(description="Memory a rank, weights and KV cache included, e.g. 128Gi. Needed by numa.policy Required."),
    ] = None
    numa: Annotated[NumaSpec, Field(description="Binding to NUMA nodes.")] = NumaSpec()


class PoolSpec(_Model):
    """A set of equal ranks."""

    name: Annotated[Name, Field(description="Name of the pool, unique in the resource.")]
    type: Annotated[PoolType, _enum(PoolType), Field(description="GPU or CPU.")]
    ranks: Annotated[int, Field(ge=1, le=MAX_RANKS, description="Ranks in the pool.")]
    ranks_per_pod: Annotated[
        int, Field(ge=1, le=MAX_RANKS, description="Ranks in one pod; `ranks` is a multiple of it.")
    ] = 1
    gpu: Annotated[GpuSpec | None, Field(description="For type GPU.")] = None
    cpu: Annotated[CpuSpec | None, Field(description="For type CPU.")] = None

    @model_validator(mode="after")
    def _consistent(self) -> PoolSpec:
        if self.type == PoolType.GPU and self.cpu is not None:
            raise field_error("cpu", "is for pools of type CPU; this pool's type is GPU")
        if self.type == PoolType.CPU and self.gpu is not None:
            raise field_error("gpu", "is for pools of type GPU; this pool's type is CPU")
        if self.ranks % self.ranks_per_pod:
            raise field_error("ranks", f"must be a multiple of ranksPerPod ({self.ranks_per_pod}), not {self.ranks}")
        cpu = self.cpu
        if cpu and cpu.numa.policy == NumaPolicy.REQUIRED and cpu.memory_per_rank is None:
            raise field_error("cpu.memoryPerRank", "is required when numa.policy is Required")
        return self

    @property
    def cpu_or_default(self) -> CpuSpec:
        """The CPU settings in force for a CPU pool."""
        return self.cpu or CpuSpec()


_Weights = Annotated[list[Annotated[float, Field(ge=0, le=1e6)]], Field(min_length=1, max_length=MAX_RANKS)]


class PlacementShares(_Model):
    """How much of each kind each rank owns: one weight a rank, in rank order; 0 means nothing.

    Whole units are dealt by largest remainder: weights [2, 1] of 3 KV heads give 2 and 1.
    """

    attention: Annotated[_Weights | None, Field(description="Weights for KV heads.")] = None
    mlp: Annotated[_Weights | None, Field(description="Weights for MLP columns.")] = None
    vocabulary: Annotated[_Weights | None, Field(description="Weights for vocabulary rows.")] = None


class PlacementSpec(_Model):
    """How the model is spread over the ranks."""

    mode: Annotated[
        PlacementMode,
        _enum(PlacementMode),
        Field(
            description="Auto chooses; Tensor splits every layer; Layer gives whole layers; GpuOnly leaves CPUs out."
        ),
    ] = PlacementMode.AUTO
    shares: Annotated[PlacementShares, Field(description="Shares, where they are not to be computed.")] = (
        PlacementShares()
    )


class EngineSpec(_Model):
    """Bounds and sizes of the engine."""

    max_num_seqs: Annotated[int, Field(ge=1, le=4096, description="Most sequences in one step.")] = 64
    max_num_batched_tokens: Annotated[
        int,
        Field(ge=1, le=131_072, description="Most tokens in one step: longer prompts are computed in chunks."),
    ] = 512
    block_size: Annotated[int, Field(ge=1, le=512, description="Token positions a KV block.")] = 16
    gpu_memory_utilization: Annotated[
        float, Field(gt=0, le=1, description="Share of a GPU's memory that its rank may use.")
    ] = 0.9
    kv_cache_memory_bytes: Annotated[
        Bytes | None,
        Field(description="KV cache a rank, e.g. 4Gi. Default: what memory leaves after the weights."),
    ] = None
    enable_prefix_caching: Annotated[bool, Field(description="Reuse KV blocks of equal prefixes.")] = True
    enforce_eager: Annotated[bool, Field(description="Never capture CUDA graphs.")] = False


class ServiceSpec(_Model):
    """The Service that clients dial; locally, the address that the gateway listens on."""

    type: Annotated[Literal["ClusterIP", "NodePort", "LoadBalancer"], Field(description="Type of the Service.")] = (
        "ClusterIP"
    )
    port: Annotated[int, Field(ge=1, le=65535, description="Port of hetero.v1.Inference.")] = INFERENCE_PORT


class GatewaySpec(_Model):
    """The front door."""

    service: Annotated[ServiceSpec, Field(description="How clients reach it.")] = ServiceSpec()
    max_queued_requests: Annotated[
        int, Field(ge=0, le=1_000_000, description="Most requests that wait; more are refused.")
    ] = 1024
    tls_secret_name: Annotated[
        str | None, Field(max_length=253, description="Secret with tls.crt and tls.key for the front door.")
    ] = None
    auth_token_secret_ref: Annotated[
        SecretKeyRef | None, Field(description="Secret with the bearer token that clients must show.")
    ] = None


class RecoverySpec(_Model):
    """What happens when a rank is lost."""

    rendezvous_timeout_seconds: Annotated[
        int, Field(ge=5, le=86_400, description="Longest wait for all ranks to meet and load.")
    ] = 600
    step_timeout_seconds: Annotated[
        int, Field(ge=1, le=3_600, description="Longest step before the ranks count as hung.")
    ] = 60
    max_restarts: Annotated[int, Field(ge=0, le=1000, description="Restarts within the window.")] = 5
    window_seconds: Annotated[int, Field(ge=60, le=604_800, description="The window of maxRestarts.")] = 3600
    node_lost_timeout_seconds: Annotated[
        int, Field(ge=10, le=86_400, description="Wait before pods on a dead node are replaced.")
    ] = 300


class SchedulingSpec(_Model):
    """Where Kubernetes may put the pods."""

    scheduler_name: Annotated[str | None, Field(max_length=253, description="Scheduler of the pods.")] = None
    priority_class_name: Annotated[str | None, Field(max_length=253, description="Priority class of the pods.")] = None
    node_selector: Annotated[dict[str, str], Field(max_length=64, description="Labels that a node must have.")] = Field(
        default_factory=dict
    )


class HeteroInferenceSpec(_Model):
    """What a user asks for."""

    model: Annotated[ModelSpec, Field(description="Which model is served.")]
    pools: Annotated[
        list[PoolSpec],
        Field(
            min_length=1,
            max_length=16,
            description="Ranks. GPU pools hold the low ranks, then CPU pools, in order.",
        ),
    ]
    placement: Annotated[PlacementSpec, Field(description="How the model is spread.")] = PlacementSpec()
    engine: Annotated[EngineSpec, Field(description="Bounds and sizes.")] = EngineSpec()
    gateway: Annotated[GatewaySpec, Field(description="The front door.")] = GatewaySpec()
    recovery: Annotated[RecoverySpec, Field(description="What happens when a rank is lost.")] = RecoverySpec()
    scheduling: Annotated[SchedulingSpec, Field(description="Where pods may run.")] = SchedulingSpec()
    suspend: Annotated[bool, Field(description="Keep the resource, run no pods.")] = False
    replicas: Annotated[int, Field(ge=0, le=1, description="0 or 1.")] = 1

    @model_validator(mode="after")
    def _consistent(self) -> HeteroInferenceSpec:
        names = [pool.name for pool in self.pools]
        for index, name in enumerate(names):
            if name in names[:index]:
                raise field_error(f"pools[{index}].name", f"{name!r} is used by another pool; names must be unique")
        if self.world_size > MAX_RANKS:
            raise field_error("pools", f"hold {self.world_size} ranks together; at most {MAX_RANKS} are supported")
        for kind in ("attention", "mlp", "vocabulary"):
            self._check_shares(kind, getattr(self.placement.shares, kind))
        return self

    def _check_shares(self, kind: str, weights: list[float] | None) -> None:
        path = f"placement.shares.{kind}"
        if weights is None:
            return
        if len(weights) != self.world_size:
            raise field_error(path, f"must hold one weight for each of the {self.world_size} ranks, not {len(weights)}")
        if not sum(weights):
            raise field_error(path, "must give something to at least one rank")

    @property
    def world_size(self) -> int:
        """Ranks over all pools."""
        return sum(pool.ranks for pool in self.pools)

    @property
    def pools_in_rank_order(self) -> tuple[PoolSpec, ...]:
        """GPU pools first, then CPU pools, each in the manifest's order."""
        return tuple(sorted(self.pools, key=lambda pool: pool.type != PoolType.GPU))


class Metadata(BaseModel):
    """The part of Kubernetes' metadata that matters here; the rest is kept by Kubernetes."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    name: Annotated[Name, Field(description="Name of the resource.")]
    namespace: Annotated[str | None, Field(max_length=63)] = None


class HeteroInference(_Model):
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
