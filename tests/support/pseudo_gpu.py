"""Pseudo-GPU ranks: GPU ranks whose device is the host, so that a mixed group runs where there is no GPU.

They take the very paths that GPU ranks take: `GpuRunner`, tensors that are copied to "the device", the attention of
devices, a device group (Gloo's, beside the one of all ranks), weights that sleep elsewhere. Only the tensors lie on
the host.

    python -m tests.support.pseudo_gpu ...     a rank, as hetero_worker is one; on a pseudo GPU with --device cuda:N
"""

from __future__ import annotations

import torch

from hetero_api.v1 import ranks_pb2
from hetero_worker.backends.base import HOST, AttentionKind, Measurement, Platform
from hetero_worker.backends.cpu import CpuPlatform

MEMORY_BYTES = 2 * 1024**3


class PseudoGpuPlatform(Platform):
    """What a CudaPlatform says, of a device that is none."""

    def __init__(self, index: int = 0, *, memory_bytes: int = MEMORY_BYTES) -> None:
        self._index = index
        self._memory_bytes = memory_bytes

    @property
    def kind(self) -> ranks_pb2.DeviceKind.ValueType:
        return ranks_pb2.DEVICE_KIND_CUDA

    @property
    def name(self) -> str:
        return f"pseudo GPU {self._index}"

    @property
    def device(self) -> torch.device:
        return HOST

    @property
    def memory_bytes(self) -> int:
        return self._memory_bytes

    @property
    def dtypes(self) -> frozenset[str]:
        return frozenset({"float32", "bfloat16"})

    @property
    def device_backend(self) -> str:
        return "gloo"

    @property
    def attention(self) -> AttentionKind:
        return AttentionKind.DEVICE

    @property
    def pins_memory(self) -> bool:
        return False

    def open(self) -> None:
        """The host is there."""

    def synchronize(self) -> None:
        """Nothing is ever under way."""

    def bandwidth(self) -> float:
        return CpuPlatform(memory_bytes=self._memory_bytes).bandwidth()

    def measure(self) -> Measurement:
        return CpuPlatform(memory_bytes=self._memory_bytes).measure()
