"""Conditions with their history: what was reported last, times of transitions, and the Events between two reports.

Conditions overlap on purpose; their Events do not. A failure is reported by Degraded, with its cause; Ready reports
when requests are served, and when they no longer are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hetero_api.status import Condition, ConditionStatus, ConditionType
from hetero_operator.reconcile.model import Transition
from hetero_operator.reconcile.status.findings import Finding
from hetero_operator.reconcile.status.reasons import Reason
from hetero_operator.reconcile.status.situation import Situation
from hetero_operator.reconcile.status.text import stored_conditions, timestamp

_OF_THE_SPEC = frozenset({ConditionType.ACCEPTED, ConditionType.PROGRESSING, ConditionType.DEGRADED})
"""Conditions that tell of the spec as written; others tell of the one in force."""
NORMAL = "Normal"
WARNING = "Warning"
Conditions = Mapping[str, Condition]


def condition_of(kind: ConditionType, finding: Finding, situation: Situation) -> Condition:
    """Return a finding as a condition; its time moves only when its status does."""
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
    """Return the generation that a condition is about.

    While a spec is refused, conditions about pods are about the spec before it: nobody who waits for the new one to be
    ready may take them for that.
    """
    if situation.plan.refusal and situation.basis is not None and kind not in _OF_THE_SPEC:
        told = before.observed_generation if before is not None else None
        return situation.generation if told is None else told
    return situation.generation


def transitions(before: Conditions, after: Conditions) -> tuple[Transition, ...]:
    """Return Events in the order in which they are to be read; `before` is empty at the first report."""
    told = [
        *_accepted(before, after),
        *_suspended(before, after),
        *_rolling_out(before, after),
        *_degraded(before, after),
        *_ready(before, after),
        *_stuck(before, after),
        *_unpinned(before, after),
    ]
    return tuple(dict.fromkeys(told))


def _accepted(before: Conditions, after: Conditions) -> Iterator[Transition]:
    kind = ConditionType.ACCEPTED
    if after[kind].status is ConditionStatus.FALSE and _differs(kind, before, after):
        yield _event(WARNING, after[kind])


def _suspended(before: Conditions, after: Conditions) -> Iterator[Transition]:
    """Yield the Event of a suspension, when it is asked for; not when the last pod has ended."""
    kind = ConditionType.SUSPENDED
    was_asked_for = kind in before and before[kind].reason != Reason.NOT_SUSPENDED
    is_asked_for = after[kind].reason != Reason.NOT_SUSPENDED
    if is_asked_for and not was_asked_for:
        yield _event(NORMAL, after[ConditionType.READY])
    elif was_asked_for and not is_asked_for:
        yield Transition(NORMAL, "Resumed", "Pods are made again.")


def _rolling_out(before: Conditions, after: Conditions) -> Iterator[Transition]:
    kind = ConditionType.PROGRESSING
    begins = after[kind].reason == Reason.ROLLING_OUT and (
        kind not in before or before[kind].reason != Reason.ROLLING_OUT
    )
    if begins:
        yield Transition(NORMAL, Reason.ROLLING_OUT.value, "Pods of an earlier spec are replaced.")


def _degraded(before: Conditions, after: Conditions) -> Iterator[Transition]:
    kind = ConditionType.DEGRADED
    now = after[kind]
    if now.status is ConditionStatus.TRUE:
        if _differs(kind, before, after):
            yield _event(WARNING, now)
    elif now.status is ConditionStatus.FALSE and kind in before and before[kind].status is ConditionStatus.TRUE:
        yield Transition(NORMAL, "Recovered", f"{before[kind].reason} is over.")


def _ready(before: Conditions, after: Conditions) -> Iterator[Transition]:
    kind = ConditionType.READY
    if not _flips(kind, before, after):
        return
    if after[kind].status is ConditionStatus.TRUE:
        yield Transition(NORMAL, "Ready", after[kind].message)
    elif kind in before and before[kind].status is ConditionStatus.TRUE:
        asked_for = after[kind].reason in (Reason.SUSPENDED, Reason.SCALED_TO_ZERO, Reason.ROLLING_OUT)
        yield _event(NORMAL if asked_for else WARNING, after[kind], reason="NotReady")


def _stuck(before: Conditions, after: Conditions) -> Iterator[Transition]:
    kind = ConditionType.PROGRESSING
    if after[kind].reason == Reason.PROGRESS_DEADLINE_EXCEEDED and _flips(kind, before, after):
        yield _event(WARNING, after[kind])


def _unpinned(before: Conditions, after: Conditions) -> Iterator[Transition]:
    kind = ConditionType.NUMA_PINNED
    if after[kind].reason in (Reason.NOT_PINNED, Reason.MEMORY_NOT_LOCAL) and _differs(kind, before, after):
        yield _event(WARNING, after[kind])


def _flips(kind: ConditionType, before: Conditions, after: Conditions) -> bool:
    return kind not in before or before[kind].status is not after[kind].status


def _differs(kind: ConditionType, before: Conditions, after: Conditions) -> bool:
    """Return whether a condition has another status or reason; another message alone is no transition."""
    return _flips(kind, before, after) or before[kind].reason != after[kind].reason


def _event(severity: str, condition: Condition, *, reason: str = "") -> Transition:
    message = condition.message or condition.reason
    if reason:
        return Transition(severity, reason, f"{condition.reason}: {condition.message}".rstrip(": "))
    return Transition(severity, condition.reason, message)
