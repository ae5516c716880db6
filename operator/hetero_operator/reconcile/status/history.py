"""Findings as conditions: with the time of the last transition, and words that only an earlier look had."""

from __future__ import annotations

from hetero_api.status import Condition, ConditionType
from hetero_operator.reconcile.status.findings import Finding
from hetero_operator.reconcile.status.situation import Situation
from hetero_operator.reconcile.status.stored import stored_conditions
from hetero_operator.reconcile.status.text import timestamp

_OF_THE_SPEC = frozenset({ConditionType.ACCEPTED, ConditionType.PROGRESSING, ConditionType.DEGRADED})
"""Conditions that tell of the spec as written; others tell of the one in force."""


def condition_of(kind: ConditionType, finding: Finding, situation: Situation) -> Condition:
    """The time moves only when the status does."""
    before = stored_conditions(situation.stored).get(kind)
    same = before is not None and before.status == finding.status
    return Condition(
        type=kind,
        status=finding.status,
        reason=finding.reason,
        message=_message(finding, before),
        last_transition_time=before.last_transition_time if before and same else timestamp(situation.observed.now),
        observed_generation=_generation(kind, situation, before),
    )


def _message(finding: Finding, before: Condition | None) -> str:
    if before is None or not finding.vague_about or before.reason != finding.reason:
        return finding.message
    return before.message if before.message.startswith(finding.vague_about) else finding.message


def _generation(kind: ConditionType, situation: Situation, before: Condition | None) -> int:
    """While a spec is refused, what is told of pods is of the spec before it: nobody who waits for the new one to be
    ready shall take it for that."""
    if situation.plan.refusal and situation.basis is not None and kind not in _OF_THE_SPEC:
        told = before.observed_generation if before is not None else None
        return situation.generation if told is None else told
    return situation.generation
