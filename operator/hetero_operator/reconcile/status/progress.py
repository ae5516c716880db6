"""The condition Progressing, and when to look again.

True   something is under way, or a failure that may pass is being tried again
False  everything is as asked for; or only a person can help: the spec is refused, the gateway gave up, the budget is
       used up and waits; or nothing moved for so long that nobody should count on it

"So long" is startupTimeoutSeconds and rendezvousTimeoutSeconds together, since the last thing that moved: a condition,
a pod that was created, a model that was fetched. A fetch may take any time, and so may a load, which the gateway ends
when it no longer gets on. The next look is at the next time at which time alone changes something, and often while
something is awaited.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from typing import Final

from hetero_api.spec import RecoverySpec
from hetero_api.status import Condition, ConditionType
from hetero_operator.reconcile import budget
from hetero_operator.reconcile.deletions import next_lost_pod
from hetero_operator.reconcile.inventory import is_leaving
from hetero_operator.reconcile.model import GatewayReport
from hetero_operator.reconcile.status.causes import Cause, first
from hetero_operator.reconcile.status.findings import FALSE, TRUE, Blockers, Finding, failed_write, worst_failure
from hetero_operator.reconcile.status.pods import NodeLoss, condition, is_ready, node_loss, node_of
from hetero_operator.reconcile.status.reasons import Reason
from hetero_operator.reconcile.status.situation import Situation
from hetero_operator.reconcile.status.text import bounded, parsed_time, stored_conditions

_GIVEN_UP: Final = frozenset({Reason.GROUP_FAILED, Reason.RESTART_BUDGET_EXHAUSTED})
_WITHOUT_DEADLINE: Final = frozenset(
    {Reason.ROLLING_OUT, Reason.FETCHING_MODEL, Reason.LOADING_MODEL, Reason.SCHEDULING_GATED}
)
_OF_NO_POD: Final = frozenset(
    {
        ConditionType.PROGRESSING, ConditionType.DEGRADED, ConditionType.ACCEPTED, ConditionType.SUSPENDED,
        ConditionType.EXPOSED, ConditionType.ROUTER_READY,
    }
)  # fmt: skip
"""Conditions whose change moves no pod. Times of most of them are not kept for each of several replicas."""
SHORTEST_POLL_S: Final = 2.0
LONGEST_POLL_S: Final = 10.0
IDLE_POLL_S: Final = 30.0
PATIENCE: Final = timedelta(minutes=30)
"""After this time without a change a look every IDLE_POLL_S is enough."""
_GROWTH: Final = 0.1
"""Share of the time waited so far that the next wait lasts."""
_SLACK_S: Final = 0.5
"""Look a little after the moment, not a little before."""


def progressing(situation: Situation, blockers: Blockers, conditions: Mapping[str, Condition]) -> Finding:
    """Return the condition Progressing; `conditions` are all the others of this report."""
    refused = situation.plan.refusal
    if refused and (blockers.is_serving or blockers.idle is not None):
        return Finding(FALSE, situation.plan.refusal_reason, bounded("; ".join(refused)))
    failure = worst_failure(situation.outcome.failures)
    if failure is not None:
        return failed_write(failure, FALSE)
    if situation.outcome.failures:
        return failed_write(situation.outcome.failures[0], TRUE)
    if blockers.idle is not None:
        if situation.live_pods and situation.basis is not None:
            return Finding(TRUE, Reason.STOPPING, "Pods are ending.")
        return Finding(FALSE, blockers.idle.reason, blockers.idle.message)
    if blockers.is_serving:
        return Finding(FALSE, Reason.COMPLETE, "Everything is as asked for.")
    return _toward_serving(situation, blockers, conditions)


def deadline(situation: Situation, conditions: Mapping[str, Condition]) -> datetime | None:
    """Return when it is too late, None while nothing has begun."""
    if situation.basis is None:
        return None
    latest = max(_movements(situation, conditions), default=None)
    return None if latest is None else latest + timedelta(seconds=_limit_s(situation.basis.spec.recovery))


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
    words = f"Nothing moved for {_limit_s(situation.basis.spec.recovery)} s"
    message = f"{words}; {cause.message}" if cause is not None else f"{words}."
    return Finding(FALSE, Reason.PROGRESS_DEADLINE_EXCEEDED, bounded(message))


def _limit_s(recovery: RecoverySpec) -> int:
    return recovery.startup_timeout_seconds + recovery.rendezvous_timeout_seconds


def _movements(situation: Situation, conditions: Mapping[str, Condition]) -> Iterator[datetime]:
    """Yield times at which something moved."""
    texts = [item.last_transition_time for kind, item in conditions.items() if kind not in _OF_NO_POD]
    before = stored_conditions(situation.stored).get(ConditionType.PROGRESSING)
    if before is not None and before.status is TRUE:
        texts.append(before.last_transition_time)
    for pod in situation.observed.pods:
        texts.append(str(pod["metadata"].get("creationTimestamp", "")))
        initialized = condition(pod, "Initialized")
        if initialized.get("status") == "True":
            texts.append(str(initialized.get("lastTransitionTime", "")))
    yield from (time for text in texts if (time := parsed_time(text)) is not None)


def look_again_s(situation: Situation, blockers: Blockers, conditions: Mapping[str, Condition]) -> float | None:
    """Return seconds until the next look, None when nothing is awaited."""
    now = situation.observed.now
    waits = [(moment - now).total_seconds() + _SLACK_S for moment in _moments(situation, conditions) if moment > now]
    if _awaits(situation, blockers):
        waits.append(_poll_s(situation, conditions))
    return max(_SLACK_S, min(waits)) if waits else None


def _awaits(situation: Situation, blockers: Blockers) -> bool:
    """Return whether something may change unreported: the gateway's answer, or nodes.

    Everything else is watched, so a group that waits for capacity costs nothing, however many there are.
    """
    if blockers.idle is not None:
        return situation.basis is not None and bool(situation.live_pods)
    if blockers.is_serving and blockers.broken is None:
        return False
    return any(
        pod["spec"].get("nodeName") and (pod is situation.gateway_pod or is_leaving(pod) or not is_ready(pod))
        for pod in situation.observed.pods
    )


def _poll_s(situation: Situation, conditions: Mapping[str, Condition]) -> float:
    since = max(
        (time for item in conditions.values() if (time := parsed_time(item.last_transition_time))), default=None
    )
    waited = situation.observed.now - since if since is not None else timedelta()
    if waited > PATIENCE:
        return IDLE_POLL_S
    return min(LONGEST_POLL_S, max(SHORTEST_POLL_S, _GROWTH * waited.total_seconds()))


def _moments(situation: Situation, conditions: Mapping[str, Condition]) -> Iterator[datetime]:
    basis = situation.basis
    if basis is None:
        return
    candidates = [next_lost_pod(situation.observed, basis.spec)]
    candidates += [loss.certain_at for loss in _losses(situation)]
    candidates.append(situation.known_from)
    candidates.append(budget.next_change(situation.restarts, basis.spec))
    if conditions[ConditionType.PROGRESSING].status is TRUE and basis.runs:
        candidates.append(deadline(situation, conditions))
    limit_s = basis.spec.recovery.step_timeout_seconds
    candidates.append(situation.from_answer(lambda answer: _late_at(answer, situation.observed.now, limit_s)))
    yield from (moment for moment in candidates if moment is not None)


def _late_at(answer: GatewayReport, now: datetime, limit_s: float) -> datetime | None:
    """Return when the step that is out has taken too long; None if none is out, or it has already."""
    stalled_s = answer.group.stalled_s
    return None if stalled_s <= 0 or stalled_s >= limit_s else now + timedelta(seconds=limit_s - stalled_s)


def _losses(situation: Situation) -> Iterator[NodeLoss]:
    """Yield losses of the nodes of pods that do not report that they are ready."""
    for node in sorted(set(map(node_of, situation.observed.pods))):
        loss = node_loss(node, situation.observed.nodes)
        if loss is not None:
            yield loss
