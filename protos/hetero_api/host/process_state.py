"""State of a process, as the kernel reports it."""

from __future__ import annotations

from pathlib import Path
from typing import Final

_PROC: Final = Path("/proc")
_STOPPED: Final = frozenset("Tt")


def is_stopped(pid: int, *, proc: Path = _PROC) -> bool:
    """Whether the process is stopped, by a signal or a debugger. False for one that is gone."""
    try:
        stat = (proc / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    # The program's name, in parentheses before the state, may hold anything.
    return stat.rpartition(")")[2].strip()[:1] in _STOPPED
