"""Sleep and wake leave no trace in what a GPU rank computes: logits before and after are the same bits.

What is compared is a group that has just been loaded with one that has just woken: both make their graphs anew.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hetero_api.v1 import ranks_pb2
from hetero_worker.backends.cuda.backend import CudaBackend
from hetero_worker.distributed.exchange import LocalExchange
from tests.support.gpu_needed import skip_without_gpu
from tests.support.mixed_runners import BLOCK_SIZE, BLOCKS, SoloTaker, load_request
from tests.support.quiet_step import WHOLE
from tests.support.random_model import save_random_llama
from tests.support.rank_group import PlanBuilder

skip_without_gpu()

pytestmark = pytest.mark.gpu

DECODES = 5


def answer(builder: PlanBuilder) -> list[torch.Tensor]:
    """Logits of a prompt's draw and of some decodes after it."""
    builder.start(0, [(i * i * 7 + 3) % 320 for i in range(21)])
    logits = []
    for _ in range(1 + DECODES):
        builder.schedule(0)
        logits.append(builder.run().logits.clone())
    builder.release(0)
    builder.run()
    return logits


def order(builder: PlanBuilder, command: ranks_pb2.GroupCommand) -> None:
    (output,) = builder.command(command).outputs
    assert output.report is not None
    assert output.report.done, output.report.problem


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs on", "graphs off"])
def test_logits_are_the_same_bits(tmp_path: Path, level: int, dtype: str, enforce_eager: bool) -> None:
    platform = CudaBackend(0, pool="test")
    platform.open()
    model = save_random_llama(tmp_path / "model")
    request = load_request(model, WHOLE, 0, dtype=dtype, memory_bytes=platform.memory_bytes)
    taker = SoloTaker(
        platform,
        replace(request, enforce_eager=enforce_eager),
        LocalExchange(),
        num_blocks=BLOCKS,
        block_size=BLOCK_SIZE,
    )
    builder = PlanBuilder(taker)
    before = answer(builder)
    order(builder, ranks_pb2.GroupCommand(sleep=ranks_pb2.SleepCommand(level=level)))
    cache = ranks_pb2.AllocateCache(num_blocks=BLOCKS, block_size=BLOCK_SIZE)
    order(builder, ranks_pb2.GroupCommand(wake=ranks_pb2.WakeCommand(weights=True, cache=cache)))
    builder.use_blocks(BLOCKS, BLOCK_SIZE)
    after = answer(builder)
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
