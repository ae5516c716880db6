"""Descendants whose parent ended: the first process of a container gets them, and has to wait for their end.

Unless it does, each stays in the table of processes, and counts against the pod's limit of them. A rank's own end is
not taken from whoever waits for it: the look at what has ended leaves it as it is.
"""

from __future__ import annotations

import os
from collections.abc import Collection


def reap_orphans(own: Collection[int]) -> list[int]:
    """Wait for what has ended and is none of `own`, which others wait for; the pids.

    One of `own` that has ended hides those that the kernel would tell after it: they come when it was waited for.
    """
    reaped: list[int] = []
    while (pid := _ended_child()) is not None and pid not in own:
        os.waitpid(pid, 0)
        reaped.append(pid)
    return reaped


def _ended_child() -> int | None:
    """A child that has ended, and goes on to be there to be waited for."""
    try:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return ended.si_pid if ended is not None else None
