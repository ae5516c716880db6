"""Events: what changed between the last report and this one, each told once.

Conditions overlap on purpose; their Events do not. A failure is told by Degraded, with its cause; Ready tells when
requests are served, and when they no longer are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hetero_api.status import Condition, ConditionStatus, ConditionType
from hetero_operator.reconcile.model import Transition
from hetero_operator.reconcile.status.reasons import Reason

NORMAL = "Normal"
WARNING = "Warning"

Conditions = Mapping[str, Condition]


def transitions(before: Conditions, after: Conditions) -> tuple[Transition, ...]:
    """Events in the order in which they are to be read; `before` is empty at the first report."""
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
    """When it is asked for, and Ready tells by which field; not when the last pod has ended."""
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
    """Whether a condition has another status or reason; other words alone are no transition."""
    return _flips(kind, before, after) or before[kind].reason != after[kind].reason


def _event(severity: str, condition: Condition, *, reason: str = "") -> Transition:
    message = condition.message or condition.reason
    if reason:
        return Transition(severity, reason, f"{condition.reason}: {condition.message}".rstrip(": "))
    return Transition(severity, condition.reason, message)
