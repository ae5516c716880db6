"""Whether, and when, the next epoch may begin after one has ended.

A rank that is lost now and then costs no time: the epoch after one that ran well begins as soon as the ranks are there.
Each further epoch in a row that did not run well doubles a pause before the next. A permanent failure, or more ends
within the window than the resource allows, is a failure of the group: it takes a process that was not there then, which
may be a mended one, to try again; after too many ends not before the longest pause either.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from hetero_api.host.restarts import RestartBudget, RestartPauses
from hetero_gateway.group.settings import GroupSettings

logger = logging.getLogger(__name__)

FIRST_PAUSE_S: Final = 0.5
LONGEST_PAUSE_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class _Failure:
    """Why no epoch begins; `present` are the instance ids of the processes that were there."""

    reason: str
    present: frozenset[str]


class EpochRestarts:
    """One group's; see the module. Processes are told apart by their instance ids."""

    def __init__(self, settings: GroupSettings, *, clock: Callable[[], float]) -> None:
        self.ended_reason = ""
        """Why the last epoch ended, or what of its end a person has to know first."""
        self._settings = settings
        self._clock = clock
        self._budget = RestartBudget(
            max_restarts=settings.max_restarts, window_s=settings.restart_window_s, clock=clock
        )
        self._pauses = RestartPauses(first_s=FIRST_PAUSE_S, longest_s=LONGEST_PAUSE_S)
        self._failure: _Failure | None = None
        self._not_before_s = clock()

    def note_end(self, reason: str, *, permanent: bool, ran_well: bool, present: Iterable[str]) -> None:
        """An epoch ended."""
        self._not_before_s = self._clock() + self._pauses.next_pause_s(did_well=ran_well)
        has_budget = self._budget.spend()
        if permanent:
            self.note_failure(reason, present=present)
        elif self._failure is not None:
            return
        elif has_budget:
            self.ended_reason = reason
        else:
            self._not_before_s = self._clock() + LONGEST_PAUSE_S
            self.note_failure(
                f"{reason}; the group has ended more than spec.recovery.maxRestarts ({self._settings.max_restarts}) "
                f"times within {self._settings.restart_window_s:g} s",
                present=present,
            )

    def note_failure(self, reason: str, *, present: Iterable[str]) -> None:
        """Trying again with the same processes cannot help."""
        self.ended_reason = reason
        self._failure = _Failure(reason, frozenset(present))

    def reconsider(self, present: Iterable[str]) -> None:
        """Forget the failure if there is a new process among those that are there, and it is time."""
        if self._failure is not None and not self.pause_left_s and not self._failure.present.issuperset(present):
            logger.info("there is a new process: the group may form again")
            self._failure = None

    @property
    def failure(self) -> str | None:
        """Why no epoch begins until there is a new process."""
        return None if self._failure is None else self._failure.reason

    @property
    def pause_left_s(self) -> float:
        """Seconds until the next epoch may begin, if nothing else is in its way."""
        return max(0.0, self._not_before_s - self._clock())

    @property
    def outlook(self) -> str:
        """When it is tried again; "" if that is a matter of the ranks alone."""
        left_s = self.pause_left_s
        if not left_s:
            return ""
        return f"next try in {left_s:.1f} s" if self._failure is None else f"a new process is tried in {left_s:.1f} s"
