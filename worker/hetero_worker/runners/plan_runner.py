"""PlanRunner: the runner of every device.

A step is: the plan's changes to the slots, the batch's tensors, one forward pass, the draws. The DeviceBackend decides
where the tensors lie, how much memory there is, and whether weights go elsewhere to sleep. Logits are float32, and
tokens are drawn where they lie (`sampling.base`). Steps that overlap (`running_step`) and multi-steps (`multi_step`)
give the tokens of single steps.

Everything is called from one thread. Weights are kept over epochs. A step that failed half-way leaves the slots
undefined; the epoch ends with it, and `attach` begins another.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from hetero_api.errors import ModelError
from hetero_api.rank_memory import StepLimits
from hetero_api.v1 import ranks_pb2
from hetero_worker.backends.base import DeviceBackend
from hetero_worker.distributed.exchange import Exchange
from hetero_worker.errors import ProtocolError
from hetero_worker.layers.sampler import SampleTokens, sample_tokens
from hetero_worker.memory.memory_pool import MemoryPool
from hetero_worker.models.decoder import Decoder
from hetero_worker.runners.base import LoadRequest, MaskSource, StepInFlight, StepOutput, WorkProgress, no_masks
from hetero_worker.runners.commands import GroupCommands
from hetero_worker.runners.draft import DraftModel
from hetero_worker.runners.experts import link_experts
from hetero_worker.runners.model_state import ModelState, ServingCache, make_cache
from hetero_worker.runners.prediction_head import PredictionHead
from hetero_worker.runners.profile_run import measure_workspace
from hetero_worker.runners.recorded.multi_step import MultiStep, MultiStepDecode, is_plain
from hetero_worker.runners.running_step import FinishedStep, RunningStep, StepContext
from hetero_worker.runners.shard import LoadedShard, limits_of, load_shard
from hetero_worker.runners.step_times import StepTimes
from hetero_worker.sampling.base import HOST_SAMPLER, HostSampler, ShardSampler

logger = logging.getLogger(__name__)


_KEEPING_STEPS: Final = frozenset({"count_experts", "place_experts"})
"""Commands after which ranks draw as before: recorded steps find experts where they lie."""

MeasureWorkspace = Callable[[Decoder, LoadRequest, MemoryPool], int | None]
"""`profile_run.measure_workspace`, or a cache of its answers."""


class PlanRunner:
    """Runner for one device."""

    def __init__(
        self,
        backend: DeviceBackend,
        *,
        sample: SampleTokens = sample_tokens,
        measure: MeasureWorkspace = measure_workspace,
        draft: DraftModel | None = None,
        progress: WorkProgress | None = None,
    ) -> None:
        """Create it without weights.

        `draft`: the model of which this rank loads its part beside its shard, where it is asked to. `progress`: what is
        told how far loading has come.
        """
        self._sample = sample
        self._sampler: ShardSampler = HOST_SAMPLER
        self._measure = measure
        self._workspaces: dict[StepLimits, int | None] = {}
        self._exchange: Exchange | None = None
        self._model_state = ModelState(backend, progress or WorkProgress(), on_leaving=self._release_draft)
        self._draft_given = draft
        self._draft: DraftModel | None = None
        self.backend: Final = backend
        self._commands = GroupCommands(self._model_state)
        self._times = StepTimes()
        self._multi_steps = MultiStepDecode()
        self._last_step_id = 0
        self._running: list[RunningStep] = []
        """Unfinished steps in the order in which they began, at most two."""

    @property
    def held(self) -> LoadRequest | None:
        """As Runner.held."""
        return self._model_state.held

    @property
    def graph_bytes(self) -> int:
        """As Runner.graph_bytes."""
        return self._model_state.graph_bytes

    @property
    def home(self) -> int | None:
        """As Runner.home."""
        return None if self.held is None else self.backend.home

    @property
    def has_multi_step(self) -> bool:
        """As Runner.has_multi_step."""
        cache = self._model_state.cache
        return cache is not None and cache.multi_step is not None

    def attach(self, exchange: Exchange) -> None:
        """As Runner.attach."""
        self.detach()
        self._exchange = exchange
        self._last_step_id = 0

    def detach(self) -> None:
        """As Runner.detach."""
        if (summary := self._times.summary()) is not None:
            logger.info("%s", summary)
        self._times = StepTimes()
        self._multi_steps.forget()
        self._running.clear()
        self._commands.begin_epoch()
        self._model_state.begin_epoch()
        if self._draft is not None:
            self._draft.drop_cache()
        self._exchange = None

    def load(self, request: LoadRequest) -> ranks_pb2.Loaded:
        """As Runner.load."""
        logger.info("rank %d: with its group, before the load: %s", request.rank, self.backend.memory_pool.describe())
        state = self._model_state
        shard, load_s = state.take_shard(), 0.0
        if shard is not None and not shard.serves(request):
            shard = None  # the old weights go before the new ones come
        if shard is None:
            self._release_draft()
        request = self._load_draft(request)
        if shard is None:
            shard = load_shard(request, self.backend, progress=state.progress)
            load_s = shard.load_s
            self._sampler = self.backend.sampler()
            self._workspaces.clear()
        workspace = None if request.cache_size_is_given else self._workspace_of(shard, request)
        logger.info("rank %d: after the load: %s", request.rank, self.backend.memory_pool.describe())
        steps = self.backend.steps
        report = shard.report(request, load_s=load_s, workspace=workspace, graph_sizes=steps.graph_sizes(request))
        report.kernels.extend((*steps.kernels(request, self._exchange), *_sampling_report(self._sampler)))
        if self._draft is not None and (request.draft_plan is None or request.rank in request.draft_plan.owners):
            report.kernels.append(f"draft={self._draft.name}")
        state.hold(shard, request, report)
        return report

    def _load_draft(self, request: LoadRequest) -> LoadRequest:
        """Load this rank's part of the draft model or prediction head; return the order with the memory left."""
        before, self._draft = self._draft, None
        wanted = self._wanted_draft(request, before)
        if before is not None and before is not wanted:
            before.drop()
        if wanted is None:
            return request
        self._draft = wanted
        return wanted.load(request)

    def _wanted_draft(self, request: LoadRequest, before: DraftModel | None) -> DraftModel | None:
        if request.has_prediction_head and request.rank == 0:
            if isinstance(before, PredictionHead) and before.is_of(request):
                return before
            return PredictionHead(self.backend, request)
        if request.draft_plan is None or (request.rank and request.draft_plan.owners == (0,)):
            return None
        if self._draft_given is None:
            raise ModelError(
                f"spec.engine.speculative.draft: rank {request.rank} was started without a draft model; restart ranks "
                "with --draft"
            )
        return self._draft_given

    def _workspace_of(self, shard: LoadedShard, request: LoadRequest) -> int | None:
        """Return the memory of the largest step, measured once for a shard and its bounds."""
        limits = limits_of(request)
        if limits not in self._workspaces:
            self._workspaces[limits] = self._measure(shard.decoder, request, shard.memory_pool)
        return self._workspaces[limits]

    def allocate(self, num_blocks: int, block_size: int, num_snapshots: int = 0) -> int:
        """As Runner.allocate."""
        shard, request, report = self._model_state.loaded("AllocateCache")
        self._model_state.cache = None
        order = ranks_pb2.AllocateCache(num_blocks=num_blocks, block_size=block_size, num_snapshots=num_snapshots)
        cache = make_cache(order, self.backend, decoder=shard.decoder, request=request, report=report)
        self._model_state.cache = cache
        if self._draft is not None:
            assert self._exchange is not None, "attach comes before a cache"
            self._draft.drop_cache()
            self._draft.follow(self._model_state, self._exchange)
        return cache.num_bytes

    def share_experts(self) -> str:
        """As Runner.share_experts."""
        shard, request, _ = self._model_state.loaded("AllocateCache")
        if not request.expert_buffer_bytes or self._exchange is None:
            return ""
        problem = self._model_state.sharing_problem = link_experts(shard, self._exchange)
        if problem:
            logger.warning("rank %d: experts are not streamed: %s", request.rank, problem)
        return problem

    def _check_shared(self, plan: ranks_pb2.StepPlan) -> None:
        """Share experts that a plan streams, if they are not. Raises ProtocolError if they cannot be."""
        _, request, _ = self._model_state.loaded("a step plan")
        problem = self._model_state.sharing_problem
        if not request.expert_buffer_bytes:
            problem = "LoadModel ordered no buffers for them"
        elif problem is None:
            problem = self.share_experts()
        if problem:
            raise ProtocolError(f"step plan {plan.step_id} streams experts: {problem}")

    def execute(self, plan: ranks_pb2.StepPlan, masks: MaskSource = no_masks) -> StepOutput:
        """As Runner.execute."""
        return self.begin(plan, masks).finish()

    def begin(self, plan: ranks_pb2.StepPlan, masks: MaskSource = no_masks) -> StepInFlight:
        """As Runner.begin."""
        before = self._running_before(plan)
        exchange = self._take_in(plan)
        multi_step = None if before is not None else self._multi_step_from(plan, exchange)
        if multi_step is not None:
            (output,) = self._outputs(multi_step, _nothing)
            return FinishedStep(output)
        return self._begin_alone(plan, masks, exchange, before)

    def execute_many(self, plans: Sequence[ranks_pb2.StepPlan], on_step: Callable[[], None]) -> Iterator[StepOutput]:
        """As Runner.execute_many."""
        rest = list(plans)
        while rest:
            first = rest.pop(0)
            exchange = self._take_in(first)
            multi_step = self._multi_step_from(first, exchange)
            if multi_step is None:
                output = self._begin_alone(first, no_masks, exchange, None).finish()
                on_step()
                yield output
                continue
            refusal: ProtocolError | None = None
            while rest and multi_step.has_room and refusal is None:
                refusal = self._extend(multi_step, rest.pop(0))
            yield from self._outputs(multi_step, on_step)
            if refusal is not None:
                raise refusal

    def _extend(self, multi_step: MultiStep, plan: ranks_pb2.StepPlan) -> ProtocolError | None:
        """Add a plan that continues the multi-step, or return the reason why it does not fit."""
        try:
            self._check_order(plan)
            multi_step.extend(plan)
        except ProtocolError as error:
            return error
        self._last_step_id = plan.step_id
        return None

    def _take_in(self, plan: ranks_pb2.StepPlan) -> Exchange:
        """Check the plan, apply its changes to the slots, and return the exchange that it is for."""
        exchange = self._check(plan)
        self._last_step_id = plan.step_id
        if self._model_state.cache is not None:
            self._model_state.cache.slots.apply(plan)
        return exchange

    def _multi_step_from(self, plan: ranks_pb2.StepPlan, exchange: Exchange) -> MultiStep | None:
        """Begin a multi-step with the plan, which was taken in; None if its step does not draw by itself."""
        cache = self._model_state.cache
        if cache is None or self._model_state.shard is None:
            return None  # a rank asleep, in part or whole, takes commands
        context = self._context(cache, exchange)
        multi_step = self._multi_steps.begin(plan, context) if is_plain(plan, context) else None
        if multi_step is not None:
            self._times.begin()
        return multi_step

    def _outputs(self, multi_step: MultiStep, on_step: Callable[[], None]) -> Iterator[StepOutput]:
        def count_step() -> None:
            self._commands.count_step()
            on_step()

        return multi_step.outputs(count_step)

    def _begin_alone(
        self, plan: ranks_pb2.StepPlan, masks: MaskSource, exchange: Exchange, before: RunningStep | None
    ) -> StepInFlight:
        """Begin the step of a plan that was taken in, behind the step `before` if that is running."""
        if plan.HasField("command"):
            if plan.command.WhichOneof("action") not in _KEEPING_STEPS:
                # Nothing here may refer to the cache: a command may have to free its memory.
                self._multi_steps.forget()
            return FinishedStep(StepOutput(report=self._run_command(plan.command, exchange)))
        cache = self._model_state.cache
        if cache is None or not (plan.decode_slots or plan.spans):
            return FinishedStep(StepOutput())
        if plan.streams_experts:
            self._check_shared(plan)
        if before is None:
            self._times.begin()
        step = RunningStep(plan, self._context(cache, exchange), on_finished=self._on_finished)
        step.fill(before)
        step.compute(masks, before)
        self._running.append(step)
        return step

    def _run_command(self, command: ranks_pb2.GroupCommand, exchange: Exchange) -> ranks_pb2.CommandReport:
        replaces_cache = command.WhichOneof("action") in ("reset_cache", "sleep", "wake")
        if self._draft is not None and replaces_cache:
            self._draft.drop_cache()
        report = self._commands.run(command, exchange, self._times)
        if self._draft is not None:
            self._draft.follow(self._model_state, exchange)
        return report

    def _release_draft(self) -> None:
        """Have the draft model let go of the rank's weights, whose memory is given back next."""
        if self._draft is not None:
            self._draft.release(self._model_state)

    def _running_before(self, plan: ranks_pb2.StepPlan) -> RunningStep | None:
        """Return the running step, if there is one, and let the slots go on without its tokens."""
        if not self._running:
            return None
        step = self._running[-1]
        if len(self._running) > 1 or not step.may_be_followed_by(plan):
            raise RuntimeError(f"step plan {plan.step_id} begins before the step that it cannot follow is finished")
        step.expect_tokens()
        return step

    def _on_finished(self) -> None:
        """Record the end of the oldest running step."""
        self._running.pop(0)
        self._times.end()
        self._commands.count_step()

    def _context(self, cache: ServingCache, exchange: Exchange) -> StepContext:
        shard, request, _ = self._model_state.loaded("a step plan")
        return StepContext(
            decoder=shard.decoder,
            cache=cache,
            exchange=exchange,
            head_ranges=[rank.head_rows for rank in request.shard_plan.ranks],
            sampler=self._sampler,
            sample=self._sample,
            times=self._times,
            inputs=cache.async_inputs,
            draft=self._draft,
            tells_states=request.has_prediction_head,
        )

    def _check(self, plan: ranks_pb2.StepPlan) -> Exchange:
        """Raise ProtocolError unless the plan fits the rank's state; return the exchange that it is for."""
        state = self._model_state
        if self._exchange is None or not (state.cache or state.is_asleep):
            raise ProtocolError(f"step plan {plan.step_id} came before AllocateCache")
        self._check_order(plan)
        if not plan.HasField("command"):
            state.check_awake(plan)
        if state.cache is not None:
            state.cache.check.run(plan, state.cache.slots.counts)
        state.check_adapters(plan)
        return self._exchange

    def _check_order(self, plan: ranks_pb2.StepPlan) -> None:
        if plan.step_id != self._last_step_id + 1:
            raise ProtocolError(f"step plan {plan.step_id}: expected step {self._last_step_id + 1}")


def _nothing() -> None:
    """Count no steps."""


def _sampling_report(sampler: ShardSampler) -> tuple[str, ...]:
    """Return how a device samples; a rank on host cores has nothing to choose."""
    return () if isinstance(sampler, HostSampler) else (f"sampling={sampler.name}",)
