"""What rank processes do in the tests of stages; each body runs in a process of its own."""

from __future__ import annotations

from pathlib import Path

import torch

from hetero_api.model_config import ModelConfig
from hetero_api.v1 import ranks_pb2
from hetero_worker.distributed.routes import routes_of
from tests.support.rank_processes import RankContext
from tests.support.rank_shares import Shares
from tests.support.stages import BLOCK_SIZE, NUM_BLOCKS, KnownSequence, load_decoder, step_of

AREA_BYTES = 4096


def staged_logits(
    ranks: RankContext, kind: ranks_pb2.ExchangeKind.ValueType, directory: Path, shares: Shares, tokens: list[int]
) -> list[list[float]]:
    """This rank's logits of a prefill in four micro-batches and of one token after it."""
    torch.set_num_threads(1)
    config = ModelConfig.from_directory(directory)
    plan = shares.plan_for(config)
    group = ranks.form(kind, area_bytes=AREA_BYTES, routes=routes_of(plan))
    decoder = load_decoder(directory, config, plan, ranks.rank, num_parts=4)
    caches = decoder.allocate_caches(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    sequence = KnownSequence(tokens, list(range(1, NUM_BLOCKS)))
    rows: list[list[float]] = []
    with torch.inference_mode():
        for count in (len(tokens) - 1, 1):
            step = step_of(((sequence, count),))
            rows += decoder.forward(step, caches=caches, exchange=group.exchange).tolist()
            sequence.computed += count
    ranks.meet()
    group.close()
    return rows
