"""Copies between a rank's device and the host, which collectives of the host go through.

On CUDA they go on streams of their own (platforms/device_streams.py), through pinned memory only: buffers of torch's
pinned allocator, or *parts* of memory that ranks share and that has been registered with the driver. A copy off the
device reads what the thread has given to the device before. A copy onto it waits for the moment at which its target
was given up, not for all that the thread has asked since; what the thread gives to the device afterwards sees what it
brought. No copy waits for the device as a whole, nor makes a thread wait before somebody asks for what it brings.

On the host itself ("cpu", pseudo-GPU ranks) copies are plain, and done when the call returns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

import torch

from hetero_worker.distributed.exchange import Arrived, PendingTensor
from hetero_worker.platforms.device_streams import PAST, CudaStreams, DeviceStreams, Moment, Way
from hetero_worker.platforms.host_pins import HostPins, NoPins, pins_for

Parts = Iterable[torch.Tensor]
"""Pieces of host memory, uint8 each, that a tensor's bytes lie in, one piece after another."""


class HostCopy(PendingTensor, Protocol):
    """A copy off the device that is on its way."""

    @property
    def is_here(self) -> bool:
        """Whether `wait` would not wait."""
        ...


class Staging(Protocol):
    """One device's way to and from the host."""

    @property
    def pins(self) -> HostPins:
        """Makes memory fit for `write_parts` and `read_parts`."""
        ...

    def now(self) -> Moment:
        """When all is done that the thread has asked of the device."""
        ...

    def start_to_host(self, tensor: torch.Tensor) -> HostCopy:
        """A host copy, under way; `tensor` is left alone until it has been waited for. One device-to-host copy."""
        ...

    def host_buffer(self, like: torch.Tensor) -> torch.Tensor:
        """Contiguous host memory for a tensor of this shape and type, of no content."""
        ...

    def to_device(self, host: torch.Tensor, out: torch.Tensor, *, after: Moment | None = None) -> None:
        """`out` becomes `host`, which the caller gives up. One host-to-device copy; returns before it is done.

        It is not made before `after`, from which on `out` is nobody else's: by default when all is done that the thread
        has asked of the device.
        """
        ...

    def write_parts(self, tensor: torch.Tensor, parts: Parts) -> Moment:
        """Copy a contiguous tensor off the device into pinned memory. When that is done; keep it until then."""
        ...

    def read_parts(self, parts: Parts, out: torch.Tensor, *, after: Moment) -> Moment:
        """Copy pinned memory into `out`, contiguous, not before `after`. When that is done, and the memory free."""
        ...


def staging_for(device: torch.device) -> Staging:
    """The one that fits the device."""
    return PlainStaging() if device.type == "cpu" else CudaStaging(CudaStreams(device), pins_for(device))


class PlainStaging:
    """Of a device that is the host."""

    def __init__(self) -> None:
        self.pins: HostPins = NoPins()

    def now(self) -> Moment:
        return PAST

    def start_to_host(self, tensor: torch.Tensor) -> HostCopy:
        return Arrived(tensor.clone())

    def host_buffer(self, like: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(like)

    def to_device(self, host: torch.Tensor, out: torch.Tensor, *, after: Moment | None = None) -> None:  # noqa: ARG002
        out.copy_(host)

    def write_parts(self, tensor: torch.Tensor, parts: Parts) -> Moment:
        for source, part in _beside(tensor, parts):
            part.copy_(source)
        return PAST

    def read_parts(self, parts: Parts, out: torch.Tensor, *, after: Moment) -> Moment:  # noqa: ARG002
        for target, part in _beside(out, parts):
            target.copy_(part)
        return PAST


class CudaStaging:
    """Of a CUDA device; see the module."""

    def __init__(self, streams: DeviceStreams, pins: HostPins) -> None:
        self._streams = streams
        self.pins: HostPins = SettledPins(pins, streams)

    def now(self) -> Moment:
        return self._streams.now()

    def start_to_host(self, tensor: torch.Tensor) -> HostCopy:
        host = self.host_buffer(tensor)
        done = self._streams.copy(Way.OUT, [(tensor, host)], after=self.now())
        return _ComingOff(tensor, host, done)

    def host_buffer(self, like: torch.Tensor) -> torch.Tensor:
        return self._streams.pinned(like.shape, like.dtype)

    def to_device(self, host: torch.Tensor, out: torch.Tensor, *, after: Moment | None = None) -> None:
        self._streams.compute_after(self._streams.copy(Way.IN, [(host, out)], after=after or self.now()))

    def write_parts(self, tensor: torch.Tensor, parts: Parts) -> Moment:
        return self._streams.copy(Way.OUT, list(_beside(tensor, parts)), after=self.now())

    def read_parts(self, parts: Parts, out: torch.Tensor, *, after: Moment) -> Moment:
        done = self._streams.copy(Way.IN, [(part, target) for target, part in _beside(out, parts)], after=after)
        self._streams.compute_after(done)
        return done


class SettledPins:
    """Implements HostPins on top of others: what is unpinned is in no copy any more."""

    def __init__(self, pins: HostPins, streams: DeviceStreams) -> None:
        self._pins = pins
        self._streams = streams

    def pin(self, address: int, num_bytes: int) -> str:
        return self._pins.pin(address, num_bytes)

    def unpin(self, address: int) -> None:
        self._streams.settle()
        self._pins.unpin(address)


class _ComingOff:
    """A HostCopy off a device. It holds on to what is copied, so that no other gets its memory."""

    def __init__(self, tensor: torch.Tensor, host: torch.Tensor, done: Moment) -> None:
        self._tensor: torch.Tensor | None = tensor
        self._host = host
        self._done = done

    @property
    def is_here(self) -> bool:
        return self._tensor is None or self._done.is_done

    def wait(self) -> torch.Tensor:
        if self._tensor is not None:
            self._done.wait()
            self._tensor = None
        return self._host


def _beside(tensor: torch.Tensor, parts: Parts) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The tensor's bytes, cut as the parts are, beside these. Raises ValueError when they are not as many."""
    flat, begin = tensor.view(-1).view(torch.uint8), 0
    for part in parts:
        end = begin + len(part)
        yield flat[begin:end], part
        begin = end
    if begin != len(flat):
        raise ValueError(f"parts of {begin} bytes do not hold a tensor of {len(flat)}")
