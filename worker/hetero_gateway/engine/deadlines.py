"""When the next request expires, in O(log n), whatever has ended meanwhile.

Entries of requests that ended stay in the heap until they surface; when they outnumber the live ones the heap is
rebuilt, so its size is bounded by the requests in flight and not by how long clients' deadlines are.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Final

from hetero_gateway.engine.request import Request, RequestStatus

_REBUILD_FROM: Final = 64


class DeadlineHeap:
    """Requests with a deadline, soonest first."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []

    def push(self, request: Request, *, live: int) -> None:
        """Add a request, if it has a deadline; `live` is how many requests are in flight with it."""
        deadline_s = request.asked.deadline_s
        if deadline_s is None:
            return
        heapq.heappush(self._heap, (deadline_s, request.order, request))
        if len(self._heap) > max(_REBUILD_FROM, 2 * live):
            self._heap = [entry for entry in self._heap if entry[2].status is not RequestStatus.ENDED]
            heapq.heapify(self._heap)

    def next_s(self) -> float | None:
        """The soonest deadline of a request that has not ended."""
        while self._heap and self._heap[0][2].status is RequestStatus.ENDED:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def pop_expired(self, now: float) -> Iterator[Request]:
        """Requests that have not ended and whose deadline is `now` or earlier."""
        while (next_s := self.next_s()) is not None and next_s <= now:
            yield heapq.heappop(self._heap)[2]

    def clear(self) -> None:
        self._heap.clear()

    def __len__(self) -> int:
        return len(self._heap)
