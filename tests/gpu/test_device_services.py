"""What GPU ranks stand on: copies to and from the host, and NCCL. With one device NCCL has a group of one."""

from __future__ import annotations

import datetime

import pytest
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch's stubs omit it

from hetero_worker.backends.cuda.backend import CudaBackend
from hetero_worker.backends.cuda.streams import CudaStreams
from hetero_worker.distributed.device_group import NCCL, TorchDeviceGroup
from hetero_worker.distributed.rendezvous import PrefixStore
from hetero_worker.distributed.staging import StreamStaging
from hetero_worker.errors import ExchangeAborted
from hetero_worker.memory.streams import PAST, Moment, to_device
from tests.support.gpu_needed import skip_without_gpu

skip_without_gpu()

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def gpu() -> CudaBackend:
    platform = CudaBackend(0, pool="test")
    platform.open()
    return platform


@pytest.fixture(scope="module")
def device(gpu: CudaBackend) -> torch.device:
    return gpu.device


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (512, 4096)], ids=str)
def test_a_tensor_comes_back_from_the_host_as_it_went(
    gpu: CudaBackend, device: torch.device, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    staging = gpu.staging()
    assert isinstance(staging, StreamStaging)
    original = torch.randn(shape, device=device).to(dtype)
    host = staging.start_to_host(original).wait()
    assert host.is_pinned()
    assert torch.equal(host, original.cpu())
    back = torch.empty_like(original)
    staging.to_device(host, back)
    assert torch.equal(back, original)


def test_copies_come_after_what_was_asked_of_the_device_before_them(gpu: CudaBackend, device: torch.device) -> None:
    """The copy reads the product, not what was there before; and work after a copy back sees what it brought."""
    staging, left = gpu.staging(), torch.randn(4096, 4096, device=device)
    for i in range(5):
        product = torch.zeros_like(left)
        torch.matmul(left, left, out=product)
        host = staging.start_to_host(product).wait()
        staging.to_device(torch.full_like(host, float(i), pin_memory=True), product)
        assert product.sum().item() == i * product.numel()
        assert host.abs().sum() > 0


def test_host_arrays_may_change_as_soon_as_they_were_copied(device: torch.device) -> None:
    host, streams = torch.arange(1 << 20, pin_memory=True), CudaStreams(device)
    copied: Moment = PAST
    there = torch.zeros(1 << 20, dtype=torch.int64, device=device)
    for i in range(20):
        copied.wait()
        host.fill_(i)
        there.copy_(host, non_blocking=True)
        copied = streams.now()
        small = to_device(torch.full((1000,), i), device)
        assert [small.min().item(), small.max().item(), there.min().item(), there.max().item()] == [i] * 4


@pytest.fixture
def group(device: torch.device) -> TorchDeviceGroup:
    store = TCPStore("127.0.0.1", 0, 1, True, datetime.timedelta(seconds=20))
    return TorchDeviceGroup.make(NCCL, (0,), rank=0, store=PrefixStore("test", store), timeout_s=20.0, device=device)


def test_an_nccl_group_of_one_does_every_collective(group: TorchDeviceGroup, device: torch.device) -> None:
    tensor = torch.randn(300, 7, device=device)
    before = tensor.clone()
    group.all_reduce(tensor)
    group.reduce(tensor, 0)
    group.broadcast(tensor, 0)
    (gathered,) = group.all_gather(tensor)
    assert torch.equal(tensor, before)
    assert torch.equal(gathered, before)
    group.close()


def test_an_aborted_group_refuses_what_comes_after(group: TorchDeviceGroup, device: torch.device) -> None:
    group.abort()
    with pytest.raises(ExchangeAborted):
        group.all_reduce(torch.ones(3, device=device))
    group.close()
