"""Errors of the group.

HeteroError (hetero_api)
├── UnsupportedSpecError   the spec asks for what this version cannot do; holds every problem
└── GroupError
    ├── RankRefused        a rank cannot take the place that it asks for
    ├── CacheSizeError     the KV cache that the ranks can hold is too small
    ├── RankMisbehaved     a rank sent a message that it must not send now: a bug, or another program
    ├── InvalidCommand     an admin RPC has a wrong field; an InvalidRequest of the engine, too
    ├── WrongState         an admin RPC does not fit the group's state
    │   └── CommandFailed  the ranks could not carry it out; the group is as it was
    └── EpochEnded         an epoch is over; `permanent` if trying again cannot help
"""

from __future__ import annotations

from collections.abc import Sequence

from hetero_api.errors import HeteroError
from hetero_gateway.engine.errors import InvalidRequest


class UnsupportedSpecError(HeteroError):
    """Spec that this version cannot serve. `problems` has a line for each field: path, problem and remedy."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(self.problems))


class GroupError(HeteroError):
    """Root of the group's errors."""


class CacheSizeError(GroupError):
    """KV cache without room for one sequence of full length; the message has the sum and the fields to change."""


class RankRefused(GroupError):
    """Hello of a rank that does not fit this group."""


class RankMisbehaved(GroupError):
    """Message that the protocol does not allow."""


class InvalidCommand(InvalidRequest, GroupError):
    """Wrong field of an admin RPC. `field` is its path in the message, `problem` what is wrong with it."""


class WrongState(GroupError):
    """Call that the group cannot serve now; the message has its state and what to do."""


class CommandFailed(WrongState):
    """Command that a rank could not carry out, so none did; the message has which rank and why."""


class EpochEnded(GroupError):
    """End of an epoch; the message is the reason. `permanent`: trying again cannot help."""

    def __init__(self, reason: str, *, permanent: bool = False) -> None:
        self.permanent = permanent
        super().__init__(reason)
