"""A GPU rank alone: every way of a sequence to the cache gives the logits that a CPU rank computes.

What a CPU rank computes is compared with transformers elsewhere; here nothing is needed but torch and safetensors.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hetero_api.v1 import ranks_pb2
from hetero_worker.backends.base import DeviceBackend
from hetero_worker.backends.cpu import cpu_backend
from hetero_worker.backends.cuda.backend import CudaBackend
from hetero_worker.distributed.exchange import LocalExchange
from hetero_worker.errors import DeviceError, MemoryBudgetError
from tests.support.gpu_needed import skip_without_gpu
from tests.support.mixed_runners import BLOCK_SIZE, BLOCKS, Drawn, SoloTaker, largest_difference, load_request, work_off
from tests.support.quiet_step import WHOLE
from tests.support.random_model import save_random_llama
from tests.support.rank_group import PlanBuilder

skip_without_gpu()

pytestmark = pytest.mark.gpu

TOLERANCE = {"float32": 2e-3, "bfloat16": 1.5}
"""Largest difference of logits, which go up to 10 or more; this random model makes much of bfloat16's rounding (a CPU
rank comes to 0.7)."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def gpu() -> CudaBackend:
    platform = CudaBackend(0, pool="test")
    platform.open()
    return platform


def drawn_on(platform: DeviceBackend, model: Path, dtype: str) -> list[Drawn]:
    return work_off(platform, model, WHOLE, 0, LocalExchange(), dtype=dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_every_path_equals_a_cpu_ranks(gpu: CudaBackend, model: Path, dtype: str) -> None:
    expected = drawn_on(cpu_backend(memory_bytes=2 << 30), model, "float32")
    drawn = drawn_on(gpu, model, dtype)
    assert drawn[0].tokens == expected[0].tokens
    assert largest_difference(drawn, expected) <= TOLERANCE[dtype]


def test_the_same_steps_give_the_same_bits(gpu: CudaBackend, model: Path) -> None:
    assert drawn_on(gpu, model, "float32") == drawn_on(gpu, model, "float32")


def taker(gpu: CudaBackend, model: Path) -> SoloTaker:
    request = load_request(model, WHOLE, 0, dtype="float32", memory_bytes=gpu.memory_bytes)
    return SoloTaker(gpu, request, LocalExchange(), num_blocks=BLOCKS, block_size=BLOCK_SIZE)


def test_weights_and_cache_lie_on_the_device_and_leave_it_to_sleep(gpu: CudaBackend, model: Path) -> None:
    awake = taker(gpu, model)
    builder = PlanBuilder(awake)
    shard, cache = awake.runner._model_state.shard, awake.runner._model_state.cache
    assert shard is not None
    assert cache is not None
    tensors = [tensor for tensor in shard.decoder.tensors if tensor.numel()]
    assert {tensor.device for tensor in tensors} == {gpu.device}
    assert {layer.keys.device for layer in cache.layers if layer is not None} == {gpu.device}
    del cache
    before = torch.cuda.memory_allocated(gpu.device)
    (output,) = builder.command(ranks_pb2.GroupCommand(sleep=ranks_pb2.SleepCommand(level=1))).outputs
    assert output.report is not None
    assert output.report.done
    assert before - torch.cuda.memory_allocated(gpu.device) >= 0.9 * awake.report.weight_bytes
    assert not any(tensor.untyped_storage().nbytes() for tensor in tensors)


def test_the_caches_size_follows_from_the_devices_memory(gpu: CudaBackend, model: Path) -> None:
    report = taker(gpu, model).report
    available = gpu.memory_pool.available_bytes()
    assert available is not None
    assert 0.5 * available < report.kv_budget_bytes < gpu.memory_bytes
    with pytest.raises(MemoryBudgetError, match="gpuMemoryUtilization"):
        SoloTaker(
            gpu,
            load_request(model, WHOLE, 0, dtype="float32", memory_bytes=1 << 20),
            LocalExchange(),
            num_blocks=BLOCKS,
            block_size=BLOCK_SIZE,
        )


def test_a_device_that_is_not_there_is_told_beside_those_that_are(gpu: CudaBackend) -> None:
    with pytest.raises(DeviceError, match=rf"pool big: .*cuda:1000.* 0 \({gpu.name}\).*gpu\.devices"):
        CudaBackend(1000, pool="big").open()


def test_a_gpu_is_measured(gpu: CudaBackend) -> None:
    measured = gpu.measure()
    assert measured.memory_bandwidth > 50e9
    assert set(measured.matmul_flops) == gpu.dtypes
    assert min(measured.matmul_flops.values()) > 1e12
    assert min(measured.to_device_bandwidth, measured.from_device_bandwidth) > 1e9
    assert 0 < measured.device_latency_s < 1e-3
