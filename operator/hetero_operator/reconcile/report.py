"""The report about one resource: the whole of its status, Events, and when to look again.

A status with the content of the stored one is the stored one, so nothing is written when nothing changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hetero_api.status import Condition, ConditionType, HeteroInferenceStatus
from hetero_operator.reconcile.inventory import is_leaving
from hetero_operator.reconcile.model import Object, Observed, Outcome, Plan, Report
from hetero_operator.reconcile.status.figures import figures
from hetero_operator.reconcile.status.findings import TRUE, Blockers, Finding, degraded, findings
from hetero_operator.reconcile.status.history import condition_of, transitions
from hetero_operator.reconcile.status.numa import numa_pinned
from hetero_operator.reconcile.status.progress import look_again_s, progressing
from hetero_operator.reconcile.status.reasons import Reason
from hetero_operator.reconcile.status.situation import Situation
from hetero_operator.reconcile.status.text import stored_conditions


def report(observed: Observed, plan: Plan, outcome: Outcome) -> Report:
    """Report what was seen, never more. `plan` and `outcome` are those of this look."""
    stored: Object = observed.resource.get("status") or {}
    if is_leaving(observed.resource):
        return Report(status=stored)
    situation = Situation.from_look(observed, plan, outcome)
    blockers = Blockers.from_situation(situation)
    conditions = _conditions(situation, blockers)
    status = _decoded(situation, conditions, is_serving=blockers.is_serving)
    return Report(
        status=stored if _says_the_same(stored, status) else status,
        events=transitions(stored_conditions(situation.stored), conditions),
        look_again_s=look_again_s(situation, blockers, conditions),
    )


def _conditions(situation: Situation, blockers: Blockers) -> dict[str, Condition]:
    """Return all conditions, in the order of ConditionType."""
    told = findings(situation, blockers)
    told[ConditionType.NUMA_PINNED] = numa_pinned(situation, blockers)
    conditions: dict[str, Condition] = {kind: condition_of(kind, item, situation) for kind, item in told.items()}
    judgement = progressing(situation, blockers, conditions)
    damage = _with_deadline(degraded(situation, blockers), judgement)
    for kind, item in ((ConditionType.PROGRESSING, judgement), (ConditionType.DEGRADED, damage)):
        conditions[kind] = condition_of(kind, item, situation)
    return {kind: conditions[kind] for kind in ConditionType}


def _with_deadline(damage: Finding, judgement: Finding) -> Finding:
    """Return the damage, or that the deadline is over: then it is broken, even if nothing said that it failed."""
    if damage.status is not TRUE and judgement.reason == Reason.PROGRESS_DEADLINE_EXCEEDED:
        return Finding(TRUE, judgement.reason, judgement.message)
    return damage


def _decoded(situation: Situation, conditions: Mapping[str, Condition], *, is_serving: bool) -> dict[str, Any]:
    status = HeteroInferenceStatus(
        **figures(situation, is_serving=is_serving),
        reason=conditions[ConditionType.READY].reason,
        conditions=list(conditions.values()),
    )
    decoded: dict[str, Any] = _without_empty(status.model_dump(mode="json", by_alias=True, exclude_none=True))
    return decoded


def _without_empty(value: Any) -> Any:
    """Return a value without empty fields: "", [], {}. Zeros stay."""
    if isinstance(value, Mapping):
        kept = {key: _without_empty(item) for key, item in value.items()}
        return {key: item for key, item in kept.items() if item not in ("", [], {})}
    if isinstance(value, list):
        return [_without_empty(item) for item in value]
    return value


def _says_the_same(stored: Object, status: Mapping[str, Any]) -> bool:
    """Return whether the stored status equals this one; conditions of others, and their order, do not count."""
    told = stored.get("conditions")
    by_type = {item.get("type"): item for item in told} if isinstance(told, list) else {}
    ours = [by_type.get(item["type"]) for item in status["conditions"]]
    return {**stored, "conditions": ours} == dict(status)
