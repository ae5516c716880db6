"""How long a step takes under a plan: the arithmetic that placements are compared by.

A layer has two halves, and after each its ranks meet; so a half takes as long as its slowest rank, plus a round among
the ranks that hold the residual stream, and what a rank saves in one half does not make up for the other. Every expert
is as likely to be chosen as any other. So of ranks with whole experts one has more to do in a layer than the others, by
chance; ranks with slices of all experts have the same. Ranks that own MLP columns or experts only are lent the hidden
states by the leader, piece by piece: the MLP half takes the longer of the leader's own part and the helpers' way there,
computation and way back. Stages of a pipeline take turns, or, if a step is cut into micro-batches, follow each other.
After the last layer come the output head, on all ranks that have rows of it, and a round of the whole group that
decides the tokens.

Pure arithmetic; a step of 80 layers on 2 ranks costs well under a millisecond, of 64 ranks some.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final, NamedTuple

from hetero_api.kept_weights import KeptWeights
from hetero_api.model_config import ModelConfig
from hetero_api.sharding import NO_UNITS, RankShard, ShardPlan, Stage
from hetero_api.spec import WorkloadSpec
from hetero_api.weight_format import FLOAT_WEIGHTS
from hetero_placement.decision import Bounds, Prediction
from hetero_placement.hardware import Hardware, RankHardware, Speeds
from hetero_placement.part_costs import ExchangeCosts, PartCosts, PartTime, active_share, element_bytes, expected_most
from hetero_placement.shard_plans import UNIT, LayerKind, PlanView, shard_of_layers
from hetero_placement.steps import Load, Repeated, Step, WorkloadSteps, decode_step, micro_batches

SLICE_ROWS: Final = 128
"""Rows of hidden states that travel to a dense layer's helpers at a time."""
_PIECE_S: Final = 1e-6
_GPU_PIECE_S: Final = 4e-5
"""Seconds that an expert at work takes however little a rank holds of it: on host cores, and by kernels of its own."""
_ADDED_BYTES: Final = 8
"""Bytes moved for an element of an expert's output: float32, written and read again."""
_DRAW_BYTES: Final = 16
"""Bytes that a rank sends for a draw: score and token."""


@dataclass(frozen=True, slots=True)
class WidePlace:
    """Who meets in a layer's MLP half."""

    holders: Sequence[int]
    helpers: int
    """Number of ranks that the leader lends to; then it works slice by slice, as they do."""
    experts: bool
    overlapped: bool = False
    """Whether other stages compute at the same time."""

    def num_slices(self, rows: float) -> int:
        """Return how many slices so many rows go in: see hetero_worker.models.lending.row_slices."""
        most = max(SLICE_ROWS, 2 * rows / max(2, self.helpers)) if self.experts else SLICE_ROWS
        return max(1, math.ceil(rows / most))


class StreamedSteps(NamedTuple):
    """Steps whose experts come to the GPU rank (`hetero_placement.streaming`)."""

    min_rows: int
    """Rows of a step with prompts, at least."""
    step_s: Callable[[Step], float]
    """Returns the seconds of such a step."""


class CostModel:
    """Times of steps of one model on one group. Speeds are taken as they are: see Hardware.levelled.

    `cache_dtype`: type of cached keys and values; "": `dtype`. `expert_deferral`: number of a token's experts whose
    results from helpers come a layer late.
    """

    def __init__(
        self, config: ModelConfig, hardware: Hardware, *, dtype: str, cache_dtype: str = "", expert_deferral: int = 0
    ) -> None:
        self.config = config
        self._deferral = expert_deferral
        self.hardware = hardware
        self.element_bytes = element_bytes(dtype)
        self.exchange = ExchangeCosts(hardware)
        shared: dict[tuple[int, frozenset[int]], PartCosts] = {}

        def costs_of(speeds: Speeds, bits: frozenset[int]) -> PartCosts:
            costs = PartCosts(config, speeds, dtype=dtype, cache_dtype=cache_dtype, weight_bits=bits)
            return shared.setdefault((id(speeds), bits), costs)

        self.ranks = tuple(costs_of(rank.speeds, rank.weight_bits) for rank in hardware.ranks)
        """While others of the host compute too."""
        self._alone = tuple(costs_of(rank.speeds.alone, rank.weight_bits) for rank in hardware.ranks)

    @classmethod
    def within(cls, bounds: Bounds, config: ModelConfig, hardware: Hardware, *, dtype: str) -> CostModel:
        """Return the model of an engine with these bounds."""
        return cls(
            config, hardware, dtype=dtype, cache_dtype=bounds.kv_cache_dtype, expert_deferral=bounds.expert_deferral
        )

    def predict(
        self, plan: ShardPlan, workload: WorkloadSpec, bounds: Bounds, *, streamed: StreamedSteps | None = None
    ) -> Prediction:
        """Predict the workload under the plan. `streamed`: steps whose experts come to the GPU rank, if any do."""
        view = self.view(plan)
        steps = WorkloadSteps.of(workload, bounds)
        prefill_s, decode_s = self._all_s(view, steps.prefill, streamed), self._all_s(view, steps.decode)
        decode = steps.decode[0].step
        step_s = self._step_s(view, decode)
        return Prediction(
            decode_tokens_per_s=decode.draws / step_s,
            prefill_tokens_per_s=workload.prompt_tokens * workload.concurrency / prefill_s,
            workload_s=prefill_s + decode_s,
            decode_step_s=step_s,
        )

    def tokens_per_s(
        self, plan: ShardPlan, load: Load, bounds: Bounds, *, streamed: StreamedSteps | None = None
    ) -> float:
        """Return the tokens a second, over all streams, of a load under the plan; `streamed` as for `predict`."""
        number = load.streams or load.tokens
        return number / self._all_s(self.view(plan), load.steps(bounds), streamed)

    def decode_step_s(self, plan: ShardPlan | PlanView, *, batch: int, context: float) -> float:
        """Return the seconds of a step in which `batch` sequences decode, each attending to `context` tokens."""
        return self.step_s(plan, decode_step(batch, context))

    def step_s(self, plan: ShardPlan | PlanView, step: Step) -> float:
        """Return the seconds of one step; a plan's view, made once, spares the time that making it takes."""
        return self._step_s(plan if isinstance(plan, PlanView) else self.view(plan), step)

    def view(self, plan: ShardPlan) -> PlanView:
        """Return the parts of a plan that its cost depends on."""
        return PlanView.of(plan, self.config.windows)

    def costs(self, rank: int, workers: Sequence[int], *, overlapped: bool = False) -> PartCosts:
        """Return the costs of a rank that computes at the same time as `workers`, itself among them, and maybe other
        stages.

        Ranks of a host share its memory: the more read, the less each gets. Only two cases are told apart: all of them,
        as they were measured, and one alone.
        """
        place = self.hardware.ranks[rank]
        beside = sum((other.host, other.kind) == (place.host, place.kind) for other in map(self._at, workers))
        return self._alone[rank] if beside == 1 and not overlapped else self.ranks[rank]

    def _at(self, rank: int) -> RankHardware:
        return self.hardware.ranks[rank]

    def attention_half_s(
        self, heads: Sequence[int], step: Step, window: int | None, *, overlapped: bool = False
    ) -> float:
        """Return the seconds of a layer's attention half: its slowest rank, and the round. `heads` in rank order."""
        holders = [rank for rank, count in enumerate(heads) if count]
        costs = {rank: self.costs(rank, holders, overlapped=overlapped) for rank in holders}
        slowest = max(costs[rank].attention(step, window).of(heads[rank]) for rank in holders)
        return slowest + self.exchange.among(holders, self.hidden_bytes(step.rows))

    def wide_half_s(
        self, holders: Sequence[int], units: Sequence[float], step: Step, *, overlapped: bool = False
    ) -> float:
        """Return the seconds of the other half of a dense layer; `units` are 64 MLP columns, in rank order."""
        helpers = sum(count > 0 and rank not in holders for rank, count in enumerate(units))
        place = WidePlace(holders, helpers=helpers, experts=False, overlapped=overlapped)
        times = (self.wide_part_s(rank, count, step, place) for rank, count in enumerate(units) if count)
        return max(times, default=0.0) + self.exchange.among(holders, self.hidden_bytes(step.rows))

    def experts_half_s(
        self,
        holders: Sequence[int],
        numbers: Sequence[int],
        columns: Sequence[int],
        step: Step,
        *,
        overlapped: bool = False,
    ) -> float:
        """Return the expected seconds of the other half of a layer with experts, each chosen as often as any other.

        In rank order, `numbers` are of experts and `columns` those of each, where they are slices; 0: they are whole.
        """
        owners = {rank: number for rank, number in enumerate(numbers) if number}
        helpers = sum(rank not in holders for rank in owners)
        place = WidePlace(holders, helpers=helpers, experts=True, overlapped=overlapped)
        share, total = active_share(self._chosen, step.rows), self.config.num_experts
        spread = math.sqrt(share * (1 - share) * total / max(1, total - 1))
        means, deviations = [], {}
        for rank, number in owners.items():
            part = columns[rank] / self.config.expert_columns if columns[rank] else 1.0
            sliced = number if columns[rank] else 0
            means.append(self.wide_part_s(rank, number * part, step, place, sliced=sliced))
            deviations[rank] = spread * part * self._wide_cost(rank, step.rows, place).unit_s / share

        def common(a: int, b: int) -> float:
            """Return the experts that both ranks hold, beyond those that they would have in common by chance."""
            is_same = a == b or bool(columns[a] and columns[b])
            return numbers[a] * is_same - numbers[a] * numbers[b] / total

        covariances = [[deviations[a] * deviations[b] * common(a, b) for b in owners] for a in owners]
        return expected_most(means, covariances) + self.exchange.among(holders, self.hidden_bytes(step.rows))

    @property
    def _chosen(self) -> float:
        """Share of the experts that a row chooses."""
        experts = self.config.experts
        return experts.per_token / experts.number if experts is not None else 0.0

    def _wide_cost(self, rank: int, rows: float, place: WidePlace) -> PartTime:
        costs = self.ranks[rank]
        if not place.helpers and rank in place.holders:
            costs = self.costs(rank, place.holders, overlapped=place.overlapped)
        return costs.experts(rows) if place.experts else costs.mlp(rows)

    def _slices_s(self, rank: int, units: float, rows: float, sliced: int) -> float:
        """Return the seconds that slices of so many experts take more than as many columns of fewer experts.

        More experts are at work on the rank, and what all of them make is added up, however narrow they are.
        """
        if not sliced:
            return 0.0
        device, added = self._at(rank), rows * self._chosen * sliced * self.config.hidden_size * _ADDED_BYTES
        piece_s = _GPU_PIECE_S if device.is_gpu else _PIECE_S
        pieces_s = piece_s * sliced * active_share(self._chosen, rows)
        return (1 - units / sliced) * (pieces_s + added / device.speeds.memory_bandwidth)

    def wide_part_s(self, rank: int, units: float, step: Step, place: WidePlace, *, sliced: int = 0) -> float:
        """One rank's time of the other half, round excluded; a helper's with its ways from and to the leader.

        `sliced`: number of experts that the units are slices of; 0: they are whole, or MLP columns.
        """
        if not units:
            return 0.0

        def part_s(rows: float) -> float:
            return self._wide_cost(rank, rows, place).of(units) + self._slices_s(rank, units, rows, sliced)

        leader = place.holders[0]
        if rank in place.holders and not (place.helpers and rank == leader):
            return part_s(step.rows)
        number = place.num_slices(step.rows)
        rows = step.rows / number
        own = part_s(rows)
        if rank == leader:
            return number * own
        num_bytes = self.hidden_bytes(rows)
        there, back = self.exchange.there_s(leader, [rank], num_bytes), self.exchange.there_s(rank, [leader], num_bytes)
        if place.experts:
            return number * (there + own + back)
        return there + own + back + (number - 1) * max(there, own, back)

    def head_part_s(self, rank: int, units: float, step: Step, *, owners: Sequence[int] = ()) -> float:
        """One rank's part of the output head; a unit is 64 rows. `owners` of all rows, where they are known."""
        if not units or not step.draws:
            return 0.0
        costs = self.costs(rank, owners) if owners else self.ranks[rank]
        return costs.head(step.draws).of(units) + self.exchange.from_device_s(rank, _DRAW_BYTES * step.draws)

    def draw_s(self, step: Step) -> float:
        """Return the seconds of the rounds in which all ranks learn the drawn tokens."""
        gathered = self.exchange.small_s(_DRAW_BYTES * step.draws * len(self.ranks))
        return gathered + self.exchange.small_s(_DRAW_BYTES * step.draws)

    def hidden_bytes(self, rows: float) -> float:
        """Return the bytes of `rows` rows of the residual stream."""
        return rows * self.config.hidden_size * self.element_bytes

    def exchange_s(self, plan: ShardPlan, step: Step) -> float:
        """Seconds of a step's exchanges, those that are hidden behind computation included."""
        view, num_bytes = self.view(plan), self.hidden_bytes(step.rows)
        seconds = self._embedding_s(view, step) + self.draw_s(step)
        for stage in view.stages:
            a_layer = 2 * self.exchange.among(stage.holders, num_bytes)
            for helper in stage.helpers[:1]:
                there = self.exchange.there_s(stage.leader, [helper], num_bytes)
                a_layer += there + self.exchange.there_s(helper, [stage.leader], num_bytes)
            seconds += stage.num_layers * a_layer
        return seconds + self._hops_s(view, step)

    def weight_bytes(self, plan: ShardPlan) -> tuple[int, ...]:
        """Each rank's, in rank order: matrices as it keeps them; a tied output head counts once."""
        return tuple(
            self._matrix_bytes(shard, self._kept(rank))
            for rank, shard in zip(self.hardware.ranks, plan.ranks, strict=True)
        )

    def read_bytes(self, plan: ShardPlan, rank: int, *, rows: float) -> float:
        """Return the bytes of a rank's matrices that a decode step of `rows` rows reads.

        Experts count as often as the rows choose any of them on average, and rows of an untied embedding do not.
        """
        shard, kept = plan.ranks[rank], self._kept(self._at(rank))
        chosen = active_share(self._chosen, rows) if self._chosen else 0.0
        read = replace(shard, embedding_rows=NO_UNITS)
        always = replace(read, layers=tuple(replace(layer, experts=NO_UNITS) for layer in read.layers))
        always_bytes = self._matrix_bytes(always, kept)
        return always_bytes + chosen * (self._matrix_bytes(read, kept) - always_bytes)

    def whole_bytes(self, rank: int) -> int:
        """Return the bytes of all the model's weights, if they lay on this rank."""
        whole = shard_of_layers(self.config, 0, self.config.num_layers)
        kept = self._matrix_bytes(whole, self._kept(self._at(rank)))
        floats = self._matrix_bytes(whole, KeptWeights(FLOAT_WEIGHTS, self.element_bytes))
        return self.config.num_parameters * self.element_bytes - floats + kept

    def _kept(self, rank: RankHardware) -> KeptWeights:
        return KeptWeights(self.config.weights, self.element_bytes, rank.weight_bits)

    def _matrix_bytes(self, shard: RankShard, kept: KeptWeights) -> int:
        config, hidden = self.config, self.config.hidden_size
        heads = [kept.layer_head_bytes(config, i) for i in range(config.num_layers)]
        column = kept.column_bytes(hidden=hidden)
        expert = kept.expert_bytes(hidden=hidden, width=config.expert_columns)
        layers = Counter(
            (s.kv_heads.size * head, s.mlp_columns.size, s.experts.size, s.expert_columns.size)
            for s, head in zip(shard.layers, heads, strict=True)
        )
        total = 0.0
        for (attention, columns, experts, sliced), times in layers.items():
            each = kept.expert_slice_bytes(sliced, config=config) if sliced else expert
            total += times * (attention + columns * column + experts * each)
        rows = shard.head_rows.size + (0 if config.tie_word_embeddings else shard.embedding_rows.size)
        inputs = kept.vocabulary.row_bytes(config.layer_inputs_width) if config.layer_input_size else 0
        beside = kept.joined_bytes(config) + shard.embedding_rows.size * inputs
        return int(total) + rows * kept.vocabulary.row_bytes(hidden) + beside

    def moved_bytes(self, plan: ShardPlan, step: Step) -> float:
        """Bytes of activations that a step's exchanges hand over."""
        stages, num_bytes = plan.stages(), self.hidden_bytes(step.rows)
        rounds = sum(s.num_layers * 2 * (len(s.holders) - 1 + len(s.helpers)) for s in stages)
        return (rounds + len(stages) - 1) * num_bytes

    def beside_layers_s(self, view: PlanView, step: Step) -> float:
        """Return the seconds of a step beside its layers and the ways between stages."""
        overhead = max(rank.step_s(step.rows) for rank in self.ranks)
        return self._embedding_s(view, step) + self._head_s(view, step) + overhead

    def packed_expert_bytes(self, rank: int, columns: int, *, sliced: bool) -> int:
        """Return the bytes of so many columns of an expert as a rank keeps them."""
        kept = self._kept(self._at(rank))
        if sliced:
            return kept.expert_slice_bytes(columns, config=self.config)
        return kept.expert_bytes(hidden=self.config.hidden_size, width=columns)

    def _step_s(self, view: PlanView, step: Step) -> float:
        number = micro_batches(step.rows, len(view.stages))
        part = step.part(number)
        stages = zip(view.stages, view.kinds, strict=True)
        times = [self._stage_s(stage, kinds, part, overlapped=number > 1) for stage, kinds in stages]
        pipeline = sum(times) + (number - 1) * max(times) + self._hops_s(view, part)
        return pipeline + self.beside_layers_s(view, step)

    def _stage_s(self, stage: Stage, kinds: Mapping[LayerKind, int], step: Step, *, overlapped: bool) -> float:
        layers = kinds.items()
        return sum(times * self._layer_s(kind, stage.holders, step, overlapped=overlapped) for kind, times in layers)

    def layer_s(self, kind: LayerKind, holders: Sequence[int], step: Step) -> float:
        """Return the seconds of a layer whose experts stay where they are."""
        return self._layer_s(kind, holders, step, overlapped=False)

    def _layer_s(self, kind: LayerKind, holders: Sequence[int], step: Step, *, overlapped: bool) -> float:
        attention = self.attention_half_s(kind.heads, step, kind.window, overlapped=overlapped)
        columns = [count / UNIT for count in kind.columns]
        if not any(kind.experts):
            return attention + self.wide_half_s(holders, columns, step, overlapped=overlapped)
        experts = self.experts_half_s(holders, kind.experts, kind.expert_columns, step, overlapped=overlapped)
        saved = min(attention, self._deferred_s(kind, holders, step))
        return attention + experts - saved + self._shared_s(holders, columns, step, overlapped=overlapped)

    def _deferred_s(self, kind: LayerKind, holders: Sequence[int], step: Step) -> float:
        """Return the seconds of a layer's experts that helpers compute while holders go on with the next layer.

        Of many rows it is 0: all experts are computed at once then. The last layer of a stage counts as any other.
        """
        helpers = [rank for rank, number in enumerate(kind.experts) if number and rank not in holders]
        experts = self.config.experts
        if experts is None or not (self._deferral and helpers) or step.rows * experts.per_token > experts.number:
            return 0.0

        def part_s(rank: int) -> float:
            part = kind.expert_columns[rank] / self.config.expert_columns if kind.expert_columns[rank] else 1.0
            return self.ranks[rank].experts(step.rows).unit_s * kind.experts[rank] * part

        slowest, leader = max(map(part_s, helpers)), part_s(holders[0])
        return min(slowest * self._deferral / experts.per_token, max(0.0, slowest - leader))

    def _shared_s(self, holders: Sequence[int], columns: Sequence[float], step: Step, *, overlapped: bool) -> float:
        """Return the seconds of shared experts, which their ranks compute beside their other experts."""
        owners = [rank for rank, count in enumerate(columns) if count]
        costs = {rank: self.costs(rank, holders, overlapped=overlapped) for rank in owners}
        return max((costs[rank].mlp(step.rows).of(columns[rank]) for rank in owners), default=0.0)

    def _hops_s(self, view: PlanView, step: Step) -> float:
        return sum(self._hop_s(here, there.holders, step.rows) for here, there in pairwise(view.stages))

    def _hop_s(self, stage: Stage, receivers: Sequence[int], rows: float) -> float:
        """From a stage's leader to ranks that have not its states."""
        missing = [rank for rank in receivers if rank not in stage.holders]
        return self.exchange.there_s(stage.leader, missing, self.hidden_bytes(rows)) if missing else 0.0

    def _embedding_s(self, view: PlanView, step: Step) -> float:
        """Return the seconds of the rounds that sum embeddings, if several ranks need or have them."""
        width = self.config.layer_inputs_width
        needing = view.stages if width else view.stages[:1]
        ranks = sorted({*view.embedding_owners, *(rank for stage in needing for rank in stage.holders)})
        inputs = self.exchange.among(ranks, step.rows * width * self.element_bytes) if width else 0.0
        return self.exchange.among(ranks, self.hidden_bytes(step.rows)) + inputs

    def _head_s(self, view: PlanView, step: Step) -> float:
        """From the last layer to the drawn tokens; 0 for a step that draws nothing."""
        if not step.draws:
            return 0.0
        owners = view.head_owners
        slowest = max(self.head_part_s(rank, view.head_rows[rank] / UNIT, step, owners=owners) for rank in owners)
        return slowest + self._hop_s(view.stages[-1], view.head_owners, step.draws) + self.draw_s(step)

    def _all_s(self, view: PlanView, steps: Sequence[Repeated], streamed: StreamedSteps | None = None) -> float:
        def step_s(step: Step) -> float:
            if streamed is not None and step.spans and step.rows >= streamed.min_rows:
                return streamed.step_s(step)
            return self._step_s(view, step)

        return sum(times * step_s(step) for step, times in steps)
