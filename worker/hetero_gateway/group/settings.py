"""GroupSettings: one group as it is to be, resolved from the resource and the model once at start.

Ranks are numbered by pool, GPU pools first: rank = pool's base + ordinal * ranksPerPod + local rank. What each of them
owns is decided once all have reported how fast they are (placement.py); shares that the spec gives, and everything that
this version cannot do, are checked before. Pure functions.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

from hetero_api.contract import VERSION
from hetero_api.errors import ModelError, PlanError
from hetero_api.manifest import find_unserved
from hetero_api.model_config import ModelConfig
from hetero_api.sharding import RankShard, ShardPlan, deferral_problem
from hetero_api.spec import (
    SHARE_KINDS,
    CacheLayout,
    DraftRanks,
    HeteroInference,
    HeteroInferenceSpec,
    PlacementMode,
    SpeculationKind,
    SpeculativeSpec,
)
from hetero_api.spec_model import Quantization
from hetero_api.spec_pools import PoolType
from hetero_api.v1 import ranks_pb2
from hetero_gateway.engine.config import SpeculationConfig
from hetero_gateway.group.errors import UnsupportedSpecError
from hetero_placement.decision import Decision, proposing_kind, quantized_config
from hetero_placement.shard_plans import (
    deal_layers,
    deal_within_layers,
    describe_layers,
    describe_units,
    most_layer_ranks,
    most_ranks,
    too_many_ranks,
)
from hetero_placement.solver import STREAMING


@dataclass(frozen=True, slots=True)
class ExpectedPlace:
    """Place of a rank that may not have joined yet.

    `pool_index` is its pool's in spec.pools; `cores` is what it gets, its weight where no shares are given.
    """

    rank: int
    pool: str
    pool_index: int
    ordinal: int
    local_rank: int
    cores: int
    is_gpu: bool = False

    @property
    def pod_name(self) -> str:
        """Name of its pod as far as it is known before the rank says Hello."""
        return f"{self.pool}-{self.ordinal}"

    def __str__(self) -> str:
        local = f" local rank {self.local_rank}" if self.local_rank else ""
        return f"rank {self.rank} ({self.pod_name}{local})"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSettings:
    """One group, as it is to be.

    `config` describes weights as ranks will hold them, quantised as the resource asks. `plan_key` names what shard
    plans of the group are made from. `block_size` is that of the resource's own cache: with a contiguous layout as long
    as the longest sequence. `model_source` is the
    origin of weights that were changed on their way; empty for others.
    """

    name: str
    spec: HeteroInferenceSpec
    config: ModelConfig
    places: tuple[ExpectedPlace, ...]
    plan_key: str
    model_fingerprint: str
    dtype: str
    max_model_len: int
    block_size: int
    version: str = VERSION
    model_source: str = ""
    draft: ModelConfig | None = None
    """The draft model or prediction head; None: there is none."""

    @property
    def quantization(self) -> ranks_pb2.Quantization | None:
        """How ranks quantise weights as they load them; None: not at all."""
        model = self.spec.model
        if model.quantization == Quantization.NONE:
            return None
        return ranks_pb2.Quantization(method=model.quantization, group_size=model.quantization_group_size or 0)

    @classmethod
    def from_resource(
        cls, resource: HeteroInference, config: ModelConfig, *, model_fingerprint: str, model_source: str = ""
    ) -> GroupSettings:
        """Resolve the resource, whose spec must have passed `check_supported`.

        Raises PlanError when the spec's shares do not fit.
        """
        spec, dtype = resource.spec, resource.spec.dtype_in_force
        max_model_len = resolve_max_model_len(spec, config)
        is_contiguous = spec.engine.cache_layout == CacheLayout.CONTIGUOUS
        check_shares(spec, config)
        quantized = quantized_config(spec, config)
        has_head = proposing_kind(spec.engine.speculative, config) == SpeculationKind.MTP
        return cls(
            name=resource.metadata.name,
            spec=spec,
            config=quantized,
            draft=quantized.prediction_head if has_head else None,
            places=expected_places(spec),
            plan_key=make_plan_key(spec, dtype=dtype, model_fingerprint=model_fingerprint, version=VERSION),
            model_fingerprint=model_fingerprint,
            model_source=model_source,
            dtype=dtype,
            max_model_len=max_model_len,
            block_size=max_model_len if is_contiguous else spec.engine.block_size,
        )


def expected_places(spec: HeteroInferenceSpec) -> tuple[ExpectedPlace, ...]:
    """Return the places of all ranks of the group, in rank order."""
    places: list[ExpectedPlace] = []
    for pool in spec.pools_in_rank_order:
        is_gpu = pool.type == PoolType.GPU
        for index in range(pool.ranks):
            ordinal, local_rank = divmod(index, pool.ranks_per_pod)
            place = ExpectedPlace(
                rank=len(places),
                pool=pool.name,
                pool_index=spec.pools.index(pool),
                ordinal=ordinal,
                local_rank=local_rank,
                cores=pool.gpu_or_default.cores_per_rank if is_gpu else pool.cpu_or_default.cores_per_rank,
                is_gpu=is_gpu,
            )
            places.append(place)
    return tuple(places)


def make_plan_key(spec: HeteroInferenceSpec, *, dtype: str, model_fingerprint: str, version: str) -> str:
    """Return the sha256, hex, of what plans are made from. Options that only matter while the group lives stay out."""
    made_from = {
        "placement": spec.placement.model_dump(mode="json", exclude={"rebalance_experts"}),
        "pools": [pool.model_dump(mode="json") for pool in spec.pools_in_rank_order],
        "dtype": dtype,
        "quantization": [spec.model.quantization, spec.model.quantization_group_size],
        "model": model_fingerprint,
        "version": version,
    }
    return hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()


def resolve_max_model_len(spec: HeteroInferenceSpec, config: ModelConfig) -> int:
    """Return the longest prompt plus completion, in tokens."""
    return spec.model.max_model_len or config.max_position


def speculation_of(spec: SpeculativeSpec, config: ModelConfig) -> SpeculationConfig | None:
    """Return how tokens are proposed to the model; None: not at all."""
    kind = proposing_kind(spec, config)
    if kind == SpeculationKind.NONE:
        return None
    return SpeculationConfig(
        max_tokens=spec.max_tokens,
        only_if_faster=spec.kind == SpeculationKind.AUTO,
        drafts=kind != SpeculationKind.NGRAM,
        has_head=kind == SpeculationKind.MTP,
    )


def draft_problem(draft: ModelConfig, spec: HeteroInferenceSpec, *, max_model_len: int) -> str:
    """Return why a model of the right tokenizer cannot draft for a group, `path: message`; "" if it can."""
    path = "spec.engine.speculative.draft"
    if draft.delta is not None:
        return (
            f"{path}: its layers keep states of sequences, which cannot go back behind a token that was wrong; take "
            "another model"
        )
    if draft.max_position < max_model_len:
        return (
            f"{path}: has {draft.max_position} positions, and sequences have up to {max_model_len}; take another "
            "model, or lower spec.model.maxModelLen"
        )
    named = spec.engine.speculative.draft
    if named is not None and named.ranks == DraftRanks.ALL and draft.num_kv_heads < spec.world_size:
        return (
            f"{path}.ranks: All, but it has {draft.num_kv_heads} KV heads for {spec.world_size} ranks; take Auto, GPU "
            "or CPU"
        )
    return ""


# --- checks -------------------------------------------------------------------------------------------------


def check_supported(spec: HeteroInferenceSpec, config: ModelConfig) -> None:
    """Raise UnsupportedSpecError with every field that asks for what this version cannot do."""
    problems = [*_model_problems(spec, config), *find_unserved(spec), *_nothing_to_run(spec)]
    if problems:
        raise UnsupportedSpecError(problems)


def check_shares(spec: HeteroInferenceSpec, config: ModelConfig) -> None:
    """Raise PlanError, naming the field, when the spec's shares do not fit, or a rank would be left with nothing.

    Without shares that can only be in modes that want all ranks to compute. Units without shares count as dealt by
    cores: the solver may find better, but has as many to give.
    """
    shares, places = spec.placement.shares, expected_places(spec)
    given = [name for name in SHARE_KINDS if getattr(shares, name)]
    if not given:
        _check_number(spec, config)
        return
    is_layered = spec.placement.mode == PlacementMode.LAYER
    deal = deal_layers if is_layered else deal_within_layers
    plan = deal(config, cores=[place.cores for place in places], shares=shares)
    if idle := [place for place in places if _owns_nothing(plan.ranks[place.rank])]:
        names, fields = ", ".join(map(str, idle)), ", ".join(f"spec.placement.shares.{name}" for name in given)
        units = describe_layers(config) if is_layered else describe_units(config)
        raise PlanError(f"{fields}: {names} would own nothing of the model ({units}); give it a share or fewer ranks")


def check_plan(plan: ShardPlan, config: ModelConfig, *, world_size: int) -> None:
    """Raise PlanError unless so many ranks own all of this model, every unit once."""
    if plan.world_size != world_size:
        raise PlanError(f"the plan is for {plan.world_size} ranks, the group has {world_size}")
    plan.validate_for(config)
    plan.stages()


def check_deferral(spec: HeteroInferenceSpec, plan: ShardPlan) -> None:
    """Raise PlanError if the spec defers experts, and no rank of the plan has any to defer."""
    if spec.engine.expert_deferral and not any(map(plan.deferring_layers, range(plan.world_size))):
        raise PlanError(
            "spec.engine.expertDeferral: no rank without KV heads has experts of two layers in a row, so nothing would "
            "come late; leave it out, or give CPU ranks no attention (spec.placement.shares.attention)"
        )


def check_streaming(spec: HeteroInferenceSpec, decision: Decision) -> None:
    """Raise PlanError if the spec says from where on experts are streamed, and the chosen plan streams none."""
    asked, chosen = spec.engine.expert_streaming, decision.chosen
    if asked and chosen.streaming is None:
        told = (option.why_not for option in decision.options if option.name == STREAMING)
        why = chosen.no_streaming or next(told, "no placement that is allowed streams any")
        raise PlanError(f"spec.engine.expertStreaming: {asked}, but {why}; leave it out or set it to 0")


def _check_number(spec: HeteroInferenceSpec, config: ModelConfig) -> None:
    """Raise PlanError when there are too many ranks. The solver would find that too, but only once all have joined."""
    limits = {
        PlacementMode.TENSOR: (most_ranks(config), describe_units(config)),
        PlacementMode.LAYER: (most_layer_ranks(config), describe_layers(config)),
    }
    limit, units = limits.get(spec.placement.mode, (spec.world_size, ""))
    if spec.world_size > limit:
        raise PlanError(too_many_ranks(spec.world_size, units))


def _owns_nothing(shard: RankShard) -> bool:
    return not (shard.embedding_rows.size or shard.head_rows.size) and all(layer.is_empty for layer in shard.layers)


def _model_problems(spec: HeteroInferenceSpec, config: ModelConfig) -> list[str]:
    problems = []
    try:
        quantized_config(spec, config)
    except ModelError as error:
        problems.append(f"spec.model.quantization: {error}")
    deferral = spec.engine.expert_deferral
    if deferral and (problem := deferral_problem(config, deferral)):
        problems.append(problem)
    asked = spec.model.max_model_len
    if asked is not None and asked > config.max_position:
        problems.append(
            f"spec.model.maxModelLen: {asked} is more than the {config.max_position} positions of the model"
        )
    if spec.engine.speculative.kind == SpeculationKind.MTP and not config.num_prediction_heads:
        problems.append(
            "spec.engine.speculative.kind: MTP, but these files have no multi-token-prediction head "
            "(num_nextn_predict_layers in config.json, and its tensors); take files that have one, or kind NGram or "
            "Draft"
        )
    return problems


def _nothing_to_run(spec: HeteroInferenceSpec) -> list[str]:
    problems = []
    if spec.suspend:
        problems.append("spec.suspend: true asks for nothing to run; set it to false to start a group")
    if not spec.replicas:
        problems.append("spec.replicas: 0 asks for nothing to run; set it to 1 to start a group")
    return problems
