"""What a device's memory pool says, and weights that leave their device and come back."""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Callable, Iterator

import pytest
import torch

from hetero_api.rank_memory import RUNTIME_BYTES, KvCost
from hetero_worker.backends.cuda.memory import CudaMemoryPool
from hetero_worker.errors import MemoryBudgetError
from hetero_worker.memory.budget import MemoryBudget
from hetero_worker.memory.memory_pool import HostMemoryPool, MemorySnapshot
from hetero_worker.memory.weight_offload import OffloadedWeights
from tests.support.played_device import PlayedDevice

pytestmark = pytest.mark.unit

CUDA = torch.device("cuda", 1)


class Driver:
    """A device of 100 units: 30 are of contexts and other processes, 20 are kept by torch, 15 of these are in use."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: set[object] = set()
        self.allocated, self.peak = 15, 15
        monkeypatch.setattr(torch.cuda, "mem_get_info", self._of((50, 100)))
        monkeypatch.setattr(torch.cuda, "memory_reserved", self._of(20))
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: self.allocated)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: self.peak)
        for name in ("synchronize", "reset_peak_memory_stats"):
            monkeypatch.setattr(torch.cuda, name, self._of(None))

    def _of(self, answer: object) -> Callable[[torch.device], object]:
        def asked(device: torch.device) -> object:
            self.asked.add(device)
            return answer

        return asked


def test_memory_that_torch_keeps_and_nobody_uses_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, pool = Driver(monkeypatch), CudaMemoryPool(CUDA)
    assert (pool.runtime_bytes(), pool.held_bytes(), pool.available_bytes()) == (30, 20, 55)
    assert driver.asked == {CUDA}


def test_a_peak_counts_from_its_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, pool = Driver(monkeypatch), CudaMemoryPool(CUDA)
    assert pool.begin_peak()
    driver.peak = 41
    driver.allocated = 17
    assert pool.peak_growth_bytes() == 26


def test_what_lies_apart_has_a_pool_that_is_given_up_with_its_last_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, done = Driver(monkeypatch), list[str]()

    class Pool:
        def __init__(self) -> None:
            done.append("made")

        def __del__(self) -> None:
            done.append("given up")

    @contextlib.contextmanager
    def use(pool: Pool, device: torch.device) -> Iterator[None]:
        assert isinstance(pool, Pool)
        assert device == CUDA
        done.append("begins")
        yield
        done.append("ends")

    monkeypatch.setattr(torch.cuda, "MemPool", Pool)
    monkeypatch.setattr(torch.cuda, "use_mem_pool", use)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("unused memory given back"))
    with CudaMemoryPool(CUDA).apart():
        done.append("allocated")
    assert done == ["unused memory given back", "made", "begins", "allocated", "ends", "given up"]
    assert driver.asked == {CUDA}


def test_nothing_is_kept_apart_on_the_host() -> None:
    with HostMemoryPool().apart():
        assert torch.ones(3).sum().item() == 3


def test_the_hosts_account_asks_the_kernel() -> None:
    pool = HostMemoryPool()
    assert pool.runtime_bytes() == RUNTIME_BYTES
    assert pool.held_bytes() > 0
    pool.release_unused()
    assert "resident" in pool.describe()


@pytest.mark.parametrize(
    ("pool", "remedy"), [(HostMemoryPool(), "memoryPerRank"), (CudaMemoryPool(CUDA), "gpuMemoryUtilization")]
)
def test_want_of_memory_names_the_field_that_helps(pool: HostMemoryPool | CudaMemoryPool, remedy: str) -> None:
    budget = MemoryBudget(100, weight_bytes=90, workspace_bytes=20, runtime_bytes=0, remedy=pool.remedy)
    with pytest.raises(MemoryBudgetError, match=remedy):
        budget.kv_budget_bytes(KvCost(1, 0))


def offload(tensors: list[torch.Tensor], device: PlayedDevice) -> OffloadedWeights:
    return OffloadedWeights(tensors, pool=HostMemoryPool(), streams=device)


def _weights() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Tensors, one of them a view and one tied to another; and what is in them."""
    torch.manual_seed(0)
    plain, odd = torch.randn(7, 5), torch.randn(3).to(torch.bfloat16)
    tensors = [plain, plain[2:4], plain, odd, torch.empty(0)]
    return tensors, [tensor.clone() for tensor in tensors]


def test_weights_come_back_as_they_were_views_and_ties_among_them() -> None:
    tensors, contents = _weights()
    offloaded = offload(tensors, PlayedDevice())
    assert offloaded.num_bytes == 7 * 5 * 4 + 3 * 2
    assert all(torch.equal(a, b) for a, b in zip(tensors, contents, strict=True))  # not before they are released
    offloaded.release()
    assert not any(tensor.untyped_storage().nbytes() for tensor in tensors)
    offloaded.restore()
    assert all(torch.equal(a, b) for a, b in zip(tensors, contents, strict=True))
    tensors[0][2, 0] = 17.0
    assert tensors[1][0, 0] == 17.0


def test_parked_weights_lie_in_pinned_memory_for_as_long_as_they_are_kept() -> None:
    device, (tensors, contents) = PlayedDevice(), _weights()
    offloaded = offload(tensors, device)
    ((address, size),) = device.pins.items()
    assert size >= offloaded.num_bytes
    offloaded.release()
    offloaded.restore()
    assert all(torch.equal(a, b) for a, b in zip(tensors, contents, strict=True))
    del offloaded
    gc.collect()
    assert device.unpinned == [address]


def test_weights_that_cannot_be_pinned_go_through_a_buffer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("hetero_worker.memory.weight_offload._BUFFER_BYTES", 16)
    tensors, contents = _weights()
    with caplog.at_level(logging.WARNING):
        offloaded = offload(tensors, PlayedDevice(refusal="no room"))
    assert "cannot be pinned, weights go through a buffer: no room" in caplog.text
    offloaded.release()
    offloaded.restore()
    assert all(torch.equal(a, b) for a, b in zip(tensors, contents, strict=True))


def test_weights_that_the_host_has_no_room_for_stay_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, contents = _weights()
    snapshot = MemorySnapshot(resident_bytes=1 << 30, anonymous_bytes=1 << 30, available_bytes=100)
    monkeypatch.setattr(MemorySnapshot, "take", lambda: snapshot)
    with pytest.raises(MemoryBudgetError, match=r"no room in host memory.*gpu\.memoryPerRank.*level 2"):
        offload(tensors, device := PlayedDevice())
    assert not device.pins
    assert all(torch.equal(a, b) for a, b in zip(tensors, contents, strict=True))


def test_there_may_be_no_weights_to_park() -> None:
    offloaded = offload([torch.empty(0)], device := PlayedDevice())
    offloaded.release()
    offloaded.restore()
    assert offloaded.num_bytes == 0
    assert not device.pins


def test_weights_that_do_not_fit_any_more_stay_parked(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, contents = _weights()
    offloaded = offload(tensors, PlayedDevice())
    offloaded.release()
    resize, grown = torch.UntypedStorage.resize_, list[int]()

    def run_out(storage: torch.UntypedStorage, size: int) -> object:
        if size and grown:
            raise RuntimeError("CUDA out of memory")
        grown.extend([size] if size else [])
        return resize(storage, size)

    with monkeypatch.context() as patched:
        patched.setattr(torch.UntypedStorage, "resize_", run_out)
        with pytest.raises(RuntimeError, match="out of memory"):
            offloaded.restore()
    assert len(grown) == 1
    assert not any(tensor.untyped_storage().nbytes() for tensor in tensors)
    offloaded.restore()
    assert all(torch.equal(a, b) for a, b in zip(tensors, contents, strict=True))
