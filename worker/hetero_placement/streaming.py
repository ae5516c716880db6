"""Prompts whose experts come to the GPU rank: from how many rows on that is faster, and what it takes.

A step of few rows computes experts where they are. Of a step with many rows of prompts the GPU rank computes all
experts, with copies of those of the ranks on host cores: layer after layer over the bus, beside the computing of the
layer before. A layer takes as long as the longer of the two. Copying does not depend on the rows: so there is a number
of rows from which on it pays, and a greater one from which on it costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from hetero_api.model_config import ModelConfig
from hetero_api.sharding import ShardPlan
from hetero_api.spec import WorkloadSpec
from hetero_placement.cost_model import CostModel, StreamedSteps
from hetero_placement.decision import Bounds, Prediction, Streaming
from hetero_placement.hardware import Hardware
from hetero_placement.memory_model import MemoryModel
from hetero_placement.shard_plans import UNIT, LayerKind, PlanView
from hetero_placement.steps import Span, Step

_MOST_ROWS: Final = 131_072
_PANEL: Final = 32
"""Rows and inputs of a packed matrix are filled up to a multiple of so many, at most."""
_EXPERT_BESIDE: Final = 6 * 64
"""Bytes by which parts of a packed expert are aligned."""
_LAYER_BESIDE: Final = 2 * 4096
"""Bytes by which a rank's part of a layer is."""
_SLICES_MARGIN: Final = 9
"""Eighths: slices have more scales, and are filled up each."""


def model_problem(config: ModelConfig) -> str:
    """Return why experts of a model are not streamed; empty if they may be."""
    experts = config.experts
    if experts is None:
        return "the model has no experts, and other weights are not streamed"
    if experts.biased:
        return "the model's experts have biases, which are not streamed"
    if experts.norms is not None:
        return "the model norms sums of experts, which are not streamed"
    return ""


def plan_problem(config: ModelConfig, hardware: Hardware, plan: ShardPlan) -> str:
    """Return why experts are not streamed under a plan; empty if they may be."""
    if problem := model_problem(config):
        return problem
    if hardware.num_gpu_ranks != 1:
        return f"experts are streamed to one GPU rank, and there are {hardware.num_gpu_ranks}"
    holders = [rank for rank, shard in enumerate(plan.ranks) if shard.kv_heads_total]
    if holders != [0]:
        return "experts are streamed only where the GPU rank has all KV heads"
    helpers = [rank for rank in range(1, plan.world_size) if any(s.experts.size for s in plan.ranks[rank].layers)]
    if not helpers:
        return "no CPU rank has experts"
    if any(plan.ranks[rank].layers[layer].mlp_columns.size for rank in helpers for layer in config.expert_layers):
        return "CPU ranks have parts of the experts that all tokens share"
    if len({hardware.ranks[rank].host for rank in (0, *helpers)}) > 1:
        return "CPU ranks with experts share no memory with the GPU rank: they are on other hosts"
    return ""


def buffers_of_all(model: CostModel) -> int:
    """Return the bytes of two buffers of all experts of a layer, at most."""
    ranks, number = model.hardware.ranks, model.config.num_experts
    each = max(_packed_bytes(model, rank, 0) for rank in range(len(ranks)) if not ranks[rank].is_gpu)
    return 2 * (number * each * _SLICES_MARGIN // 8 + len(ranks) * _LAYER_BESIDE)


def streaming_of(
    model: CostModel, memory: MemoryModel, plan: ShardPlan, bounds: Bounds
) -> tuple[Streaming | None, str]:
    """Return what a plan that fits streams; or None, and why nothing."""
    if bounds.expert_streaming == 0:
        return None, bounds.no_streaming
    if problem := plan_problem(model.config, model.hardware, plan):
        return None, problem
    costs = StreamingCosts(model, plan)
    needs, has = costs.buffer_bytes + memory.all_experts_beside, memory.room(plan, 0)
    if needs > has:
        return None, (
            f"two buffers of a layer's experts need {needs / 1e9:.2f} GB of the GPU, which has {max(0, has) / 1e9:.2f} "
            "GB left (spec.engine.gpuMemoryUtilization)"
        )
    return costs.decided(bounds)


def streamed_steps(model: CostModel, plan: ShardPlan, streaming: Streaming | None) -> StreamedSteps | None:
    """Return the costs of steps that stream experts; None if none do."""
    return None if streaming is None else StreamedSteps(streaming.min_rows, StreamingCosts(model, plan).step_s)


def predicted(
    model: CostModel, plan: ShardPlan, workload: WorkloadSpec, bounds: Bounds, streaming: Streaming | None
) -> Prediction:
    """Predict the workload under a plan that streams experts, or does not."""
    return model.predict(plan, workload, bounds, streamed=streamed_steps(model, plan, streaming))


def told_of(streaming: Streaming | None, bounds: Bounds) -> str:
    """Say for a person what is streamed; empty for nothing."""
    if streaming is None:
        return ""
    tokens = bounds.max_num_batched_tokens
    full = f"chunks of {streaming.full_rows} would hide all copies"
    if tokens >= streaming.full_rows:
        full = f"all copies are hidden from {streaming.full_rows} on"
    return (
        f"experts of CPU ranks come to the GPU in steps of {streaming.min_rows} tokens or more: {tokens} take "
        f"{streaming.chunk_s:.3g} s instead of {streaming.resident_chunk_s:.3g}, {full}; two buffers of "
        f"{streaming.buffer_bytes / 2e9:.2f} GB"
    )


class StreamingCosts:
    """Costs of steps whose experts are streamed, under a plan that has no `plan_problem`."""

    def __init__(self, model: CostModel, plan: ShardPlan) -> None:
        self._model = model
        self._view: PlanView = model.view(plan)
        self._plan = plan

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the two buffers, at most."""
        return 2 * max(self._most_bytes(kind) for kinds in self._view.kinds for kind in kinds)

    def step_s(self, step: Step) -> float:
        """Return the seconds of a step."""
        model, stages = self._model, zip(self._view.stages, self._view.kinds, strict=True)
        layers = [(kind, times, stage.holders) for stage, kinds in stages for kind, times in kinds.items()]
        first = max(self._copy_s(kind) for kind, _, _ in layers)
        streamed = sum(times * self._layer_s(kind, holders, step) for kind, times, holders in layers)
        return first + streamed + model.beside_layers_s(self._view, step)

    def resident_s(self, step: Step) -> float:
        """Return the seconds of the step where experts stay."""
        return self._model.step_s(self._plan, step)

    def decided(self, bounds: Bounds) -> tuple[Streaming | None, str]:
        """Return from how many rows on steps stream: as the bounds say, or where it is faster; or why none does."""
        most, asked = bounds.max_num_batched_tokens, bounds.expert_streaming
        if asked is None and not self._model.hardware.ranks[0].speeds.to_device_bandwidth:
            return None, "the speed of the bus is not known"
        pays_from = _least(_MOST_ROWS, lambda rows: self.step_s(_chunk(rows)) < self.resident_s(_chunk(rows)))
        min_rows = pays_from if asked is None else asked
        if not min_rows:
            return None, "CPU ranks compute experts faster than the bus brings them, however long prompts are"
        if min_rows > most:
            why = "pays" if asked is None else "is asked for"
            return None, f"it {why} from steps of {min_rows} tokens on (spec.engine.maxNumBatchedTokens is {most})"
        full, chunk = _least(_MOST_ROWS, self._is_full) or _MOST_ROWS, _chunk(most)
        return Streaming(min_rows, full, self.buffer_bytes, self.step_s(chunk), self.resident_s(chunk)), ""

    def _is_full(self, rows: int) -> bool:
        """Return whether a layer takes as long to compute as to copy."""
        step = _chunk(rows)
        stages = zip(self._view.stages, self._view.kinds, strict=True)
        layers = [(kind, stage.holders) for stage, kinds in stages for kind in kinds if any(kind.experts)]
        return all(self._computing_s(kind, holders, step) >= self._copy_s(kind) for kind, holders in layers)

    def _layer_s(self, kind: LayerKind, holders: tuple[int, ...], step: Step) -> float:
        if not any(kind.experts):
            return self._model.layer_s(kind, holders, step)
        return max(self._computing_s(kind, holders, step), self._copy_s(kind))

    def _computing_s(self, kind: LayerKind, holders: tuple[int, ...], step: Step) -> float:
        """Return the seconds of the GPU rank's computing of a layer with all experts."""
        model, gpu = self._model, holders[0]
        attention = model.attention_half_s(kind.heads, step, kind.window)
        own = model.costs(gpu, holders)
        shared = own.mlp(step.rows).of(kind.columns[gpu] / UNIT)
        return attention + own.experts(step.rows).of(model.config.num_experts) + shared

    def _copy_s(self, kind: LayerKind) -> float:
        bus = self._model.hardware.ranks[0].speeds.to_device_bandwidth
        return self._most_bytes(kind) / bus if bus else 0.0

    def _most_bytes(self, kind: LayerKind) -> int:
        """Return the bytes of a layer's experts on CPU ranks, as they are packed there, at most."""
        return sum(self._bytes_on(rank, kind) for rank in range(1, len(kind.experts)) if kind.experts[rank])

    def _bytes_on(self, rank: int, kind: LayerKind) -> int:
        return kind.experts[rank] * _packed_bytes(self._model, rank, kind.expert_columns[rank]) + _LAYER_BESIDE


def _packed_bytes(model: CostModel, rank: int, columns: int) -> int:
    """Return the most bytes of an expert as a rank packs it; `columns` of a slice, 0: it is whole."""
    hidden, width = model.config.hidden_size, _filled(columns or model.config.expert_columns)
    each = model.packed_expert_bytes(rank, width, sliced=bool(columns))
    return -(-each * _filled(hidden) // hidden) + _EXPERT_BESIDE


def _filled(count: int) -> int:
    return -(-count // _PANEL) * _PANEL


def _chunk(rows: float) -> Step:
    """Return a step of so many rows of a prompt that begins."""
    return Step(spans=(Span(rows, 0),), draws=1)


def _least(most: int, holds: Callable[[int], bool]) -> int:
    """Return the least number from 1 to `most` from which on it holds, by halving; 0 if it does not hold for `most`."""
    if not holds(most):
        return 0
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
