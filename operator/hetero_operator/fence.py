"""Who may write, and for how long: the border that a process which no longer leads cannot cross.

The Lease is another's from `duration_s` after its last renewal on. Writes end earlier, `renew_s` after it, and each
write is given no more time than the Lease has left: when another process takes over, nothing of ours is under way.
Both are counted on this process's monotonic clock from before the renewal was sent, so no clocks are compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from hetero_operator.errors import NotLeading

Clock = Callable[[], float]


class Fence:
    """Closed until `open` is called, and again when its time is over."""

    def __init__(self, *, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._writes_until = 0.0
        self._lease_until = 0.0

    @property
    def is_open(self) -> bool:
        return self._clock() < self._writes_until

    def open(self, *, writes_until: float, lease_until: float) -> None:
        """Allow writes until a moment of the clock; another may hold the Lease from `lease_until` on."""
        self._writes_until, self._lease_until = writes_until, lease_until

    def close(self) -> None:
        """No write begins any more."""
        self._writes_until = 0.0

    def allowance_s(self) -> float:
        """How long a write that begins now may take, in seconds. Raises NotLeading."""
        if not self.is_open:
            raise NotLeading("the Lease is not held")
        return self._lease_until - self._clock()
