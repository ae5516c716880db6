"""Errors of the operator.

HeteroError
├── ConfigError          a setting is wrong; the message names the argument or variable
├── NotLeading           a write was stopped because the Lease is not held, or not for long enough
├── FenceBroken          a write left the process although the Lease was not held
├── KopfStopped          kopf ended though nobody asked it to
├── OverBudget           a resource controls more than this process reads
└── ApiError             the API server did not do what was asked
    ├── TooLarge         the answer is larger than this process takes in
    ├── Unreachable      no answer: connection refused or cut, or the time was over
    ├── Gone             410: the resource version is too old, list again
    ├── NotFound         404
    ├── Conflict         409: it exists, or it is not what the caller believed it to be
    └── Refused          400, 403, 422: trying again as it is will not help
"""

from __future__ import annotations

from hetero_api.contract import LABEL_NAME
from hetero_api.errors import HeteroError


class ConfigError(HeteroError):
    """A setting is wrong."""


class NotLeading(HeteroError):
    """This process does not lead, so it must not write."""


class FenceBroken(HeteroError):
    """A write left the process although the Lease was not held."""


class KopfStopped(HeteroError):
    """kopf ended on its own."""


class OverBudget(HeteroError):
    """A resource controls more than this process reads, in a namespace with more than this process keeps."""

    def __init__(self, namespace: str, name: str, *, limit: int) -> None:
        super().__init__(
            f"resources in namespace {namespace} control more than {limit >> 20} MiB of objects, and {name} too many "
            f"of them; delete what the operator did not make and is labelled {LABEL_NAME}={name}"
        )


class ApiError(HeteroError):
    """The API server did not do what was asked.

    `status` is HTTP's, 0 where there was no answer; `reason` is that of Kubernetes' Status; `retry_after_s` is what the
    server asked for, 0 where it did not.
    """

    def __init__(self, status: int, reason: str, message: str, *, retry_after_s: float = 0.0) -> None:
        super().__init__(f"{status} {reason}: {message}" if status else message)
        self.status = status
        self.reason = reason
        self.message = message
        self.retry_after_s = retry_after_s


class Unreachable(ApiError):
    """There was no answer."""

    def __init__(self, message: str) -> None:
        super().__init__(0, "Unreachable", message)


class TooLarge(ApiError):
    """The answer is larger than this process takes in."""

    def __init__(self, message: str) -> None:
        super().__init__(0, "TooLarge", message)


class Gone(ApiError):
    """410: changes since that resource version are no longer known."""


class NotFound(ApiError):
    """404."""


class Conflict(ApiError):
    """409."""


class Refused(ApiError):
    """400, 403 or 422."""
