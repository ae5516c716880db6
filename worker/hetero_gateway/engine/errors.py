"""Errors of the engine.

HeteroError (hetero_api)
└── EngineError
    ├── InvalidRequest       a request that can never be served as asked; names the field
    ├── DuplicateRequest     a request with this id is in flight
    ├── QueueFull            no more requests may wait
    ├── EngineUnavailable    no group, the group was lost, or the engine drains: try later
    ├── DeadlineExceeded     the request's deadline passed
    ├── GroupLost            the ranks cannot go on
    ├── StepMismatch         a rank's answer does not fit the plan that was sent
    └── EngineFault          an invariant of the engine is broken: a bug
"""

from __future__ import annotations

from hetero_api.errors import HeteroError


class EngineError(HeteroError):
    """Root of the engine's errors."""


class InvalidRequest(EngineError):
    """Error in a request. `field` is a path in GenerateRequest, `problem` what is wrong with it.

    `is_too_long`: it is a prompt that the model's length has no room for.
    """

    def __init__(self, field: str, problem: str, *, is_too_long: bool = False) -> None:
        self.field = field
        self.problem = problem
        self.is_too_long = is_too_long
        super().__init__(f"{field}: {problem}")


class DuplicateRequest(EngineError):
    """Request whose id belongs to one that is in flight."""


class QueueFull(EngineError):
    """Refusal because no more requests may wait."""


class EngineUnavailable(EngineError):
    """Refusal because requests cannot be served now; another try later may succeed."""


class DeadlineExceeded(EngineError):
    """End of a request whose deadline passed."""


class GroupLost(EngineError):
    """End of a group of ranks that cannot go on; its epoch is over."""


class StepMismatch(EngineError):
    """StepResult that does not answer the plan in flight."""


class EngineFault(EngineError):
    """Broken promise of the engine itself: a bug, never the fault of a request or of a rank."""
