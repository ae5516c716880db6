"""Errors of the engine.

HeteroError (hetero_api)
└── EngineError
    ├── InvalidRequest       a request that can never be served as asked; names the field
    ├── DuplicateRequest     a request with this id is in flight
    ├── QueueFull            as many requests wait as may
    ├── EngineUnavailable    no group, the group was lost, or the engine drains: try later
    ├── DeadlineExceeded     the request's deadline passed
    ├── GroupLost            raised by a StepExecutor: the ranks cannot go on
    ├── StepMismatch         a rank's answer does not fit the plan that was sent
    └── EngineFault          an invariant of the engine is broken: a bug
"""

from __future__ import annotations

from hetero_api.errors import HeteroError


class EngineError(HeteroError):
    """Root of the engine's errors."""


class InvalidRequest(EngineError):
    """A request is wrong. `field` is its path in GenerateRequest, `problem` what is wrong with it."""

    def __init__(self, field: str, problem: str) -> None:
        self.field = field
        self.problem = problem
        super().__init__(f"{field}: {problem}")


class DuplicateRequest(EngineError):
    """The id belongs to a request that is in flight."""


class QueueFull(EngineError):
    """No more requests may wait."""


class EngineUnavailable(EngineError):
    """Requests cannot be served now; another try later may succeed."""


class DeadlineExceeded(EngineError):
    """The request's deadline passed before it ended."""


class GroupLost(EngineError):
    """The group of ranks cannot go on; its epoch is over."""


class StepMismatch(EngineError):
    """A StepResult that does not answer the plan in flight."""


class EngineFault(EngineError):
    """The engine broke a promise of its own. Never the fault of a request or of a rank."""
