"""Lists of slots out of a message, as an index array, without making an array for it."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


class SlotList:
    """Room for so many slots."""

    def __init__(self, capacity: int) -> None:
        self._slots: npt.NDArray[np.int64] = np.zeros(capacity, dtype=np.int64)
        self._layouts: dict[int, struct.Struct] = {}

    def fill(self, slots: Sequence[int], *more: int) -> npt.NDArray[np.int64]:
        """int64 [slots + more]: a view, valid until the next call."""
        count = len(slots) + len(more)
        layout = self._layouts.get(count)
        if layout is None:
            layout = self._layouts[count] = struct.Struct(f"={count}q")
        layout.pack_into(self._slots.data, 0, *slots, *more)
        return self._slots[:count]
