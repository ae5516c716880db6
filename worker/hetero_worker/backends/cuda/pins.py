"""Pins host memory that somebody else allocated, so that a device copies straight from and to it.

Memory that ranks share comes from the kernel, not from torch's allocator of pinned memory; it is registered with the
driver where it lies, and must be taken out again before it is unmapped.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Protocol

import torch


class HostPins(Protocol):
    """A device's hold on host memory."""

    def pin(self, address: int, num_bytes: int) -> str:
        """Let the device copy from and to this memory by itself. Why it cannot; empty if it can."""
        ...

    def unpin(self, address: int) -> None:
        """Undo `pin`, before the memory goes. No copy may be under way there."""
        ...


class NoPins:
    """Pins of a device that is the host: it copies from and to any memory."""

    def pin(self, address: int, num_bytes: int) -> str:  # noqa: ARG002
        """Return "": nothing needs to be pinned."""
        return ""

    def unpin(self, address: int) -> None:
        """Nothing was done."""


class CudaPins:
    """Implements HostPins by cudaHostRegister. A limit on locked memory (ulimit -l) does not bind the driver."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def pin(self, address: int, num_bytes: int) -> str:
        """Register the memory with the driver; return the reason if it refuses, else ""."""
        with torch.cuda.device(self._device):
            code = int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, 0))  # type: ignore[no-untyped-call]
            return "" if code == 0 else self._reason(code)

    def unpin(self, address: int) -> None:
        """Undo `pin`. Raises RuntimeError for memory that is not pinned."""
        with torch.cuda.device(self._device):
            torch.cuda.check_error(int(torch.cuda.cudart().cudaHostUnregister(address)))  # type: ignore[no-untyped-call]

    def _reason(self, code: int) -> str:
        """Return the error's text, and clear it: the runtime keeps it until the next launch of a kernel asks."""
        with suppress(RuntimeError):
            torch.zeros(1, device=self._device).add_(1)
        try:
            torch.cuda.check_error(code)
        except RuntimeError as error:
            return str(error).partition("\n")[0]
        return f"CUDA error {code}"


def pins_for(device: torch.device) -> HostPins:
    """Return the pins of the device."""
    return NoPins() if device.type == "cpu" else CudaPins(device)
