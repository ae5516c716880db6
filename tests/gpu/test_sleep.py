"""Sleep gives a GPU's memory back to the driver: what it says, and at least 95 % of what it claims to."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hetero_api.v1 import ranks_pb2
from hetero_worker.backends.cuda.backend import CudaBackend
from hetero_worker.distributed.exchange import LocalExchange
from tests.support.gpu_needed import skip_without_gpu
from tests.support.mixed_runners import BLOCK_SIZE, SoloTaker, load_request
from tests.support.quiet_step import WHOLE
from tests.support.random_model import save_random_llama
from tests.support.rank_group import PlanBuilder

skip_without_gpu()

pytestmark = pytest.mark.gpu

SHARE = 0.95
MANY_BLOCKS = 16384
"""256 MiB of this model's cache in float32: beside it the weights are small."""


@pytest.fixture(scope="module")
def gpu() -> CudaBackend:
    platform = CudaBackend(0, pool="test")
    platform.open()
    return platform


def free_bytes(gpu: CudaBackend) -> int:
    return torch.cuda.mem_get_info(gpu.device)[0]


@pytest.mark.parametrize("level", [1, 2])
def test_a_rank_that_sleeps_gives_back_what_it_claims(gpu: CudaBackend, tmp_path: Path, level: int) -> None:
    request = load_request(
        save_random_llama(tmp_path / "model"), WHOLE, 0, dtype="float32", memory_bytes=gpu.memory_bytes
    )
    taker = SoloTaker(gpu, request, LocalExchange(), num_blocks=MANY_BLOCKS, block_size=BLOCK_SIZE)
    claimed = taker.report.weight_bytes + MANY_BLOCKS * BLOCK_SIZE * taker.report.kv_bytes_per_token
    before = free_bytes(gpu)
    sleep = ranks_pb2.GroupCommand(sleep=ranks_pb2.SleepCommand(level=level))
    (output,) = PlanBuilder(taker).command(sleep).outputs
    assert output.report is not None
    assert output.report.done, output.report.problem
    assert output.report.freed_bytes >= SHARE * claimed
    assert free_bytes(gpu) - before >= SHARE * claimed


def test_weights_of_all_sizes_leave_whole_and_what_lies_beside_them_stays(gpu: CudaBackend) -> None:
    pool = gpu.memory_pool
    pool.release_unused()
    others = [torch.ones(1000 + i, device=gpu.device) for i in range(100)]
    with pool.apart():
        weights = [torch.randn(1 + 7919 * k, device=gpu.device) for k in range(200)]
    others += [torch.ones(1000 + i, device=gpu.device) for i in range(100)]
    contents, num_bytes = [weight.cpu() for weight in weights], sum(weight.nbytes for weight in weights)
    offloaded, before = gpu.offload(weights), free_bytes(gpu)
    offloaded.release()
    pool.release_unused()
    assert free_bytes(gpu) - before >= SHARE * num_bytes
    offloaded.restore()
    assert all(torch.equal(weight.cpu(), content) for weight, content in zip(weights, contents, strict=True))
    assert all(other.min().item() == 1 for other in others)
