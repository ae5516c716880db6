"""Shared-memory rounds and links by the native library: what it costs Python is one call a round.

All that a call needs (a route: bytes, type, contributors) is prepared once and found again by the tensor's shape, and
the library does the rest without Python's lock. It comes back after a tenth of a second at the latest; then Python
looks whether those that it waits for are alive (shm_peers.py), lets signal handlers run, and calls again.

Memory is the segment's, state is in ctypes structs that live as long as their Python object does. One thread calls;
only `abort` and `close` may come from another.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch

from hetero_worker.distributed.shm_peers import ABORTED, LOOK_EVERY_S, Late, Peers
from hetero_worker.distributed.shm_segment import ShmSegment
from hetero_worker.distributed.traffic import Traffic
from hetero_worker.errors import ExchangeTimeout
from hetero_worker.native.compute_library import CallOp
from hetero_worker.native.library import WAITING, NativeLibrary, RankState

SPIN_S: Final = 5e-6
"""Yielding costs a rank that has its core for itself nothing, and spinning costs one that shares it a great deal."""
YIELD_S: Final = 0.002
"""After so long a wait sleeps: waking takes some 50 µs then, and others may have the core."""


@dataclass(frozen=True, slots=True)
class NativeCall:
    """A round or a message, as an operation of the compute library for the tensor that it was made for."""

    op: CallOp
    finish: Callable[[int], None]
    """Goes on with one that answered something else than 0; raises as the exchange does."""
    kept: tuple[object, ...]
    """What the operation points at, beside the tensor."""


class NativeRank:
    """What all rounds and links of one rank share."""

    def __init__(self, segment: ShmSegment, library: NativeLibrary, *, timeout_s: float) -> None:
        self.segment = segment
        self.library = library
        self._memory = (ctypes.c_char * len(segment.memory)).from_buffer(segment.memory)
        self._nap_s = nap_s = min(LOOK_EVERY_S, timeout_s)
        self._state = RankState(
            memory=ctypes.addressof(self._memory),
            rank=segment.rank,
            world_size=segment.layout.world_size,
            area_bytes=segment.layout.area_bytes,
            spin_ns=int(SPIN_S * 1e9),
            yield_ns=int(YIELD_S * 1e9),
            nap_ns=int(nap_s * 1e9),
        )
        self.address = ctypes.addressof(self._state)
        self._words = memoryview(segment.memory).cast("Q")
        self._while_waiting: Callable[[], None] = _nothing
        self._peers = Peers(segment, timeout_s=timeout_s, end=self._end)

    def __getitem__(self, word: int) -> int:
        return self._words[word]

    def set_while_waiting(self, action: Callable[[], None]) -> None:
        """Call `action` each time that this rank has waited for LOOK_EVERY_S."""
        self._while_waiting = action

    @property
    def traffic(self) -> Traffic:
        return Traffic(self._state.published_bytes, self._state.rounds, self._state.messages)

    @property
    def is_closed(self) -> bool:
        return bool(self._state.closed)

    def check_open(self) -> None:
        if self._state.closed or self._words[0]:
            raise self._peers.ended()

    def finish(self, code: int, again: Callable[[], int], *, late: Callable[[], Late], at: Callable[[], int]) -> None:
        """Go on with a call that answered `code`, which is not DONE, until it is done.

        `again` makes the same call, `at` says how far it is: time that is not lost waiting is not counted. Raises
        ExchangeAborted, ExchangeTimeout, PeerLost.
        """
        since_s, reached = time.monotonic() - self._nap_s, at()
        while code == WAITING:
            self._while_waiting()
            try:
                self._peers.look(late, since_s=since_s)
            except ExchangeTimeout:
                self._close("a round or message was given up in its middle: the exchange cannot go on")
                raise
            code = again()
            if at() != reached:
                since_s, reached = time.monotonic() - self._nap_s, at()
        if code:
            raise self._peers.ended()

    def abort(self) -> None:
        self._end(ABORTED)

    def close(self) -> None:
        self._while_waiting = _nothing
        self._close("the exchange is closed")

    def _close(self, reason: str) -> None:
        self._peers.close(reason)
        self._state.closed = 1

    def _end(self, word: int) -> None:
        self.library.end(self.address, word)


def _nothing() -> None:
    pass


def address_of(tensor: torch.Tensor) -> int:
    """Where a contiguous host tensor's elements lie. Raises ValueError for any other."""
    if not tensor.is_contiguous() or not tensor.is_cpu:
        raise ValueError("tensors are exchanged where they lie: they must be contiguous and in host memory")
    return tensor.data_ptr()
