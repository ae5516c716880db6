"""The status of a HeteroInference as types: what the operator has seen, never more.

The CRD's status schema is generated from these, and the operator builds what it writes with them. Conditions follow
the Kubernetes API conventions; there is no phase. Every list and text is bounded.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field, GetJsonSchemaHandler
from pydantic.alias_generators import to_camel
from pydantic.config import JsonDict
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from hetero_api.spec_cluster import MAX_REPLICAS
from hetero_api.spec_pools import MAX_POOLS, MAX_RANKS
from hetero_api.spec_types import described

MAX_MESSAGE_LENGTH: Final = 2048
MAX_OPTIONS: Final = 16
"""Most ways to spread a model that a status lists; there are fewer kinds of them."""
MAX_OPTION_NAME_LENGTH: Final = 128


class ConditionType(StrEnum):
    """Conditions of a resource. Each is there from the first report on."""

    READY = "Ready"
    """The group is formed, the gateway serves, and steps go forward."""
    PROGRESSING = "Progressing"
    """The operator or the cluster works toward the spec."""
    DEGRADED = "Degraded"
    """Something is broken that was asked for, whether or not requests are served."""
    ACCEPTED = "Accepted"
    """The spec makes sense and is the one in force."""
    SCHEDULED = "Scheduled"
    """Every pod has a node."""
    MODEL_READY = "ModelReady"
    """Every rank has the model's weights."""
    GROUP_FORMED = "GroupFormed"
    """All ranks met in one epoch."""
    GATEWAY_READY = "GatewayReady"
    """The gateway's front door is open."""
    ROUTER_READY = "RouterReady"
    """The router takes calls, or a Gateway routes to the InferencePool; False with reason NotRequested where
    spec.router.type is None."""
    NUMA_PINNED = "NUMAPinned"
    """Every CPU rank proved that its cores and memory are of one NUMA node."""
    SUSPENDED = "Suspended"
    """No pods run because the user asked for none."""
    EXPOSED = "Exposed"
    """Clients beyond the resource's namespace reach the gateway, and it asks them for nothing."""


class ConditionStatus(StrEnum):
    """Value of a condition."""

    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


def _map_by(key: str) -> JsonDict:
    """Return the schema of a list whose items have a key, so that writers can own them one by one."""
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]}


class _Status(BaseModel):
    model_config = ConfigDict(
        alias_generator=to_camel, validate_by_name=True, validate_by_alias=True, extra="ignore", frozen=True
    )

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return described(cls, handler.resolve_ref_schema(handler(schema)))


class Condition(_Status):
    """One condition, as metav1.Condition."""

    type: Annotated[str, Field(max_length=64)]
    """Kind of condition."""
    status: ConditionStatus
    """True, False or Unknown."""
    reason: Annotated[str, Field(min_length=1, max_length=64, pattern="^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$")]
    """Why, as one word for programs."""
    message: Annotated[str, Field(max_length=MAX_MESSAGE_LENGTH)] = ""
    """Why, for a person to act on."""
    last_transition_time: Annotated[str, Field(max_length=40)]
    """When status last changed, RFC 3339."""
    observed_generation: Annotated[int | None, Field(ge=0)] = None
    """Generation that was judged."""


class PoolStatus(_Status):
    """Pods of a pool, counted in ranks."""

    name: Annotated[str, Field(max_length=63)]
    """The pool."""
    desired: Annotated[int, Field(ge=0)]
    """Ranks asked for."""
    scheduled: Annotated[int, Field(ge=0)] = 0
    """Ranks whose pod has a node."""
    ready: Annotated[int, Field(ge=0)] = 0
    """Ranks that are ready, by the gateway's word where it answers."""
    pinned: Annotated[int, Field(ge=0)] = 0
    """Ranks that proved their NUMA binding."""


class ShareStatus(_Status):
    """Part of the model that a rank owns."""

    kv_heads: Annotated[int, Field(ge=0)] = 0
    """KV heads, the most over its layers."""
    mlp_columns: Annotated[int, Field(ge=0)] = 0
    """MLP columns, the most over its layers."""
    experts: Annotated[int, Field(ge=0)] = 0
    """Experts, the most over its layers."""
    expert_columns: Annotated[int, Field(ge=0)] = 0
    """Columns of each of these experts, where they are dealt in slices; 0: they are whole."""
    vocabulary_rows: Annotated[int, Field(ge=0)] = 0
    """Rows of the vocabulary."""
    weight_bytes: Annotated[int, Field(ge=0)] = 0
    """Bytes of its weights."""
    kv_bytes: Annotated[int, Field(ge=0)] = 0
    """Bytes of its KV cache."""


class PlacedRank(_Status):
    """Place and share of a rank, as reported by the gateway and by the rank."""

    rank: Annotated[int, Field(ge=0)]
    """Global rank."""
    pool: Annotated[str, Field(max_length=63)] = ""
    """Its pool."""
    pod: Annotated[str, Field(max_length=253)] = ""
    """Its pod."""
    node: Annotated[str, Field(max_length=253)] = ""
    """Its node."""
    device: Annotated[str, Field(max_length=128)] = ""
    """Device that it computes on."""
    numa_nodes: Annotated[list[int] | None, Field(max_length=64)] = None
    """NUMA nodes of its cores."""
    cpus: Annotated[str, Field(max_length=1024)] = ""
    """Its cores, e.g. "0-31"."""
    local_memory_percent: Annotated[int | None, Field(ge=0, le=100)] = None
    """Share of its memory that lies on its own NUMA node."""
    shares: ShareStatus = ShareStatus()
    """Its share of the model."""


class PlacementOptionStatus(_Status):
    """One way to spread the model that was considered."""

    name: Annotated[str, Field(max_length=MAX_OPTION_NAME_LENGTH)]
    """Its name, e.g. "Tensor, CPU ranks on MLP only"."""
    chosen: bool = False
    """Whether it is the one in force."""
    predicted_tokens_per_second: Annotated[float | None, Field(ge=0)] = None
    """Decode speed that it is predicted to have; none if it cannot be had."""
    predicted_prefill_tokens_per_second: Annotated[float | None, Field(ge=0)] = None
    """Prompt tokens a second, predicted; none if it cannot be had."""
    why_not: Annotated[str, Field(max_length=MAX_MESSAGE_LENGTH)] = ""
    """Why it cannot be had."""


class PlacementStatus(_Status):
    """How the model is spread, why, and how fast that is, for the load of spec.placement.workload."""

    mode: Annotated[str, Field(max_length=32)] = ""
    """The mode in force."""
    exchange: Annotated[str, Field(max_length=32)] = ""
    """How ranks exchange tensors in host memory."""
    exchange_reason: Annotated[str, Field(max_length=MAX_MESSAGE_LENGTH)] = ""
    """Why that is not the fastest way; empty if it is."""
    predicted_tokens_per_second: Annotated[float | None, Field(ge=0)] = None
    """Decode speed that was predicted, over all streams."""
    measured_tokens_per_second: Annotated[float | None, Field(ge=0)] = None
    """Decode speed that was measured, to two digits, seldom renewed."""
    prediction_ratio: Annotated[float | None, Field(ge=0)] = None
    """Measured seconds of a decode step over predicted ones: 1.1 is 10 % slower."""
    speculation_gain: Annotated[float | None, Field(ge=0)] = None
    """Tokens a second of steps with proposed tokens, times those of steps without; seldom renewed."""
    reason: Annotated[str, Field(max_length=MAX_MESSAGE_LENGTH)] = ""
    """Why this way was chosen, for a person."""
    options: Annotated[list[PlacementOptionStatus], Field(max_length=MAX_OPTIONS)] = Field(default_factory=list)
    """All ways that were considered."""


class SeenRestarts(_Status):
    """How many restarts of a pod are in the count already."""

    pod: Annotated[str, Field(max_length=253)]
    """Name of the pod."""
    uid: Annotated[str, Field(max_length=64)]
    """Its uid: a replaced pod counts as a restart."""
    count: Annotated[int, Field(ge=0)] = 0
    """Restarts of its containers."""


class RestartsStatus(_Status):
    """Restarts of ranks within the budget's window."""

    count: Annotated[int, Field(ge=0)] = 0
    """Restarts within the window."""
    window_start: Annotated[str | None, Field(max_length=40)] = None
    """Begin of the window, RFC 3339."""
    last_rank: Annotated[int | None, Field(ge=0)] = None
    """The rank that restarted last."""
    last_reason: Annotated[str, Field(max_length=MAX_MESSAGE_LENGTH)] = ""
    """Why."""
    last_time: Annotated[str | None, Field(max_length=40)] = None
    """When, RFC 3339."""
    attempts: Annotated[int, Field(ge=0)] = 0
    """Attempts since the budget was used up."""
    next_attempt_time: Annotated[str | None, Field(max_length=40)] = None
    """When ranks are started again; none: nothing waits."""
    seen: Annotated[list[SeenRestarts], Field(max_length=MAX_RANKS)] = Field(default_factory=list)
    """Restarts that the count includes, one entry a pod."""


class GroupStatus(_Status):
    """One of several replicas: a gateway and its ranks."""

    ordinal: Annotated[int, Field(ge=0)]
    """Its number, which its objects' names have."""
    updated: bool = False
    """Whether it has the spec as written."""
    revision: Annotated[str, Field(max_length=63)] = ""
    """Hash of the spec that its ranks were started from."""
    gateway_revision: Annotated[str, Field(max_length=63)] = ""
    """Hash of the spec that its gateway was started from."""
    epoch: Annotated[int, Field(ge=0)] = 0
    """Epoch of its ranks; 0 before the first."""
    ranks: Annotated[str, Field(max_length=16)] = ""
    """Ready ranks of all, e.g. "3/4"."""
    ready_ranks: Annotated[int, Field(ge=0)] = 0
    """Ranks that are ready."""
    reason: Annotated[str, Field(max_length=64)] = ""
    """Reason of its condition Ready."""
    placement: PlacementStatus = PlacementStatus()
    """How the model is spread over its ranks, without the ways that were considered."""
    restarts: RestartsStatus = RestartsStatus()
    """Restarts of its ranks."""
    conditions: Annotated[list[Condition], Field(max_length=16, json_schema_extra=_map_by("type"))] = Field(
        default_factory=list
    )
    """State of the replica."""


class HeteroInferenceStatus(_Status):
    """Status as the operator last saw it."""

    observed_generation: Annotated[int | None, Field(ge=0)] = None
    """Generation that this status describes."""
    replicas: Annotated[int, Field(ge=0)] = 0
    """Replicas whose pods exist."""
    ready_replicas: Annotated[int, Field(ge=0)] = 0
    """Replicas that serve, whichever spec they have."""
    updated_replicas: Annotated[int | None, Field(ge=0)] = None
    """Of several replicas: those that have the spec as written, whether or not they serve."""
    selector: Annotated[str, Field(max_length=512)] = ""
    """Label selector of the pods, as text."""
    revision: Annotated[str, Field(max_length=63)] = ""
    """Hash of the spec that ranks were started from."""
    gateway_revision: Annotated[str, Field(max_length=63)] = ""
    """Hash of the spec that the gateway was started from."""
    epoch: Annotated[int, Field(ge=0)] = 0
    """Epoch of the group; 0 before the first."""
    world_size: Annotated[int, Field(ge=0)] = 0
    """Ranks asked for."""
    model_source: Annotated[str, Field(max_length=600)] = ""
    """Origin of weights that were changed on their way. Absent for weights as spec.model.uri names them."""
    ranks: Annotated[str, Field(max_length=16)] = ""
    """Ready ranks of all, e.g. "3/4"."""
    ready_ranks: Annotated[int, Field(ge=0)] = 0
    """Ranks that are ready, by the gateway's word where it answers."""
    reason: Annotated[str, Field(max_length=64)] = ""
    """Reason of the condition Ready, for kubectl get."""
    pools: Annotated[list[PoolStatus], Field(max_length=MAX_POOLS, json_schema_extra=_map_by("name"))] = Field(
        default_factory=list
    )
    """The pools, in the spec's order."""
    placements: Annotated[list[PlacedRank], Field(max_length=MAX_RANKS, json_schema_extra=_map_by("rank"))] = Field(
        default_factory=list
    )
    """Ranks that reported their place, in order."""
    placement: PlacementStatus = PlacementStatus()
    """How the model is spread."""
    restarts: RestartsStatus = RestartsStatus()
    """Restarts of ranks."""
    groups: Annotated[list[GroupStatus], Field(max_length=2 * MAX_REPLICAS, json_schema_extra=_map_by("ordinal"))] = (
        Field(default_factory=list)
    )
    """Several replicas, each by itself. `epoch`, `placement` and `placements` of the whole are of replica 0."""
    endpoint: Annotated[str, Field(max_length=512)] = ""
    """host:port of hetero.v1.Inference within the cluster."""
    conditions: Annotated[list[Condition], Field(max_length=16, json_schema_extra=_map_by("type"))] = Field(
        default_factory=list
    )
    """State of the resource, as Kubernetes conditions."""
