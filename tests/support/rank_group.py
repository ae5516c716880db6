"""A group of runners in one process, and the plans to drive it with.

`PlanBuilder` plays the scheduler's part with a trivial block allocator; `RankGroup` runs every plan on all ranks
(a thread each), checks that they agree, and returns tokens and whole logits.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from hetero_api.model_config import ModelConfig
from hetero_api.sharding import ShardPlan, UnitRange
from hetero_api.v1 import ranks_pb2
from hetero_placement.shard_plans import whole_on
from hetero_worker.backends.cpu import cpu_backend
from hetero_worker.backends.torch_reference import TorchReference
from hetero_worker.distributed.exchange import Exchange, HostExchange
from hetero_worker.layers.sampler import SampledRows, SampleTokens, gather_logits, sample_tokens
from hetero_worker.memory.streams import HOST
from hetero_worker.runners.base import LoadRequest, SampledToken, StepOutput
from hetero_worker.runners.draft import DraftModel
from hetero_worker.runners.plan_runner import PlanRunner
from hetero_worker.sampling.base import ShardSampler, StartedDraws
from hetero_worker.sampling.request import SamplingRow
from tests.support.pseudo_gpu import MakeGraphs, PseudoGpu
from tests.support.rank_shares import Shares
from tests.support.thread_exchange import run_ranks, thread_exchanges

__all__ = ["GREEDY", "LogitsRecorder", "PlanBuilder", "PlanTaker", "RankGroup", "Shares", "StepOutcome"]

GREEDY = ranks_pb2.Sampling(temperature=0.0, top_p=1.0)
MakeExchanges = Callable[[ShardPlan], Sequence[HostExchange]]
"""Every rank's, in rank order."""
LINK_BYTES = 4 << 20
"""What links over shared memory hold."""


@dataclass(slots=True)
class LogitsRecorder:
    """A sampler that keeps the whole logits before it draws."""

    last: torch.Tensor = field(default_factory=lambda: torch.empty(0))

    def __call__(
        self,
        logits: torch.Tensor,
        rows: Sequence[SamplingRow],
        *,
        head_ranges: Sequence[UnitRange],
        exchange: Exchange,
        sampler: ShardSampler,
        started: StartedDraws | None,
    ) -> SampledRows:
        self.last = gather_logits(logits.to(HOST), head_ranges, exchange).clone()
        return sample_tokens(logits, rows, head_ranges=head_ranges, exchange=exchange, sampler=sampler, started=started)


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What all ranks agree on."""

    sampled: list[SampledToken]
    """In batch order: slots that decode, then spans."""
    logits: torch.Tensor
    """float32 [draws, vocabulary], as rank 0 gathered them."""
    outputs: list[StepOutput]
    """What each rank says."""


class PlanTaker(Protocol):
    """What a PlanBuilder builds plans for."""

    num_blocks: int
    block_size: int

    def run(self, plan: ranks_pb2.StepPlan, masks: Sequence[bytes] = ()) -> StepOutcome: ...


class RankGroup:
    """Runners of one group, loaded and allocated; the first `num_gpu_ranks` are on pseudo GPUs."""

    def __init__(
        self,
        directory: Path,
        shares: Shares,
        *,
        dtype: str = "float32",
        kv_cache_dtype: str = "",
        num_blocks: int = 64,
        block_size: int = 4,
        num_snapshots: int = 0,
        max_num_batched_tokens: int = 128,
        max_num_seqs: int = 8,
        num_gpu_ranks: int = 0,
        make_graphs: MakeGraphs | None = None,
        make_gpu: Callable[..., PseudoGpu] = PseudoGpu,
        recorded: bool = True,
        enforce_eager: bool = False,
        batch_invariant: bool = False,
        expert_deferral: int = 0,
        expert_buffer_bytes: int = 0,
        max_adapters: int = 0,
        adapts_experts: bool = False,
        quantization: str = "none",
        native: bool = True,
        make_exchanges: MakeExchanges | None = None,
        on_top: Callable[[HostExchange], Exchange] = lambda host: host,
        keeps_logits: bool = True,
        draft: Path | None = None,
        draft_shares: Shares | None = None,
        has_prediction_head: bool = False,
    ) -> None:
        """`make_graphs`: of the pseudo GPUs, which `make_gpu` makes; None: they have none. `native`: host cores compute
        by native kernels; else by torch's. `recorded`: decode steps on host cores are recorded where they can be.
        `make_exchanges` None: in Python. `on_top`: what a rank uses of its host exchange.
        `keeps_logits`: a recorder is asked for all draws; else the runners draw as they do when they serve. `draft`: a
        draft model, which lies on rank 0 or by `draft_shares`. `has_prediction_head`: rank 0 drafts with the model's
        own head."""
        config = ModelConfig.from_directory(directory).quantized(quantization)
        self.plan = shares.plan_for(config)
        draft_plan = None if draft is None else _draft_plan(draft, draft_shares, world_size=self.plan.world_size)
        self.recorders = [LogitsRecorder() for _ in self.plan.ranks]
        host = partial(cpu_backend, records=recorded) if native else partial(TorchReference, "no native kernels")
        samplers: list[SampleTokens] = [recorder if keeps_logits else sample_tokens for recorder in self.recorders]
        backends = [
            make_gpu(rank, make_graphs=make_graphs) if rank < num_gpu_ranks else host()
            for rank in range(self.plan.world_size)
        ]
        self.runners = [
            PlanRunner(backend, sample=sampler, draft=DraftModel(backend, draft) if draft is not None else None)
            for backend, sampler in zip(backends, samplers, strict=True)
        ]
        self.requests = [
            LoadRequest(
                directory=directory,
                config=config,
                dtype=dtype,
                kv_cache_dtype=kv_cache_dtype,
                shard_plan=self.plan,
                rank=rank,
                max_model_len=config.max_position,
                max_num_batched_tokens=max_num_batched_tokens,
                max_num_seqs=max_num_seqs,
                memory_bytes=2 << 30,
                enforce_eager=enforce_eager,
                batch_invariant=batch_invariant,
                expert_deferral=expert_deferral,
                expert_buffer_bytes=expert_buffer_bytes,
                max_adapters=max_adapters,
                max_adapter_rank=16,
                adapts_experts=adapts_experts,
                draft_plan=draft_plan,
                has_prediction_head=has_prediction_head,
                num_gpu_ranks=num_gpu_ranks or None,
            )
            for rank in range(self.plan.world_size)
        ]
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.num_snapshots = num_snapshots
        self._make_exchanges = make_exchanges or _thread_exchanges
        self._on_top = on_top
        self.exchanges: Sequence[HostExchange] = []
        self.reports: list[ranks_pb2.Loaded] = []
        self.problems: dict[int, str] = {}
        """Why experts are not streamed, by rank; empty strings if they can be."""
        self.start()

    def start(self) -> None:
        """A new epoch: exchanges, load, allocate."""
        self.exchanges = self._make_exchanges(self.plan)
        self.reports = run_ranks(self.exchanges, self._start_rank)

    def run(self, plan: ranks_pb2.StepPlan, masks: Sequence[bytes] = ()) -> StepOutcome:
        if len(self.runners) == 1:  # on this thread: a profiler belongs to one
            outputs = [self.runners[0].execute(plan, lambda: masks)]
        else:
            outputs = run_ranks(self.exchanges, lambda rank: self.runners[rank].execute(plan, lambda: masks))
        sampled = [list(output.sampled) for output in outputs]
        if any(tokens != sampled[0] for tokens in sampled):
            raise AssertionError(f"ranks disagree on the sampled tokens: {sampled}")
        return StepOutcome(sampled[0], self.recorders[0].last, outputs)

    def _start_rank(self, rank: int) -> ranks_pb2.Loaded:
        runner = self.runners[rank]
        runner.attach(self._on_top(self.exchanges[rank]))
        report = runner.load(self.requests[rank])
        runner.allocate(self.num_blocks, self.block_size, self.num_snapshots)
        self.problems[rank] = runner.share_experts()
        return report


def _draft_plan(draft: Path, shares: Shares | None, *, world_size: int) -> ShardPlan:
    config = ModelConfig.from_directory(draft)
    return whole_on(config, 0, world_size) if shares is None else shares.plan_for(config)


def _thread_exchanges(plan: ShardPlan) -> Sequence[HostExchange]:
    return thread_exchanges(plan.world_size, link_bytes=LINK_BYTES)


@dataclass(slots=True)
class _Sequence:
    tokens: list[int]
    computed: int
    blocks: list[int]


class PlanBuilder:
    """Builds step plans; blocks are handed out in a scattered order and never given back."""

    def __init__(self, group: PlanTaker) -> None:
        self._group = group
        self._free = random.Random(0).sample(range(1, group.num_blocks), group.num_blocks - 1)
        self._step_id = 0
        self.streams_from: int | None = None
        """Rows from which on a step with spans streams experts."""
        self.sequences: dict[int, _Sequence] = {}
        self._plan = ranks_pb2.StepPlan()

    def start(
        self,
        slot: int,
        tokens: Sequence[int],
        *,
        shared_blocks: Sequence[int] = (),
        sampling: ranks_pb2.Sampling = GREEDY,
        adapter: int = 0,
    ) -> None:
        """Bind a slot; `shared_blocks` are full blocks that hold its leading tokens already."""
        computed = len(shared_blocks) * self._group.block_size
        self.sequences[slot] = _Sequence(list(tokens), computed, list(shared_blocks))
        self._plan.new_sequences.append(
            ranks_pb2.NewSequence(
                slot=slot,
                token_ids=tokens,
                num_computed_tokens=computed,
                block_ids=shared_blocks,
                sampling=sampling,
                num_prompt_tokens=len(tokens),
                adapter=adapter,
            )
        )

    def release(self, slot: int) -> None:
        del self.sequences[slot]
        self._plan.released_slots.append(slot)

    def schedule(
        self,
        slot: int,
        num_tokens: int | None = None,
        *,
        from_snapshot: int | None = None,
        snapshots: Mapping[int, int] | None = None,
        proposed: Sequence[int] = (),
        saved: Sequence[int] = (),
    ) -> None:
        """Compute so many tokens (all that are left when None); samples when it reaches the last.

        `snapshots`: those to take of its states, by the number of tokens that they are behind. `proposed`: tokens that
        may follow the last; the caller takes in what came of them.
        `saved`: the snapshots of the states behind each token before those.
        """
        sequence = self.sequences[slot]
        left = len(sequence.tokens) - sequence.computed
        count = left if num_tokens is None else min(num_tokens, left)
        sequence.computed += count
        reached = sequence.computed + len(proposed)
        needed = max(0, -(-reached // self._group.block_size) - len(sequence.blocks))
        if proposed:
            self._plan.proposals.add(slot=slot, token_ids=proposed, snapshots=saved)
        new_blocks = [self._free.pop(0) for _ in range(needed)]
        sequence.blocks.extend(new_blocks)
        self._plan.block_slots.extend([slot] * needed)
        self._plan.block_ids.extend(new_blocks)
        if left == 1:
            self._plan.decode_slots.append(slot)
        else:
            taken = [
                ranks_pb2.StateSnapshot(num_tokens=behind, snapshot=snapshot)
                for behind, snapshot in (snapshots or {}).items()
            ]
            span = ranks_pb2.ScheduledSpan(
                slot=slot, num_tokens=count, sample=count == left, from_snapshot=from_snapshot, snapshots=taken
            )
            self._plan.spans.append(span)

    def run(self) -> StepOutcome:
        """Run what was built, follow the sampled tokens, begin the next plan."""
        outcome = self.send(self.take_plan())
        for slot, token in outcome.sampled:
            self.sequences[slot].tokens.append(token)
        return outcome

    def take_plan(self) -> ranks_pb2.StepPlan:
        """What was built; the next plan begins."""
        self._step_id += 1
        self._plan.step_id = self._step_id
        rows = len(self._plan.decode_slots) + sum(span.num_tokens for span in self._plan.spans)
        self._plan.streams_experts = (
            self.streams_from is not None and rows >= self.streams_from and bool(self._plan.spans)
        )
        plan, self._plan = self._plan, ranks_pb2.StepPlan()
        return plan

    def send(self, plan: ranks_pb2.StepPlan, masks: Sequence[bytes] = ()) -> StepOutcome:
        return self._group.run(plan, masks)

    def use_blocks(self, num_blocks: int, block_size: int) -> None:
        """The group's cache has been replaced by one of this shape."""
        self._group.num_blocks, self._group.block_size = num_blocks, block_size
        self._free = random.Random(0).sample(range(1, num_blocks), num_blocks - 1)

    def command(self, command: ranks_pb2.GroupCommand) -> StepOutcome:
        """Have the group do something between steps; what was released goes with it."""
        self._plan.command.CopyFrom(command)
        return self.run()
