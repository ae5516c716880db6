"""HomeCore: keeps a thread on one core for as long as it works off steps.

The other threads of a native team are on a core each for good. The thread that works plans off is the team's first, and
it has more to do than that: it forms groups, loads, and starts threads of libraries, which are born where it is. So it
keeps to its core from one step to the next only, when it starts none. Left to the system it would at times be put on a
core of the others', and two threads that wait for one another by turns on one core take many times as long.
"""

from __future__ import annotations

import logging
import os

logger = logging.getLogger(__name__)


class HomeCore:
    """Of one thread, which makes all calls."""

    def __init__(self) -> None:
        self._cpu: int | None = None
        """That the thread keeps to."""
        self._refused: int | None = None
        self._before: set[int] = set()

    def keep_to(self, cpu: int | None) -> None:
        """Be there from now on; None: wherever the thread could be before. Says once that a CPU cannot be had."""
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
        """Be wherever the thread could be before. Idempotent."""
        if self._cpu is None:
            return
        self._cpu = None
        try:
            os.sched_setaffinity(0, self._before)
        except OSError as error:  # the next look at the binding tells what is missing
            logger.warning("CPUs %s were taken away while steps ran: %s", sorted(self._before), error.strerror)
