"""MemoryAccount: what memory a rank's device has, and what of it is taken, asked in one way whatever the device.

On the host the kernel is asked (`snapshot`); of a CUDA device the driver, and torch's allocator, which keeps what is
freed: memory that it keeps but nobody uses counts as available.

Weights and the KV cache are each allocated `apart`: on a CUDA device in a pool of their own, on whose pages nothing
else lies. So the driver gets them back whole when they go to sleep, whatever was allocated between their tensors.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch

from hetero_api.host.freed_memory import release_freed_memory
from hetero_api.rank_memory import RUNTIME_BYTES
from hetero_worker.memory.budget import mib
from hetero_worker.memory.snapshot import MemorySnapshot, PeakMeter


class MemoryAccount(Protocol):
    """One device's memory, as this process sees it."""

    @property
    def remedy(self) -> str:
        """What gives the rank more memory; for a person."""
        ...

    def describe(self) -> str:
        """For a log."""
        ...

    def runtime_bytes(self) -> int:
        """What is taken whatever the model is: interpreter and libraries, or contexts, communicators, and others."""
        ...

    def available_bytes(self) -> int | None:
        """What can still be taken; None where nobody tells."""
        ...

    def held_bytes(self) -> int:
        """What this process has taken."""
        ...

    def release_unused(self) -> None:
        """Give back what an allocator keeps though nobody uses it."""
        ...

    def apart(self) -> AbstractContextManager[None]:
        """What this thread allocates on the device within lies by itself: no page of it is shared with anything else.

        Once all of it is freed, `release_unused` gives back all of its memory.
        """
        ...

    def begin_peak(self) -> bool:
        """From here on the most that is held at once is noted; False where that cannot be."""
        ...

    def peak_growth_bytes(self) -> int:
        """How much more than at `begin_peak` was held at once."""
        ...


class HostAccount:
    """Memory of this machine, or of the container."""

    remedy = "give the rank more memory (memoryPerRank)"

    def __init__(self) -> None:
        self._meter = PeakMeter()

    def describe(self) -> str:
        return str(MemorySnapshot.take())

    def runtime_bytes(self) -> int:
        return RUNTIME_BYTES

    def available_bytes(self) -> int | None:
        return MemorySnapshot.take().available_bytes

    def held_bytes(self) -> int:
        return MemorySnapshot.take().resident_bytes

    def release_unused(self) -> None:
        release_freed_memory()

    def apart(self) -> AbstractContextManager[None]:
        return nullcontext()

    def begin_peak(self) -> bool:
        return self._meter.begin()

    def peak_growth_bytes(self) -> int:
        return self._meter.grown_bytes()


class CudaAccount:
    """Memory of one CUDA device."""

    remedy = "raise gpuMemoryUtilization, use GPUs with more memory"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before_bytes = 0

    def describe(self) -> str:
        free, total = torch.cuda.mem_get_info(self._device)
        return f"{mib(self.held_bytes())} held, {mib(free)} of {mib(total)} free on {self._device}"

    def runtime_bytes(self) -> int:
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free - torch.cuda.memory_reserved(self._device)

    def available_bytes(self) -> int | None:
        free, _ = torch.cuda.mem_get_info(self._device)
        unused = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return free + unused

    def held_bytes(self) -> int:
        return torch.cuda.memory_reserved(self._device)

    def release_unused(self) -> None:
        gc.collect()  # graphs and tensors that only a cycle holds are of use to nobody
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()

    @contextmanager
    def apart(self) -> Iterator[None]:
        self.release_unused()  # What others have freed is of no use to a new pool.
        pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(pool, self._device):
            yield
        # With the pool itself goes only the hold on what nobody uses: tensors in it stay, and free their pages at last.

    def begin_peak(self) -> bool:
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        self._before_bytes = torch.cuda.memory_allocated(self._device)
        return True

    def peak_growth_bytes(self) -> int:
        torch.cuda.synchronize(self._device)
        return max(0, torch.cuda.max_memory_allocated(self._device) - self._before_bytes)


def account_of(device: torch.device) -> MemoryAccount:
    """Of the memory that tensors on the device take."""
    return CudaAccount(device) if device.type == "cuda" else HostAccount()
