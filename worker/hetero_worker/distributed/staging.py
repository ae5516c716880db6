"""Copies between a rank's device and the host, for collectives over the host.

On CUDA they run on streams of their own (platforms/device_streams.py) and use pinned memory only: buffers of torch's
pinned allocator, or *parts* of the memory that ranks share, registered with the driver. A copy off the device sees all
work that the thread gave to the device before. A copy onto it waits until its target is free, not for later work of the
thread; work that follows the copy sees what it brought. No copy waits for the whole device, and no thread waits before
it asks for the result.

On the host itself ("cpu", pseudo-GPU ranks) copies are plain, and done when the call returns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

import torch

from hetero_worker.backends.cuda.pins import HostPins, NoPins, pins_for
from hetero_worker.backends.cuda.streams import PAST, CudaStreams, DeviceStreams, Moment, Way
from hetero_worker.distributed.exchange import Arrived, PendingTensor

Parts = Iterable[torch.Tensor]
"""Pieces of host memory, uint8, that hold a tensor's bytes one after another."""


class HostCopy(PendingTensor, Protocol):
    """Copy off the device that is under way."""

    @property
    def is_here(self) -> bool:
        """True if `wait` would return at once."""
        ...


class Staging(Protocol):
    """Copies of one device to and from the host."""

    @property
    def pins(self) -> HostPins:
        """Pins that prepare memory for `write_parts` and `read_parts`."""
        ...

    def now(self) -> Moment:
        """Return the moment at which all work that the thread has given to the device is done."""
        ...

    def start_to_host(self, tensor: torch.Tensor) -> HostCopy:
        """Start a copy to the host and return it; the caller leaves `tensor` alone until it has waited for the copy."""
        ...

    def host_buffer(self, like: torch.Tensor) -> torch.Tensor:
        """Return uninitialised contiguous host memory for a tensor of this shape and type."""
        ...

    def to_device(self, host: torch.Tensor, out: torch.Tensor, *, after: Moment | None = None) -> None:
        """Copy `host`, which the caller gives up, into `out`; returns before the copy is done.

        The copy starts at `after`, when nobody else uses `out` any more: by default when all work is done that the
        thread has given to the device.
        """
        ...

    def write_parts(self, tensor: torch.Tensor, parts: Parts) -> Moment:
        """Copy a contiguous tensor into pinned memory, and return the moment when it is done; keep it until then."""
        ...

    def read_parts(self, parts: Parts, out: torch.Tensor, *, after: Moment) -> Moment:
        """Copy pinned memory into contiguous `out`, not before `after`. Return the moment when the copy is done."""
        ...


def staging_for(device: torch.device) -> Staging:
    """Return the staging for the device."""
    return PlainStaging() if device.type == "cpu" else CudaStaging(CudaStreams(device), pins_for(device))


class PlainStaging:
    """Staging of a device that is the host."""

    def __init__(self) -> None:
        self.pins: HostPins = NoPins()

    def now(self) -> Moment:
        """Return the past: all work is done."""
        return PAST

    def start_to_host(self, tensor: torch.Tensor) -> HostCopy:
        """Return a copy."""
        return Arrived(tensor.clone())

    def host_buffer(self, like: torch.Tensor) -> torch.Tensor:
        """Return uninitialised memory of this shape and type."""
        return torch.empty_like(like)

    def to_device(self, host: torch.Tensor, out: torch.Tensor, *, after: Moment | None = None) -> None:  # noqa: ARG002
        """Copy `host` into `out`."""
        out.copy_(host)

    def write_parts(self, tensor: torch.Tensor, parts: Parts) -> Moment:
        """Copy the tensor into the parts."""
        for source, part in _beside(tensor, parts):
            part.copy_(source)
        return PAST

    def read_parts(self, parts: Parts, out: torch.Tensor, *, after: Moment) -> Moment:  # noqa: ARG002
        """Copy the parts into `out`."""
        for target, part in _beside(out, parts):
            target.copy_(part)
        return PAST


class CudaStaging:
    """Staging of a CUDA device; see the module."""

    def __init__(self, streams: DeviceStreams, pins: HostPins) -> None:
        self._streams = streams
        self.pins: HostPins = SettledPins(pins, streams)

    def now(self) -> Moment:
        """Return the moment at which all work given to the device is done."""
        return self._streams.now()

    def start_to_host(self, tensor: torch.Tensor) -> HostCopy:
        """Start a copy into a pinned buffer."""
        host = self.host_buffer(tensor)
        done = self._streams.copy(Way.OUT, [(tensor, host)], after=self.now())
        return _ComingOff(tensor, host, done)

    def host_buffer(self, like: torch.Tensor) -> torch.Tensor:
        """Return an uninitialised pinned buffer."""
        return self._streams.pinned(like.shape, like.dtype)

    def to_device(self, host: torch.Tensor, out: torch.Tensor, *, after: Moment | None = None) -> None:
        """Start a copy onto the device; later work of the thread waits for it."""
        self._streams.compute_after(self._streams.copy(Way.IN, [(host, out)], after=after or self.now()))

    def write_parts(self, tensor: torch.Tensor, parts: Parts) -> Moment:
        """Start copies into the parts."""
        return self._streams.copy(Way.OUT, list(_beside(tensor, parts)), after=self.now())

    def read_parts(self, parts: Parts, out: torch.Tensor, *, after: Moment) -> Moment:
        """Start copies from the parts; later work of the thread waits for them."""
        done = self._streams.copy(Way.IN, [(part, target) for target, part in _beside(out, parts)], after=after)
        self._streams.compute_after(done)
        return done


class SettledPins:
    """HostPins on top of others, which unpin memory only when no copy uses it any more."""

    def __init__(self, pins: HostPins, streams: DeviceStreams) -> None:
        self._pins = pins
        self._streams = streams

    def pin(self, address: int, num_bytes: int) -> str:
        """Pin memory; return why it cannot be pinned, empty if it can."""
        return self._pins.pin(address, num_bytes)

    def unpin(self, address: int) -> None:
        """Wait for all copies, and unpin memory."""
        self._streams.settle()
        self._pins.unpin(address)


class _ComingOff:
    """HostCopy off a device. It keeps the source alive until the copy is done."""

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
    """Yield pieces of the tensor's bytes with the parts that they fit. Raises ValueError if the sizes differ."""
    flat, begin = tensor.view(-1).view(torch.uint8), 0
    for part in parts:
        end = begin + len(part)
        yield flat[begin:end], part
        begin = end
    if begin != len(flat):
        raise ValueError(f"parts of {begin} bytes do not hold a tensor of {len(flat)}")
