"""CudaDriver: the calls of one CUDA device's driver that its backend makes. Tests replace it by one on host tensors.

Nothing happens before `take`: a rank that only reads these facts makes no CUDA context.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import torch
from torch.profiler import ProfilerActivity

from hetero_api.host.gpus import installed_driver, visible_gpus
from hetero_worker.backends.base import Work
from hetero_worker.backends.cuda.graphs import CudaGraphBackend
from hetero_worker.backends.cuda.memory import CudaMemoryPool
from hetero_worker.backends.cuda.streams import CudaStreams
from hetero_worker.memory.memory_pool import MemoryPool
from hetero_worker.memory.streams import DeviceStreams
from hetero_worker.runners.graphs.breaks import GraphBackend

_BFLOAT16_CAPABILITY: Final = (8, 0)
_LEAST_DRIVERS: Final = {11: 450, 12: 525, 13: 580}
"""First branch of NVIDIA's drivers that runs programs of a CUDA version without libraries of forward compatibility."""


def driver_problem(driver: str, *, cuda: str) -> str | None:
    """Return why programs built for `cuda`, like "13.0", cannot run on a driver, and what to do; None if they can.

    `driver`: its version, like "570.124.06"; "" if unknown. Versions that we do not know pass.
    """
    least = _LEAST_DRIVERS.get(int(cuda.partition(".")[0]), 0)
    branch = driver.partition(".")[0]
    if not branch.isdecimal() or int(branch) >= least:
        return None
    return (
        f"this node's NVIDIA driver is {driver}, and torch {torch.__version__} is built for CUDA {cuda}, which needs "
        f"driver {least} or newer; update the driver, or take an image of ranks that is built for an older CUDA "
        "(spec.images.gpuWorker; make locks TORCH_INDEX=…)"
    )


class CudaDriver:
    """The device of an index, among those that this process sees."""

    collectives: str = "nccl"
    """torch.distributed's backend among these devices."""
    records_graphs: bool = True
    """True if steps can be recorded in graphs."""
    pins_memory: bool = True
    """True if host memory that is copied to and from the device is to be pinned."""
    profiler_activities: Sequence[ProfilerActivity] = (ProfilerActivity.CPU, ProfilerActivity.CUDA)
    """Activities of a profile, the device's kernels included."""

    def __init__(self, index: int) -> None:
        self._index = index

    @property
    def device(self) -> torch.device:
        """Device of the rank's tensors."""
        return torch.device("cuda", self._index)

    @property
    def name(self) -> str:
        """Name of the device."""
        return torch.cuda.get_device_name(self._index)

    @property
    def memory_bytes(self) -> int:
        """Memory of the whole device."""
        return int(torch.cuda.get_device_properties(self._index).total_memory)

    @property
    def has_bfloat16(self) -> bool:
        """True if the device computes in bfloat16, which needs compute capability 8.0."""
        return torch.cuda.get_device_capability(self._index) >= _BFLOAT16_CAPABILITY

    @property
    def num_multiprocessors(self) -> int:
        """Number of streaming multiprocessors."""
        return int(torch.cuda.get_device_properties(self._index).multi_processor_count)

    def problem(self) -> str | None:
        """Return why the device cannot be had, and what to do; None if it can."""
        built_for = torch.version.cuda
        if built_for is None:
            return f"torch {torch.__version__} was built without CUDA; install a CUDA build of torch"
        if not torch.cuda.is_available():
            if (too_old := driver_problem(installed_driver(), cuda=built_for)) is not None:
                return too_old
            seen = len(visible_gpus(os.environ)) or "no"
            return (
                f"no CUDA device can be used here: /dev holds {seen} NVIDIA device(s) that this process may see, and "
                "CUDA opens none; see what nvidia-smi says; a pod needs the pool's gpu.resourceName, and an image for "
                "GPUs"
            )
        count = torch.cuda.device_count()
        if self._index < count:
            return None
        found = ", ".join(f"{i} ({torch.cuda.get_device_name(i)})" for i in range(count))
        return f"there are only these: {found}; name others in the pool's gpu.devices"

    def take(self) -> None:
        """Make the device this process's."""
        torch.cuda.set_device(self._index)

    def synchronize(self) -> None:
        """Wait until the device has done all work."""
        torch.cuda.synchronize(self._index)

    def free_bytes(self) -> int:
        """Return the memory that nobody has taken."""
        return torch.cuda.mem_get_info(self._index)[0]

    def laps(self, works: Sequence[Work]) -> list[float]:
        """See `DeviceBackend.laps`: events between queued works, read when all are done."""
        marks = [torch.Event(device=self.device, enable_timing=True) for _ in range(len(works) + 1)]
        self.synchronize()
        marks[0].record()
        for work, mark in zip(works, marks[1:], strict=True):
            work()
            mark.record()
        self.synchronize()
        return [begin.elapsed_time(end) * 1e-3 for begin, end in pairwise(marks)]

    def memory_pool(self) -> MemoryPool:
        """Return the pool of the device's memory."""
        return CudaMemoryPool(self.device)

    def streams(self) -> DeviceStreams:
        """Return new streams for copies."""
        return CudaStreams(self.device)

    def graphs(self) -> GraphBackend:
        """Return a new recorder of graphs, whose memory goes with them; only if it `records_graphs`."""
        return CudaGraphBackend(self.device)
