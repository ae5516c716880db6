"""One CUDA device as a platform.

Only ranks that compute on a GPU import this module, and nothing happens before `open`: a rank on host cores makes no
CUDA context, however many GPUs its machine has.
"""

from __future__ import annotations

import os
from typing import Final

import torch

from hetero_api.host.gpus import visible_gpus
from hetero_api.v1 import ranks_pb2
from hetero_worker.backends.base import AttentionKind, Measurement, Platform
from hetero_worker.backends.speeds import copy_bandwidths, matmul_flops, read_bandwidth, round_trip_s
from hetero_worker.errors import DeviceError

_READ_BYTES: Final = 1024 * 1024 * 1024
_MATRIX_SIZE: Final = 4096
_BFLOAT16_CAPABILITY: Final = (8, 0)


class CudaPlatform(Platform):
    """The device of an index, among those that this process sees. `pool` is named in errors."""

    def __init__(self, index: int, *, pool: str) -> None:
        self._index = index
        self._pool = pool

    @property
    def kind(self) -> ranks_pb2.DeviceKind.ValueType:
        """GPU."""
        return ranks_pb2.DEVICE_KIND_CUDA

    @property
    def name(self) -> str:
        """Name of the device, as the driver reports it."""
        return torch.cuda.get_device_name(self._index)

    @property
    def device(self) -> torch.device:
        """Device of the rank's tensors."""
        return torch.device("cuda", self._index)

    @property
    def memory_bytes(self) -> int:
        """Memory of the whole device."""
        return int(torch.cuda.get_device_properties(self._index).total_memory)

    @property
    def dtypes(self) -> frozenset[str]:
        """Arithmetic types; bfloat16 needs compute capability 8.0."""
        has_bfloat16 = torch.cuda.get_device_capability(self._index) >= _BFLOAT16_CAPABILITY
        return frozenset({"float32", "bfloat16"} if has_bfloat16 else {"float32"})

    @property
    def device_backend(self) -> str:
        """NCCL."""
        return "nccl"

    @property
    def attention(self) -> AttentionKind:
        """Attention of devices."""
        return AttentionKind.DEVICE

    @property
    def pins_memory(self) -> bool:
        """True: pinned memory is copied without waiting."""
        return True

    def open(self) -> None:
        """Take the device. Raises DeviceError, with what to do, if there is none."""
        if (problem := _problem(self._index)) is not None:
            raise DeviceError(f"pool {self._pool}: this rank is to compute on cuda:{self._index}, but {problem}")
        torch.cuda.set_device(self._index)

    def synchronize(self) -> None:
        """Wait until the device has done all work."""
        torch.cuda.synchronize(self._index)

    def bandwidth(self) -> float:
        """Measure the memory bandwidth now, in bytes a second."""
        free, _ = torch.cuda.mem_get_info(self._index)
        return read_bandwidth(self, min(_READ_BYTES, free // 4))

    def measure(self) -> Measurement:
        """Measure bandwidth, matrix products, and copies over the bus."""
        to_device, from_device = copy_bandwidths(self)
        return Measurement(
            memory_bandwidth=self.bandwidth(),
            matmul_flops=matmul_flops(self, self.dtypes, size=_MATRIX_SIZE),
            to_device_bandwidth=to_device,
            from_device_bandwidth=from_device,
            device_latency_s=round_trip_s(self),
        )


def _problem(index: int) -> str | None:
    """Why the device cannot be had, and what to do; None if it can."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} was built without CUDA; install a CUDA build of torch"
    if not torch.cuda.is_available():
        seen = len(visible_gpus(os.environ)) or "no"
        return (
            f"no CUDA device can be used here: /dev holds {seen} NVIDIA device(s) that this process may see, and CUDA "
            "opens none; see what nvidia-smi says; a pod needs the pool's gpu.resourceName, and an image for GPUs"
        )
    count = torch.cuda.device_count()
    if index < count:
        return None
    found = ", ".join(f"{i} ({torch.cuda.get_device_name(i)})" for i in range(count))
    return f"there are only these: {found}; name others in the pool's gpu.devices"
