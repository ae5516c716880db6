"""ShmRank: one rank's attachment to a shared segment, which all of its rounds and links use.

A round or message is one call of the native library, made without Python's lock. A call that blocks returns after a
tenth of a second at the latest. Python then checks that the awaited ranks are alive, lets signal handlers run, and
repeats the call.

The segment's end word ends every rank's wait. Whoever ends the exchange sets it once: `abort`, or the first rank that
finds another one gone (ShmSegment.absent). It says which rank that was. So a rank that dies in an exchange costs the
others one check, not a timeout, and all of them learn its number.

One thread makes all calls; only `abort` and `close` may come from another.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch

from hetero_worker.distributed.exchange import Traffic
from hetero_worker.distributed.native_exchange import WAITING, ffi
from hetero_worker.distributed.shm_segment import ShmSegment
from hetero_worker.errors import ExchangeAborted, ExchangeError, ExchangeTimeout, PeerLost
from hetero_worker.native.loading import address_of

SPIN_S: Final = 5e-6
"""Short, because yielding costs nothing on a core of one's own, and spinning costs much on a shared one."""
YIELD_S: Final = 0.002
"""A longer wait sleeps: waking then takes some 50 µs, and others may have the core."""
LOOK_EVERY_S: Final = 0.1
"""Interval at which a waiting rank checks that those that it waits for are alive."""
_ABORTED: Final = 1
_FIRST_LOST: Final = 2
"""The end word is this plus a rank's number when that rank was lost."""


@dataclass(frozen=True, slots=True)
class Late:
    """Ranks that are waited for, and what they did not do; for an error's text."""

    ranks: tuple[int, ...]
    did_not: str


@dataclass(frozen=True, slots=True)
class NativeCall:
    """A round or message as a call that native code can make: function(*arguments) returns 0 when it is done."""

    function: int
    """Address."""
    arguments: tuple[int, int, int]
    finish: Callable[[int], None]
    """Completes a call that returned another code; raises as the exchange does."""
    kept: tuple[object, ...]
    """Owners of the memory that the arguments point at, except the tensor's."""


class ShmRank:
    """State of one rank in a segment; see the module."""

    def __init__(self, segment: ShmSegment, library: Any, *, timeout_s: float) -> None:
        self.segment = segment
        self.library = library
        self.timeout_s = timeout_s
        self._nap_s = nap_s = min(LOOK_EVERY_S, timeout_s)
        self._memory = ffi.from_buffer("uint8_t[]", segment.memory, require_writable=True)
        self.state = ffi.new(
            "hx_rank *",
            {
                "memory": self._memory,
                "rank": segment.rank,
                "world_size": segment.layout.world_size,
                "area_bytes": segment.layout.area_bytes,
                "spin_ns": int(SPIN_S * 1e9),
                "yield_ns": int(YIELD_S * 1e9),
                "nap_ns": int(nap_s * 1e9),
            },
        )
        self._words = memoryview(segment.memory).cast("Q")
        self._closed_because = ""
        self.while_waiting: Callable[[], None] = _nothing
        """Called each time that this rank has waited for LOOK_EVERY_S; until `close`."""

    @property
    def traffic(self) -> Traffic:
        """Amount that this rank has moved so far."""
        return Traffic(self.state.published_bytes, self.state.rounds, self.state.messages)

    def counter(self, word: int) -> int:
        """Return the segment's 64-bit word of this index."""
        return self._words[word]

    def check_open(self) -> None:
        """Raise ExchangeAborted or PeerLost if the exchange has ended."""
        if self.state.closed or self._words[0]:
            raise self._ended()

    def finish(self, code: int, again: Callable[[], int], *, late: Callable[[], Late], at: Callable[[], int]) -> None:
        """Complete a call that returned `code`, which is not 0.

        `again` repeats the call. `at` returns how far it has come: the timeout restarts with every progress. Raises
        ExchangeAborted, ExchangeTimeout, PeerLost.
        """
        since_s, reached = time.monotonic() - self._nap_s, at()
        while code == WAITING:
            self.while_waiting()
            try:
                self._check_peers(late, since_s=since_s)
            except ExchangeTimeout:
                self._close("a round or message was given up in its middle: the exchange cannot go on")
                raise
            code = again()
            if at() != reached:
                since_s, reached = time.monotonic() - self._nap_s, at()
        if code:
            raise self._ended()

    def abort(self) -> None:
        """End the exchange for all ranks. From any thread; never blocks."""
        self._end(_ABORTED)

    def close(self) -> None:
        """End the exchange for this rank. From any thread; others may go on."""
        self.while_waiting = _nothing
        self._close("the exchange is closed")

    def _close(self, reason: str) -> None:
        self._closed_because = self._closed_because or reason
        self.state.closed = 1

    def _end(self, word: int) -> None:
        self.library.hx_end(self.state, word)

    def _ended(self) -> ExchangeError:
        """Return why the exchange has ended."""
        if self._closed_because:
            return ExchangeAborted(self._closed_because)
        word = self._words[0]
        if word >= _FIRST_LOST:
            return PeerLost(f"rank {word - _FIRST_LOST} ended, or left the group, while others waited for it")
        return ExchangeAborted("the epoch was aborted")

    def _check_peers(self, late: Callable[[], Late], *, since_s: float) -> None:
        """Check once, during a wait that began at `since_s` (monotonic), that the late ranks are alive.

        Raises PeerLost, after ending the exchange for all, when one of them is gone; ExchangeTimeout when the time is
        over. A rank that has done its part and left is not late, so `late` is called again after one was found gone.
        """
        waited_for = late()
        if gone := self.segment.absent(waited_for.ranks):
            if lost := [rank for rank in gone if rank in late().ranks]:
                self._end(_FIRST_LOST + lost[0])
                raise self._ended()
        elif waited_for.ranks and time.monotonic() - since_s >= self.timeout_s:
            ranks = ", ".join(map(str, waited_for.ranks))
            raise ExchangeTimeout(f"rank(s) {ranks} did not {waited_for.did_not} within {self.timeout_s:g} s")


class ShmEnd(ABC):
    """Base of one rank's end of rounds or of a link, whose struct in C is `state`."""

    def __init__(self, rank: ShmRank, state: Any) -> None:
        self._rank = rank
        self._state = state

    def _call(self, function: Any, *arguments: Any) -> None:
        """Call one of the library's functions with the state and then the arguments. Raises as the exchange does."""
        if code := function(self._state, *arguments):
            self._finish(function, arguments, code)

    def _native_call(self, function: Any, *arguments: Any) -> NativeCall:
        """Return `_call` with two arguments as a call for native code."""
        first, second = (argument if isinstance(argument, int) else address_of(argument) for argument in arguments)
        words = address_of(self._state), first, second
        return NativeCall(address_of(function), words, partial(self._finish, function, arguments), (self, arguments))

    def _finish(self, function: Any, arguments: tuple[Any, ...], code: int) -> None:
        """Complete a call that returned `code`, which is not 0."""
        self._rank.finish(code, partial(function, self._state, *arguments), late=self._late, at=self._at)

    @abstractmethod
    def _late(self) -> Late:
        """Return the ranks that a call waits for."""

    @abstractmethod
    def _at(self) -> int:
        """Return how far calls have come."""


def data_address(tensor: torch.Tensor) -> int:
    """Return where a contiguous host tensor's elements lie. Raises ValueError for any other tensor."""
    if not tensor.is_contiguous() or not tensor.is_cpu:
        raise ValueError("tensors are exchanged where they lie: they must be contiguous and in host memory")
    return tensor.data_ptr()


def _nothing() -> None:
    pass
