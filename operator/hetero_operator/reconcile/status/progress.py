"""The condition Progressing: whether the operator or the cluster still works toward the spec.

True   something is under way, or a failure that may pass is being tried again
False  everything is as asked for; or only a person can help: the spec is refused, the gateway gave up, the budget is
       used up and waits; or nothing moved for so long that nobody should count on it

"So long" is startupTimeoutSeconds and rendezvousTimeoutSeconds together, since the last thing that moved: a condition,
a pod that was created, a model that was fetched. A fetch may take any time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from typing import Final

from hetero_api.status import Condition, ConditionType
from hetero_operator.reconcile.status.causes import Cause, first
from hetero_operator.reconcile.status.findings import FALSE, TRUE, Blockers, Finding, failed_write, worst_failure
from hetero_operator.reconcile.status.pods import condition
from hetero_operator.reconcile.status.reasons import Reason
from hetero_operator.reconcile.status.situation import Situation
from hetero_operator.reconcile.status.stored import stored_conditions
from hetero_operator.reconcile.status.text import bounded, parsed_time

_GIVEN_UP: Final = frozenset({Reason.GROUP_FAILED, Reason.RESTART_BUDGET_EXHAUSTED})
_WITHOUT_DEADLINE: Final = frozenset({Reason.ROLLING_OUT, Reason.FETCHING_MODEL, Reason.SCHEDULING_GATED})
_OF_THE_JUDGEMENT: Final = frozenset({ConditionType.PROGRESSING, ConditionType.DEGRADED})


def progressing(situation: Situation, blockers: Blockers, conditions: Mapping[str, Condition]) -> Finding:
    """`conditions`: all the others, as this report tells them."""
    refused = situation.plan.refusal
    if refused and (blockers.is_serving or blockers.idle is not None):
        return Finding(FALSE, situation.plan.refusal_reason, bounded("; ".join(refused)))
    failure = worst_failure(situation.outcome.failures)
    if failure is not None:
        return failed_write(failure, FALSE)
    if situation.outcome.failures:
        return failed_write(situation.outcome.failures[0], TRUE)
    if blockers.idle is not None:
        return _toward_nothing(situation, blockers.idle)
    if blockers.is_serving:
        return Finding(FALSE, Reason.COMPLETE, "Everything is as asked for.")
    return _toward_serving(situation, blockers, conditions)


def deadline(situation: Situation, conditions: Mapping[str, Condition]) -> datetime | None:
    """When it is too late; None: nothing has begun."""
    if situation.basis is None:
        return None
    recovery = situation.basis.spec.recovery
    latest = max(_movements(situation, conditions), default=None)
    limit = timedelta(seconds=recovery.startup_timeout_seconds + recovery.rendezvous_timeout_seconds)
    return None if latest is None else latest + limit


def _toward_nothing(situation: Situation, idle: Finding) -> Finding:
    if situation.observed.pods and situation.basis is not None:
        return Finding(TRUE, Reason.STOPPING, "Pods are ending.")
    return Finding(FALSE, idle.reason, idle.message)


def _toward_serving(situation: Situation, blockers: Blockers, conditions: Mapping[str, Condition]) -> Finding:
    cause = first(blockers.causes)
    finding = blockers.finding(status=TRUE)
    if cause is not None and cause.reason in _GIVEN_UP:
        return blockers.finding(status=FALSE)
    if not situation.plan.idle or (cause is not None and cause.reason in _WITHOUT_DEADLINE):
        return finding
    end = deadline(situation, conditions)
    return finding if end is None or situation.observed.now < end else _too_late(situation, cause)


def _too_late(situation: Situation, cause: Cause | None) -> Finding:
    assert situation.basis is not None
    recovery = situation.basis.spec.recovery
    limit = recovery.startup_timeout_seconds + recovery.rendezvous_timeout_seconds
    words = f"Nothing moved for {limit} s"
    message = f"{words}; {cause.message}" if cause is not None else f"{words}."
    return Finding(FALSE, Reason.PROGRESS_DEADLINE_EXCEEDED, bounded(message))


def _movements(situation: Situation, conditions: Mapping[str, Condition]) -> Iterator[datetime]:
    """Times at which something moved."""
    texts = [item.last_transition_time for kind, item in conditions.items() if kind not in _OF_THE_JUDGEMENT]
    before = stored_conditions(situation.stored).get(ConditionType.PROGRESSING)
    if before is not None and before.status is TRUE:
        texts.append(before.last_transition_time)
    for pod in situation.observed.pods:
        texts.append(str(pod["metadata"].get("creationTimestamp", "")))
        initialized = condition(pod, "Initialized")
        if initialized.get("status") == "True":
            texts.append(str(initialized.get("lastTransitionTime", "")))
    yield from (time for text in texts if (time := parsed_time(text)) is not None)
