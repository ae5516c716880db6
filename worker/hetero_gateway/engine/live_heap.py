"""A priority queue whose entries die in place.

Requests end at any moment, wherever they are queued. Taking them out of a heap would cost O(n), so the dead stay
until they surface, and when more than half of the heap may be dead it is rebuilt. Its size is therefore bounded by
twice the living, and every operation costs O(log n), amortised.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar

_REBUILD_FROM: Final = 64

ItemT = TypeVar("ItemT")


class LiveHeap(Generic[ItemT]):
    """Items by key, smallest first. No two living items have the same key."""

    def __init__(self, *, is_dead: Callable[[ItemT], bool]) -> None:
        self._is_dead = is_dead
        self._heap: list[tuple[tuple[Any, ...], ItemT]] = []
        self._rebuild_at = _REBUILD_FROM

    def push(self, key: tuple[Any, ...], item: ItemT) -> None:
        heapq.heappush(self._heap, (key, item))
        if len(self._heap) > self._rebuild_at:
            self._heap = [entry for entry in self._heap if not self._is_dead(entry[1])]
            heapq.heapify(self._heap)
            self._rebuild_at = max(_REBUILD_FROM, 2 * len(self._heap))

    def first(self) -> ItemT | None:
        """The living item of the smallest key."""
        while self._heap and self._is_dead(self._heap[0][1]):
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def pop(self) -> ItemT:
        """Take out what `first` has just returned."""
        return heapq.heappop(self._heap)[1]

    def clear(self) -> None:
        self._heap.clear()

    def __len__(self) -> int:
        """Entries, dead ones included."""
        return len(self._heap)
