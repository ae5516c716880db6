"""Places in the batch. A slot that was given up is bound again only once a plan has told ranks to drop it."""

from __future__ import annotations

import heapq


class SlotTable:
    """Slots 0 .. count - 1, lowest first."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count))
        self._given_up: list[int] = []

    def has_free(self) -> bool:
        return bool(self._free)

    def take(self) -> int:
        return heapq.heappop(self._free)

    def give_up(self, slot: int) -> None:
        """The next plan releases it."""
        self._given_up.append(slot)

    def release(self) -> list[int]:
        """What the plan being made releases; from now on these slots can be bound, by this plan already."""
        released, self._given_up = self._given_up, []
        for slot in released:
            heapq.heappush(self._free, slot)
        return released
