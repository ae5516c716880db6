"""What a rank that waits in shared memory knows of the others: whether the exchange has ended, and who is still there.

The end word of the segment ends every rank's wait. It is set once, by whoever ends the exchange: by `abort`, or by the
first rank that finds another one gone (ShmSegment.absent); it says which. So a rank that dies in the middle of an
exchange costs the others one look, not a timeout, and all of them learn its number.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from hetero_worker.distributed.shm_segment import ShmSegment
from hetero_worker.errors import ExchangeAborted, ExchangeError, ExchangeTimeout, PeerLost

ABORTED: Final = 1
_FIRST_LOST: Final = 2
"""The end word is this plus a rank's number when that rank was lost."""
LOOK_EVERY_S: Final = 0.1
"""A rank that waits looks this often whether those that it waits for are there."""


@dataclass(frozen=True, slots=True)
class Late:
    """Who is waited for, and what they did not do; for a person."""

    ranks: tuple[int, ...]
    did_not: str


class Peers:
    """One rank's view. `end` sets the end word unless it is set, and wakes those that sleep."""

    def __init__(self, segment: ShmSegment, *, timeout_s: float, end: Callable[[int], None]) -> None:
        self.timeout_s = timeout_s
        self._segment = segment
        self._end_word = memoryview(segment.memory).cast("Q")[:1]
        self._end = end
        self._closed_because = ""

    def close(self, reason: str = "the exchange is closed") -> None:
        """What `ended` says from now on. The end word is left as it is: others may go on."""
        self._closed_because = self._closed_because or reason

    def ended(self) -> ExchangeError:
        """Why the exchange has ended."""
        if self._closed_because:
            return ExchangeAborted(self._closed_because)
        word = self._end_word[0]
        if word >= _FIRST_LOST:
            return PeerLost(f"rank {word - _FIRST_LOST} ended, or left the group, while others waited for it")
        return ExchangeAborted("the epoch was aborted")

    def look(self, late: Callable[[], Late], *, since_s: float) -> None:
        """One look during a wait that began at `since_s` (monotonic); `late` says who is late now.

        Raises PeerLost, after ending the exchange for all, when one of them is gone; ExchangeTimeout when the time is
        over. A rank that has done its part and left is not late: so that is asked again after it was found gone.
        """
        waited_for = late()
        if gone := self._segment.absent(waited_for.ranks):
            if lost := [rank for rank in gone if rank in late().ranks]:
                self._end(_FIRST_LOST + lost[0])
                raise self.ended()
        elif waited_for.ranks and time.monotonic() - since_s >= self.timeout_s:
            ranks = ", ".join(map(str, waited_for.ranks))
            raise ExchangeTimeout(f"rank(s) {ranks} did not {waited_for.did_not} within {self.timeout_s:g} s")
