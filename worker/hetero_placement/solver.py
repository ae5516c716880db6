"""Chooses how a model is spread over the ranks of a group: predicts every way, takes the fastest allowed, says why.

The ways are

    GPU only                        all on GPU ranks, every layer split over them
    Layer split                     whole layers
    Tensor, CPU ranks on MLP only   GPU ranks hold heads and vocabulary, CPU ranks help with the MLP
    Tensor, CPU ranks on all parts  every layer split over GPU and CPU ranks, heads too
    CPU ranks only                  all of them, or the number of them that is fastest
    Weight streaming                CPU ranks on experts, which come to the GPU rank for long prompts (`streaming`)

Of each way that splits layers, the fastest layout of experts is taken: whole, in slices, or mixed. The resource's mode,
shares and experts restrict what may be chosen; the rest is told all the same. Ranks that are alike count as equally
fast. The same input gives the same plan on every machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from hetero_api.errors import PlanError
from hetero_api.model_config import ModelConfig
from hetero_api.sharding import ShardPlan
from hetero_api.spec import SHARE_KINDS, ExpertDeal, PlacementMode, PlacementShares, PlacementSpec, WorkloadSpec
from hetero_api.spec_pools import PoolType
from hetero_placement.cost_model import CostModel
from hetero_placement.decision import Bounds, Decision, DraftPlace, Option, Prediction, Streaming
from hetero_placement.draft import draft_places
from hetero_placement.hardware import Hardware
from hetero_placement.layer_search import LayerSearch
from hetero_placement.memory_model import MemoryModel
from hetero_placement.roles import RoleChoices
from hetero_placement.search import EXHAUSTIVE
from hetero_placement.shard_plans import (
    UNIT,
    deal_layers,
    deal_within_layers,
    describe_layers,
    describe_units,
    in_units,
    largest_remainder,
    most_layer_ranks,
    most_ranks,
    too_many_ranks,
    units_of,
)
from hetero_placement.steps import Step, WorkloadSteps, decode_step
from hetero_placement.streaming import buffers_of_all, model_problem, predicted, streaming_of, told_of
from hetero_placement.tensor_search import NOTHING_FIXED, ExpertLayout, FixedCounts, Roles, TensorSearch

GPU_ONLY: Final = "GPU only"
LAYER: Final = "Layer split"
MLP_ONLY: Final = "Tensor, CPU ranks on MLP only"
ALL_PARTS: Final = "Tensor, CPU ranks on all parts"
CPU_ONLY: Final = "CPU ranks only"
TENSOR: Final = "Tensor, all ranks"
SHARES: Final = "Tensor, by the spec's shares"
STREAMING: Final = "Weight streaming"
ADOPTED: Final = "As the ranks hold it"

_SAME: Final = 1e-6


def solve(
    config: ModelConfig,
    hardware: Hardware,
    *,
    dtype: str,
    placement: PlacementSpec,
    bounds: Bounds,
    exhaustive: int = EXHAUSTIVE,
) -> Decision:
    """Choose the plan to use. Raises PlanError, naming fields, when nothing that the resource allows can be had.

    A draft model goes where it is fastest, of the places that leave room for a plan.
    `exhaustive` bounds how many deals of a component are all looked at; beyond, the search goes step by step. It takes
    milliseconds for some ranks, up to seconds for 64.
    """
    hardware, draft, problem = hardware.levelled(), bounds.draft, None

    def solved(within: Bounds) -> Decision:
        return _Solver(config, hardware, dtype=dtype, placement=placement, bounds=within, exhaustive=exhaustive).solve()

    if draft is None:
        return solved(bounds)
    for place in draft_places(draft, hardware, dtype=dtype, bounds=bounds, workload=placement.workload):
        within = bounds.drafting_at(place)
        try:
            decision = solved(within)
            # The search looks at ranks that compute; another may have the draft model alone.
            if short := MemoryModel(config, hardware, within, dtype=dtype).problem(decision.plan):
                raise PlanError(f"spec.engine.speculative.draft.ranks: {place.name}: {short}")
        except PlanError as error:
            problem = problem or error
        else:
            return replace(decision, draft=place, reason=f"{decision.reason}; {_draft_note(draft, place)}")
    assert problem is not None, "there is a place to try"
    raise problem


def predict(
    config: ModelConfig, hardware: Hardware, plan: ShardPlan, *, dtype: str, workload: WorkloadSpec, bounds: Bounds
) -> tuple[Prediction, Streaming | None, str]:
    """Predict the workload under a plan that is in use; return what it streams, too, or why nothing."""
    model = CostModel.within(bounds, config, hardware.levelled(), dtype=dtype)
    memory = MemoryModel(config, hardware.levelled(), bounds, dtype=dtype)
    streaming, no_streaming = streaming_of(model, memory, plan, bounds)
    return predicted(model, plan, workload, bounds, streaming), streaming, no_streaming


@dataclass(frozen=True, slots=True)
class _Found:
    """The best plan of some, and by what it was compared."""

    plan: ShardPlan
    prediction: Prediction
    moved_bytes: float
    owners: int
    streaming: Streaming | None = None
    no_streaming: str = ""
    layouts_s: dict[ExpertLayout, float] = field(default_factory=dict)
    """Seconds that the workload takes at best with each layout of experts that was tried."""

    def better_than(self, other: _Found | None) -> bool:
        """By time; of equal times fewer bytes moved, then fewer ranks."""
        if other is None:
            return True
        mine, theirs = self.prediction.workload_s, other.prediction.workload_s
        if abs(mine - theirs) > _SAME * theirs:
            return mine < theirs
        return (self.moved_bytes, self.owners) < (other.moved_bytes, other.owners)


class _Solver:
    def __init__(
        self,
        config: ModelConfig,
        hardware: Hardware,
        *,
        dtype: str,
        placement: PlacementSpec,
        bounds: Bounds,
        exhaustive: int,
    ) -> None:
        self._config = config
        self._hardware = hardware
        self._mode, self._shares, self._workload = placement.mode, placement.shares, placement.workload
        self._experts = placement.experts
        self._bounds = bounds
        self._exhaustive = exhaustive
        self._dtype = dtype
        self._model = CostModel.within(bounds, config, hardware, dtype=dtype)
        self._memory = MemoryModel(config, hardware, bounds, dtype=dtype)
        self._steps = WorkloadSteps.of(self._workload, bounds).all
        self._every_rank = self._mode == PlacementMode.TENSOR
        """Whether the resource wants every layer split over all ranks."""
        self._roles = RoleChoices(hardware, num_kv_heads=config.num_kv_heads, every_rank=self._every_rank)
        self._gpus, self._cpus = hardware.ranks_of(PoolType.GPU), hardware.ranks_of(PoolType.CPU)
        self._all = tuple(range(len(hardware.ranks)))

    def solve(self) -> Decision:
        options = list(self._options())
        eligible = [option for option in options if option.eligible]
        if not eligible:
            told = "; ".join(f"{option.name}: {option.why_not}" for option in options if option.mode is not None)
            raise PlanError(f"spec.placement: no placement can be had: {told}")
        if self._bounds.expert_streaming:  # It was asked for, as fast as it may be.
            eligible = [option for option in eligible if option.streaming is not None] or eligible
        # Rounded: what differs by less than a millionth is the same, and the earlier option, which is simpler, wins.
        chosen = min(eligible, key=lambda option: float(f"{option.predicted.workload_s:.6g}"))
        decode = decode_step(min(self._workload.concurrency, self._bounds.max_num_seqs), self._workload.decode_context)
        return Decision(chosen.made, tuple(options), chosen, explain(chosen, options, self._model, decode, self._mode))

    def _options(self) -> Iterator[Option]:
        if self._shares.attention or self._shares.mlp or self._shares.vocabulary:
            yield from self._by_shares(self._shares)
            return
        if self._gpus:
            yield self._option(GPU_ONLY, PlacementMode.GPU_ONLY, self._best(self._roles.gpu_only()), self._gpus)
        elif self._mode == PlacementMode.GPU_ONLY:
            yield Option(GPU_ONLY, PlacementMode.GPU_ONLY, why_not="spec.pools has no pool of type GPU")
        if len(self._all) > 1 or self._mode == PlacementMode.LAYER:
            yield self._layer_option()
        if self._gpus and self._cpus:
            found = self._best(self._roles.mlp_only())
            problem = "" if found is not None else self._problem_of_helpers()
            yield self._option(MLP_ONLY, PlacementMode.TENSOR, found, self._all, problem=problem)
            yield self._option(ALL_PARTS, PlacementMode.TENSOR, self._best(self._roles.all_parts()), self._all)
        elif self._cpus:
            yield self._option(TENSOR, PlacementMode.TENSOR, self._best(self._roles.every_cpu_rank()), self._all)
        yield from self._some_cpus()
        if self._gpus and self._cpus:
            yield self._streaming()

    def _allowed(self, option: Option) -> Option:
        """With a word why it may not be chosen, if the resource asks for something else."""
        if option.mode is None or option.why_not or self._mode in (PlacementMode.AUTO, option.mode):
            return option
        return replace(option, why_not=f"spec.placement.mode asks for {self._mode}")

    def _option(
        self, name: str, mode: PlacementMode, found: _Found | None, ranks: Sequence[int], *, problem: str = ""
    ) -> Option:
        if found is None:
            return Option(name, mode, why_not=problem or self._no_room(ranks))
        weights = self._model.weight_bytes(found.plan)
        shares = tuple(part / sum(weights) for part in weights)
        layout = ExpertLayout.of(found.plan)
        named = name if layout is ExpertLayout.WHOLE else f"{name}, {layout.value}"
        notes = self._experts_note(found), told_of(found.streaming, self._bounds)
        option = Option(named, mode, found.plan, found.prediction, weight_shares=shares, streaming=found.streaming)
        note = "; ".join(filter(None, notes))
        return self._allowed(replace(option, note=note, no_streaming=found.no_streaming))

    def _best(
        self, choices: Iterator[Roles], fixed: FixedCounts = NOTHING_FIXED, *, memory: MemoryModel | None = None
    ) -> _Found | None:
        """`memory`: what has to suffice; with one of its own, prompts stream experts in the room that it leaves."""
        best: _Found | None = None
        layouts_s: dict[ExpertLayout, float] = {}
        for roles, wanted in ((each, layout) for each in choices for layout in self._layouts(each, fixed)):
            search = TensorSearch(self._model, memory or self._memory, self._steps, roles, fixed, wanted)
            plan = search.plan(exhaustive=self._exhaustive)
            if plan is None:
                continue
            found = self._judged(plan, streams=memory is not None)
            layout, seconds = ExpertLayout.of(plan), found.prediction.workload_s
            layouts_s[layout] = min(seconds, layouts_s.get(layout, seconds))
            if found.better_than(best):
                best = found
        return None if best is None else replace(best, layouts_s=layouts_s)

    def _layouts(self, roles: Roles, fixed: FixedCounts) -> tuple[ExpertLayout, ...]:
        """Return the ways to deal experts to ranks with these roles that the resource allows."""
        owners = {*roles.holders, *roles.helpers}
        if self._experts == ExpertDeal.WHOLE or len(owners) < 2 or self._uncut:
            return (ExpertLayout.WHOLE,)
        if self._experts == ExpertDeal.SLICES:
            return (ExpertLayout.SLICES,)
        is_mixed = fixed.experts is None and owners.intersection(self._gpus)
        more = (ExpertLayout.MIXED,) if is_mixed and len(owners.intersection(self._cpus)) > 1 else ()
        return (ExpertLayout.WHOLE, ExpertLayout.SLICES, *more)

    @property
    def _uncut(self) -> str:
        """Reason why experts cannot be dealt in slices; empty if they can."""
        columns, unit = self._config.expert_columns, self._config.expert_unit
        if not columns:
            return "the model has none"
        return f"their {columns} columns are one unit of {unit}" if columns <= unit else ""

    def _experts_note(self, found: _Found) -> str:
        """Compare the layouts of experts that were tried with the one that was taken; say if none could be cut."""
        if self._uncut and self._config.expert_columns and self._experts == ExpertDeal.SLICES:
            return f"experts stay whole: {self._uncut}"
        own_s = found.prediction.workload_s
        others = {layout: s for layout, s in found.layouts_s.items() if layout is not ExpertLayout.of(found.plan)}
        return ", ".join(f"{layout.value} would take {s / own_s:.2f} times as long" for layout, s in others.items())

    def _judged(self, plan: ShardPlan, *, streams: bool = False) -> _Found:
        """`streams`: whether prompts may stream experts, for which there is room."""
        streaming, no_streaming = None, ""
        if streams:
            streaming, no_streaming = streaming_of(self._model, self._memory, plan, self._bounds)
        prediction = predicted(self._model, plan, self._workload, self._bounds, streaming)
        moved = self._model.moved_bytes(plan, decode_step(1, 0))
        owners = sum(weights > 0 for weights in self._model.weight_bytes(plan))
        return _Found(plan, prediction, moved, owners, streaming=streaming, no_streaming=no_streaming)

    def _some_cpus(self) -> Iterator[Option]:
        """CPU ranks alone, as many of them as are of use; in a group without GPU ranks fewer than all."""
        if self._gpus:
            computing = [self._cpus] if self._cpus else []
        else:
            dropped = [alike[-1] for alike in self._roles.classes(self._cpus)] if len(self._cpus) > 1 else []
            computing = [tuple(rank for rank in self._cpus if rank != one) for one in dropped]
        if not computing:
            return
        best = self._best(roles for ranks in computing for roles in self._roles.cpu_ranks_within(ranks))
        most = max(computing, key=lambda ranks: sum(self._hardware.ranks[rank].memory_bytes for rank in ranks))
        yield self._option(self._name_of_some(best), PlacementMode.AUTO, best, most)

    def _name_of_some(self, found: _Found | None) -> str:
        """With how many CPU ranks take part."""
        number = len(self._cpus)
        if found is None:
            return CPU_ONLY if self._gpus else f"{CPU_ONLY}, fewer than {number}"
        if found.owners < number:
            return f"{CPU_ONLY}, {found.owners} of {number}"
        in_layers = len({rank for stage in found.plan.stages() for rank in stage.ranks})
        return CPU_ONLY if in_layers == number else f"{CPU_ONLY}, layers on {in_layers} of {number}"

    def _layer_option(self) -> Option:
        search = LayerSearch(
            self._model, self._memory, self._steps, all_ranks=self._mode == PlacementMode.LAYER,
            exhaustive=self._exhaustive,
        )  # fmt: skip
        plan = search.plan()
        too_many = self._mode == PlacementMode.LAYER and len(self._all) > most_layer_ranks(self._config)
        problem = too_many_ranks(len(self._all), describe_layers(self._config)) if too_many else ""
        found = self._judged(plan) if plan is not None else None
        return self._option(LAYER, PlacementMode.LAYER, found, self._all, problem=problem)

    def _by_shares(self, shares: PlacementShares) -> Iterator[Option]:
        """Only what the shares leave open is solved."""
        if self._mode == PlacementMode.LAYER:
            plan = deal_layers(self._config, cores=[1] * len(self._all), shares=shares)
            problem = self._idle_problem(plan, describe_layers(self._config)) or self._memory.problem(plan)
            found = None if problem else self._judged(plan)
            yield self._option(LAYER, PlacementMode.LAYER, found, self._all, problem=problem)
            return
        fixed = self._fixed(shares)
        found = self._best(self._roles.by_shares(fixed), fixed, memory=self._memory)
        problem = self._idle_problem(found.plan, describe_units(self._config)) if found is not None else ""
        yield self._option(SHARES, PlacementMode.TENSOR, None if problem else found, self._all, problem=problem)

    def _idle_problem(self, plan: ShardPlan, units: str) -> str:
        """Return the message that shares leave a rank with nothing; empty if they do not."""
        weights = self._model.weight_bytes(plan)
        names = [f"rank {rank} ({self._hardware.ranks[rank].pool})" for rank in self._all if not weights[rank]]
        if not names:
            return ""
        given = [name for name in SHARE_KINDS if getattr(self._shares, name)]
        fields = ", ".join(f"spec.placement.shares.{name}" for name in given)
        return f"{fields}: {', '.join(names)} would own nothing of the model ({units}); give it a share or fewer ranks"

    def _fixed(self, shares: PlacementShares) -> FixedCounts:
        config, mlp, unit = self._config, shares.mlp, self._config.expert_unit
        return FixedCounts(
            heads=tuple(largest_remainder(config.num_kv_heads, shares.attention)) if shares.attention else None,
            columns=_units_by(config.intermediate_size, mlp) if mlp else None,
            experts=tuple(largest_remainder(config.num_experts, mlp)) if mlp and config.experts else None,
            expert_columns=_units_by(config.expert_columns, mlp, unit) if mlp and config.experts else None,
            rows=_units_by(config.vocab_size, shares.vocabulary) if shares.vocabulary else None,
        )

    def _streaming(self) -> Option:
        """CPU ranks have experts, and the GPU rank room for two buffers of them."""
        if problem := self._bounds.no_streaming if self._bounds.expert_streaming == 0 else model_problem(self._config):
            return Option(STREAMING, None, why_not=problem)
        if len(self._gpus) > 1:
            return Option(STREAMING, None, why_not=f"experts are streamed to one GPU rank, not to {len(self._gpus)}")
        kept = buffers_of_all(self._model) + self._memory.all_experts_beside
        ranks = [
            replace(rank, memory_bytes=max(0, rank.memory_bytes - kept)) if rank.is_gpu else rank
            for rank in self._hardware.ranks
        ]
        memory = MemoryModel(self._config, replace(self._hardware, ranks=tuple(ranks)), self._bounds, dtype=self._dtype)
        found = self._best(self._roles.mlp_only(), memory=memory)
        if found is None:
            room = f"{kept / 1e9:.2f} GB of the GPU for two buffers of a layer's experts"
            return Option(STREAMING, None, why_not=f"nothing fits beside {room} (spec.engine.gpuMemoryUtilization)")
        if found.streaming is None:
            return Option(STREAMING, None, why_not=found.no_streaming)
        return self._option(STREAMING, PlacementMode.TENSOR, found, self._all)

    def _problem_of_helpers(self) -> str:
        """Say why CPU ranks cannot all help: too few slices, or a GPU rank without room for attention; or empty."""
        if problem := self._too_few_slices(self._all, self._gpus):
            return problem
        on_gpu = [float(rank in self._gpus) for rank in self._all]
        on_cpu = [1.0 - share for share in on_gpu]
        shares = PlacementShares(attention=on_gpu, mlp=on_cpu, vocabulary=on_cpu)
        return self._memory.problem(deal_within_layers(self._config, cores=[1] * len(self._all), shares=shares))

    def _no_room(self, ranks: Sequence[int]) -> str:
        if self._every_rank and len(ranks) > most_ranks(self._config):
            return too_many_ranks(len(self._all), describe_units(self._config))
        if problem := self._too_few_slices(ranks, ranks):
            return problem
        weights = min(self._model.whole_bytes(rank) for rank in ranks)
        cache = self._memory.cache_bytes(self._config.num_kv_heads)
        if problem := self._memory.shortage(weights + cache, tuple(ranks)):
            return problem
        room = [rank.memory_bytes if number in ranks else 0 for number, rank in enumerate(self._hardware.ranks)]
        problem = self._memory.problem(deal_within_layers(self._config, cores=room, shares=PlacementShares()))
        nearest = f"; dealt by memory, {problem}" if problem else ""
        return f"memory is enough in sum, but no deal fits every rank{nearest}"

    def _too_few_slices(self, ranks: Sequence[int], holders: Sequence[int]) -> str:
        """Return the message that an expert has too few units to give ranks without heads one each; empty if not.

        `holders`: those of `ranks` that may have heads.
        """
        config, shares = self._config, self._shares
        units = units_of(config.expert_columns, config.expert_unit)
        needs_all = not shares.mlp and (self._every_rank or shares.attention or shares.vocabulary)
        others = len(ranks) - min(len(holders), config.num_kv_heads)
        if self._experts != ExpertDeal.SLICES or self._uncut or not needs_all or others <= units:
            return ""
        return (
            f"spec.placement.experts: Slices has {units} units of an expert's columns ({config.expert_columns} in "
            f"units of {config.expert_unit}) for {others} of the {len(ranks)} ranks, which have no KV heads and need "
            "one each; use fewer ranks, Whole or Auto"
        )


def _units_by(total: int, weights: Sequence[float], unit: int = UNIT) -> tuple[int, ...]:
    return tuple(in_units(total, largest_remainder(units_of(total, unit), weights), unit))


def explain(chosen: Option, options: Sequence[Option], model: CostModel, decode: Step, mode: PlacementMode) -> str:
    """Say the chosen option's speed, its exchanges, the speed of the others, and which cannot be had and why."""
    own = chosen.predicted
    parts = [
        f"{chosen.name}: {own.decode_tokens_per_s:.3g} tokens/s decode, {own.prefill_tokens_per_s:.3g} prefill, "
        f"{_seconds(own.workload_s)} for the workload",
        *_exchanges(chosen, model, decode),
        *filter(None, [chosen.note]),
    ]
    if mode != PlacementMode.AUTO:
        parts.append(f"spec.placement.mode asks for {mode}")
    others = [option for option in options if option is not chosen and option.plan]
    parts += [_comparison(option, own) for option in sorted(others, key=lambda option: option.predicted.workload_s)]
    parts += [f"{option.name} cannot be had: {option.why_not}" for option in options if option.mode and not option.plan]
    return "; ".join(parts)


def _draft_note(draft: ModelConfig, place: DraftPlace) -> str:
    owners = place.plan.owners
    what = "prediction head" if draft.follows_states else "draft model"
    where = f"rank {owners[0]}" if len(owners) == 1 else f"{len(owners)} ranks"
    return f"{what} on {where}: {_seconds(place.token_s)} a drafted token"


def _comparison(option: Option, chosen: Prediction) -> str:
    """Compare by what counts for the choice, the workload's time, and give the tokens/s."""
    ratio = option.predicted.workload_s / chosen.workload_s
    slower = f"{ratio:.2f} times as long" if abs(ratio - 1) > 5e-3 else "as long"
    return f"{option.name} would give {option.predicted.decode_tokens_per_s:.3g} tokens/s, and take {slower}"


def _exchanges(chosen: Option, model: CostModel, decode: Step) -> list[str]:
    """Say how much of a decode step exchanges are."""
    plan = chosen.made
    seconds = model.exchange_s(plan, decode)
    if not seconds:
        return []
    hidden = ", hidden behind computation as far as possible" if any(stage.helpers for stage in plan.stages()) else ""
    step = _seconds(chosen.predicted.decode_step_s)
    return [f"exchanges of a decode step of {step} take {_seconds(seconds)}{hidden}"]


def _seconds(seconds: float) -> str:
    """3 digits, in the unit that reads best."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"
