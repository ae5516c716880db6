"""PlayedDevice: a device's streams and its hold on host memory, played on host tensors.

It does what it was asked for as late as it may: an operation is done when somebody waits for it, or for one that must
come after it, and not before. So whoever forgets to wait, or to say what comes first, finds old bytes; and who waits
for more than he must can be told by what was done meanwhile. A copy from or to host memory that is not pinned is an
error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import torch

from hetero_worker.memory.streams import Copies, Moment, Way

COMPUTING: Final = "computing"


@dataclass(eq=False)
class Operation:
    """Implements Moment."""

    work: Callable[[], object]
    after: list[Operation]
    number: int
    """How many were asked for before."""
    is_done: bool = False

    def wait(self) -> None:
        if not self.is_done:
            for earlier in self.after:
                earlier.wait()
            self.work()
            self.is_done = True


@dataclass
class PlayedDevice:
    """Implements DeviceStreams, and HostPins."""

    refusal: str = ""
    """Why memory cannot be pinned; empty: it can."""
    computes_at_once: bool = True
    """Whether what is asked of it is computed there and then, as torch does with the tests' tensors."""
    asked: list[tuple[str, Operation]] = field(default_factory=list)
    """Where, and what, in the order in which it was asked for."""
    buffers: list[torch.Tensor] = field(default_factory=list)
    """Pinned memory that was given out."""
    pins: dict[int, int] = field(default_factory=dict)
    unpinned: list[int] = field(default_factory=list)

    def compute(self, work: Callable[[], object]) -> Operation:
        """Have it computed behind what was to be computed before."""
        operation = self._ask(COMPUTING, work, [])
        if self.computes_at_once:
            operation.wait()
        return operation

    def now(self) -> Moment:
        return self.compute(lambda: None)

    def pinned(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        self.buffers.append(torch.empty(shape, dtype=dtype))
        return self.buffers[-1]

    def copy(self, way: Way, copies: Copies, *, after: Moment) -> Moment:
        assert isinstance(after, Operation)
        for source, target in copies:
            assert source.dtype == target.dtype
            assert source.shape == target.shape
            assert self._is_pinned(target if way is Way.OUT else source), "this copy would hold the thread up"

        def work() -> None:
            for source, target in copies:
                target.copy_(source)

        return self._ask(way.name, work, [after])

    def compute_after(self, moment: Moment) -> None:
        assert isinstance(moment, Operation)
        operation = self._ask(COMPUTING, lambda: None, [moment])
        if self.computes_at_once:
            operation.wait()

    def settle(self) -> None:
        for where, operation in self.asked:
            if where != COMPUTING:
                operation.wait()

    def pin(self, address: int, num_bytes: int) -> str:
        if not self.refusal:
            self.pins[address] = num_bytes
        return self.refusal

    def unpin(self, address: int) -> None:
        assert all(operation.is_done for where, operation in self.asked if where != COMPUTING), "it is being copied"
        self.unpinned.append(address)
        del self.pins[address]

    def on(self, where: Way) -> list[Operation]:
        """Copies of one way."""
        return [operation for name, operation in self.asked if name == where.name]

    def _ask(self, where: str, work: Callable[[], object], after: list[Operation]) -> Operation:
        before = next((operation for name, operation in reversed(self.asked) if name == where), None)
        operation = Operation(work, [*([] if before is None else [before]), *after], len(self.asked))
        self.asked.append((where, operation))
        return operation

    def _is_pinned(self, tensor: torch.Tensor) -> bool:
        begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        places = [(buffer.data_ptr(), buffer.nbytes) for buffer in self.buffers] + list(self.pins.items())
        return any(address <= begin and end <= address + size for address, size in places)
