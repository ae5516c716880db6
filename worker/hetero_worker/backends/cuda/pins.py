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
        """Before memory that was pinned goes. No copy may be under way there."""
        ...


class NoPins:
    """Of a device that is the host: it copies from and to whatever memory there is."""

    def pin(self, address: int, num_bytes: int) -> str:  # noqa: ARG002
        return ""

    def unpin(self, address: int) -> None:
        """Nothing was done."""


class CudaPins:
    """Implements HostPins by cudaHostRegister. A limit on locked memory (ulimit -l) does not bind the driver."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def pin(self, address: int, num_bytes: int) -> str:
        with torch.cuda.device(self._device):
            code = int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, 0))  # type: ignore[no-untyped-call]
            return "" if code == 0 else self._reason(code)

    def unpin(self, address: int) -> None:
        with torch.cuda.device(self._device):
            torch.cuda.check_error(int(torch.cuda.cudart().cudaHostUnregister(address)))  # type: ignore[no-untyped-call]

    def _reason(self, code: int) -> str:
        """Of an error that the runtime keeps until it is asked, as the launch of a kernel does: so it is asked here."""
        with suppress(RuntimeError):
            torch.zeros(1, device=self._device).add_(1)
        try:
            torch.cuda.check_error(code)
        except RuntimeError as error:
            return str(error).partition("\n")[0]
        return f"CUDA error {code}"


def pins_for(device: torch.device) -> HostPins:
    """The device's."""
    return NoPins() if device.type == "cpu" else CudaPins(device)
