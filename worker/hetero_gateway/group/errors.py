"""Errors of the group.

HeteroError (hetero_api)
├── UnsupportedSpecError   the spec asks for what this version cannot do; holds every problem
└── GroupError
    ├── RankRefused        a rank cannot take the place that it asks for
    ├── CacheSizeError     the KV cache that the ranks can hold is too small
    ├── RankMisbehaved     a rank said what it must not say now: a bug, or another program
    └── EpochEnded         an epoch is over; `permanent` if trying again cannot help
"""

from __future__ import annotations

from collections.abc import Sequence

from hetero_api.errors import HeteroError


class UnsupportedSpecError(HeteroError):
    """`problems` holds one line a field: its path, what is wrong and what to do."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(self.problems))


class GroupError(HeteroError):
    """Root of the group's errors."""


class CacheSizeError(GroupError):
    """One sequence of full length has no room; the message has the arithmetic and the fields to change."""


class RankRefused(GroupError):
    """The rank's Hello does not fit this group."""


class RankMisbehaved(GroupError):
    """A message that the protocol does not allow."""


class EpochEnded(GroupError):
    """The epoch is over; the message is why."""

    def __init__(self, reason: str, *, permanent: bool = False) -> None:
        self.permanent = permanent
        super().__init__(reason)
