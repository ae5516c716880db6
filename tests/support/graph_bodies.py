"""One rank of a group whose GPU ranks replay steps from tapes, over the real exchange: for rank_processes.run_ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from hetero_api.model_config import ModelConfig
from hetero_api.v1 import ranks_pb2
from hetero_worker.backends.cpu import cpu_backend
from tests.support.mixed_runners import BLOCK_SIZE, BLOCKS, Drawn, SoloTaker, load_request
from tests.support.pseudo_gpu import PseudoGpu
from tests.support.rank_group import PlanBuilder
from tests.support.rank_processes import RankContext
from tests.support.rank_shares import Shares
from tests.support.tape import TapeBackend


@dataclass(frozen=True, slots=True)
class Replayed:
    """What one rank has to say."""

    drawn: list[Drawn]
    num_replayed: int
    """Segments."""


def graphs_body(
    ranks: RankContext, kind: ranks_pb2.ExchangeKind.ValueType, directory: Path, shares: Shares, num_gpu_ranks: int
) -> Replayed:
    """Decodes of several sizes, padded and not, a prefill in between. GPU ranks are pseudo GPUs."""
    tapes: list[TapeBackend] = []

    def make_tape(device: torch.device) -> TapeBackend:
        tapes.append(TapeBackend(device))
        return tapes[-1]

    is_gpu = ranks.rank < num_gpu_ranks
    backend = PseudoGpu(ranks.rank, make_graphs=make_tape) if is_gpu else cpu_backend(memory_bytes=2 << 30)
    group = ranks.coordinate_backend(kind, backend, num_gpu_ranks)
    config = ModelConfig.from_directory(directory)
    exchange = group.connect(shares.plan_for(config))
    try:
        taker = SoloTaker(
            backend,
            load_request(directory, shares, ranks.rank, dtype="float32", memory_bytes=backend.memory_bytes),
            exchange,
            num_blocks=BLOCKS,
            block_size=BLOCK_SIZE,
        )
        drawn = _play(PlanBuilder(taker), vocab_size=config.vocab_size)
    finally:
        ranks.meet()
        group.close()
    return Replayed(drawn, sum(tape.replayed for tape in tapes))


def _play(builder: PlanBuilder, *, vocab_size: int) -> list[Drawn]:
    drawn: list[Drawn] = []

    def run(slots: Sequence[int], *, steps: int = 1) -> None:
        for _ in range(steps):
            for slot in slots:
                builder.schedule(slot)
            outcome = builder.run()
            for row, (slot, _) in enumerate(outcome.sampled):
                drawn.append(Drawn(builder.sequences[slot].tokens[:-1], outcome.logits[row].tolist()))

    def start(slots: Sequence[int]) -> None:
        for slot in slots:
            builder.start(slot, [(slot * 37 + i * i * 11 + i) % vocab_size for i in range(3 + 2 * slot)])
        run(slots)

    start((0, 1, 2))
    run((2, 0, 1), steps=4)
    run((1,), steps=3)
    start((3, 4))
    run((4, 0, 3, 2, 1), steps=3)
    run((3, 0, 2), steps=2)
    return drawn
