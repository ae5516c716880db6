"""What keeps a container, a pod or a group from being ready."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from hetero_operator.reconcile.status.reasons import Reason


class Level(IntEnum):
    """How bad it is; what is worse is told first, whichever rank it is of."""

    BROKEN = 0
    """Something failed."""
    ABSENT = 1
    """Not there yet: being scheduled, created, fetched."""
    APART = 2
    """Runs, but is not one of the group yet."""
    UNREADY = 3
    """One of the group, and not ready yet."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """What keeps something from being ready. `words` go on after "rank 0 (pod x-cpu-0): "."""

    level: Level
    reason: Reason
    words: str
    is_vague: bool = False
    """Whether an earlier look may have seen more: an image that is waited for, when its error has been told before."""


def broken(reason: Reason, words: str, *, is_vague: bool = False) -> Trouble:
    return Trouble(Level.BROKEN, reason, words, is_vague)


def absent(reason: Reason, words: str) -> Trouble:
    return Trouble(Level.ABSENT, reason, words)
