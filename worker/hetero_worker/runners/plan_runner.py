"""PlanRunner: what the runners of all devices have in common, which is nearly everything.

A step is: the plan's deltas to the slots, the batch's tensors, one forward pass, the draws. Where the tensors lie, what
memory is there and whether weights go elsewhere to sleep is its RunnerDevice's to say; logits are float32, and drawn
from where they lie (`sampling.drawing`), which makes no difference to the tokens. Nor does it that a step begins while
the one before is under way, as it may where `begun_step` says so, or that steps draw by themselves and are made in runs
(`step_runs`).

Everything is called from one thread. Weights are kept over epochs. A step that failed half-way leaves the slots
undefined; the epoch ends with it, and `attach` begins anew.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from hetero_api.rank_memory import StepLimits
from hetero_api.v1 import ranks_pb2
from hetero_worker.backends.base import Platform
from hetero_worker.distributed.exchange import Exchange
from hetero_worker.errors import ProtocolError
from hetero_worker.layers.drawing_choice import drawing_for
from hetero_worker.layers.sampler import sample_tokens
from hetero_worker.models.decoder import Decoder
from hetero_worker.runners.base import LoadReport, LoadRequest, MaskSource, StepOutput, StepUnderWay, no_masks
from hetero_worker.runners.begun_step import BegunStep, DoneStep, SampleTokens, StepMeans
from hetero_worker.runners.commands import GroupCommands
from hetero_worker.runners.holdings import Holdings
from hetero_worker.runners.largest_step import measure_workspace
from hetero_worker.runners.runner_device import RunnerDevice
from hetero_worker.runners.serving import ServingCache, make_cache
from hetero_worker.runners.shard import LoadedShard, limits_of, load_shard, native_for
from hetero_worker.runners.step_runs import StepRun, StepRuns, is_plain
from hetero_worker.runners.step_times import StepTimes
from hetero_worker.runners.trust import Trust
from hetero_worker.sampling.drawing import HOST_DRAWING, ShardDrawing

logger = logging.getLogger(__name__)


MeasureWorkspace = Callable[[Decoder, LoadRequest], int | None]
"""`largest_step.measure_workspace`, or one that remembers its answers."""


class PlanRunner:
    """Implements runners.base.Runner for a device."""

    def __init__(
        self,
        device: RunnerDevice,
        *,
        sample: SampleTokens = sample_tokens,
        measure: MeasureWorkspace = measure_workspace,
    ) -> None:
        self._sample = sample
        self._drawing: ShardDrawing = HOST_DRAWING
        self._measure = measure
        self._workspaces: dict[StepLimits, int | None] = {}
        self._exchange: Exchange | None = None
        self._holdings = Holdings(device)
        self._device = device
        self._commands = GroupCommands(self._holdings)
        self._times = StepTimes()
        self._trust = Trust()
        self._runs = StepRuns()
        self._last_step_id = 0
        self._under_way: list[BegunStep] = []
        """Not finished, in the order in which they began: two at most."""

    @property
    def held(self) -> LoadRequest | None:
        return self._holdings.held

    @property
    def graph_bytes(self) -> int:
        return self._holdings.graph_bytes

    @property
    def platform(self) -> Platform:
        return self._device.platform

    @property
    def home(self) -> int | None:
        request = self.held
        return None if request is None else native_for(request, self.platform).home

    @property
    def runs_steps(self) -> bool:
        cache = self._holdings.cache
        return cache is not None and cache.drawing is not None

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
        self._runs.forget()
        self._under_way.clear()
        self._commands.begin_epoch()
        self._holdings.begin_epoch()
        self._exchange = None

    def load(self, request: LoadRequest) -> LoadReport:
        logger.info("rank %d: with its group, before the load: %s", request.rank, self._device.memory_pool.describe())
        holdings = self._holdings
        shard, load_s = holdings.take_shard(), 0.0
        if shard is None or not shard.serves(request):
            shard = None  # the old weights go before the new ones come
            shard = load_shard(request, self._device)
            load_s = shard.load_s
            self._drawing = drawing_for(self.platform)
            self._workspaces.clear()
        workspace = None if request.cache_size_is_given else self._workspace_of(shard, request)
        logger.info("rank %d: after the load: %s", request.rank, self._device.memory_pool.describe())
        steps = self._device.steps
        report = shard.report(request, load_s=load_s, workspace=workspace, graph_sizes=steps.graph_sizes(request))
        kernels = (*report.kernels, *steps.kernels(request, self._exchange), *_drawing_report(self._drawing))
        report = replace(report, kernels=kernels)
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
        return self.begin(plan, masks).finish()

    def begin(self, plan: ranks_pb2.StepPlan, masks: MaskSource = no_masks) -> StepUnderWay:
        behind = self._followed_by(plan)
        exchange = self._take_in(plan)
        run = None if behind is not None else self._run_from(plan, exchange)
        if run is not None:
            (output,) = self._outputs(run, _nothing)
            return DoneStep(output)
        return self._begin_alone(plan, masks, exchange, behind)

    def run(self, plans: Sequence[ranks_pb2.StepPlan], on_step: Callable[[], None]) -> Iterator[StepOutput]:
        rest = list(plans)
        while rest:
            first = rest.pop(0)
            exchange = self._take_in(first)
            run = self._run_from(first, exchange)
            if run is None:
                output = self._begin_alone(first, no_masks, exchange, None).finish()
                on_step()
                yield output
                continue
            refusal: ProtocolError | None = None
            while rest and run.has_room and refusal is None:
                refusal = self._extend(run, rest.pop(0))
            yield from self._outputs(run, on_step)
            if refusal is not None:
                raise refusal

    def _extend(self, run: StepRun, plan: ranks_pb2.StepPlan) -> ProtocolError | None:
        """Take in a plan that goes on with the run; or what is wrong with it."""
        try:
            self._check_order(plan)
            run.extend(plan)
        except ProtocolError as error:
            return error
        self._last_step_id = plan.step_id
        return None

    def _take_in(self, plan: ranks_pb2.StepPlan) -> Exchange:
        """Check the plan, and apply its deltas. The exchange that it is for."""
        exchange = self._check(plan)
        self._last_step_id = plan.step_id
        if self._holdings.cache is not None:
            self._holdings.cache.slots.apply(plan)
        return exchange

    def _run_from(self, plan: ranks_pb2.StepPlan, exchange: Exchange) -> StepRun | None:
        """A run that begins with the plan, which was taken in; None if its step does not draw by itself."""
        cache = self._holdings.cache
        if cache is None or not is_plain(plan, cache.slots):
            return None
        run = self._runs.begin(plan, self._means(cache, exchange))
        if run is not None:
            self._times.begin()
        return run

    def _outputs(self, run: StepRun, on_step: Callable[[], None]) -> Iterator[StepOutput]:
        def count_step() -> None:
            self._commands.count_step()
            on_step()

        return run.outputs(count_step)

    def _begin_alone(
        self, plan: ranks_pb2.StepPlan, masks: MaskSource, exchange: Exchange, behind: BegunStep | None
    ) -> StepUnderWay:
        """The plan has been taken in."""
        if plan.HasField("command"):
            # Nothing here may refer to the cache: a command may have to free its memory.
            self._runs.forget()
            return DoneStep(StepOutput(report=self._commands.run(plan.command, exchange, self._times)))
        cache = self._holdings.cache
        if cache is None or not (plan.decode_slots or plan.spans):
            return DoneStep(StepOutput())
        if behind is None:
            self._times.begin()
        step = BegunStep(plan, self._means(cache, exchange), on_finished=self._on_finished)
        step.fill(behind)
        step.compute(masks)
        if behind is not None:
            behind.be_followed_by(step)
        self._under_way.append(step)
        return step

    def _followed_by(self, plan: ranks_pb2.StepPlan) -> BegunStep | None:
        """The step that is under way, if one is; the slots have gone on without its tokens."""
        if not self._under_way:
            return None
        step = self._under_way[-1]
        if len(self._under_way) > 1 or not step.may_be_followed_by(plan):
            raise RuntimeError(f"step plan {plan.step_id} begins before the step that it cannot follow is finished")
        step.expect_tokens()
        return step

    def _on_finished(self) -> None:
        """The oldest step under way."""
        self._under_way.pop(0)
        self._times.end()
        self._commands.count_step()

    def _means(self, cache: ServingCache, exchange: Exchange) -> StepMeans:
        shard, request, _ = self._holdings.loaded("a step plan")
        return StepMeans(
            decoder=shard.decoder,
            cache=cache,
            exchange=exchange,
            head_ranges=[rank.head_rows for rank in request.shard_plan.ranks],
            drawing=self._drawing,
            sample=self._sample,
            times=self._times,
            trust=self._trust,
            inputs=cache.chained,
        )

    def _check(self, plan: ranks_pb2.StepPlan) -> Exchange:
        """Raise ProtocolError unless the plan fits the rank's state. The exchange that it is for."""
        holdings = self._holdings
        if self._exchange is None or not (holdings.cache or holdings.is_asleep):
            raise ProtocolError(f"step plan {plan.step_id} came before AllocateCache")
        self._check_order(plan)
        if not plan.HasField("command"):
            holdings.check_awake(plan)
        if holdings.cache is not None:
            holdings.cache.check.run(plan, holdings.cache.slots.counts)
        return self._exchange

    def _check_order(self, plan: ranks_pb2.StepPlan) -> None:
        if plan.step_id != self._last_step_id + 1:
            raise ProtocolError(f"step plan {plan.step_id}: expected step {self._last_step_id + 1}")


def _nothing() -> None:
    """Nobody counts steps."""


def _drawing_report(drawing: ShardDrawing) -> tuple[str, ...]:
    """How a device draws; a rank on host cores has nothing to choose."""
    return () if drawing is HOST_DRAWING else (f"draws={drawing.name}",)
