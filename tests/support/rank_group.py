"""A group of CPU runners in one process, and the plans to drive it with.

`PlanBuilder` plays the scheduler's part with a trivial block allocator; `RankGroup` runs every plan on all ranks
(a thread each), checks that they agree, and returns tokens and whole logits.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from hetero_api.model_config import ModelConfig
from hetero_api.sharding import LayerShard, RankShard, ShardPlan, UnitRange, ranges_of_counts
from hetero_api.v1 import ranks_pb2
from hetero_worker.distributed.exchange import HostExchange
from hetero_worker.layers.sampler import gather_logits, sample_tokens
from hetero_worker.runners.base import LoadReport, LoadRequest, SampledToken
from hetero_worker.runners.cpu_runner import CpuRunner
from hetero_worker.sampling.request import SamplingRow
from tests.support.thread_exchange import ThreadExchange, run_ranks, thread_exchanges

GREEDY = ranks_pb2.Sampling(temperature=0.0, top_p=1.0)


@dataclass(frozen=True, slots=True)
class Shares:
    """Units of each thing a rank owns, in rank order; heads and columns may differ by layer."""

    kv_heads: tuple[tuple[int, ...], ...]
    """One tuple a layer; the last one serves all further layers."""
    mlp_columns: tuple[tuple[int, ...], ...]
    vocab_rows: tuple[int, ...]

    def plan(self, num_layers: int) -> ShardPlan:
        heads = [ranges_of_counts(self.kv_heads[min(i, len(self.kv_heads) - 1)]) for i in range(num_layers)]
        columns = [ranges_of_counts(self.mlp_columns[min(i, len(self.mlp_columns) - 1)]) for i in range(num_layers)]
        return ShardPlan(
            tuple(
                RankShard(tuple(LayerShard(h[rank], c[rank]) for h, c in zip(heads, columns, strict=True)), rows)
                for rank, rows in enumerate(ranges_of_counts(self.vocab_rows))
            )
        )


@dataclass(slots=True)
class LogitsRecorder:
    """A sampler that keeps the whole logits before it draws."""

    last: torch.Tensor = field(default_factory=lambda: torch.empty(0))

    def __call__(
        self,
        logits: torch.Tensor,
        rows: Sequence[SamplingRow],
        *,
        vocab_ranges: Sequence[UnitRange],
        exchange: HostExchange,
    ) -> list[int]:
        self.last = gather_logits(logits, vocab_ranges, exchange).clone()
        return sample_tokens(logits, rows, vocab_ranges=vocab_ranges, exchange=exchange)


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What all ranks agree on."""

    sampled: list[SampledToken]
    logits: torch.Tensor
    """float32 [draws, vocabulary], as rank 0 gathered them."""


class RankGroup:
    """Runners of one group, loaded and allocated."""

    def __init__(
        self,
        directory: Path,
        shares: Shares,
        *,
        dtype: str = "float32",
        num_blocks: int = 64,
        block_size: int = 4,
        max_num_batched_tokens: int = 128,
        max_num_seqs: int = 8,
    ) -> None:
        config = ModelConfig.from_directory(directory)
        self.plan = shares.plan(config.num_layers)
        self.recorders = [LogitsRecorder() for _ in self.plan.ranks]
        self.runners = [CpuRunner(sample=recorder) for recorder in self.recorders]
        self.requests = [
            LoadRequest(
                directory=directory,
                config=config,
                dtype=dtype,
                shard_plan=self.plan,
                rank=rank,
                max_model_len=config.max_position,
                max_num_batched_tokens=max_num_batched_tokens,
                max_num_seqs=max_num_seqs,
                memory_bytes=1 << 30,
            )
            for rank in range(self.plan.world_size)
        ]
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.exchanges: list[ThreadExchange] = []
        self.reports: list[LoadReport] = []
        self.start()

    def start(self) -> None:
        """A new epoch: exchanges, load, allocate."""
        self.exchanges = thread_exchanges(self.plan.world_size)
        self.reports = run_ranks(self.exchanges, self._start_rank)

    def run(self, plan: ranks_pb2.StepPlan) -> StepOutcome:
        results = run_ranks(self.exchanges, lambda rank: list(self.runners[rank].execute(plan)))
        if any(result != results[0] for result in results):
            raise AssertionError(f"ranks disagree on the sampled tokens: {results}")
        return StepOutcome(results[0], self.recorders[0].last)

    def _start_rank(self, rank: int) -> LoadReport:
        runner = self.runners[rank]
        runner.attach(self.exchanges[rank])
        report = runner.load(self.requests[rank])
        runner.allocate(self.num_blocks, self.block_size)
        return report


@dataclass(slots=True)
class _Sequence:
    tokens: list[int]
    computed: int
    blocks: list[int]


class PlanBuilder:
    """Builds step plans; blocks are handed out in a scattered order and never given back."""

    def __init__(self, group: RankGroup) -> None:
        self._group = group
        self._free = random.Random(0).sample(range(1, group.num_blocks), group.num_blocks - 1)
        self._step_id = 0
        self.sequences: dict[int, _Sequence] = {}
        self._plan = ranks_pb2.StepPlan()

    def start(
        self,
        slot: int,
        tokens: Sequence[int],
        *,
        shared_blocks: Sequence[int] = (),
        sampling: ranks_pb2.Sampling = GREEDY,
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
            )
        )

    def release(self, slot: int) -> None:
        del self.sequences[slot]
        self._plan.released_slots.append(slot)

    def schedule(self, slot: int, num_tokens: int | None = None) -> None:
        """Compute so many tokens (all that are left when None); samples when it reaches the last."""
        sequence = self.sequences[slot]
        left = len(sequence.tokens) - sequence.computed
        count = left if num_tokens is None else min(num_tokens, left)
        sequence.computed += count
        needed = -(-sequence.computed // self._group.block_size) - len(sequence.blocks)
        new_blocks = [self._free.pop(0) for _ in range(needed)]
        sequence.blocks.extend(new_blocks)
        self._plan.scheduled.append(
            ranks_pb2.ScheduledSequence(slot=slot, num_tokens=count, new_block_ids=new_blocks, sample=count == left)
        )

    def run(self) -> StepOutcome:
        """Run what was built, follow the sampled tokens, begin the next plan."""
        self._step_id += 1
        self._plan.step_id = self._step_id
        plan, self._plan = self._plan, ranks_pb2.StepPlan()
        outcome = self._group.run(plan)
        for slot, token in outcome.sampled:
            self.sequences[slot].tokens.append(token)
        return outcome
