"""NativeBackend: records a pass as pieces of native operations, for `graphs.breaks`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass

from hetero_worker.native.op_queue import Arena, OpQueue, RecordedOps
from hetero_worker.runners.recorded.guard import RecordingGuard


@dataclass(frozen=True, slots=True)
class NativeSegment:
    """Piece of a recorded pass."""

    op_queue: OpQueue
    recorded: RecordedOps

    def __call__(self) -> None:
        """Replay the operations."""
        self.op_queue.replay(self.recorded)


class NativeBackend:
    """Implements graphs.breaks.GraphBackend for native operations."""

    records_device_sums = False

    def __init__(self, op_queue: OpQueue) -> None:
        self._op_queue = op_queue
        self._segment = ExitStack()
        self._recorded: RecordedOps | None = None
        self._guard = RecordingGuard()
        self.num_ops = 0
        """Operations of the last pass."""
        self.num_bytes = 0
        """Bytes that the last pass computes in."""

    @property
    def not_recorded(self) -> list[str]:
        """Names of torch's operators that wrote or allocated within the last pass's segments."""
        return self._guard.seen

    def reserve(self, num_bytes: int) -> None:
        """Do nothing: memory is allocated as it is needed."""

    def aside(self) -> AbstractContextManager[None]:
        """Return a context that does nothing: the host has no streams."""
        return nullcontext()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record a pass within this context; its segments share an arena."""
        arena = Arena()
        self.num_ops = 0
        self._guard = RecordingGuard()
        with self._op_queue.computing_in(arena), self._segment:
            yield
        self.num_bytes = arena.num_bytes

    def begin(self) -> None:
        """Begin a segment."""
        self._recorded = self._segment.enter_context(self._op_queue.recording())
        self._segment.enter_context(self._guard)

    def end(self) -> Callable[[], object] | None:
        """End the segment and return its replay, or None if it has no operations."""
        recorded, self._recorded = self._recorded, None
        self._segment.close()
        if recorded is None or not recorded.ops:
            return None
        self.num_ops += len(recorded.ops)
        return NativeSegment(self._op_queue, recorded)

    def free_bytes(self) -> int:
        """Return 0: recordings take little of the host's memory, and nobody asks."""
        return 0
