"""Rules that types and bounds cannot say, each declared once and held in two worlds.

A `Rule` stands in the `rules` of the model that it is about. The CRD carries its CEL text, so that an API server that
knows CEL (Kubernetes 1.25 and newer) refuses what breaks it; Python asks `holds` of the same model, so that the
operator on older servers, the gateway and `hetero validate` refuse the same with the same words. That the two texts
mean the same is proved by tests that put the same documents to both.

CEL sees the object after the schema's defaults were filled in. Only functions of Kubernetes 1.25 are used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Reason(StrEnum):
    """Kind of a problem, as an API server names it."""

    INVALID = "FieldValueInvalid"
    REQUIRED = "FieldValueRequired"
    FORBIDDEN = "FieldValueForbidden"


@dataclass(frozen=True, slots=True)
class Rule:
    """Condition that a model has to meet.

    `path` is the field that is at fault, below the model and as in YAML. `holds` is asked only of models whose fields
    are valid each.
    """

    path: str
    cel: str
    message: str
    holds: Callable[[Any], bool]
    reason: Reason = Reason.INVALID

    def problem(self, model: object) -> tuple[str, str] | None:
        """Path and message when the model breaks the rule."""
        return None if self.holds(model) else (self.path, self.message)

    def validation(self) -> dict[str, str]:
        """Return the rule as an entry of x-kubernetes-validations."""
        return validation(self.path, self.cel, self.message, self.reason)


@dataclass(frozen=True, slots=True)
class TransitionRule:
    """Condition on a change from one value of a model to another."""

    path: str
    cel: str
    message: str
    allows: Callable[[Any, Any], bool]

    def problem(self, old: object, new: object) -> tuple[str, str] | None:
        """Path and message when the change breaks the rule."""
        return None if self.allows(old, new) else (self.path, self.message)

    def validation(self) -> dict[str, str]:
        """Return the rule as an entry of x-kubernetes-validations."""
        return validation(self.path, self.cel, self.message, Reason.FORBIDDEN)


def problems_of(rules: Sequence[Rule], model: object) -> list[tuple[str, str]]:
    """Path and message of every rule that the model breaks."""
    return [problem for rule in rules if (problem := rule.problem(model)) is not None]


def validation(path: str, cel: str, message: str, reason: Reason = Reason.INVALID) -> dict[str, str]:
    """Return an entry of x-kubernetes-validations.

    The message is the same text always: a messageExpression that shows a number is beyond the cost that API servers
    allow, since they count the text of a number as of any length.
    """
    entry = {"rule": cel, "message": message, "reason": str(reason)}
    return {**entry, "fieldPath": f".{path}"} if path else entry
