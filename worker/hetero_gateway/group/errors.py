"""Errors of the group.

HeteroError (hetero_api)
├── UnsupportedSpecError   the spec asks for what this version cannot do; holds every problem
└── GroupError
    ├── RankRefused        a rank cannot take the place that it asks for
    ├── CacheSizeError     the KV cache that the ranks can hold is too small
    ├── RankMisbehaved     a rank said what it must not say now: a bug, or another program
    ├── InvalidCommand     what is asked of the group has a wrong field
    ├── WrongState         what is asked of the group does not fit its state
    │   └── CommandFailed  the ranks could not do it; the group is as it was
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


class InvalidCommand(GroupError):
    """`field` is a path in the message of an Admin call, `problem` what is wrong with it."""

    def __init__(self, field: str, problem: str) -> None:
        self.field = field
        self.problem = problem
        super().__init__(f"{field}: {problem}")


class WrongState(GroupError):
    """The group cannot do this now; the message has its state and what to do."""


class CommandFailed(WrongState):
    """A rank could not do its part, so none did; the message has which and why."""


class EpochEnded(GroupError):
    """The epoch is over; the message is why."""

    def __init__(self, reason: str, *, permanent: bool = False) -> None:
        self.permanent = permanent
        super().__init__(reason)
