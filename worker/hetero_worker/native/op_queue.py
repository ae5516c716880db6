"""OpQueue: runs native operations on a team of threads, and records steps of them for replay.

An operation runs when it is submitted. While a step is recorded, the queue also keeps the operation and everything
whose address it holds. A replay then runs the whole step by one call, without Python. Steps take their memory from the
queue (`empty`, `scratch`). Usually that is ordinary memory. A recorded step computes in an arena, which nobody else
uses between two replays; within one, the arena reuses the memory of tensors that are gone.

Operations of anybody else are not recorded: the caller has to make sure that there are none (recording_guard.py).
"""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import c_char
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch

from hetero_worker.native.compute_library import ffi
from hetero_worker.native.loading import address_of
from hetero_worker.native.team import NativeTeam

ALIGNMENT: Final = 64
Finish = Callable[[int], None]
"""Completes a CALL that returned another status than 0, which it is given; raises if the CALL failed."""


@dataclass(slots=True)
class RecordedOps:
    """Operations in the order of their submission, with all that they point at."""

    ops: list[Any] = field(default_factory=list)
    kept: list[Any] = field(default_factory=list)
    finishes: dict[int, Finish] = field(default_factory=dict)
    """Completions of CALLs, by the operation's index."""
    _table: Any = None

    @property
    def table(self) -> Any:
        """Array of the operations' addresses."""
        if self._table is None or len(self._table) != len(self.ops):
            self._table = ffi.new("uintptr_t[]", list(map(address_of, self.ops)))
        return self._table

    def followed_by(self, others: RecordedOps) -> RecordedOps:
        """Return one recording of these operations and then the others."""
        finishes = {len(self.ops) + number: finish for number, finish in others.finishes.items()}
        return RecordedOps([*self.ops, *others.ops], [*self.kept, *others.kept], self.finishes | finishes)


class Arena:
    """Memory that recorded operations compute in, as pieces by size; those of tensors that are gone are used again.

    The memory lasts as long as this object, even if no tensor is left.
    """

    def __init__(self) -> None:
        self._memory: list[ctypes.Array[c_char]] = []
        self._free: dict[int, list[ctypes.Array[c_char]]] = {}
        self.num_bytes = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor of undefined content, aligned to 64 bytes."""
        num_bytes = max(ALIGNMENT, whole_lines(math.prod(shape) * dtype.itemsize))
        pieces = self._free.setdefault(num_bytes, [])
        piece = pieces.pop() if pieces else self._new(num_bytes)
        # The storage that torch makes of a view keeps the view; when the last tensor on it goes, so does the view.
        view = (c_char * num_bytes).from_buffer(piece)
        weakref.finalize(view, pieces.append, piece).atexit = False
        return torch.frombuffer(view, dtype=dtype, count=math.prod(shape)).view(shape)

    def _new(self, num_bytes: int) -> ctypes.Array[c_char]:
        raw = (c_char * (num_bytes + ALIGNMENT))()
        self._memory.append(raw)
        self.num_bytes += num_bytes
        return (c_char * num_bytes).from_buffer(raw, -ctypes.addressof(raw) % ALIGNMENT)


class CommonArena:
    """Memory of a fixed size that several recordings share, one at a time, each from its beginning.

    It is for the few tensors that are too large to exist once for each recording. No piece is used twice within a
    recording. Memory that no recording reaches is never touched.
    """

    def __init__(self, num_bytes: int) -> None:
        self._memory = torch.empty(num_bytes + ALIGNMENT, dtype=torch.uint8)
        self._begin: Final = -self._memory.data_ptr() % ALIGNMENT
        self._end: Final = self._begin + num_bytes
        self._next = self._begin

    def restart(self) -> None:
        """Begin the next recording, or the same one again. Earlier tensors may be overwritten."""
        self._next = self._begin

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor of undefined content, aligned to 64 bytes. Raises MemoryError if no room is left."""
        num_bytes = math.prod(shape) * dtype.itemsize
        begin, self._next = self._next, self._next + whole_lines(num_bytes)
        if self._next > self._end:
            raise MemoryError(f"a tensor of {num_bytes} bytes does not fit in the {self._end - begin} that are left")
        return self._memory[begin : begin + num_bytes].view(dtype).view(shape)


def whole_lines(num_bytes: int) -> int:
    """Round up to a multiple of the alignment."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class OpQueue:
    """One rank's queue; one thread at a time may use it."""

    def __init__(self, team: NativeTeam) -> None:
        self.team = team
        self._arena: Arena | CommonArena | None = None
        self._recorded: RecordedOps | None = None
        self._scratch = np.empty(ALIGNMENT, dtype=np.uint8)

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return a tensor of undefined content for an operation to write."""
        if self._arena is None or not math.prod(shape):
            return torch.empty(shape, dtype=dtype)
        return self._arena.empty(shape, dtype)

    def scratch(self, op: Any) -> int:
        """Return the address of as much scratch as the operation needs, aligned to 64 bytes; 0 if it needs none.

        It belongs to the operation until the next one is submitted. What no operation writes is never touched, and
        takes no memory. It grows by doubling: recordings keep what they were made with, which is together at most four
        times what the largest operation needs.
        """
        needed = self.team.scratch_bytes(op)
        if not needed:
            return 0
        if len(self._scratch) < needed + ALIGNMENT:
            self._scratch = np.empty(max(needed + ALIGNMENT, 2 * len(self._scratch)), dtype=np.uint8)
        if self._recorded is not None and self._recorded.kept[-1] is not self._scratch:
            self._recorded.kept.append(self._scratch)
        return -(-self._scratch.ctypes.data // ALIGNMENT) * ALIGNMENT

    def release_scratch(self) -> None:
        """Free the scratch; recordings keep theirs."""
        self._scratch = np.empty(ALIGNMENT, dtype=np.uint8)

    def submit(self, op: Any, *kept: object) -> None:
        """Run the operation. `kept`: everything that it points at, except memory of `empty` and `scratch`."""
        self.team.run_one(op)
        if self._recorded is not None:
            self._recorded.ops.append(op)
            self._recorded.kept.extend(kept)

    def call(self, op: Any, finish: Finish, *kept: object) -> None:
        """Run a CALL, and complete it by `finish` if its function does not return 0. `kept`: as in `submit`."""
        if status := self.team.run_call(op):
            finish(status)
        if self._recorded is not None:
            self._recorded.finishes[len(self._recorded.ops)] = finish
            self._recorded.ops.append(op)
            self._recorded.kept.extend(kept)

    @contextmanager
    def computing_in(self, arena: Arena | CommonArena) -> Iterator[None]:
        """Take the memory of `empty` from the arena within this context. Several recordings within it may share one."""
        outer, self._arena = self._arena, arena
        try:
            yield
        finally:
            self._arena = outer

    @contextmanager
    def recording(self) -> Iterator[RecordedOps]:
        """Record what is submitted within. Raises RuntimeError without an arena, and within another recording."""
        if self._recorded is not None or self._arena is None:
            raise RuntimeError("operations are recorded one piece at a time, and compute in an arena")
        recorded = RecordedOps(kept=[self._arena])
        self._recorded = recorded
        try:
            yield recorded
        finally:
            self._recorded = None

    def replay(self, recorded: RecordedOps) -> None:
        """Run the recorded operations again. Raises what their CALLs raise."""
        table, begin = recorded.table, 0
        while begin < len(table):
            stopped, status = self.team.run(table, begin)
            if stopped < len(table):
                recorded.finishes[stopped](status)
            begin = stopped + 1
