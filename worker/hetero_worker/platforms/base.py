"""Platform: what a rank's device is, what it can do and how fast it is.

One object a rank, made once by the process's entry and handed on; nothing asks a global. `measure` is what the
placement solver gets to see, so it is a measurement and never a data sheet.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from hetero_api.v1 import ranks_pb2


@dataclass(frozen=True, slots=True)
class Measurement:
    """Speeds of the threads and memory that the rank has."""

    memory_bandwidth: float
    """Bytes read a second, from memory, not from cache."""
    fp32_flops: float
    """FLOP a second of a square fp32 matrix product (2·n³ each)."""


class Platform(ABC):
    """A kind of device."""

    @property
    @abstractmethod
    def kind(self) -> ranks_pb2.DeviceKind.ValueType: ...

    @property
    @abstractmethod
    def name(self) -> str:
        """As the system names it."""

    @property
    @abstractmethod
    def device(self) -> torch.device: ...

    @property
    @abstractmethod
    def memory_bytes(self) -> int:
        """Memory that the rank may use."""

    @property
    @abstractmethod
    def dtypes(self) -> frozenset[str]:
        """Arithmetic types, by the names of LoadModel.dtype."""

    @abstractmethod
    def measure(self) -> Measurement:
        """Takes well under a second."""
