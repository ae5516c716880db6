"""The streams on which a rank's copies between its device and the host go, beside the one that it computes on.

One stream a direction: copies off the device, copies onto it and the computing overlap. What must come before what is
said by *moments* (events), never by waiting for a stream, let alone for the device; and host memory is pinned, for a
copy from or to any other holds the calling thread up until it is done. Whoever starts a copy keeps its tensors until
then.

A DeviceStreams is made for one device; one thread calls. Tests have one that plays the device's part.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Final, Protocol

import torch

Copies = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Sources and targets, of one type and shape each, contiguous."""


class Way(Enum):
    """Directions, each of which has a stream."""

    OUT = "off the device"
    IN = "onto the device"


class Moment(Protocol):
    """When something that was asked of the device is done."""

    @property
    def is_done(self) -> bool:
        """True if it is over; never waits."""
        ...

    def wait(self) -> None:
        """Block the calling thread until then."""
        ...


class Past:
    """A moment that is over: of a device that is the host."""

    is_done = True

    def wait(self) -> None:
        """Nothing is under way."""


PAST: Final = Past()


class DeviceStreams(Protocol):
    """See the module."""

    def now(self) -> Moment:
        """When all is done that the calling thread has asked of the device, copies of this object apart."""
        ...

    def pinned(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Contiguous pinned host memory of no content."""
        ...

    def copy(self, way: Way, copies: Copies, *, after: Moment) -> Moment:
        """Have these made, not before `after`, and behind what was asked for this way before. When they are done."""
        ...

    def compute_after(self, moment: Moment) -> None:
        """Have the device do what the calling thread asks of it from here on only after the moment."""
        ...

    def settle(self) -> None:
        """Wait until no copy is under way."""
        ...


class _CudaMoment:
    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    @property
    def is_done(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        self.event.synchronize()


class CudaStreams:
    """Implements DeviceStreams for a CUDA device; what a thread asks of it is what is on torch's current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams = {way: torch.cuda.Stream(device) for way in Way}  # type: ignore[no-untyped-call]

    def now(self) -> Moment:
        """Record an event on the current stream."""
        return _CudaMoment(torch.cuda.current_stream(self._device).record_event())

    def pinned(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised pinned tensor."""
        # torch keeps what was pinned once, and gives it out again only when the copies that use it are done.
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def copy(self, way: Way, copies: Copies, *, after: Moment) -> Moment:
        """Copy on the way's stream after `after`; return the moment when it is done."""
        stream = self._streams[way]
        stream.wait_event(_event(after))
        with torch.cuda.stream(stream):
            for source, target in copies:
                target.copy_(source, non_blocking=True)
        return _CudaMoment(stream.record_event())

    def compute_after(self, moment: Moment) -> None:
        """Let later work of the current stream wait for the moment."""
        torch.cuda.current_stream(self._device).wait_event(_event(moment))

    def settle(self) -> None:
        """Wait for the copies of both ways."""
        for stream in self._streams.values():
            stream.synchronize()


def _event(moment: Moment) -> torch.cuda.Event:
    if not isinstance(moment, _CudaMoment):
        raise TypeError(f"a CUDA stream cannot wait for a {type(moment).__name__}")
    return moment.event
