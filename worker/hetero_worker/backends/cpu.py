"""Host cores as a platform."""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path
from typing import Final

import torch

from hetero_api.v1 import ranks_pb2
from hetero_worker.backends.base import HOST, AttentionKind, Measurement, Platform
from hetero_worker.backends.speeds import matmul_flops, read_bandwidth
from hetero_worker.native.op_library import OpLibrary, open_op_library

_READ_BYTES: Final = 128 * 1024 * 1024
_MATRIX_SIZE: Final = 768


def total_memory_bytes() -> int:
    """Memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class CpuPlatform(Platform):
    """The cores that this process is bound to, with the threads that torch was given.

    `memory_bytes` 0 means the machine's. `read_bytes` is how much `measure` reads at a time: it should exceed
    the last-level cache by far.
    """

    def __init__(
        self, *, memory_bytes: int = 0, read_bytes: int = _READ_BYTES, cpuinfo: Path = Path("/proc/cpuinfo")
    ) -> None:
        self._memory_bytes = memory_bytes
        self._read_bytes = read_bytes
        self._cpuinfo = cpuinfo

    @property
    def kind(self) -> ranks_pb2.DeviceKind.ValueType:
        """Host cores."""
        return ranks_pb2.DEVICE_KIND_CPU

    @property
    def name(self) -> str:
        """Model name of the CPU."""
        for line in self._cpuinfo.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
        return os.uname().machine

    @property
    def device(self) -> torch.device:
        """Host memory."""
        return HOST

    @property
    def memory_bytes(self) -> int:
        """Share of the host's memory that the rank may use."""
        return self._memory_bytes or total_memory_bytes()

    @property
    def dtypes(self) -> frozenset[str]:
        """Arithmetic types of host cores."""
        return frozenset({"float32", "bfloat16"})

    @property
    def device_backend(self) -> None:
        """None: host ranks exchange through the host."""
        return None

    @property
    def attention(self) -> AttentionKind:
        """Attention of host cores."""
        return AttentionKind.HOST

    @cached_property
    def native(self) -> OpLibrary:
        """Its threads are started when it is first asked for: by then the process is bound to its cores."""
        return open_op_library(torch.get_num_threads())

    @property
    def pins_memory(self) -> bool:
        """False: nothing is copied to a device."""
        return False

    def open(self) -> None:
        """Do nothing: the rank was bound to its cores before torch was imported."""

    def synchronize(self) -> None:
        """Nothing is ever under way."""

    def bandwidth(self) -> float:
        """Measure the memory bandwidth now, in bytes a second."""
        return read_bandwidth(self, min(self._read_bytes, self.memory_bytes // 8))

    def measure(self) -> Measurement:
        """Measure bandwidth and matrix products."""
        return Measurement(
            memory_bandwidth=self.bandwidth(),
            matmul_flops=matmul_flops(self, self.dtypes, size=_MATRIX_SIZE),
        )


_GRAIN: Final = 32768
"""Elements that torch gives a thread at least: at::internal::GRAIN_SIZE."""


def start_compute_threads(num_threads: int) -> None:
    """Use that many threads, the calling one included, from now on. Costs some hundred microseconds.

    OpenMP starts its threads at the first piece of work that is large enough, and they keep the affinity that the
    caller has at that moment. A rank leaves its cores for a while when it forms groups (`numa.threads_started_on`),
    and on a rank that has all its measurements already that may be the first piece of work. So they are started here.
    """
    torch.set_num_threads(num_threads)
    torch.empty(2 * _GRAIN * num_threads, dtype=torch.uint8).fill_(0)
