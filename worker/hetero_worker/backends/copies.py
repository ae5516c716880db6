"""Copies of small host arrays to a device, made so that nobody waits.

The array may be changed as soon as the call returns. On CUDA it goes through pinned memory of torch's caching host
allocator, which gives a piece out again only when the copy that reads it is done, so there is nothing to wait for here.
"""

from __future__ import annotations

import torch


def to_device(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy of a host tensor on `device`, ready for the current stream's later work."""
    if device.type == "cuda":
        return host.pin_memory().to(device, non_blocking=True)
    return host.clone()


class PendingCopies:
    """Copies to a device out of host memory that is to be used again: on CUDA they may still be under way."""

    def __init__(self, device: torch.device) -> None:
        self._done: torch.cuda.Event | None = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def began(self) -> None:
        """All copies of now have been asked for."""
        if self._done is not None:
            self._done.record()

    def wait(self) -> None:
        """Until they are done."""
        if self._done is not None:
            self._done.synchronize()
