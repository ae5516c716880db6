"""Copies between a rank's device and the host, which collectives of the host go through.

On CUDA a copy has a stream of its own a direction and pinned memory (torch's caching allocator of it keeps what was
used before), so that it overlaps with what the device computes. What a copy reads is what the calling thread has given
to the device before; what the thread gives to the device after a copy back sees what that brought. On the host
itself ("cpu", pseudo-GPU ranks) copies are plain, and done when the call returns.
"""

from __future__ import annotations

from typing import Protocol

import torch

from hetero_worker.distributed.exchange import Arrived, PendingTensor


class Staging(Protocol):
    """One device's way to and from the host."""

    def start_to_host(self, tensor: torch.Tensor) -> PendingTensor:
        """A host copy, under way; `tensor` is left alone until it has been waited for. One device-to-host copy."""
        ...

    def host_buffer(self, like: torch.Tensor) -> torch.Tensor:
        """Contiguous host memory for a tensor of this shape and type, of no content."""
        ...

    def to_device(self, host: torch.Tensor, out: torch.Tensor) -> None:
        """`out` becomes `host`, which the caller gives up. One host-to-device copy; returns before it is done."""
        ...


def staging_for(device: torch.device) -> Staging:
    """The one that fits the device."""
    return PlainStaging() if device.type == "cpu" else CudaStaging(device)


class PlainStaging:
    """Of a device that is the host."""

    def start_to_host(self, tensor: torch.Tensor) -> PendingTensor:
        return Arrived(tensor.clone())

    def host_buffer(self, like: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(like)

    def to_device(self, host: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(host)


class CudaStaging:
    """Of a CUDA device; see the module."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._outward = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._inward = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def start_to_host(self, tensor: torch.Tensor) -> PendingTensor:
        host = self.host_buffer(tensor)
        self._outward.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._outward):
            host.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._outward)
        return _CudaCopy(host, self._outward.record_event())

    def host_buffer(self, like: torch.Tensor) -> torch.Tensor:
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)

    def to_device(self, host: torch.Tensor, out: torch.Tensor) -> None:
        computing = torch.cuda.current_stream(self._device)
        self._inward.wait_stream(computing)  # `out` may still be read by what was given to the device before
        with torch.cuda.stream(self._inward):
            out.copy_(host, non_blocking=True)
        out.record_stream(self._inward)
        computing.wait_stream(self._inward)


class _CudaCopy:
    """A PendingTensor that comes off a device."""

    def __init__(self, host: torch.Tensor, done: torch.cuda.Event) -> None:
        self._host = host
        self._done = done

    def wait(self) -> torch.Tensor:
        self._done.synchronize()
        return self._host
