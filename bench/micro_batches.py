"""What micro-batches give a pipeline: forward passes of SmolLM2 over two stages of one core each, cut in 1 to 8 parts.

    python -m bench.micro_batches [--rounds N]

Times are of whole forward passes on real rank processes over shared memory, the variants taking turns; the least and
the median of the rounds. One rank of two threads on the same passes stands beside. "auto" is what a step would do.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import numpy as np
import torch

from hetero_api.model_config import ModelConfig
from hetero_api.sharding import ShardPlan
from hetero_api.spec import PlacementShares
from hetero_api.v1 import ranks_pb2
from hetero_client.home import HeteroHome
from hetero_client.model_store.demo_model import demo_directory
from hetero_placement.shard_plans import deal_layers, deal_within_layers
from hetero_worker.attention.base import AttentionBatch, DecodeRows, PrefillSpan
from hetero_worker.attention.kv_cache import LayerCache
from hetero_worker.attention.torch_paged import TorchPagedAttention
from hetero_worker.checkpoints.checkpoint import Checkpoint
from hetero_worker.distributed.exchange import HostExchange, LocalExchange
from hetero_worker.distributed.routes import routes_of
from hetero_worker.layers.linear_kernels import PlainKernel
from hetero_worker.models.decoder import Decoder, DecoderInput
from hetero_worker.models.micro_batches import best_number
from tests.support.rank_processes import RankContext, run_ranks

BLOCK_SIZE: Final = 16
CONTEXT: Final = 128
NUM_BLOCKS: Final = 512
PARTS: Final = (0, 1, 2, 4, 8)
"""0: what a step would do."""
TIMEOUT_S: Final = 900.0


def prefill(rows: int) -> DecoderInput:
    """One sequence's first `rows` tokens."""
    blocks = np.arange(1, 1 + -(-rows // BLOCK_SIZE), dtype=np.int32)
    none = DecodeRows(np.zeros(0, np.int32), np.zeros((0, len(blocks)), np.int32))
    batch = AttentionBatch(torch.arange(rows) + BLOCK_SIZE, none, (PrefillSpan(0, rows, 0, blocks),))
    return DecoderInput(torch.arange(rows), torch.arange(rows), batch, torch.tensor([rows - 1]))


def decode(rows: int) -> DecoderInput:
    """One token each of `rows` sequences of CONTEXT tokens."""
    num_blocks = CONTEXT // BLOCK_SIZE
    tables = 1 + np.arange(rows * num_blocks, dtype=np.int32).reshape(rows, num_blocks)
    slots = torch.from_numpy(tables[:, -1].astype(np.int64)) * BLOCK_SIZE + BLOCK_SIZE - 1
    batch = AttentionBatch(slots, DecodeRows(np.full(rows, CONTEXT, np.int32), tables), ())
    return DecoderInput(torch.arange(rows), torch.full((rows,), CONTEXT - 1), batch, None)


STEPS: Final[Mapping[str, Callable[[], DecoderInput]]] = {
    "prefill 512": lambda: prefill(512),
    "prefill 128": lambda: prefill(128),
    "prefill 64": lambda: prefill(64),
    "decode 1": lambda: decode(1),
    "decode 8": lambda: decode(8),
    "decode 32": lambda: decode(32),
}
Times = dict[str, dict[int, list[float]]]
"""Seconds, by step and number of parts."""


class Cut:
    """How many parts the decoder cuts its steps in; every rank sets the same."""

    def __init__(self) -> None:
        self.parts = 0

    def __call__(self, rows: int, stages: int) -> int:
        return self.parts or best_number(rows, stages)


def measure(
    ranks: RankContext, model: str, in_stages: bool, threads: int, parts: tuple[int, ...], rounds: int
) -> Times:
    """One rank's body; rank 0's times are those of the whole group."""
    torch.set_num_threads(threads)
    cores = {ranks.rank} if ranks.world_size > 1 else set(range(threads))
    os.sched_setaffinity(0, cores)
    config = ModelConfig.from_directory(Path(model))
    deal = deal_layers if in_stages else deal_within_layers
    plan = deal(config, cores=[1] * ranks.world_size, shares=PlacementShares())
    cut = Cut()
    decoder = _loaded(config, plan, Path(model), rank=ranks.rank, cut=cut)
    caches = decoder.allocate_caches(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    if ranks.world_size == 1:
        return _time_steps(decoder, caches, LocalExchange(), cut, parts, rounds)
    group = ranks.form(ranks_pb2.EXCHANGE_KIND_SHM, routes=routes_of(plan), timeout_s=TIMEOUT_S)
    times = _time_steps(decoder, caches, group.exchange, cut, parts, rounds)
    group.close()
    return times


def _loaded(config: ModelConfig, plan: ShardPlan, model: Path, *, rank: int, cut: Cut) -> Decoder:
    decoder = Decoder(
        config, plan, rank=rank, dtype=torch.float32, max_length=1024, attention=TorchPagedAttention(),
        count_parts=cut,
    )  # fmt: skip
    with Checkpoint(model) as checkpoint:
        decoder.load(checkpoint, PlainKernel())
    return decoder


def _time_steps(
    decoder: Decoder, caches: list[LayerCache | None], exchange: HostExchange, cut: Cut, parts: tuple[int, ...],
    rounds: int,
) -> Times:  # fmt: skip
    times: Times = {name: {number: [] for number in parts} for name in STEPS}
    flag = torch.zeros(1)
    with torch.inference_mode():
        for name, make in STEPS.items():
            step = make()
            for number in [number for _ in range(rounds + 1) for number in parts]:
                cut.parts = number
                exchange.broadcast(flag, 0)
                begin_s = time.perf_counter()
                decoder.forward(step, caches=caches, exchange=exchange)
                exchange.broadcast(flag, exchange.world_size - 1)
                times[name][number].append(time.perf_counter() - begin_s)
    return times


def show(title: str, times: Times) -> None:
    """Milliseconds, least / median; the first round warmed up."""
    print(title)
    for name, by_parts in times.items():
        cells = [
            f"{number or 'auto'}: {1e3 * min(each[1:]):7.1f} /{1e3 * statistics.median(each[1:]):7.1f}"
            for number, each in by_parts.items()
        ]
        print(f"  {name:12}", "   ".join(cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    model = str(demo_directory(HeteroHome.from_environment()))
    staged = run_ranks(measure, 2, model, True, 1, PARTS, rounds, timeout_s=TIMEOUT_S)[0]
    show("2 stages x 1 thread, by number of micro-batches, ms (least / median)", staged)
    whole = run_ranks(measure, 1, model, False, 2, (1,), rounds, timeout_s=TIMEOUT_S)[0]
    show("1 rank x 2 threads", whole)


if __name__ == "__main__":
    main()
