"""Memory pool of one CUDA device, by the driver's and torch's allocator's numbers; cached memory is available."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hetero_worker.memory.budget import mib
from hetero_worker.memory.memory_pool import MemoryPool


class CudaMemoryPool(MemoryPool):
    """Memory of one CUDA device. Only this process's allocations by torch count as held."""

    remedy = "raise gpuMemoryUtilization, use GPUs with more memory"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before_bytes = 0

    def describe(self) -> str:
        """See `MemoryPool.describe`."""
        free, total = torch.cuda.mem_get_info(self._device)
        return f"{mib(self.held_bytes())} held, {mib(free)} of {mib(total)} free on {self._device}"

    def runtime_bytes(self) -> int:
        """See `MemoryPool.runtime_bytes`."""
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free - torch.cuda.memory_reserved(self._device)

    def available_bytes(self) -> int | None:
        """See `MemoryPool.available_bytes`."""
        free, _ = torch.cuda.mem_get_info(self._device)
        unused = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return free + unused

    def held_bytes(self) -> int:
        """See `MemoryPool.held_bytes`."""
        return torch.cuda.memory_reserved(self._device)

    def release_unused(self) -> None:
        """See `MemoryPool.release_unused`."""
        gc.collect()  # frees graphs and tensors that only a reference cycle holds
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()

    @contextmanager
    def apart(self) -> Iterator[None]:
        """See `MemoryPool.apart`."""
        self.release_unused()  # A new pool cannot use memory that others have freed.
        pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(pool, self._device):
            yield
        # Dropping the pool only drops its unused memory: tensors in it live on, and free their pages when they go.

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """See `MemoryPool.zeros`."""
        return torch.zeros(shape, dtype=dtype, device=self._device)

    def begin_peak(self) -> bool:
        """See `MemoryPool.begin_peak`."""
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        self._before_bytes = torch.cuda.memory_allocated(self._device)
        return True

    def peak_growth_bytes(self) -> int:
        """See `MemoryPool.peak_growth_bytes`."""
        torch.cuda.synchronize(self._device)
        return max(0, torch.cuda.max_memory_allocated(self._device) - self._before_bytes)
