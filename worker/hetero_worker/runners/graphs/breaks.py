"""Breaks: a pass that is recorded as segments, and calls between them that are made again each time.

Code that is recorded is ordinary code. Where it comes to something that cannot be (a round with other ranks over the
host, a kernel whose shapes depend on lengths) it says so by `call`: the segment ends there, the call is made, and the
next segment begins. A replay goes through segments and calls in the same order. So a call must read
again in every step what differs, and leave what it makes in a tensor that lasts.

Tensors that calls use are kept for as long as the graph is; segments' other tensors are the backend's to reuse.

A GraphBackend records a segment: `begin`, the work, `end`. The segment has run once when `end` returns, so a pass that
is recorded is a pass like any other: calls find real values, and other ranks notice nothing. A segment works on the
very tensors that it was recorded with, at their addresses.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch

T = TypeVar("T")
Replay = Callable[[], object]
"""Gives a segment's work to the device again, on the current stream."""


class GraphBackend(Protocol):
    """Recorder of graphs on one device. Called from the thread that computes."""

    @property
    def records_device_sums(self) -> bool:
        """True if sums among GPU ranks may lie within a segment."""
        ...

    def reserve(self, num_bytes: int) -> None:
        """Reserve one piece of memory for all graphs, before anything is recorded.

        Without it, or where it is too small, graphs take memory in pieces as they need it.
        """
        ...

    def aside(self) -> AbstractContextManager[None]:
        """Return the context of a pass that prepares a recording or is recorded; later work waits for that pass."""
        ...

    def recording(self) -> AbstractContextManager[None]:
        """Return `aside` for all segments of a pass. A segment that an exception left open is given up."""
        ...

    def begin(self) -> None:
        """Begin a segment. Nothing may wait for the device from here to `end`."""
        ...

    def end(self) -> Replay | None:
        """End the segment, run it once and return its replay; return None if it was empty."""
        ...

    def free_bytes(self) -> int:
        """Return the bytes of the device's memory that are free."""
        ...


@dataclass(frozen=True, slots=True)
class RecordedPass(Generic[T]):
    """Segments and calls, and what the pass returned: the same tensors after every replay, with new content."""

    parts: tuple[Callable[[], object], ...]
    num_segments: int
    outcome: T

    def replay(self) -> T:
        """Run the pass again; return its result."""
        for part in self.parts:
            part()
        return self.outcome


class Breaks:
    """See the module. One pass at a time."""

    def __init__(self, backend: GraphBackend) -> None:
        self._backend = backend
        self._parts: list[Callable[[], object]] | None = None
        """Parts of the pass that is being recorded."""
        self._num_segments = 0

    def call(self, function: Callable[[], T]) -> T:
        """Call `function` and return its result. Where a pass is recorded, every replay calls it again."""
        if self._parts is None:
            return function()
        self._end_segment(self._parts)
        result = function()
        self._parts.append(function)
        self._backend.begin()
        return result

    def record(self, make_pass: Callable[[], T]) -> RecordedPass[T]:
        """Make the pass, and remember it. What the pass raises ends the recording."""
        parts: list[Callable[[], object]] = []
        self._parts, self._num_segments = parts, 0
        try:
            with self._backend.recording():
                self._backend.begin()
                outcome = make_pass()
                self._end_segment(parts)
        finally:
            self._parts = None
        return RecordedPass(tuple(parts), self._num_segments, outcome)

    def _end_segment(self, parts: list[Callable[[], object]]) -> None:
        segment = self._backend.end()
        if segment is not None:
            parts.append(segment)
            self._num_segments += 1


class CurrentStep:
    """Step with `num_rows` rows, padded to `size`: tensors' first dimension is the padded rows'."""

    def __init__(self) -> None:
        self.num_rows = 0
        self.size = 0

    def begin(self, num_rows: int, *, size: int) -> None:
        """Note the step's rows."""
        self.num_rows, self.size = num_rows, size

    def own_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the step's own rows of the tensor, as a view. Raises ValueError for another number of rows."""
        if len(tensor) != self.size:
            raise ValueError(f"a tensor of {len(tensor)} rows is none of a step that is padded to {self.size}")
        return tensor[: self.num_rows]

    def clear_padding(self, tensor: torch.Tensor) -> None:
        """Zero the padding's rows, which nobody fills: what is not finite would reach other rows over the cache."""
        if self.num_rows < self.size:
            tensor[self.num_rows :].zero_()
