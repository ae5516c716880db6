"""One rank's runner in a real group of processes, GPU ranks first, and a script of steps that all of them work off.

Every rank builds the same plans by itself, since all draw the same tokens. What comes back is what the steps' logits
were, and the sequences that they are of, so that whoever asks can compare. No transformers, no pydantic: a machine
with a GPU may have neither.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from hetero_api.model_config import ModelConfig
from hetero_api.v1 import ranks_pb2
from hetero_worker.backends.base import DeviceBackend
from hetero_worker.backends.cpu import cpu_backend
from hetero_worker.distributed.exchange import Exchange
from hetero_worker.runners.base import LoadRequest
from hetero_worker.runners.plan_runner import PlanRunner
from tests.support.pseudo_gpu import PseudoGpu
from tests.support.rank_group import LogitsRecorder, PlanBuilder, StepOutcome
from tests.support.rank_processes import RankContext
from tests.support.rank_shares import Shares

BLOCKS, BLOCK_SIZE = 64, 4
MAX_MODEL_LEN = 128
CONTIGUOUS_BLOCKS = 3


@dataclass(frozen=True, slots=True)
class Drawn:
    """A draw: the sequence that it was drawn after, and the logits."""

    tokens: list[int]
    logits: list[float]


class SoloTaker:
    """PlanTaker of one rank; its peers are other processes."""

    def __init__(
        self, backend: DeviceBackend, request: LoadRequest, exchange: Exchange, *, num_blocks: int, block_size: int
    ) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.recorder = LogitsRecorder()
        self.runner = PlanRunner(backend, sample=self.recorder)
        self.runner.attach(exchange)
        self.report = self.runner.load(request)
        self.runner.allocate(num_blocks, block_size)

    def run(self, plan: ranks_pb2.StepPlan, masks: Sequence[bytes] = ()) -> StepOutcome:
        output = self.runner.execute(plan, lambda: masks)
        return StepOutcome(list(output.sampled), self.recorder.last, [output])


def load_request(directory: Path, shares: Shares, rank: int, *, dtype: str, memory_bytes: int) -> LoadRequest:
    config = ModelConfig.from_directory(directory)
    return LoadRequest(
        directory=directory,
        config=config,
        dtype=dtype,
        shard_plan=shares.plan_for(config),
        rank=rank,
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=MAX_MODEL_LEN,
        max_num_seqs=8,
        memory_bytes=memory_bytes,
    )


def work_off(
    backend: DeviceBackend,
    directory: Path,
    shares: Shares,
    rank: int,
    exchange: Exchange,
    *,
    dtype: str = "float32",
    changes: Mapping[str, Any] = MappingProxyType({}),
) -> list[Drawn]:
    """The whole script on one rank: its draws. `changes` are of the LoadRequest."""
    request = load_request(directory, shares, rank, dtype=dtype, memory_bytes=backend.memory_bytes)
    request = replace(request, **changes)
    taker = SoloTaker(backend, request, exchange, num_blocks=BLOCKS, block_size=BLOCK_SIZE)
    return _Script(PlanBuilder(taker), vocab_size=request.config.vocab_size).play()


class _Script:
    """Every way of a sequence to the cache."""

    def __init__(self, builder: PlanBuilder, *, vocab_size: int) -> None:
        self._builder = builder
        self._vocab_size = vocab_size
        self._drawn: list[Drawn] = []

    def play(self) -> list[Drawn]:
        self._chunked()
        self._prefix_hit_mixed_and_preempted()
        for level in (1, 2):
            self._order(ranks_pb2.GroupCommand(sleep=ranks_pb2.SleepCommand(level=level)))
            self._order(ranks_pb2.GroupCommand(wake=ranks_pb2.WakeCommand(weights=True, cache=_cache())))
            self._builder.use_blocks(BLOCKS, BLOCK_SIZE)
            self._whole(11 + level)
        contiguous = ranks_pb2.AllocateCache(num_blocks=CONTIGUOUS_BLOCKS, block_size=MAX_MODEL_LEN)
        self._order(ranks_pb2.GroupCommand(reset_cache=contiguous))
        self._builder.use_blocks(CONTIGUOUS_BLOCKS, MAX_MODEL_LEN)
        self._whole(9)
        return self._drawn

    def _chunked(self) -> None:
        for chunk in (1, 4, 7):
            self._builder.start(0, self._prompt(9, seed=chunk))
            for _ in range(-(-9 // chunk)):
                self._builder.schedule(0, chunk)
                self._run()
            self._builder.release(0)

    def _prefix_hit_mixed_and_preempted(self) -> None:
        builder, common = self._builder, self._prompt(3 * BLOCK_SIZE, seed=2)
        for slot, tokens in {0: [*common, 5], 1: self._prompt(70, seed=3)}.items():
            builder.start(slot, tokens)
            builder.schedule(slot)
        self._run()
        builder.start(2, [*common, 9, 8, 7], shared_blocks=builder.sequences[0].blocks[:3])
        for slot in (2, 1, 0):
            builder.schedule(slot)
        self._run()
        preempted = list(builder.sequences[1].tokens)
        builder.release(1)
        builder.start(1, preempted)
        for slot, count in {0: None, 2: None, 1: 37}.items():
            builder.schedule(slot, count)
        self._run()
        builder.schedule(1)
        self._run()
        for slot in (0, 1, 2):
            builder.release(slot)
        self._run()

    def _whole(self, length: int) -> None:
        self._builder.start(3, self._prompt(length, seed=length))
        for _ in range(3):
            self._builder.schedule(3)
            self._run()
        self._builder.release(3)

    def _run(self) -> None:
        outcome = self._builder.run()
        for row, (slot, _) in enumerate(outcome.sampled):
            tokens = self._builder.sequences[slot].tokens[:-1]
            self._drawn.append(Drawn(list(tokens), outcome.logits[row].tolist()))

    def _order(self, command: ranks_pb2.GroupCommand) -> None:
        (output,) = self._builder.command(command).outputs
        if output.report is None or not output.report.done:
            raise AssertionError(f"{command} was not done: {output.report}")

    def _prompt(self, length: int, *, seed: int) -> list[int]:
        return [(seed * 37 + i * i * 11 + i) % self._vocab_size for i in range(length)]


def _cache() -> ranks_pb2.AllocateCache:
    return ranks_pb2.AllocateCache(num_blocks=BLOCKS, block_size=BLOCK_SIZE)


def body(
    ranks: RankContext, kind: ranks_pb2.ExchangeKind.ValueType, directory: Path, shares: Shares, num_gpu_ranks: int,
    dtype: str, pseudo: bool, changes: Mapping[str, Any] = MappingProxyType({}),
) -> list[Drawn]:  # fmt: skip
    """For rank_processes.run_ranks. Rank r of the GPU ranks computes on cuda:r, or on a pseudo GPU."""
    backend = backend_of(ranks.rank, num_gpu_ranks, pseudo=pseudo)
    backend.open()
    group = ranks.coordinate_backend(kind, backend, num_gpu_ranks)
    config = ModelConfig.from_directory(directory)
    exchange = group.connect(shares.plan_for(config))
    try:
        return work_off(backend, directory, shares, ranks.rank, exchange, dtype=dtype, changes=changes)
    finally:
        ranks.meet()
        group.close()


def backend_of(rank: int, num_gpu_ranks: int, *, pseudo: bool) -> DeviceBackend:
    """Of ranks [0, num_gpu_ranks) a GPU, cuda:r, or a pseudo GPU; of the others host cores."""
    if rank >= num_gpu_ranks:
        return cpu_backend(memory_bytes=2 << 30)
    if pseudo:
        return PseudoGpu(rank)
    from hetero_worker.backends.cuda.backend import CudaBackend

    return CudaBackend(rank, pool="test")


def largest_difference(drawn: Sequence[Drawn], other: Sequence[Drawn]) -> float:
    """Of logits of the same sequences. Where a draw of two tied tokens went another way, the rest is of other
    sequences, and not compared; what comes before is."""
    largest = 0.0
    for one, two in zip(drawn, other, strict=True):
        if one.tokens == two.tokens:
            largest = max(largest, float((torch.tensor(one.logits) - torch.tensor(two.logits)).abs().max()))
    return largest
