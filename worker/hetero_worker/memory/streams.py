"""Host memory, and copies between it and a device beside the work that the rank computes.

Copies off a device, copies onto it and the computing overlap: each has a stream of its own. Their order is given by
*moments* (events), never by waiting for a stream, let alone for the device. Host memory is pinned, for a copy from or
to any other blocks the calling thread until it is done. The caller of a copy keeps its tensors until then.

The room below all rooms that compute: here stand the terms in which they speak of a device without knowing its kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Final, Protocol

import torch

HOST: Final = torch.device("cpu")
"""Device of all tensors in host memory."""
_SHAPES: Final = "meta"
"""Type of torch's device whose tensors have a shape and no memory."""

Copies = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Sources and targets, of one type and shape each, contiguous."""


def to_device(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy of a small host tensor on `device`, ready for the current stream's later work; do not wait.

    The caller may change `host` at once. On a device the copy goes through pinned memory of torch's caching allocator,
    which reuses a piece only when the copy that reads it is done.
    """
    if device == HOST:
        return host.clone()
    if device.type == _SHAPES:
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)


class Way(Enum):
    """Directions of copies, each of which has a stream."""

    OUT = "off the device"
    IN = "onto the device"


class Moment(Protocol):
    """End of some work of a device."""

    @property
    def is_done(self) -> bool:
        """True if it is over; never waits."""
        ...

    def wait(self) -> None:
        """Block the calling thread until then."""
        ...


class Past:
    """Moment that is over."""

    is_done = True

    def wait(self) -> None:
        """Return at once."""


PAST: Final = Past()


class HostPins(Protocol):
    """A device's hold on host memory that torch did not allocate, such as memory that ranks share."""

    def pin(self, address: int, num_bytes: int) -> str:
        """Let the device copy from and to this memory by itself; return why it cannot, or an empty string."""
        ...

    def unpin(self, address: int) -> None:
        """Undo `pin`, before the memory goes. No copy may be under way there."""
        ...


class DeviceStreams(HostPins, Protocol):
    """Streams and pinned memory of one device; one thread calls."""

    def now(self) -> Moment:
        """Return the end of all work that the calling thread has given to the device, except this object's copies."""
        ...

    def pinned(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Return uninitialised, contiguous, pinned host memory."""
        ...

    def copy(self, way: Way, copies: Copies, *, after: Moment) -> Moment:
        """Start copies, not before `after`, and behind earlier ones of this way. Return the moment when they end."""
        ...

    def compute_after(self, moment: Moment) -> None:
        """Let later work of the calling thread on the device wait for the moment."""
        ...

    def settle(self) -> None:
        """Wait until no copy is under way."""
        ...
