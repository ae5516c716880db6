"""Errors of the servers.

HeteroError (hetero_api)
└── ServerError
    ├── BindError          a port cannot be listened on
    └── InvalidArguments   a call's message breaks bounds; holds every violation
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hetero_api.errors import HeteroError


class ServerError(HeteroError):
    """Root of the servers' errors."""


class BindError(ServerError):
    """A port is taken, or no port of this machine. The message names the option that chooses it."""


@dataclass(frozen=True, slots=True)
class Violation:
    """One problem of a call's message. `field` is a path in the message."""

    field: str
    problem: str

    def __str__(self) -> str:
        return f"{self.field}: {self.problem}"


class InvalidArguments(ServerError):
    """A call's message breaks bounds."""

    def __init__(self, violations: Sequence[Violation]) -> None:
        self.violations = tuple(violations)
        super().__init__("; ".join(map(str, violations)))
