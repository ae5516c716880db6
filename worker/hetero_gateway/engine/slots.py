"""Places in the batch. A plan drops slots before it binds any, so one that was given up can be bound by the plan that
tells ranks to drop it, and by none before."""

from __future__ import annotations

import heapq


class SlotTable:
    """Slots 0 .. count - 1, lowest first. Every plan that goes out must carry `take_released`."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count))
        self._released: list[int] = []

    def has_free(self) -> bool:
        return bool(self._free)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def has_released(self) -> bool:
        """Whether ranks keep state that the next plan drops."""
        return bool(self._released)

    def take(self) -> int:
        return heapq.heappop(self._free)

    def give_up(self, slot: int) -> None:
        """The next plan releases it."""
        self._released.append(slot)
        heapq.heappush(self._free, slot)

    def take_released(self) -> list[int]:
        """What the plan being made releases."""
        released, self._released = self._released, []
        return released
