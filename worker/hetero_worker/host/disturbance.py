"""Whether others had this process's cores while it measured.

The kernel counts how long each core was busy, or held back by a hypervisor; what of that was not this process's time
was somebody else's. That threads of its own wait for one another does not count. What others take of the memory's
bandwidth from other cores is not seen here.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final

_STAT: Final = Path("/proc/stat")
_IDLE: Final = (3, 4)
"""Columns of a core's line that are not work: idle, and idle while something is read."""
_COLUMNS: Final = 8
"""Those after them are contained in those before."""
_SHARE: Final = 0.1
"""Share of the time of its cores that others may have."""
_LEAST_S: Final = 0.05
"""Less is nothing: the kernel counts in hundredths of a second."""


class CoreWatch:
    """Looks from its construction on. `cpus`: those that the process computes on; None: the calling thread's."""

    def __init__(
        self,
        *,
        cpus: Collection[int] | None = None,
        stat: Path = _STAT,
        own_s: Callable[[], float] = time.process_time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cpus = frozenset(os.sched_getaffinity(0) if cpus is None else cpus)
        self._stat = stat
        self._own_s = own_s
        self._clock = clock
        self._began_s, self._others_s = clock(), self._others()

    def was_disturbed(self) -> bool:
        """Whether others had more than a tenth of the cores' time; False where the kernel does not tell."""
        core_s = len(self._cpus) * (self._clock() - self._began_s)
        return self._others() - self._others_s > max(_LEAST_S, _SHARE * core_s)

    def _others(self) -> float:
        """Seconds that the cores have worked for others, up to a constant."""
        try:
            lines = self._stat.read_text(encoding="ascii").splitlines()
        except OSError:
            return 0.0
        ticks = 0
        for name, *columns in map(str.split, lines):
            if name.startswith("cpu") and name[3:].isdecimal() and int(name[3:]) in self._cpus:
                ticks += sum(int(ticks) for i, ticks in enumerate(columns[:_COLUMNS]) if i not in _IDLE)
        return ticks / os.sysconf("SC_CLK_TCK") - self._own_s()
