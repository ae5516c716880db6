"""Breaks: a pass that is recorded as segments, and calls between them that are made anew each time.

Code that is recorded is ordinary code. Where it comes to something that cannot be (a round with other ranks over the
host, a kernel whose shapes depend on lengths) it says so by `call`: the segment ends there, the call is made, and the
next segment begins. A replay goes through segments and calls in the same order. So a call must read what differs from
step to step anew, and leave what it makes in a tensor that lasts.

Tensors that calls use are kept for as long as the graph is; segments' other tensors are the backend's to reuse.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from hetero_worker.runners.graphs.backend import GraphBackend

T = TypeVar("T")


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
