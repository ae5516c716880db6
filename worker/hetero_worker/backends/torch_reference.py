"""Torch's operators on any device: the reference of all tests, and what serves where faster kernels are missing.

TorchReference is a rank on host cores that uses nothing else: a machine without a compiler gets it, and its reports say
why (`Loaded.kernels`). Weights and activations stay as wide as the arithmetic type, and steps run operator by operator.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Final

import torch

from hetero_api.model_config import ModelConfig
from hetero_api.v1 import ranks_pb2
from hetero_worker.attention.base import AttentionBackend
from hetero_worker.attention.torch_paged import TorchPagedAttention
from hetero_worker.backends.base import DeviceBackend, Measurement, Work
from hetero_worker.backends.speeds import matmul_flops, read_bandwidth
from hetero_worker.distributed.staging import PlainStaging, Staging
from hetero_worker.layers.fused_ops import FusedOps, PlainOps
from hetero_worker.layers.invariant_ops import InvariantOps
from hetero_worker.layers.linear_kernels import LinearKernel, PlainKernel, RowKernel
from hetero_worker.memory.huge_pages import HUGE_PAGE_BYTES, populate_in_background
from hetero_worker.memory.memory_pool import HostMemoryPool, MemoryPool
from hetero_worker.memory.streams import HOST
from hetero_worker.memory.weight_offload import OffloadedWeights
from hetero_worker.runners.recorded.steps import NativeSteps
from hetero_worker.runners.step_parts import StepMaker
from hetero_worker.sampling.base import HOST_SAMPLER, ShardSampler
from hetero_worker.sampling.device_kernels import SamplingKernels, TorchSamplingKernels

READ_BYTES: Final = 128 * 1024 * 1024
"""Bytes that a bandwidth is measured with: more than a last-level cache."""
_MATRIX_SIZE: Final = 768
TOUCHED_BYTES: Final = 512 * 1024 * 1024
"""Bytes of a KV cache that are touched before they are written. That takes a second in a virtual machine whose host has
yet to back them: all but the first huge page of each tensor are touched while the rank goes on."""


def total_memory_bytes() -> int:
    """Return the memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class TorchOperators(DeviceBackend):
    """Operators of a backend by torch alone."""

    reason: str = ""
    """Why nothing faster serves, for reports; empty if there is none."""

    def attention(self, config: ModelConfig, *, batch_invariant: bool) -> AttentionBackend:  # noqa: ARG002
        """See `DeviceBackend.attention`."""
        return TorchPagedAttention(self.device, batch_invariant=batch_invariant, reason=self.reason)

    def linear(self, dtype: torch.dtype, *, batch_invariant: bool) -> LinearKernel:  # noqa: ARG002
        """See `DeviceBackend.linear`."""
        return RowKernel() if batch_invariant else PlainKernel()

    def fused_ops(self, *, batch_invariant: bool) -> FusedOps:
        """See `DeviceBackend.fused_ops`."""
        return InvariantOps() if batch_invariant else PlainOps(self.reason)

    def sampling_kernels(self) -> SamplingKernels:
        """Return the kernels of a sampler on the device."""
        return TorchSamplingKernels()


class TorchReference(TorchOperators):
    """Host cores that compute by torch's operators.

    `memory_bytes` 0 means the machine's. `read_bytes` is how much `measure` reads at a time: it should exceed the
    last-level cache by far. `reason`: why there is nothing faster.
    """

    kind = ranks_pb2.DEVICE_KIND_CPU
    default_dtype = "float32"
    device = HOST
    has_kernels = False
    dtypes = frozenset({"float32", "bfloat16"})
    collectives = None

    def __init__(
        self,
        reason: str = "",
        *,
        memory_bytes: int = 0,
        read_bytes: int = READ_BYTES,
        cpuinfo: Path = Path("/proc/cpuinfo"),
    ) -> None:
        self.reason = reason
        self._memory_bytes = memory_bytes
        self._read_bytes = read_bytes
        self._cpuinfo = cpuinfo

    @property
    def name(self) -> str:
        """Model name of the CPU."""
        for line in self._cpuinfo.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
        return os.uname().machine

    def cache_dtypes(self, dtype: str) -> frozenset[str]:  # noqa: ARG002 - the same for both
        """Return all: what is cached is widened where it is read."""
        return frozenset({"float32", "bfloat16", "float16"})

    @property
    def memory_bytes(self) -> int:
        """Share of the host's memory that the rank may use."""
        return self._memory_bytes or total_memory_bytes()

    def open(self) -> None:
        """Do nothing: the rank was bound to its cores before torch was imported."""

    def memory_share(self, asked: float) -> float:  # noqa: ARG002
        """Return 1: a host rank may use all the memory that it was given."""
        return 1.0

    def bandwidth(self) -> float:
        """See `DeviceBackend.bandwidth`."""
        return read_bandwidth(HOST, min(self._read_bytes, self.memory_bytes // 8), self.laps)

    def measure(self) -> Measurement:
        """Measure bandwidth and matrix products."""
        flops = matmul_flops(HOST, self.measured_dtypes, size=_MATRIX_SIZE, laps=self.laps)
        return Measurement(self.bandwidth(), flops)

    @property
    def measured_dtypes(self) -> frozenset[str]:
        """Types whose rate of products is measured; others have that of float32."""
        return self.dtypes

    def laps(self, works: Sequence[Work]) -> list[float]:
        """See `DeviceBackend.laps`; work is done when the call returns."""
        marks = [time.perf_counter()]
        for work in works:
            work()
            marks.append(time.perf_counter())
        return [end - begin for begin, end in pairwise(marks)]

    @cached_property
    def memory_pool(self) -> MemoryPool:
        """Pool of the machine's or container's memory."""
        return HostMemoryPool()

    def touch_cache(self, caches: Iterable[torch.Tensor]) -> None:
        """Fault in the first blocks, which are given out first: a page fault takes longer than to compute the page."""
        tensors = list(caches)
        each = TOUCHED_BYTES // max(1, len(tensors))
        for tensor in tensors:
            tensor.view(-1)[: min(each, HUGE_PAGE_BYTES) // tensor.itemsize].zero_()
        if each > HUGE_PAGE_BYTES:
            populate_in_background(tensors, HUGE_PAGE_BYTES, each)

    def staging(self) -> Staging:
        """Return plain copies."""
        return PlainStaging()

    def offload(self, tensors: Iterable[torch.Tensor]) -> OffloadedWeights | None:  # noqa: ARG002
        """Return None: weights stay where they are."""
        return None

    @cached_property
    def steps(self) -> StepMaker:
        """Maker of steps that run operator by operator."""
        return NativeSteps(None, self.reason)

    def sampler(self) -> ShardSampler:
        """Return the host's sampler."""
        return HOST_SAMPLER
