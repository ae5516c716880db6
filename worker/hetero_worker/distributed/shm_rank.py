"""ShmRank: one rank's attachment to a shared segment, which all of its rounds and links use.

The end word lies in the segment, so it ends every rank's wait. A waiting rank asks the segment who is gone
(ShmSegment.absent).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hetero_worker.distributed.native_ends import Late, NativeRank
from hetero_worker.distributed.native_exchange import ABORTED, FIRST_LOST, ffi
from hetero_worker.distributed.shm_segment import ShmSegment


class ShmRank(NativeRank):
    """State of one rank in a segment."""

    def __init__(self, segment: ShmSegment, library: Any, *, timeout_s: float) -> None:
        self.segment = segment
        self._memory = ffi.from_buffer("uint8_t[]", segment.memory, require_writable=True)
        fields = {
            "memory": self._memory,
            "rank": segment.rank,
            "world_size": segment.layout.world_size,
            "area_bytes": segment.layout.area_bytes,
        }
        self._words = memoryview(segment.memory).cast("Q")
        super().__init__(ffi.new("hx_rank *", fields), rank=segment.rank, library=library, timeout_s=timeout_s)

    def counter(self, word: int) -> int:
        """Return the segment's 64-bit word of this index."""
        return self._words[word]

    def abort(self) -> None:
        """End the exchange for all ranks. From any thread; never blocks."""
        self._end(ABORTED)

    def close(self) -> None:
        """End the exchange for this rank, and leave the segment. Call once, from any thread."""
        super().close()
        self.segment.leave()

    def _end_word(self) -> int:
        return self._words[0]

    def _end(self, word: int) -> None:
        self.library.hx_end(self.state, word)

    def _check_alive(self, late: Callable[[], Late]) -> Late:
        """See NativeRank. A rank that has done its part and left is not late, so `late` is called again."""
        waited_for = late()
        if gone := self.segment.absent(waited_for.ranks):
            if lost := [rank for rank in gone if rank in late().ranks]:
                self._end(FIRST_LOST + lost[0])
                raise self.ended()
            return Late((), "")
        return waited_for
