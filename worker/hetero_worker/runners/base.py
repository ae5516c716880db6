"""Runner: the interface between a rank's state machine and the code that computes, on any device.

`process/state_machine.py` drives it in the order of the group's life, from one thread:

    attach(exchange) → load(request) → allocate(...) → execute(plan 1), execute(plan 2), … → detach()

`execute` begins a step and finishes it. A step may begin before the one before is finished, where its plan suits: the
device then goes from one to the other without waiting for the host (`process/async_steps.py`). A rank with multi-step
decode takes plans that came together in one `execute_many`.

A new epoch starts again at `attach`; weights survive it, and `load` with an equal request costs nothing. Only
the exchange may be touched by another thread (its `abort`), which ends a blocked `execute` with
ExchangeAborted; the runner is then good for `detach` and the next `attach`.

Commands of the whole group between steps (reset of the cache, sleep, wake, profiles, experts that move) are plans too,
and `execute` answers these with a report. The group does such a thing as a whole or not at all: ranks prepare it, vote,
and then commit it or drop it.

Errors: ModelError (the directory cannot be served; permanent), MemoryBudgetError (it does not fit; permanent),
ProtocolError (a plan or an order that does not fit the state), ExchangeError (a peer is gone), WeightsChangedError
(weights that were read again are others; permanent), WeightsDamagedError (weights changed in memory).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

from hetero_api.model_config import ModelConfig
from hetero_api.sharding import ShardPlan
from hetero_api.v1 import logprobs_pb2, ranks_pb2
from hetero_worker.checkpoints.checkpoint import Checkpoint
from hetero_worker.distributed.exchange import Exchange


class WorkProgress:
    """How far the rank's long work has come. One thread works; another reads `message`.

    `on_advance` is called by the working thread whenever some of the work is done.
    """

    def __init__(self, on_advance: Callable[[], None] = lambda: None) -> None:
        self._now: ranks_pb2.Progress | None = None
        self._on_advance = on_advance

    @contextmanager
    def of(self, work: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
        """Count a work of `total` units within the block; yield what takes the units done since the last call."""
        self._now = ranks_pb2.Progress(work=work, total=max(1, total), unit=unit)
        try:
            yield self._advance
        finally:
            self._now = None

    def message(self) -> ranks_pb2.Progress | None:
        """Return the work under way; None if there is none. From any thread."""
        return self._now

    def _advance(self, amount: int) -> None:
        now = self._now
        if now is not None:  # a message that another thread may be sending is never changed
            done = min(now.total, now.done + amount)
            self._now = ranks_pb2.Progress(work=now.work, done=done, total=now.total, unit=now.unit)
            self._on_advance()


@dataclass(frozen=True, slots=True)
class DraftNeeds:
    """Memory that a rank's part of the draft model takes, in bytes."""

    weight_bytes: int = 0
    step_bytes: int = 0
    """Of its largest step, and graphs of its steps."""
    kv_bytes_per_token: int = 0
    """Of its cache, which has as many blocks as the rank's own."""


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """Order to load a shard, with the bounds that buffers are sized by."""

    directory: Path
    config: ModelConfig
    dtype: str
    """Arithmetic type of weights and activations: "float32", "bfloat16" or "float16"."""
    shard_plan: ShardPlan
    rank: int
    max_model_len: int
    """Longest sequence, tokens."""
    max_num_batched_tokens: int
    """Most tokens in a step."""
    max_num_seqs: int
    """Most sequences in a step, and the number of slots."""
    memory_bytes: int
    """Memory of the device that weights, workspace and KV cache of this rank may take together."""
    memory_utilization: float = 1.0
    """Share of this memory that they may really take."""
    plan_key: str = ""
    """Name of the plan's inputs; the weights do not depend on it."""
    cache_size_is_given: bool = False
    """True if the size of the KV cache is decided already, so that the largest step need not be measured."""
    enforce_eager: bool = False
    """True if no graphs of steps are to be recorded."""
    open_weights: Callable[[Path], Checkpoint] = Checkpoint
    """Opens the weights of `directory`."""
    kv_cache_dtype: str = ""
    """Type of cached keys and values: "float32", "bfloat16" or "float16"; empty: `dtype`."""
    batch_invariant: bool = False
    """True if a sequence's numbers must not depend on the rest of its batch, to the last bit."""
    expert_deferral: int = 0
    """Number of a token's chosen experts whose sum ranks without KV heads return a layer late."""
    expert_buffer_bytes: int = 0
    """Bytes of the GPU rank's buffers for experts of ranks without KV heads, which share them with it; 0: none do."""
    max_adapters: int = 0
    """Number of adapters that may be held at once, which memory is kept for."""
    max_adapter_rank: int = 0
    """Largest rank of an adapter."""
    adapts_experts: bool = False
    """True if adapters may change experts, too."""
    draft_plan: ShardPlan | None = None
    """Who owns what of the draft model that ranks were started with; None: it is not loaded."""
    has_prediction_head: bool = False
    """True if rank 0 also loads the model's first multi-token-prediction head, to draft with."""
    draft: DraftNeeds = DraftNeeds()
    """Memory of the draft model, or head, that this rank has loaded."""
    borrows_vocabulary: bool = False
    """True if embedding and output head are those of the rank's own shard, which has all rows of them."""
    async_steps: bool = True
    """True if a step may begin before the one before is finished, where a rank can do that."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Digests of the files that this rank said it has, by name: the weights must be read from these. Empty: any."""
    num_gpu_ranks: int | None = None
    """Ranks [0, num_gpu_ranks) compute on GPUs, the others on host cores; None: all are of one kind."""
    gpus_have_kernels: bool = True
    """True if our own kernels run on all GPU ranks: then steps with experts or adapters can be padded."""

    @property
    def cache_dtype(self) -> str:
        """Type of cached keys and values."""
        return self.kv_cache_dtype or self.dtype

    @property
    def num_host_ranks(self) -> int:
        """Number of ranks on host cores that have a part of some layer, in a group that has GPU ranks too."""
        if self.num_gpu_ranks is None:
            return 0
        others = self.shard_plan.ranks[self.num_gpu_ranks :]
        return sum(any(not layer.is_empty for layer in shard.layers) for shard in others)


class SampledToken(NamedTuple):
    """A slot that sampled in a step, and its token."""

    slot: int
    token: int


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Output of a plan."""

    sampled: Sequence[SampledToken] = ()
    """In batch order, the same on every rank."""
    logprobs: Sequence[logprobs_pb2.TokenLogprobs] = ()
    """Log-probabilities of the draws that want them, in batch order; complete on rank 0."""
    prompt_logprobs: Sequence[ranks_pb2.PromptSpanLogprobs] = ()
    """Log-probabilities of the spans that want them, in batch order; complete on rank 0."""
    pooled: Sequence[ranks_pb2.PooledSpan] = ()
    """Sums of hidden states of the spans that want them, in batch order; complete on rank 0."""
    drafts: Sequence[ranks_pb2.Proposal] = ()
    """Proposals of the draft model, for the plan's draft_slots; on rank 0, and ranks that draft with it."""
    report: ranks_pb2.CommandReport | None = field(default=None)
    """Report of the plan's command; None for a plan without one."""


MaskSource = Callable[[], Sequence[bytes]]
"""Returns the masks of a step's masked_slots in order; blocks until they have come. Raises ExchangeAborted."""


def no_masks() -> Sequence[bytes]:
    """Return no masks, for a step without masked slots."""
    return ()


class StepInFlight(Protocol):
    """A step that was begun and is not finished; steps are finished in the order in which they began."""

    @property
    def can_be_followed(self) -> bool:
        """True if some plan may begin before it is finished; otherwise it should be finished at once."""
        ...

    def may_be_followed_by(self, plan: ranks_pb2.StepPlan) -> bool:
        """Return whether the next plan may begin before this step, the last that was begun, is finished."""
        ...

    @property
    def is_done(self) -> bool:
        """True if `finish` would not wait for the device; never waits itself."""
        ...

    def finish(self) -> StepOutput:
        """Wait for the tokens and return the plan's output; called once.

        Raises ModelError or ProtocolError for a draw that has no token; ExchangeError when a peer is gone.
        """
        ...


class Runner(Protocol):
    """Computes one rank's share of every step."""

    @property
    def held(self) -> LoadRequest | None:
        """Request of the weights in memory: the last load's, with the plan now in force; None without weights."""
        ...

    @property
    def graph_bytes(self) -> int:
        """Bytes of device memory that graphs of steps have taken so far. Readable from any thread."""
        ...

    @property
    def home(self) -> int | None:
        """CPU that the calling thread should keep to while it works off steps; None: it may be anywhere."""
        ...

    def attach(self, exchange: Exchange) -> None:
        """Take a new epoch's exchange. Slot state is dropped, weights are kept; step ids begin at 1 again.

        The caller closes the exchange, after the last `execute` that uses it.
        """
        ...

    def load(self, request: LoadRequest) -> ranks_pb2.Loaded:
        """Read this rank's slices of the weights. A request equal to the last one keeps them (load_s = 0).

        Raises ModelError, PlanError, MemoryBudgetError.
        """
        ...

    def share_experts(self) -> str:
        """Share experts with the GPU rank, where the load was ordered with buffers for them. Collective.

        Return why they cannot be; empty if they are, or were not to be. Raises ExchangeError.
        """
        ...

    def allocate(self, num_blocks: int, block_size: int, num_snapshots: int = 0) -> int:
        """Make the KV cache (null block 0 included), drop all slot state, return the cache's bytes.

        `num_snapshots`: of states, if the model keeps any.

        Raises MemoryBudgetError when it exceeds the budget that `load` reported, ProtocolError before `load`.
        """
        ...

    def begin(self, plan: ranks_pb2.StepPlan, masks: MaskSource = no_masks) -> StepInFlight:
        """Begin a step. Steps before it are finished, except one that it may follow.

        `masks` is called just before the draw, and only for a plan with masked slots. Raises ProtocolError before any
        state changed when the plan does not fit; ExchangeError when a peer is gone, after which only `detach` and
        `attach` are of use. After any error a step that was begun before can still be finished.
        """
        ...

    def execute(self, plan: ranks_pb2.StepPlan, masks: MaskSource = no_masks) -> StepOutput:
        """Begin a step and finish it; raises as these do."""
        ...

    @property
    def has_multi_step(self) -> bool:
        """True if plans that only decode should be given to `execute_many`, as many together as have come."""
        ...

    def execute_many(self, plans: Sequence[ranks_pb2.StepPlan], on_step: Callable[[], None]) -> Iterator[StepOutput]:
        """Yield each plan's output in order; `on_step` is called after each step.

        The first plan only decodes and has no masks, and the others continue it (`multi_step.may_lead`, `may_follow`).
        All steps may be computed before the first output, and none before it is asked for. Raises as `execute` does, a
        plan's error after the outputs of the plans before it.
        """
        ...

    def detach(self) -> None:
        """Drop the epoch's exchange, cache and slots; weights are kept. Idempotent."""
        ...
