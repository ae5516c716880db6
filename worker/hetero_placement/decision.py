"""Values that go into the solver and come out of it, and how a resource's spec becomes such values."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hetero_api.model_config import ModelConfig
from hetero_api.sharding import ShardPlan
from hetero_api.spec import (
    DraftRanks,
    ExchangeKind,
    HeteroInferenceSpec,
    PlacementMode,
    SpeculationKind,
    SpeculativeSpec,
)
from hetero_placement.shard_plans import whole_on


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Engine bounds: they say how much memory must be there, and how prompts are cut."""

    max_model_len: int
    max_num_batched_tokens: int = 512
    max_num_seqs: int = 64
    block_size: int = 16
    kv_cache_bytes: int | None = None
    """spec.engine.kvCacheMemoryBytes, a rank's; None: room for one longest sequence is enough."""
    kv_cache_dtype: str = ""
    """Type of cached keys and values; empty: the arithmetic type."""
    enforce_eager: bool = False
    """spec.engine.enforceEager: GPU ranks make no graphs, and need no memory for them."""
    expert_deferral: int = 0
    """spec.engine.expertDeferral."""
    expert_streaming: int | None = 0
    """spec.engine.expertStreaming: rows from which on steps stream experts; 0: none do; None: where it is faster."""
    no_streaming: str = "spec.engine.expertStreaming is 0"
    """Why no experts are streamed, if `expert_streaming` is 0."""
    draft: ModelConfig | None = None
    """Draft model or prediction head; None: there is none."""
    draft_ranks: DraftRanks = DraftRanks.AUTO
    """spec.engine.speculative.draft.ranks."""
    draft_plan: ShardPlan | None = None
    """Who owns what of it; None: rank 0 has all."""

    def drafting_at(self, place: DraftPlace | None) -> Bounds:
        """Return the bounds with the draft model at a place; None: there is no draft model."""
        return self if place is None else replace(self, draft_plan=place.plan)

    def draft_plan_of(self, world_size: int) -> ShardPlan | None:
        """Return who owns what of the draft model in a group of so many ranks; None: there is none."""
        if self.draft is None or self.draft_plan is not None:
            return self.draft_plan
        return whole_on(self.draft, 0, world_size)


@dataclass(frozen=True, slots=True)
class DraftPlace:
    """Ranks that may hold the draft model."""

    name: str
    """As in spec.engine.speculative.draft.ranks, where it is one of these."""
    plan: ShardPlan
    token_s: float
    """Predicted seconds of drafting a token for each stream of the workload."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted speed of the workload under one plan."""

    decode_tokens_per_s: float
    """Over all streams."""
    prefill_tokens_per_s: float
    workload_s: float
    """All prompts, then all outputs."""
    decode_step_s: float


@dataclass(frozen=True, slots=True)
class Streaming:
    """Experts that come to the GPU rank, in steps with many rows of prompts."""

    min_rows: int
    """Rows of a step, from which on they come."""
    full_rows: int
    """Rows from which on a layer takes as long to compute as to copy: chunks of so many lose nothing."""
    buffer_bytes: int
    """Bytes of two buffers on the GPU."""
    chunk_s: float
    """Predicted seconds of the largest step ..."""
    resident_chunk_s: float
    """... and of the same step where experts stay."""


@dataclass(frozen=True, slots=True)
class Option:
    """One way to spread the model."""

    name: str
    mode: PlacementMode | None
    """The mode that it belongs to; None: told for comparison, cannot be chosen."""
    plan: ShardPlan | None = None
    prediction: Prediction | None = None
    why_not: str = ""
    """Why it cannot be had, or may not be chosen; empty if it may."""
    weight_shares: tuple[float, ...] = ()
    """Each rank's part of the weights' bytes; () where there is no plan."""
    note: str = ""
    """Comparison with other layouts of its experts, and what is streamed, for a person."""
    streaming: Streaming | None = None
    """What is streamed; None: nothing."""
    no_streaming: str = ""
    """Why nothing is streamed, where that was looked at."""

    @property
    def made(self) -> ShardPlan:
        """The plan of an option that has one."""
        assert self.plan is not None
        return self.plan

    @property
    def predicted(self) -> Prediction:
        """The prediction of an option that has a plan: every plan is predicted."""
        assert self.prediction is not None
        return self.prediction

    @property
    def eligible(self) -> bool:
        """True if it may be chosen."""
        return self.plan is not None and not self.why_not


@dataclass(frozen=True, slots=True)
class Decision:
    """The plan to use, out of what, and why."""

    plan: ShardPlan
    options: tuple[Option, ...]
    chosen: Option
    reason: str
    draft: DraftPlace | None = None
    """Where the draft model lies; None: there is none."""


def bounds_of(spec: HeteroInferenceSpec, config: ModelConfig, draft: ModelConfig | None = None) -> Bounds:
    """Return the engine's bounds under the spec, with the draft model that it names."""
    return Bounds(
        max_model_len=spec.model.max_model_len or config.max_position,
        max_num_batched_tokens=spec.engine.max_num_batched_tokens,
        max_num_seqs=spec.engine.max_num_seqs,
        block_size=spec.engine.block_size,
        kv_cache_bytes=spec.engine.kv_cache_memory_bytes,
        kv_cache_dtype=spec.kv_cache_dtype_in_force,
        enforce_eager=spec.engine.enforce_eager,
        expert_deferral=spec.engine.expert_deferral,
        expert_streaming=0 if (no_streaming := _no_streaming(spec)) else spec.engine.expert_streaming,
        no_streaming=no_streaming,
        draft=draft,
        draft_ranks=DraftRanks.AUTO if (named := spec.engine.speculative.draft) is None else named.ranks,
    )


def _no_streaming(spec: HeteroInferenceSpec) -> str:
    """Return why the resource has no experts streamed; empty if it may."""
    if spec.engine.expert_streaming == 0:
        return "spec.engine.expertStreaming is 0"
    others = {
        "engine.batchInvariant": spec.engine.batch_invariant,
        "engine.expertDeferral": spec.engine.expert_deferral,
        "engine.adapters.experts": spec.engine.adapters.experts,
    }
    if field := next((field for field, is_set in others.items() if is_set), ""):
        return f"experts are not streamed with spec.{field}"
    if spec.exchange.kind in (ExchangeKind.TCP, ExchangeKind.GLOO):
        return f"spec.exchange.kind: {spec.exchange.kind} shares no memory"
    return ""


def proposing_kind(spec: SpeculativeSpec, config: ModelConfig) -> SpeculationKind:
    """Return the way in which tokens are proposed to the model: NGram, Draft or MTP; None: not at all."""
    if spec.kind != SpeculationKind.AUTO:
        return spec.kind
    if spec.draft is not None:
        return SpeculationKind.DRAFT
    return SpeculationKind.MTP if config.num_prediction_heads else SpeculationKind.NGRAM


def quantized_config(spec: HeteroInferenceSpec, config: ModelConfig) -> ModelConfig:
    """With weights as ranks will have them. Raises ModelError where the checkpoint is quantised already."""
    return config.quantized(spec.model.quantization, spec.model.quantization_group_size)
