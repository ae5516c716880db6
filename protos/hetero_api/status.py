"""The status of a HeteroInference as types: what the operator has seen, never more.

The CRD's status schema is generated from these, and the operator builds what it writes with them. Conditions follow
the Kubernetes API conventions; there is no phase. Every list and text is bounded.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel
from pydantic.config import JsonDict

from hetero_api.spec import MAX_POOLS, MAX_RANKS

MAX_MESSAGE_LENGTH: Final = 2048
MAX_OPTIONS: Final = 16
"""Ways to spread a model that are told; there are fewer kinds of them."""
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
    NUMA_PINNED = "NUMAPinned"
    """Every CPU rank proved that its cores and memory are of one NUMA node."""
    SUSPENDED = "Suspended"
    """No pods run because the user asked for none."""


class ConditionStatus(StrEnum):
    """Value of a condition."""

    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


def _map_by(key: str) -> JsonDict:
    """Items are told apart by a key, so that writers can own them one by one."""
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]}


class _Status(BaseModel):
    model_config = ConfigDict(
        alias_generator=to_camel, validate_by_name=True, validate_by_alias=True, extra="ignore", frozen=True
    )


class Condition(_Status):
    """One condition, as metav1.Condition."""

    type: Annotated[str, Field(max_length=64, description="What is told.")]
    status: Annotated[ConditionStatus, Field(description="True, False or Unknown.")]
    reason: Annotated[
        str,
        Field(
            min_length=1,
            max_length=64,
            pattern="^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$",
            description="Why, as one word for programs.",
        ),
    ]
    message: Annotated[str, Field(max_length=MAX_MESSAGE_LENGTH, description="Why, for a person to act on.")] = ""
    last_transition_time: Annotated[str, Field(max_length=40, description="When status last changed, RFC 3339.")]
    observed_generation: Annotated[int | None, Field(ge=0, description="Generation that was looked at.")] = None


class PoolStatus(_Status):
    """Pods of a pool, counted in ranks."""

    name: Annotated[str, Field(max_length=63, description="The pool.")]
    desired: Annotated[int, Field(ge=0, description="Ranks asked for.")]
    scheduled: Annotated[int, Field(ge=0, description="Ranks whose pod has a node.")] = 0
    ready: Annotated[int, Field(ge=0, description="Ranks that are ready, by the gateway's word where it answers.")] = 0
    pinned: Annotated[int, Field(ge=0, description="Ranks that proved their NUMA binding.")] = 0


class ShareStatus(_Status):
    """Part of the model that a rank owns."""

    kv_heads: Annotated[int, Field(ge=0, description="KV heads, the most over its layers.")] = 0
    mlp_columns: Annotated[int, Field(ge=0, description="MLP columns, the most over its layers.")] = 0
    experts: Annotated[int, Field(ge=0, description="Experts, the most over its layers.")] = 0
    vocabulary_rows: Annotated[int, Field(ge=0, description="Rows of the vocabulary.")] = 0
    weight_bytes: Annotated[int, Field(ge=0, description="Bytes of its weights.")] = 0
    kv_bytes: Annotated[int, Field(ge=0, description="Bytes of its KV cache.")] = 0


class PlacedRank(_Status):
    """Where a rank is and what it owns, as the gateway and the rank itself told."""

    rank: Annotated[int, Field(ge=0, description="Global rank.")]
    pool: Annotated[str, Field(max_length=63, description="Its pool.")] = ""
    pod: Annotated[str, Field(max_length=253, description="Its pod.")] = ""
    node: Annotated[str, Field(max_length=253, description="Its node.")] = ""
    device: Annotated[str, Field(max_length=128, description="What it computes on.")] = ""
    numa_nodes: Annotated[list[int] | None, Field(max_length=64, description="NUMA nodes that its cores are of.")] = (
        None
    )
    cpus: Annotated[str, Field(max_length=1024, description='Its cores, e.g. "0-31".')] = ""
    local_memory_percent: Annotated[
        int | None, Field(ge=0, le=100, description="Share of its memory that lies on its own NUMA node.")
    ] = None
    shares: Annotated[ShareStatus, Field(description="What it owns.")] = ShareStatus()


class PlacementOptionStatus(_Status):
    """One way to spread the model that was weighed up."""

    name: Annotated[
        str, Field(max_length=MAX_OPTION_NAME_LENGTH, description='Its name, e.g. "Tensor, CPU ranks on MLP only".')
    ]
    chosen: Annotated[bool, Field(description="Whether it is the one in force.")] = False
    predicted_tokens_per_second: Annotated[
        float | None, Field(ge=0, description="Decode speed that it is predicted to have; none if it cannot be had.")
    ] = None
    predicted_prefill_tokens_per_second: Annotated[
        float | None, Field(ge=0, description="Prompt tokens a second, predicted; none if it cannot be had.")
    ] = None
    why_not: Annotated[str, Field(max_length=MAX_MESSAGE_LENGTH, description="Why it cannot be had.")] = ""


class PlacementStatus(_Status):
    """How the model is spread, why, and how fast that is, for the load of spec.placement.workload."""

    mode: Annotated[str, Field(max_length=32, description="The mode in force.")] = ""
    exchange: Annotated[str, Field(max_length=32, description="How ranks exchange tensors in host memory.")] = ""
    exchange_reason: Annotated[
        str, Field(max_length=MAX_MESSAGE_LENGTH, description="Why that is not the fastest way; empty if it is.")
    ] = ""
    predicted_tokens_per_second: Annotated[
        float | None, Field(ge=0, description="Decode speed that was predicted, over all streams.")
    ] = None
    measured_tokens_per_second: Annotated[
        float | None, Field(ge=0, description="Decode speed that was measured, to two digits, seldom renewed.")
    ] = None
    prediction_ratio: Annotated[
        float | None,
        Field(ge=0, description="Measured seconds of a decode step over predicted ones: 1.1 is 10 % slower."),
    ] = None
    reason: Annotated[
        str, Field(max_length=MAX_MESSAGE_LENGTH, description="Why this way was chosen, for a person.")
    ] = ""
    options: Annotated[
        list[PlacementOptionStatus], Field(max_length=MAX_OPTIONS, description="All ways that were weighed up.")
    ] = Field(default_factory=list)


class SeenRestarts(_Status):
    """How many restarts of a pod are in the count already."""

    pod: Annotated[str, Field(max_length=253, description="Name of the pod.")]
    uid: Annotated[str, Field(max_length=64, description="Its uid: a pod made anew counts as a restart.")]
    count: Annotated[int, Field(ge=0, description="Restarts of its containers.")] = 0


class RestartsStatus(_Status):
    """Restarts of ranks within the budget's window."""

    count: Annotated[int, Field(ge=0, description="Restarts within the window.")] = 0
    window_start: Annotated[str | None, Field(max_length=40, description="Begin of the window, RFC 3339.")] = None
    last_rank: Annotated[int | None, Field(ge=0, description="The rank that restarted last.")] = None
    last_reason: Annotated[str, Field(max_length=MAX_MESSAGE_LENGTH, description="Why.")] = ""
    last_time: Annotated[str | None, Field(max_length=40, description="When, RFC 3339.")] = None
    attempts: Annotated[int, Field(ge=0, description="Attempts since the budget was used up.")] = 0
    next_attempt_time: Annotated[
        str | None, Field(max_length=40, description="When ranks are started again; none: nothing waits.")
    ] = None
    seen: Annotated[
        list[SeenRestarts], Field(max_length=MAX_RANKS, description="What the count includes, a pod each.")
    ] = Field(default_factory=list)


class HeteroInferenceStatus(_Status):
    """Status as the operator last saw it."""

    observed_generation: Annotated[int | None, Field(ge=0, description="Generation that this tells about.")] = None
    replicas: Annotated[int, Field(ge=0, description="1 when the group's pods exist, else 0.")] = 0
    ready_replicas: Annotated[int, Field(ge=0, description="1 when the group serves, else 0.")] = 0
    selector: Annotated[str, Field(max_length=512, description="Label selector of the pods, as text.")] = ""
    revision: Annotated[str, Field(max_length=63, description="Hash of the spec that ranks were started from.")] = ""
    gateway_revision: Annotated[
        str, Field(max_length=63, description="Hash of the spec that the gateway was started from.")
    ] = ""
    epoch: Annotated[int, Field(ge=0, description="Epoch of the group; 0 before the first.")] = 0
    world_size: Annotated[int, Field(ge=0, description="Ranks asked for.")] = 0
    model_source: Annotated[
        str,
        Field(
            max_length=600,
            description="Origin of weights that were changed on their way. Absent for weights as spec.model.uri names "
            "them.",
        ),
    ] = ""
    ranks: Annotated[str, Field(max_length=16, description='Ready ranks of all, e.g. "3/4".')] = ""
    ready_ranks: Annotated[
        int, Field(ge=0, description="Ranks that are ready, by the gateway's word where it answers.")
    ] = 0
    reason: Annotated[str, Field(max_length=64, description="Reason of the condition Ready, for kubectl get.")] = ""
    pools: Annotated[
        list[PoolStatus],
        Field(max_length=MAX_POOLS, description="The pools, in the spec's order.", json_schema_extra=_map_by("name")),
    ] = Field(default_factory=list)
    placements: Annotated[
        list[PlacedRank],
        Field(
            max_length=MAX_RANKS,
            description="The ranks that told where they are, in order.",
            json_schema_extra=_map_by("rank"),
        ),
    ] = Field(default_factory=list)
    placement: Annotated[PlacementStatus, Field(description="How the model is spread.")] = PlacementStatus()
    restarts: Annotated[RestartsStatus, Field(description="Restarts of ranks.")] = RestartsStatus()
    endpoint: Annotated[
        str, Field(max_length=512, description="host:port of hetero.v1.Inference within the cluster.")
    ] = ""
    conditions: Annotated[
        list[Condition],
        Field(
            max_length=16,
            description="What is known of the resource, each as a condition of Kubernetes.",
            json_schema_extra=_map_by("type"),
        ),
    ] = Field(default_factory=list)
