"""How a group notices that a rank is frozen, and how it comes back after an epoch has ended. One asyncio loop."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from typing import Final

from hetero_api.host.restarts import RestartBudget, RestartPauses
from hetero_gateway.group.settings import GroupSettings

logger = logging.getLogger(__name__)

HEARTBEAT_INTERVAL_S: Final = 0.5
"""Seconds between two heartbeats of a rank (FormGroup.heartbeat_interval_s)."""
SERVING_SILENCE_S: Final = 2.0
"""Longest silence of a rank that serves."""
FORMING_SILENCE_S: Final = 5.0
"""Longest silence of a rank that meets the others."""
BUSY_SILENCE_S: Final = 20.0
"""Longest silence of a rank that loads, warms up or does a command: it may hold Python's lock for long."""
CHECK_S: Final = 0.25
"""Seconds between two looks."""
STALL_S: Final = 1.0
"""Delay of a look that shows that the loop was stopped ..."""
HEARING_S: Final = 0.5
"""... and the least time after that to hear what ranks said meanwhile."""


class HeartbeatWatch:
    """Watch over the ranks of an epoch; `on_silent` is called once for each that falls silent, with the reason.

    A rank beats from a thread of its own, regardless of what it computes. So a rank that has been silent for some time
    is frozen, or its machine is. Any message counts as a beat.

    The watch measures this process's patience, so time in which its own loop did not turn does not count: a gateway
    that was stopped or starved accuses nobody for what it could not hear.
    """

    def __init__(
        self,
        ranks: Iterable[int],
        *,
        on_silent: Callable[[int, str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.silence_s = FORMING_SILENCE_S
        """Longest silence that is tolerated now."""
        self._on_silent = on_silent
        self._clock = clock
        self._looked_s = clock()
        self._heard_s = dict.fromkeys(ranks, self._looked_s)

    def hear(self, rank: int) -> None:
        """Note that a rank said something."""
        if rank in self._heard_s:
            self._heard_s[rank] = self._clock()

    def tolerate(self, silence_s: float) -> None:
        """Tolerate this long a silence from now on; the time before does not count."""
        self.silence_s = silence_s
        self._heard_s = dict.fromkeys(self._heard_s, self._clock())

    async def run(self) -> None:
        """Look until cancelled."""
        self._looked_s = self._clock()
        while True:
            await asyncio.sleep(CHECK_S)
            self.look()

    def look(self) -> None:
        """Report the ranks that are silent. To be called every CHECK_S."""
        now = self._clock()
        late_s = max(0.0, now - self._looked_s - CHECK_S)
        self._looked_s = now
        self._heard_s = {rank: min(now, heard_s + late_s) for rank, heard_s in self._heard_s.items()}
        if late_s > STALL_S:
            logger.warning("the event loop did not turn for %.1f s; no rank is accused for it", late_s)
            latest_s = now - self.silence_s + HEARING_S
            self._heard_s = {rank: max(heard_s, latest_s) for rank, heard_s in self._heard_s.items()}
        for rank, heard_s in list(self._heard_s.items()):
            if now - heard_s > self.silence_s:
                del self._heard_s[rank]
                self._on_silent(
                    rank,
                    f"said nothing for {now - heard_s:.1f} s, not even a heartbeat (one is due every "
                    f"{HEARTBEAT_INTERVAL_S:g} s): it is frozen, or its machine is",
                )


FIRST_PAUSE_S: Final = 0.5
LONGEST_PAUSE_S: Final = 30.0


class EpochRestarts:
    """Decides whether, and when, the next epoch of a group may begin. Instance ids tell processes apart.

    A rank that is lost now and then costs no time: the epoch after one that ran well begins as soon as the ranks are
    there. Each further epoch in a row that did not run well doubles a pause before the next. A permanent failure, or
    more ends within the window than the resource allows, is a failure of the group: only a process that was not there
    then, perhaps a repaired one, lets it try again; after too many ends not before the longest pause either. An orderly
    end, of a rank that was told to end, neither counts nor costs time: nodes are drained as often as somebody likes.
    """

    def __init__(self, settings: GroupSettings, *, clock: Callable[[], float]) -> None:
        self.ended_reason = ""
        """Why the last epoch ended, or the part of it that a person has to know first."""
        self._limits = settings.spec.recovery
        self._clock = clock
        self._budget = RestartBudget(
            max_restarts=self._limits.max_restarts, window_s=self._limits.window_seconds, clock=clock
        )
        self._pauses = RestartPauses(first_s=FIRST_PAUSE_S, longest_s=LONGEST_PAUSE_S)
        self.failure: str | None = None
        """Why no epoch begins until there is a new process."""
        self._present: frozenset[str] = frozenset()
        """Instance ids of the processes that were there at the failure."""
        self._not_before_s = clock()

    def note_end(
        self, reason: str, *, permanent: bool, ran_well: bool, is_orderly: bool, present: Iterable[str]
    ) -> None:
        """Note the end of an epoch."""
        self._not_before_s = self._clock() + self._pauses.next_pause_s(did_well=ran_well or is_orderly)
        has_budget = is_orderly or self._budget.spend()
        if permanent:
            self.note_failure(reason, present=present)
        elif self.failure is not None:
            return
        elif has_budget:
            self.ended_reason = reason
        else:
            self._not_before_s = self._clock() + LONGEST_PAUSE_S
            self.note_failure(
                f"{reason}; the group has ended more than spec.recovery.maxRestarts ({self._limits.max_restarts}) "
                f"times within {self._limits.window_seconds:g} s",
                present=present,
            )

    def note_failure(self, reason: str, *, present: Iterable[str]) -> None:
        """Note a failure that trying again with the same processes cannot cure."""
        self.ended_reason = reason
        self.failure, self._present = reason, frozenset(present)

    def reconsider(self, present: Iterable[str]) -> None:
        """Forget the failure if there is a new process among those that are there, and it is time."""
        if self.failure is not None and not self.pause_left_s and not self._present.issuperset(present):
            logger.info("there is a new process: the group may form again")
            self.failure = None

    @property
    def pause_left_s(self) -> float:
        """Seconds until the next epoch may begin, if nothing else is in its way."""
        return max(0.0, self._not_before_s - self._clock())

    @property
    def outlook(self) -> str:
        """When the next try comes; empty if that only depends on the ranks."""
        left_s = self.pause_left_s
        if not left_s:
            return ""
        return f"next try in {left_s:.1f} s" if self.failure is None else f"a new process is tried in {left_s:.1f} s"
