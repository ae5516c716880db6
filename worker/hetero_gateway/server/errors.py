"""Errors of the servers.

HeteroError (hetero_api)
└── ServerError
    ├── BindError          a port cannot be listened on
    ├── TlsError           a certificate, key or authority cannot be used
    ├── InvalidArguments   a call's message breaks bounds; holds every violation
    ├── Unauthenticated    a call shows no key that is known
    ├── Forbidden          a call's key is known, and lacks the role
    └── LimitExceeded      a principal has taken what its limits allow; holds when to try again
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hetero_api.errors import HeteroError


class ServerError(HeteroError):
    """Root of the servers' errors."""


class BindError(ServerError):
    """A port is taken, or no port of this machine. The message names the option that chooses it."""


class TlsError(ServerError):
    """A certificate, key or authority cannot be used. The message names the files."""


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


class Unauthenticated(ServerError):
    """A call shows no key that is known."""


class Forbidden(ServerError):
    """A call's key is known, and lacks the role."""


class NoReplica(ServerError):
    """A call to the responder, which stands where no replica runs."""

    def __init__(self, *, retry_after_s: int) -> None:
        super().__init__(
            f"no replica runs now: spec.replicas is 0, or the first one is starting; try again in {retry_after_s} s"
        )
        self.retry_after_s = retry_after_s


class LimitExceeded(ServerError):
    """A principal has taken what its limits allow."""

    def __init__(self, message: str, *, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
