"""GraphBackend: what records the work that a thread gives to a device, to give it again at once.

A forward pass is recorded in segments: `begin`, the work, `end`, and between two segments whatever cannot be recorded.
The segment has been done once when `end` returns, so that a pass that is recorded is a pass like any other: what comes
between segments finds real values, and other ranks notice nothing. A segment works on the very tensors that it was
recorded with, at their addresses.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

Replay = Callable[[], object]
"""Gives a segment's work to the device again, on the present stream."""


class GraphBackend(Protocol):
    """Recorder of graphs on one device. Called from the thread that computes."""

    @property
    def records_device_sums(self) -> bool:
        """Whether sums among GPU ranks may lie within a segment."""
        ...

    def reserve(self, num_bytes: int) -> None:
        """Before anything is recorded: what graphs compute with lies in one place of so many bytes, in whatever order
        they are recorded. Without, or where it is too small, it lies in pieces that come as they are needed."""
        ...

    def aside(self) -> AbstractContextManager[None]:
        """Where a pass is made that prepares a recording, or is recorded; what comes after it waits for it."""
        ...

    def recording(self) -> AbstractContextManager[None]:
        """As `aside`, around all segments of a pass. A segment that an exception left open is given up."""
        ...

    def begin(self) -> None:
        """Begin a segment. Nothing may wait for the device from here to `end`."""
        ...

    def end(self) -> Replay | None:
        """End the segment, and run it once; return None where nothing was in it."""
        ...

    def free_bytes(self) -> int:
        """Memory of the device that nobody has taken."""
        ...
