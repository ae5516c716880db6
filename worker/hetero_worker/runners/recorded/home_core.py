"""HomeCore: keeps a thread on one core while it executes steps.

The other threads of a native team stay on a core each. The thread that executes plans is the team's first, and does
more than that: it forms groups, loads, and starts threads of libraries, which inherit its core. So it is bound only
from one step to the next, while it starts no threads. Unbound, it would sometimes share a core with another thread of
the team; two threads that wait for each other on one core take many times as long.
"""

from __future__ import annotations

import logging
import os

logger = logging.getLogger(__name__)


class HomeCore:
    """Binding of the thread that makes all calls."""

    def __init__(self) -> None:
        self._cpu: int | None = None
        """Core that the thread is bound to."""
        self._refused: int | None = None
        self._before: set[int] = set()

    def keep_to(self, cpu: int | None) -> None:
        """Bind the thread to the core; None: release it. Logs once if the system refuses the core."""
        if cpu == self._cpu:
            return
        self.leave()
        if cpu is None or cpu == self._refused:
            return
        before = os.sched_getaffinity(0)
        try:
            os.sched_setaffinity(0, {cpu})
        except OSError as error:
            self._refused = cpu
            logger.warning("steps run on any core: CPU %d, which is left for them, is refused: %s", cpu, error.strerror)
            return
        self._cpu, self._before = cpu, before

    def leave(self) -> None:
        """Restore the cores that the thread had before. Idempotent."""
        if self._cpu is None:
            return
        self._cpu = None
        try:
            os.sched_setaffinity(0, self._before)
        except OSError as error:  # the next look at the binding tells what is missing
            logger.warning("CPUs %s were taken away while steps ran: %s", sorted(self._before), error.strerror)
