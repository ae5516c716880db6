"""Platform: what a rank's device is, what it can do and how fast it is.

One object a rank, made once by the process's entry and handed on; nothing asks a global, and a rank on host cores
never comes near a GPU's driver: that code is imported by the ranks that compute there. `measure` is what the placement
solver gets to see, so it is a measurement and never a data sheet.

The platform says by name which attention suits the device (`attention`), and has the native kernels if there are any
(`native`); the kernels themselves live in layers above.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import torch

from hetero_api.v1 import ranks_pb2
from hetero_worker.errors import ProtocolError
from hetero_worker.native.op_library import NOT_FOR_DEVICES, OpLibrary

HOST: Final = torch.device("cpu")
"""Where everything lies that is not on a device of its own."""


class AttentionKind(StrEnum):
    """Families of attention backends; attention.selection makes them."""

    HOST = "host"
    """Indices on the host, kernels that suit its cores."""
    DEVICE = "device"
    """Indices on the device, kernels of torch that every device has."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """Speeds of the threads and memory, or the device, that the rank has."""

    memory_bandwidth: float
    """Bytes read a second, from memory, not from cache."""
    matmul_flops: Mapping[str, float]
    """FLOP a second of a square matrix product (2·n³ each), by arithmetic type."""
    to_device_bandwidth: float = 0.0
    """Bytes a second from pinned host memory to the device's; 0 where they are the same."""
    from_device_bandwidth: float = 0.0
    """Bytes a second back."""
    device_latency_s: float = 0.0
    """Seconds of the smallest copy from the device to the host and back."""


class Platform(ABC):
    """A kind of device, and one of that kind.

    Made without a look at the device; `open` takes it. What it is called, has and can do is known from then on.
    """

    @property
    @abstractmethod
    def kind(self) -> ranks_pb2.DeviceKind.ValueType:
        """Kind of device, as the contract numbers it."""
        ...

    @property
    def is_host(self) -> bool:
        """Whether its tensors are the host's."""
        return self.kind == ranks_pb2.DEVICE_KIND_CPU

    @property
    @abstractmethod
    def name(self) -> str:
        """As the system names it."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Device of the rank's tensors."""
        ...

    @property
    @abstractmethod
    def memory_bytes(self) -> int:
        """Memory that the rank may use: the host's share of it, or the whole device's."""

    @property
    @abstractmethod
    def dtypes(self) -> frozenset[str]:
        """Arithmetic types, by the names of LoadModel.dtype."""

    @property
    @abstractmethod
    def device_backend(self) -> str | None:
        """torch.distributed's backend for collectives among devices of this kind; None: they lie on the host."""

    @property
    @abstractmethod
    def attention(self) -> AttentionKind:
        """Which attention suits the device."""

    @property
    def native(self) -> OpLibrary:
        """The native kernels, and the threads that they run on; the same object every time."""
        return NOT_FOR_DEVICES

    @property
    @abstractmethod
    def pins_memory(self) -> bool:
        """Whether host memory that is copied to and from the device should be pinned."""

    @abstractmethod
    def open(self) -> None:
        """Take the device for this process. Raises DeviceError when there is no such device. Idempotent."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until the device has done all that this thread asked of it."""

    @abstractmethod
    def bandwidth(self) -> float:
        """Bytes of memory read a second, now; some hundredths of a second."""

    @abstractmethod
    def measure(self) -> Measurement:
        """Measure the device; takes well under a second."""


_NAMES = {ranks_pb2.DEVICE_KIND_CUDA: "a GPU", ranks_pb2.DEVICE_KIND_CPU: "host cores"}


def kind_of_rank(rank: int, *, num_gpu_ranks: int) -> ranks_pb2.DeviceKind.ValueType:
    """Return the kind of device that a rank computes on."""
    return ranks_pb2.DEVICE_KIND_CUDA if rank < num_gpu_ranks else ranks_pb2.DEVICE_KIND_CPU


@dataclass(frozen=True, slots=True)
class HeterogeneousPlatform:
    """Platforms of a mixed group, as one of its processes sees them: it can be the ranks of its own kind.

    Ranks [0, num_gpu_ranks) of a group are GPU ranks, all others compute on host cores: the gateway numbers them so. A
    process is started for one device, and gets its number later, in each epoch again. By its number the rank gets the
    platform of that kind; a process that has no device of that kind is refused.
    """

    own: Platform
    pool: str
    """The process's; errors name it."""

    def of_rank(self, rank: int, *, num_gpu_ranks: int) -> Platform:
        """Return the platform of the rank. Raises ProtocolError when this process has no device of its kind."""
        kind = kind_of_rank(rank, num_gpu_ranks=num_gpu_ranks)
        if self.own.kind != kind:
            raise ProtocolError(
                f"pool {self.pool}: of a group with {num_gpu_ranks} GPU ranks, rank {rank} computes on {_NAMES[kind]}, "
                f"but this process was started for {_NAMES[self.own.kind]}; the pool's type and its ranks' devices "
                "must agree"
            )
        return self.own
