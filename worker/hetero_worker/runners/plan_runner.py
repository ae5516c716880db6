"""PlanRunner: what the runners of all devices have in common, which is nearly everything.

A step is: the plan's deltas to the slots, the batch's tensors, one forward pass, the draws. Where the tensors lie, what
memory is there and whether weights go elsewhere to sleep is its RunnerDevice's to say; logits are float32, and drawn
from where they lie (`sampling.drawing`), which makes no difference to the tokens.

Everything is called from one thread. Weights are kept over epochs. A step that failed half-way leaves the slots
undefined; the epoch ends with it, and `attach` begins anew.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from hetero_api.sharding import UnitRange
from hetero_api.v1 import logprobs_pb2, ranks_pb2
from hetero_worker.distributed.exchange import Exchange
from hetero_worker.errors import ProtocolError
from hetero_worker.layers.drawing_choice import drawing_for
from hetero_worker.layers.kernel_choice import choose_kernel
from hetero_worker.layers.sampler import SampledRows, prompt_logprobs, sample_tokens
from hetero_worker.memory.budget import PROMPT_LOGIT_ROWS, StepLimits
from hetero_worker.models.decoder import Decoder
from hetero_worker.platforms.base import HOST, Platform
from hetero_worker.runners.base import LoadReport, LoadRequest, MaskSource, SampledToken, StepOutput, no_masks
from hetero_worker.runners.commands import GroupCommands
from hetero_worker.runners.holdings import Holdings
from hetero_worker.runners.input_batch import InputBatch, PromptRows
from hetero_worker.runners.largest_step import limits_of, measure_workspace
from hetero_worker.runners.runner_device import RunnerDevice
from hetero_worker.runners.serving import ServingCache, make_cache
from hetero_worker.runners.shard import ChooseKernel, LoadedShard, load_shard
from hetero_worker.runners.step_times import StepTimes
from hetero_worker.sampling.drawing import HOST_DRAWING, ShardDrawing
from hetero_worker.sampling.request import SamplingRow

logger = logging.getLogger(__name__)


class SampleTokens(Protocol):
    """Draws tokens from sharded logits; layers.sampler.sample_tokens says how."""

    def __call__(
        self,
        logits: torch.Tensor,
        rows: Sequence[SamplingRow],
        *,
        head_ranges: Sequence[UnitRange],
        exchange: Exchange,
        drawing: ShardDrawing,
    ) -> SampledRows: ...


MeasureWorkspace = Callable[[Decoder, LoadRequest], int | None]
"""`largest_step.measure_workspace`, or one that remembers its answers."""


class PlanRunner:
    """Implements runners.base.Runner for a device."""

    def __init__(
        self,
        device: RunnerDevice,
        *,
        sample: SampleTokens = sample_tokens,
        choose: ChooseKernel = choose_kernel,
        measure: MeasureWorkspace = measure_workspace,
    ) -> None:
        self._sample = sample
        self._drawing: ShardDrawing = HOST_DRAWING
        self._measure = measure
        self._workspaces: dict[StepLimits, int | None] = {}
        self._choose = choose
        self._exchange: Exchange | None = None
        self._holdings = Holdings(device)
        self._device = device
        self._commands = GroupCommands(self._holdings)
        self._times = StepTimes()
        self._last_step_id = 0

    @property
    def held(self) -> LoadRequest | None:
        return self._holdings.held

    @property
    def platform(self) -> Platform:
        return self._device.platform

    def attach(self, exchange: Exchange) -> None:
        self.detach()
        self._exchange = exchange
        self._last_step_id = 0

    def detach(self) -> None:
        if (drawn := self._drawing.summary()) is not None:
            logger.info("%s", drawn)
        if (summary := self._times.summary()) is not None:
            logger.info("%s", summary)
        self._times = StepTimes()
        self._commands.begin_epoch()
        self._holdings.begin_epoch()
        self._exchange = None

    def load(self, request: LoadRequest) -> LoadReport:
        logger.info("rank %d: with its group, before the load: %s", request.rank, self._device.account.describe())
        holdings = self._holdings
        shard, load_s = holdings.take_shard(), 0.0
        if shard is None or not shard.serves(request):
            shard = None  # the old weights go before the new ones come
            shard = load_shard(request, self._device, choose=self._choose)
            load_s = shard.load_s
            self._drawing = drawing_for(self.platform)
            self._workspaces.clear()
        workspace = None if request.cache_size_is_given else self._workspace_of(shard, request)
        logger.info("rank %d: after the load: %s", request.rank, self._device.account.describe())
        report = shard.report(request, load_s=load_s, workspace=workspace)
        steps = self._device.steps
        kernels = (*report.kernels, *steps.kernels(request), *_drawing_report(self._drawing))
        report = replace(report, kernels=kernels, graph_sizes=steps.graph_sizes(request))
        holdings.hold(shard, request, report)
        return report

    def _workspace_of(self, shard: LoadedShard, request: LoadRequest) -> int | None:
        """What the largest step takes; measured once for a shard and its bounds."""
        limits = limits_of(request)
        if limits not in self._workspaces:
            self._workspaces[limits] = self._measure(shard.decoder, request)
        return self._workspaces[limits]

    def allocate(self, num_blocks: int, block_size: int) -> int:
        shard, request, report = self._holdings.loaded("AllocateCache")
        self._holdings.cache = None
        order = ranks_pb2.AllocateCache(num_blocks=num_blocks, block_size=block_size)
        steps = self._device.steps
        cache = make_cache(order, decoder=shard.decoder, request=request, report=report, steps=steps)
        self._holdings.cache = cache
        return cache.num_bytes

    def execute(self, plan: ranks_pb2.StepPlan, masks: MaskSource = no_masks) -> StepOutput:
        exchange = self._check(plan)
        self._last_step_id = plan.step_id
        cache = self._holdings.cache
        if cache is not None:
            cache.slots.apply(plan)
        if plan.HasField("command"):
            return StepOutput(report=self._commands.run(plan.command, exchange, self._times))
        if cache is None or not (plan.decode_slots or plan.spans):
            return StepOutput()
        self._times.begin()
        output = self._compute(plan, masks, cache, exchange)
        self._times.end()
        self._commands.count_step()
        return output

    def _check(self, plan: ranks_pb2.StepPlan) -> Exchange:
        """Raise ProtocolError unless the plan fits the rank's state. The exchange that it is for."""
        holdings = self._holdings
        if self._exchange is None or not (holdings.cache or holdings.is_asleep):
            raise ProtocolError(f"step plan {plan.step_id} came before AllocateCache")
        if plan.step_id != self._last_step_id + 1:
            raise ProtocolError(f"step plan {plan.step_id}: expected step {self._last_step_id + 1}")
        if not plan.HasField("command"):
            holdings.check_awake(plan)
        if holdings.cache is not None:
            holdings.cache.check.run(plan, holdings.cache.slots.counts)
        return self._exchange

    def _compute(
        self, plan: ranks_pb2.StepPlan, masks: MaskSource, cache: ServingCache, exchange: Exchange
    ) -> StepOutput:
        """One forward pass, and the draws."""
        shard, request, _ = self._holdings.loaded("a step plan")
        batch = cache.inputs.fill(plan, cache.slots)
        head_ranges = [rank.head_rows for rank in request.shard_plan.ranks]
        with torch.inference_mode():
            states = cache.forward.run(shard.decoder, batch, caches=cache.layers, exchange=exchange)
            prompts = [
                _prompt_span(prompt, states.hidden, shard, head_ranges=head_ranges, exchange=exchange)
                for prompt in batch.prompts
            ]
            num_draws = len(batch.draw_slots)
            logits = states.logits_of(shard.decoder, num_draws) if num_draws else None
            _advance(plan, cache)
            if logits is None:
                return StepOutput(prompt_logprobs=prompts)
            rows = _draws(plan, batch, cache, masks)
            drawn = self._sample(logits, rows, head_ranges=head_ranges, exchange=exchange, drawing=self._drawing)
        cache.slots.append_tokens(batch.draw_slots, drawn.tokens)
        return StepOutput(
            sampled=list(map(SampledToken, batch.draw_slots.tolist(), drawn.tokens)),
            logprobs=[logprobs for logprobs in drawn.logprobs if logprobs is not None],
            prompt_logprobs=prompts,
        )


def _drawing_report(drawing: ShardDrawing) -> tuple[str, ...]:
    """How a device draws; a rank on host cores has nothing to choose."""
    return () if drawing is HOST_DRAWING else (f"draws={drawing.name}",)


def _draws(plan: ranks_pb2.StepPlan, batch: InputBatch, cache: ServingCache, masks: MaskSource) -> list[SamplingRow]:
    """How each token is drawn. Waits for the step's masks if it has any."""
    mask_of = dict(zip(plan.masked_slots, _masks_of(plan, masks), strict=True)) if plan.masked_slots else {}
    return [cache.slots.sampling(slot).draw(mask_of.get(slot)) for slot in batch.draw_slots.tolist()]


def _masks_of(plan: ranks_pb2.StepPlan, masks: MaskSource) -> Sequence[bytes]:
    given = masks()
    if len(given) != len(plan.masked_slots):
        raise ProtocolError(
            f"step plan {plan.step_id}: {len(given)} masks came for {len(plan.masked_slots)} masked_slots"
        )
    return given


def _advance(plan: ranks_pb2.StepPlan, cache: ServingCache) -> None:
    """What the step computed is in the cache now."""
    cache.inputs.advance_decoding(len(plan.decode_slots), cache.slots)
    for span in plan.spans:
        cache.slots.counts.num_computed[span.slot] += span.num_tokens


def _prompt_span(
    prompt: PromptRows,
    hidden: torch.Tensor,
    shard: LoadedShard,
    *,
    head_ranges: Sequence[UnitRange],
    exchange: Exchange,
) -> ranks_pb2.PromptSpanLogprobs:
    """Log-probabilities of the prompt's tokens behind the rows, a bounded number of rows at a time."""
    positions: list[logprobs_pb2.TokenLogprobs] = []
    for begin in range(0, len(prompt.token_ids), PROMPT_LOGIT_ROWS):
        token_ids = prompt.token_ids[begin : begin + PROMPT_LOGIT_ROWS]
        first = prompt.first_row + begin
        logits = shard.decoder.logits(hidden[first : first + len(token_ids)]).to(HOST)
        positions += prompt_logprobs(logits, token_ids, prompt.num_top, head_ranges=head_ranges, exchange=exchange)
    return ranks_pb2.PromptSpanLogprobs(slot=prompt.slot, begin=prompt.begin, positions=positions)
