"""The report about one resource: the whole of its status, Events, and when to look again.

A status with the content of the stored one is the stored one, so nothing is written when nothing changed.

Conditions overlap on purpose; their Events do not. A failure is reported by Degraded, with its cause; Ready reports
when requests are served, and when they no longer are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hetero_api.status import Condition, ConditionStatus, ConditionType, HeteroInferenceStatus
from hetero_operator.reconcile.inventory import is_leaving
from hetero_operator.reconcile.model import Object, Observed, Outcome, Plan, Report, Transition
from hetero_operator.reconcile.replicas import Course, Judged, judged_replicas
from hetero_operator.reconcile.revision import without_empty
from hetero_operator.reconcile.status.figures import figures
from hetero_operator.reconcile.status.findings import TRUE, Blockers, Finding, degraded, findings
from hetero_operator.reconcile.status.progress import look_again_s, progressing
from hetero_operator.reconcile.status.reasons import Reason
from hetero_operator.reconcile.status.router import router_ready, router_trouble
from hetero_operator.reconcile.status.situation import Situation
from hetero_operator.reconcile.status.text import stored_conditions, stored_status, timestamp
from hetero_operator.reconcile.status.whole import Part, is_rolling_out, whole_figures, whole_findings

_OF_THE_SPEC = frozenset({ConditionType.ACCEPTED, ConditionType.PROGRESSING, ConditionType.DEGRADED})
"""Conditions that tell of the spec as written; others tell of the one in force."""
_UNPINNED = frozenset({Reason.NOT_PINNED, Reason.MEMORY_NOT_LOCAL})
NORMAL = "Normal"
WARNING = "Warning"
Conditions = Mapping[str, Condition]


def report(observed: Observed, plan: Plan, outcome: Outcome) -> Report:
    """Report what was seen, never more. `plan` and `outcome` are those of this look."""
    stored: Object = observed.resource.get("status") or {}
    if is_leaving(observed.resource):
        return Report(status=stored)
    parts = [_part(judged, plan, outcome) for judged in judged_replicas(observed, is_refused=bool(plan.refusal))]
    before, conditions, reported = _of_one(parts[0]) if len(parts) == 1 else _of_all(observed, parts)
    status = _decoded(conditions, reported)
    waits = [look_again_s(part.situation, part.blockers, part.conditions) for part in parts]
    return Report(
        status=stored if _says_the_same(stored, status) else status,
        events=transitions(stored_conditions(before), conditions),
        look_again_s=min((wait for wait in waits if wait is not None), default=None),
    )


def _part(judged: Judged, plan: Plan, outcome: Outcome) -> Part:
    situation = Situation.from_look(judged.view, plan, outcome)
    blockers = Blockers.from_situation(situation)
    conditions = _conditions(situation, blockers, is_old=judged.course is Course.KEPT)
    return Part(judged, situation, blockers, conditions)


def _of_one(part: Part) -> tuple[HeteroInferenceStatus, Conditions, dict[str, Any]]:
    """Return the last report, and conditions and figures of this one."""
    situation = part.situation
    return situation.stored, part.conditions, figures(situation, is_serving=part.blockers.is_serving)


def _of_all(observed: Observed, parts: Sequence[Part]) -> tuple[HeteroInferenceStatus, Conditions, dict[str, Any]]:
    """Return the last report about the whole, and conditions and figures of this one."""
    stored, found = stored_status(observed.resource), whole_findings(parts)
    whole, is_old = replace(parts[0].situation, stored=stored), is_rolling_out(parts)
    conditions: dict[str, Condition] = {
        kind: condition_of(kind, found[kind], whole, is_old=is_old) for kind in ConditionType
    }
    return stored, conditions, whole_figures(parts)


def _conditions(situation: Situation, blockers: Blockers, *, is_old: bool) -> dict[str, Condition]:
    """Return all conditions, in the order of ConditionType; `is_old`: of a replica with an earlier spec."""
    found = {**findings(situation, blockers), ConditionType.ROUTER_READY: router_ready(situation, blockers)}
    conditions: dict[str, Condition] = {
        kind: condition_of(kind, item, situation, is_old=is_old) for kind, item in found.items()
    }
    judgement = progressing(situation, blockers, conditions)
    damage = _with_deadline(_with_router(degraded(situation, blockers), situation), judgement)
    for kind, item in ((ConditionType.PROGRESSING, judgement), (ConditionType.DEGRADED, damage)):
        conditions[kind] = condition_of(kind, item, situation)
    return {kind: conditions[kind] for kind in ConditionType}


def _with_router(damage: Finding, situation: Situation) -> Finding:
    """Return the damage, or what is broken about the router where nothing else is."""
    return damage if damage.status is TRUE else router_trouble(situation) or damage


def _with_deadline(damage: Finding, judgement: Finding) -> Finding:
    """Return the damage, or that the deadline is over: then it is broken, even if nothing said that it failed."""
    if damage.status is not TRUE and judgement.reason == Reason.PROGRESS_DEADLINE_EXCEEDED:
        return Finding(TRUE, judgement.reason, judgement.message)
    return damage


def _decoded(conditions: Conditions, reported: Mapping[str, Any]) -> dict[str, Any]:
    status = HeteroInferenceStatus(
        **reported, reason=conditions[ConditionType.READY].reason, conditions=list(conditions.values())
    )
    dumped = status.model_dump(mode="json", by_alias=True, exclude_none=True)
    return without_empty(dumped, empty=("", [], {}))


def _says_the_same(stored: Object, status: Mapping[str, Any]) -> bool:
    """Return whether the stored status equals this one; conditions of others, and their order, do not count."""
    conditions = stored.get("conditions")
    by_type = {item.get("type"): item for item in conditions} if isinstance(conditions, list) else {}
    ours = [by_type.get(item["type"]) for item in status["conditions"]]
    return {**stored, "conditions": ours} == dict(status)


def condition_of(kind: ConditionType, finding: Finding, situation: Situation, *, is_old: bool = False) -> Condition:
    """Return a finding as a condition; its time moves only when its status does.

    `is_old`: pods have the spec before the one as written, at least some of them.
    """
    before = stored_conditions(situation.stored).get(kind)
    same = before is not None and before.status == finding.status
    return Condition(
        type=kind,
        status=finding.status,
        reason=finding.reason,
        message=_message(finding, before),
        last_transition_time=before.last_transition_time if before and same else timestamp(situation.observed.now),
        observed_generation=_generation(kind, situation, before, is_old=is_old),
    )


def _message(finding: Finding, before: Condition | None) -> str:
    if before is None or not finding.vague_about or before.reason != finding.reason:
        return finding.message
    return before.message if before.message.startswith(finding.vague_about) else finding.message


def _generation(kind: ConditionType, situation: Situation, before: Condition | None, *, is_old: bool) -> int:
    """Return the generation that a condition is about.

    While a spec is refused or rolled out, conditions about pods are about the spec before it: nobody who waits for the
    new one to be ready may take them for that.
    """
    is_refused = bool(situation.plan.refusal) and situation.basis is not None
    if (is_refused or is_old) and kind not in _OF_THE_SPEC:
        reported = before.observed_generation if before is not None else None
        return situation.generation if reported is None else reported
    return situation.generation


def transitions(before: Conditions, after: Conditions) -> tuple[Transition, ...]:
    """Return Events in the order in which they are to be read; `before` is empty at the first report."""
    accepted, pinned = after[ConditionType.ACCEPTED], after[ConditionType.NUMA_PINNED]
    messages = [
        *_warning(ConditionType.ACCEPTED, before, after, when=accepted.status is ConditionStatus.FALSE),
        *_suspended(before, after),
        *_rolling_out(before, after),
        *_degraded(before, after),
        *_ready(before, after),
        *_stuck(before, after),
        *_warning(ConditionType.EXPOSED, before, after, when=after[ConditionType.EXPOSED].reason == Reason.EXPOSED),
        *_warning(ConditionType.NUMA_PINNED, before, after, when=pinned.reason in _UNPINNED),
    ]
    return tuple(dict.fromkeys(messages))


def _warning(kind: ConditionType, before: Conditions, after: Conditions, *, when: bool) -> Iterator[Transition]:
    if when and _differs(kind, before, after):
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
    was_under_way = kind in before and before[kind].reason == Reason.ROLLING_OUT
    if after[kind].reason == Reason.ROLLING_OUT and not was_under_way:
        yield Transition(NORMAL, Reason.ROLLING_OUT.value, "Pods of an earlier spec are replaced.")


def _degraded(before: Conditions, after: Conditions) -> Iterator[Transition]:
    kind = ConditionType.DEGRADED
    now = after[kind]
    yield from _warning(kind, before, after, when=now.status is ConditionStatus.TRUE)
    if now.status is ConditionStatus.FALSE and kind in before and before[kind].status is ConditionStatus.TRUE:
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
