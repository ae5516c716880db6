"""The HeteroInference resource as types: the only source of its schema, defaults and messages.

The operator, the gateway and the local launcher read manifests through these models; the CRD and the
reference page are generated from them, with the fields' docstrings as descriptions for users. Field names are Python's
here and camelCase in YAML. Use `hetero_api.manifest.load_manifest` to read a file: it turns every problem into
`path: message`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Annotated, ClassVar, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from hetero_api.contract import API_VERSION, GROUP, HTTP_PORT, INFERENCE_PORT, KIND
from hetero_api.spec_access import AuthSpec, KeysSecretRef, TlsSpec
from hetero_api.spec_cluster import (
    MAX_REPLICAS,
    DisruptionBudgetSpec,
    ImagesSpec,
    MonitoringSpec,
    NetworkPolicySpec,
    PodMetadataSpec,
    ResourcesSpec,
    RolloutSpec,
    SchedulingSpec,
    leaves_ours_alone,
)
from hetero_api.spec_http import HttpSpec
from hetero_api.spec_idle import IdleSpec
from hetero_api.spec_model import FOLDER_URI_RULES, URI_RULES, DType, ModelSpec, SecretKeyRef, UriText, where_given
from hetero_api.spec_pods import PodPatch, Variables, Volumes, leaves_our_variables
from hetero_api.spec_pools import MAX_RANKS, Pools, PoolSpec, PoolType
from hetero_api.spec_router import CacheIsolation, RouterSpec, RouterType
from hetero_api.spec_topology import ONE_POD_RULES, Colocation, GroupTopologySpec
from hetero_api.spec_types import (
    Annotations,
    Bytes,
    HostFolder,
    Name,
    ObjectName,
    Reason,
    Rule,
    SpecEnum,
    SpecModel,
    TransitionRule,
    field_error,
    left_out,
    spelled,
)

SHARE_KINDS: Final = ("attention", "mlp", "vocabulary")


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

    attention: _Weights | None = None
    """Weights for KV heads, one a rank; 0: none. Default: computed."""
    mlp: _Weights | None = None
    """Weights for MLP columns, one a rank; 0: none. Default: computed."""
    vocabulary: _Weights | None = None
    """Weights for vocabulary rows, one a rank; 0: none. Default: computed."""

    @property
    def layer_problem(self) -> str:
        """Why these cannot be weights for whole layers, as `path: message`; "" if they can."""
        if self.vocabulary:
            return (
                "spec.placement.shares.vocabulary: does not apply in mode Layer, where the embedding lies with the "
                "first layer and the output head with the last; leave it out"
            )
        if self.attention and self.mlp and self.attention != self.mlp:
            return (
                "spec.placement.shares: attention and mlp differ, but in mode Layer both are weights for whole layers; "
                "give one of them"
            )
        return ""


class WorkloadSpec(SpecModel):
    """Load that the placement is chosen for and predictions are made for."""

    prompt_tokens: Annotated[int, Field(ge=1, le=10_000_000)] = 512
    """Tokens of a prompt."""
    output_tokens: Annotated[int, Field(ge=1, le=10_000_000)] = 128
    """Tokens of an output."""
    concurrency: Annotated[int, Field(ge=1, le=4096)] = 1
    """Requests at a time."""

    @property
    def decode_context(self) -> int:
        """Tokens that a token of the output attends to, in the middle of the output."""
        return self.prompt_tokens + self.output_tokens // 2


class PlacementMode(SpecEnum):
    """Way to spread a model over ranks."""

    AUTO = "Auto"
    TENSOR = "Tensor"
    LAYER = "Layer"
    GPU_ONLY = "GpuOnly"


class ExpertDeal(SpecEnum):
    """Way to deal a layer's experts to ranks."""

    AUTO = "Auto"
    WHOLE = "Whole"
    SLICES = "Slices"


class PlacementSpec(SpecModel):
    """How the model is spread over the ranks."""

    mode: Annotated[PlacementMode, spelled(PlacementMode)] = PlacementMode.AUTO
    """Auto: the way that is predicted to be fastest, by what ranks measured; it may leave ranks idle. Tensor: every
    layer is split over ranks. Layer: ranks hold whole layers. GpuOnly: CPU ranks hold nothing.
    """
    shares: PlacementShares = PlacementShares()
    """Share of each rank, where it is not to be computed. In mode Layer attention and mlp are weights for whole
    layers (if both are given, equal), and vocabulary does not apply.
    """
    workload: WorkloadSpec = WorkloadSpec()
    """Load that mode and shares are chosen for, where they are computed."""
    experts: Annotated[ExpertDeal, spelled(ExpertDeal)] = ExpertDeal.AUTO
    """How experts are dealt where a layer is split over ranks. Whole: each is one rank's, and ranks wait for the one
    whose experts a token chose most. Slices: every rank has some columns of each, so that all have the same to do, in
    more and smaller pieces. Auto: what is predicted to be fastest, also whole on GPU ranks and in slices on CPU ranks.
    """
    rebalance_experts: bool = True
    """Move experts that were often chosen to the ranks that are fastest with them, between steps; requests run on."""


class ExchangeKind(SpecEnum):
    """Way of ranks to exchange tensors in host memory."""

    AUTO = "Auto"
    SHARED_MEMORY = "SharedMemory"
    TCP = "Tcp"
    GLOO = "Gloo"


class ExchangeSpec(SpecModel):
    """How ranks exchange tensors in host memory."""

    rules: ClassVar[tuple[Rule, ...]] = (
        left_out("host_path", "is of no use with kind Tcp; leave it out", where=("kind", "Tcp")),
        left_out("host_path", "is of no use with kind Gloo; leave it out", where=("kind", "Gloo")),
    )

    kind: Annotated[ExchangeKind, spelled(ExchangeKind)] = ExchangeKind.AUTO
    """Auto: shared memory where all ranks have it in common, else Tcp. SharedMemory: nothing else; ranks that have
    none in common do not serve. Tcp: over the network by the native library; ranks that cannot use it use Gloo. Gloo:
    over the network without native code, which is slower.
    """
    host_path: HostFolder | None = None
    """Folder in the memory of each node, e.g. /dev/shm, that becomes /dev/shm of all rank pods: pods of one node then
    share memory, where each has its own by default. It must exist, and pods must be allowed to write to it. Pod
    Security levels Baseline and Restricted forbid such volumes; topology.colocate needs none. Of use where pods share
    nodes: scheduling.topology with key kubernetes.io/hostname brings them together.
    """


class CacheLayout(SpecEnum):
    """Layout of the KV cache."""

    PAGED = "Paged"
    """Blocks of blockSize positions, shared between requests with equal prefixes."""
    CONTIGUOUS = "Contiguous"
    """One block a sequence, as long as the longest sequence: nothing is shared."""


class SamplingDefaults(SpecEnum):
    """Defaults of sampling parameters that a request leaves out."""

    MODEL = "Model"
    NONE = "None"


class SpeculationKind(SpecEnum):
    """Way to propose tokens."""

    AUTO = "Auto"
    NONE = "None"
    NGRAM = "NGram"
    DRAFT = "Draft"
    MTP = "MTP"


class DraftRanks(SpecEnum):
    """Ranks that hold the draft model."""

    AUTO = "Auto"
    GPU = "GPU"
    CPU = "CPU"
    ALL = "All"


class DraftSpec(SpecModel):
    """A smaller model of the same tokenizer, which ranks hold beside their parts of the served one."""

    rules: ClassVar[tuple[Rule, ...]] = URI_RULES

    uri: UriText
    """Where it is, as in model.uri. Its weights stay as its files have them; it computes in model.dtype."""
    ranks: Annotated[DraftRanks, spelled(DraftRanks)] = DraftRanks.AUTO
    """Who holds it, with its KV cache. GPU: the first GPU rank, whole. CPU: the first CPU rank, whole. All: every layer
    is split over all ranks, each of which needs one of its KV heads. Auto: where a token is predicted to be drafted
    fastest, of the places that leave room for the served model.
    """


class SpeculativeSpec(SpecModel):
    """Tokens that are proposed, so that one step may give a request several."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "draft",
            "self.kind != 'Draft' || has(self.draft)",
            "is what kind Draft proposes with; give it the uri of a smaller model of the same tokenizer",
            lambda spec: spec.kind != SpeculationKind.DRAFT or spec.draft is not None,
        ),
        Rule(
            "draft",
            "!has(self.draft) || self.kind in ['Draft', 'Auto']",
            "is for the kinds Draft and Auto; leave it out",
            lambda spec: spec.draft is None or spec.kind in (SpeculationKind.DRAFT, SpeculationKind.AUTO),
            Reason.FORBIDDEN,
        ),
    )

    kind: Annotated[SpeculationKind, spelled(SpeculationKind)] = SpeculationKind.NONE
    """None: nothing is proposed. NGram: what followed the last few tokens where they stood before, in the prompt, in
    the output or in recent outputs of the same tenant. Draft: what the model `draft` draws. MTP: what the first
    multi-token-prediction head draws that the model's files have behind the layers; rank 0 holds it whole. Auto: as
    Draft where there is a `draft`, else as MTP where there is a head, else as NGram, but only while measurements of
    this group promise more tokens per second than without; and nothing for a model that keeps states of sequences,
    which NGram, Draft and MTP refuse.
    """
    draft: DraftSpec | None = None
    """The model that proposes."""
    max_tokens: Annotated[int, Field(ge=1, le=16)] = 8
    """Most tokens that are proposed to a request in a step. They count among maxNumSeqs and maxNumBatchedTokens."""


class AdapterSpec(SpecModel):
    """A LoRA adapter, as PEFT saves it."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "uri",
            "has(self.uri) != has(self.directory)",
            "set uri or directory, and not both",
            lambda adapter: (adapter.uri is None) != (adapter.directory is None),
        ),
        *where_given("uri", FOLDER_URI_RULES),
    )

    name: Annotated[str, StringConstraints(min_length=1, max_length=256)]
    """Name that requests ask for."""
    uri: UriText | None = None
    """Where it is, as in model.uri: a folder with adapter_config.json and adapter_model.safetensors. It is brought to
    every rank as the model is, with model.tokenSecretRef and model.cache for the Hub, and needs none of roots.
    """
    directory: HostFolder | None = None
    """Its directory on every rank, in one of roots, in place of a uri."""


class AdaptersSpec(SpecModel):
    """LoRA adapters, which are loaded and unloaded while the group serves."""

    max_loaded: Annotated[int, Field(ge=0, le=64)] = 0
    """Most adapters in the ranks' memory at a time, each of up to maxRank. 0: none can be loaded. A group knows up to
    1,024: one that is loaded, or that a request asks for, takes the place of the one that was used least recently.
    """
    max_rank: Annotated[int, Field(ge=1, le=256)] = 16
    """Largest rank of an adapter."""
    roots: Annotated[list[HostFolder], Field(max_length=8)] = Field(default_factory=list)
    """Folders that adapters may be loaded from; the same files must be there on every rank (pools' volumes)."""
    load: Annotated[list[AdapterSpec], Field(max_length=64)] = Field(default_factory=list)
    """Adapters that are loaded from the start, at most maxLoaded."""
    experts: bool = False
    """Let adapters change a model's experts, too. Memory is kept for factors of maxRank of every expert; experts stay
    where they are (placement.rebalanceExperts).
    """
    over_http: bool = False
    """Serve /v1/load_lora_adapter and /v1/unload_lora_adapter, too, to keys of the role admin and to the
    administrator's token. A local group without keys asks for neither.
    """

    @property
    def uris(self) -> dict[str, str]:
        """URIs of adapters that are named by one, in order, by their fields in the resource."""
        named = {f"spec.engine.adapters.load[{index}].uri": each.uri for index, each in enumerate(self.load)}
        return {path: uri for path, uri in named.items() if uri is not None}

    def brought_to(self, directories: Sequence[str]) -> AdaptersSpec:
        """Return the adapters with directories, which are roots, too, in place of their URIs, in order."""
        left = iter(directories)
        load = [
            each if each.uri is None else each.model_copy(update={"uri": None, "directory": next(left)})
            for each in self.load
        ]
        return self.model_copy(update={"load": load, "roots": [*self.roots, *directories]})

    def root_of(self, directory: str) -> str | None:
        """Return the folder of `roots` that a directory lies in; None: it lies in none."""
        path = PurePosixPath(directory)
        found = next((root for root in self.roots if path.is_relative_to(root)), None)
        return None if ".." in path.parts else found


class EngineSpec(SpecModel):
    """Bounds and sizes of the engine."""

    max_num_seqs: Annotated[int, Field(ge=1, le=4096)] = 64
    """Most sequences in one step."""
    max_num_batched_tokens: Annotated[int, Field(ge=1, le=131_072)] = 512
    """Most tokens in one step: longer prompts are computed in chunks."""
    block_size: Annotated[int, Field(ge=1, le=512)] = 16
    """Token positions a KV block. Contiguous caches do not use it."""
    cache_layout: Annotated[CacheLayout, spelled(CacheLayout)] = CacheLayout.PAGED
    """Paged: blocks of blockSize positions, shared between requests with equal prefixes. Contiguous: one block a
    sequence, as long as model.maxModelLen; nothing is shared.
    """
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Share of a GPU's memory that its rank may use."""
    kv_cache_memory_bytes: Bytes | None = None
    """KV cache a rank, e.g. 4Gi. Default: what memory leaves after the weights."""
    kv_cache_dtype: Annotated[DType, spelled(DType)] = DType.AUTO
    """Type of cached keys and values. auto: that of the arithmetic (model.dtype). Ranks compute in float32 over a
    cache of bfloat16 or float16, too, in half the memory.
    """
    enable_prefix_caching: bool = True
    """Reuse KV blocks of equal prefixes."""
    overlap_scheduling: bool = True
    """Send a step to the ranks while they still compute the one before."""
    enforce_eager: bool = False
    """Never capture CUDA graphs."""
    batch_invariant: bool = False
    """A request gets the same numbers to the last bit, and so the same tokens, whatever else is computed with it, and
    whether its prompt is computed whole, in chunks or found in the cache. It takes more time, on GPUs needs Triton, and
    leaves experts where they are (placement.rebalanceExperts).
    """
    expert_deferral: Annotated[int, Field(ge=0, le=64)] = 0
    """Number of a token's chosen experts, those with the least weights, whose result from CPU ranks is added one layer
    later: CPU ranks then compute while GPU ranks go on. The model is another one then, and its texts differ
    (docs/using.md). 0: none. It must leave a token one expert at least.
    """
    expert_streaming: Annotated[int, Field(ge=0, le=131_072)] | None = None
    """Rows of a step with prompts from which on a GPU rank computes all experts, with copies of those of CPU ranks that
    share memory with it. 0: never. Default: from where it is predicted to be faster, if ever (docs/using.md).
    """
    sampling_defaults: Annotated[SamplingDefaults, spelled(SamplingDefaults)] = SamplingDefaults.MODEL
    """Model: where a request leaves out temperature, topK, topP, minP or a repetition penalty, the model's own
    generation_config.json counts, if it names one. None: temperature 1, and nothing else.
    """
    adapters: AdaptersSpec = AdaptersSpec()
    """LoRA adapters that requests may ask for by their names."""
    speculative: SpeculativeSpec = SpeculativeSpec()
    """Tokens that are proposed to the model, so that one step may give a request several. A request gets the tokens
    that it would get without, where its numbers do not depend on what else is computed: on CPU ranks with native
    kernels, and with batchInvariant. Elsewhere rounding may decide a near tie otherwise.
    """


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

    type: Literal["ClusterIP", "NodePort", "LoadBalancer"] = "ClusterIP"
    """Type of the Service."""
    port: Annotated[int, Field(ge=1, le=65535)] = INFERENCE_PORT
    """Port of hetero.v1.Inference."""
    http_port: Annotated[int, Field(ge=1, le=65535)] = HTTP_PORT
    """Port of the OpenAI-compatible endpoint, over HTTP."""
    annotations: Annotated[Annotations, Field(max_length=32)] = Field(default_factory=dict)
    """Annotations of the Service, e.g. for a cloud's load balancer."""


class GatewaySpec(SpecModel):
    """The front door."""

    rules: ClassVar[tuple[Rule, ...]] = (leaves_our_variables("env"),)

    service: ServiceSpec = ServiceSpec()
    """How clients reach it."""
    http: HttpSpec = HttpSpec()
    """The endpoint that speaks the OpenAI API."""
    max_queued_requests: Annotated[int, Field(ge=0, le=1_000_000)] = 1024
    """Most requests that wait; more are refused."""
    tls_secret_name: ObjectName | None = None
    """Refused; tls.secretName took its place."""
    auth_token_secret_ref: SecretKeyRef | None = None
    """Refused; auth.keysSecretRef took its place."""
    tls: TlsSpec | None = None
    """TLS of both doors. Default: none."""
    auth: AuthSpec | None = None
    """Who may call. Default: whoever can reach the gateway."""
    resources: ResourcesSpec = ResourcesSpec()
    """Resources of the gateway's container."""
    drain_timeout_seconds: Annotated[int, Field(ge=0, le=3600)] = 60
    """How long a stopping gateway lets requests in flight finish. Pods of ranks have 60 s more to end; those that run
    keep the time that they were made with."""
    env: Variables | None = None
    """Environment variables of the gateway, e.g. HTTPS_PROXY."""
    volumes: Volumes | None = None
    """Volumes in its pod, e.g. certificates."""
    pod_template: PodPatch | None = None
    """Patch of its pod (metadata and spec), merged last; what comes out must still be a pod of the operator's."""

    def without_files(self, *, keys: object, tls: object, client_ca: object) -> list[str]:
        """Return the fields below spec.gateway that name a Secret for which no file is given."""
        authority = self.tls.client_ca_secret_name if self.tls is not None else None
        wanted = {
            "auth.keysSecretRef": (self.keys_secret, keys),
            "tls.secretName": (self.tls, tls),
            "tls.clientCASecretName": (authority, client_ca),
        }
        return [field for field, (secret, given) in wanted.items() if secret is not None and given is None]

    @property
    def asks_for_proof(self) -> bool:
        """Whether callers have to show a key or a certificate."""
        has_authority = self.tls is not None and self.tls.client_ca_secret_name is not None
        return has_authority or self.keys_secret is not None

    @property
    def keys_secret(self) -> KeysSecretRef | None:
        """Where the keys file is; None if callers need no key."""
        return None if self.auth is None else self.auth.keys_secret_ref


_HAS_KEYS: Final = "has(self.router.keysSecretRef) || has(self.gateway.auth) && has(self.gateway.auth.keysSecretRef)"


def _shares_no_tenants_cache(spec: HeteroInferenceSpec) -> bool:
    """Return whether the router leaves tenants apart, or the spec says that it need not."""
    has_keys = spec.router.keys_secret_ref is not None or spec.gateway.keys_secret is not None
    has_tenants = spec.has_router and has_keys and spec.engine.enable_prefix_caching
    return not has_tenants or spec.router.cache_isolation == CacheIsolation.SHARED


ROUTER_RULES: Final = (
    Rule(
        "router.cacheIsolation",
        "self.router.type != 'SMG' || self.router.cacheIsolation == 'Shared' || !self.engine.enablePrefixCaching || "
        f"!({_HAS_KEYS})",
        "must be Shared where keys tell tenants apart: behind a router all share the prefix cache; else set "
        "router.type None, or engine.enablePrefixCaching false",
        _shares_no_tenants_cache,
    ),
    Rule(
        "router.type",
        "self.router.type != 'SMG' || self.networkPolicy.enabled",
        "needs networkPolicy.enabled, because gateways ask a router for nothing; else set it to None",
        lambda spec: not spec.has_router or spec.network_policy.enabled,
    ),
    Rule(
        "router.type",
        "self.router.type != 'InferencePool' || !has(self.gateway.tls)",
        "InferencePool has no TLS to its pods: leave gateway.tls out, and let the Gateway have the certificate",
        lambda spec: not spec.has_inference_pool or spec.gateway.tls is None,
    ),
)


class RecoverySpec(SpecModel):
    """Steps that are taken when a rank is lost."""

    rendezvous_timeout_seconds: Annotated[int, Field(ge=5, le=86_400)] = 600
    """Longest wait for all ranks to meet, and then for a load to get on."""
    startup_timeout_seconds: Annotated[int, Field(ge=30, le=86_400)] = 1800
    """Longest time from a pod's start until its ranks have met, model fetch left out."""
    step_timeout_seconds: Annotated[int, Field(ge=1, le=3_600)] = 60
    """Longest step before the ranks count as hung."""
    max_restarts: Annotated[int, Field(ge=0, le=1000)] = 5
    """Restarts of ranks within the window; beyond it they wait ever longer."""
    window_seconds: Annotated[int, Field(ge=60, le=604_800)] = 3600
    """The window of maxRestarts."""
    node_lost_timeout_seconds: Annotated[int, Field(ge=10, le=86_400)] = 300
    """Wait before pods on a dead node are replaced."""


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
        Rule(
            "engine.speculative.draft.ranks",
            "!has(self.engine.speculative.draft) || self.engine.speculative.draft.ranks in ['Auto', 'All'] || "
            "self.pools.exists(pool, pool.type == self.engine.speculative.draft.ranks)",
            "names a kind of ranks that no pool has; take Auto, All or the other kind",
            lambda spec: (
                spec.engine.speculative.draft is None
                or spec.engine.speculative.draft.ranks in (DraftRanks.AUTO, DraftRanks.ALL)
                or spec.engine.speculative.draft.ranks in {str(pool.type) for pool in spec.pools}
            ),
        ),
        Rule(
            "engine.expertDeferral",
            "self.engine.expertDeferral == 0 || (self.pools.exists(pool, pool.type == 'GPU') && "
            "self.pools.exists(pool, pool.type == 'CPU') && self.placement.mode != 'GpuOnly')",
            "defers what CPU ranks compute for GPU ranks: it needs pools of both types, and not the "
            "placement.mode GpuOnly; else leave it out",
            lambda spec: (
                not spec.engine.expert_deferral
                or (len({pool.type for pool in spec.pools}) > 1 and spec.placement.mode != PlacementMode.GPU_ONLY)
            ),
        ),
        Rule(
            "engine.expertStreaming",
            "!has(self.engine.expertStreaming) || self.engine.expertStreaming == 0 || "
            "(self.pools.exists(pool, pool.type == 'GPU') && self.pools.exists(pool, pool.type == 'CPU') && "
            "self.placement.mode != 'GpuOnly' && !self.engine.batchInvariant && self.engine.expertDeferral == 0 && "
            "!self.engine.adapters.experts)",
            "brings experts of CPU ranks to a GPU rank: it needs pools of both types, and neither the placement.mode "
            "GpuOnly, batchInvariant, expertDeferral nor adapters.experts; else leave it out or set it to 0",
            lambda spec: (
                not spec.engine.expert_streaming
                or (
                    len({pool.type for pool in spec.pools}) > 1
                    and spec.placement.mode != PlacementMode.GPU_ONLY
                    and not (spec.engine.batch_invariant or spec.engine.expert_deferral or spec.engine.adapters.experts)
                )
            ),
        ),
        Rule(
            "engine.adapters.experts",
            "!self.engine.adapters.experts || self.engine.expertDeferral == 0",
            "does not go with expertDeferral: set one of them to its default",
            lambda spec: not spec.engine.adapters.experts or spec.engine.expert_deferral == 0,
        ),
        *ONE_POD_RULES,
        *ROUTER_RULES,
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

    model: ModelSpec
    """Model that is served."""
    pools: Pools
    """Sets of equal ranks. GPU pools hold the low ranks, then CPU pools, each in order. Pools are not added, removed or
    renamed once the resource exists.
    """
    topology: GroupTopologySpec = GroupTopologySpec()
    """Distribution of ranks over pods."""
    placement: PlacementSpec = PlacementSpec()
    """Spread of the model over the ranks."""
    exchange: ExchangeSpec = ExchangeSpec()
    """Exchange of tensors in host memory between ranks."""
    engine: EngineSpec = EngineSpec()
    """Bounds and sizes of the engine."""
    gateway: GatewaySpec = GatewaySpec()
    """The front door."""
    recovery: RecoverySpec = RecoverySpec()
    """Recovery from the loss of a rank."""
    scheduling: SchedulingSpec = SchedulingSpec()
    """Where Kubernetes may put the pods."""
    images: ImagesSpec = ImagesSpec()
    """Container images, where those of the installation are not wanted."""
    pod_metadata: PodMetadataSpec = PodMetadataSpec()
    """Labels and annotations of all pods."""
    network_policy: NetworkPolicySpec = NetworkPolicySpec()
    """Who may talk to the pods."""
    disruption_budget: DisruptionBudgetSpec = DisruptionBudgetSpec()
    """Protection from evictions."""
    monitoring: MonitoringSpec = MonitoringSpec()
    """Objects for Prometheus."""
    suspend: bool = False
    """true: keep the resource and what it owns, run no pods."""
    replicas: Annotated[int, Field(ge=0, le=MAX_REPLICAS)] = 1
    """Groups of a gateway and its ranks, each with the whole model, behind one Service; 0 for no pods. `kubectl scale`
    and autoscalers set it. One machine runs as many as `hetero up --replicas` says.
    """
    rollout: RolloutSpec = RolloutSpec()
    """How a changed spec reaches the replicas."""
    idle: IdleSpec = IdleSpec()
    """Behaviour while there are no requests, or no replicas."""
    router: RouterSpec = RouterSpec()
    """Router in front of all replicas."""

    @property
    def runs(self) -> bool:
        """Whether pods are wanted."""
        return self.replicas > 0 and not self.suspend

    @property
    def has_router(self) -> bool:
        """Whether a router of the operator's own is asked for."""
        return self.router.type == RouterType.SMG

    @property
    def has_inference_pool(self) -> bool:
        """Whether gateways are to be the pods of an InferencePool."""
        return self.router.type == RouterType.INFERENCE_POOL

    @property
    def world_size(self) -> int:
        """Ranks over all pools."""
        return sum(pool.ranks for pool in self.pools)

    @property
    def is_one_pod(self) -> bool:
        """Whether all ranks are in one pod."""
        return self.topology.colocate == Colocation.POD

    @property
    def dtype_in_force(self) -> str:
        """The arithmetic type: Auto is bfloat16 where GPU ranks compute, float32 where only CPU ranks do."""
        if self.model.dtype != DType.AUTO:
            return str(self.model.dtype)
        has_gpus = any(pool.type == PoolType.GPU for pool in self.pools)
        return str(DType.BFLOAT16 if has_gpus else DType.FLOAT32)

    @property
    def kv_cache_dtype_in_force(self) -> str:
        """Type of cached keys and values; auto is the arithmetic type."""
        asked = self.engine.kv_cache_dtype
        return self.dtype_in_force if asked == DType.AUTO else str(asked)

    @property
    def pools_in_rank_order(self) -> tuple[PoolSpec, ...]:
        """GPU pools first, then CPU pools, each in the manifest's order."""
        return tuple(sorted(self.pools, key=lambda pool: pool.type != PoolType.GPU))


class Metadata(BaseModel):
    """The part of Kubernetes' metadata that matters here; the rest is kept by Kubernetes."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    name: Name
    """Name of the resource."""
    namespace: Annotated[str | None, Field(max_length=63)] = None


class HeteroInference(SpecModel):
    """The whole resource."""

    api_version: str
    kind: str
    metadata: Metadata
    spec: HeteroInferenceSpec

    @model_validator(mode="after")
    def _our_kind(self) -> HeteroInference:
        if self.api_version != f"{GROUP}/{API_VERSION}":
            raise field_error("apiVersion", f"must be {GROUP}/{API_VERSION}, not {self.api_version!r}")
        if self.kind != KIND:
            raise field_error("kind", f"must be {KIND}, not {self.kind!r}")
        return self
