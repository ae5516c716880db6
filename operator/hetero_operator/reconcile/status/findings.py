"""The conditions but Progressing, as this look finds them, without their times."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from hetero_api.status import Condition, ConditionStatus, ConditionType
from hetero_operator.reconcile.model import FailureKind, WriteFailure
from hetero_operator.reconcile.status import causes as found
from hetero_operator.reconcile.status.causes import GATEWAY, Cause
from hetero_operator.reconcile.status.pods import node_of
from hetero_operator.reconcile.status.reasons import MODEL_REASONS, Level, Reason
from hetero_operator.reconcile.status.situation import Situation, is_formed, is_serving
from hetero_operator.reconcile.status.text import bounded, counted, steady, stored_conditions

TRUE: Final = ConditionStatus.TRUE
FALSE: Final = ConditionStatus.FALSE
UNKNOWN: Final = ConditionStatus.UNKNOWN

_REASONS_OF_FAILURES: Final = {
    FailureKind.FOREIGN: Reason.NAME_CONFLICT,
    FailureKind.INVALID: Reason.APPLY_REJECTED,
    FailureKind.FORBIDDEN: Reason.APPLY_FORBIDDEN,
    FailureKind.TRANSIENT: Reason.API_UNAVAILABLE,
}


@dataclass(frozen=True, slots=True)
class Finding:
    """Content of a condition, without its times."""

    status: ConditionStatus
    reason: str
    message: str
    vague_about: str = ""
    """Begin of the message, when an earlier one that begins so and has the same reason may have said more."""


@dataclass(frozen=True, slots=True)
class Blockers:
    """Causes for which the group does not serve, or is broken although it does."""

    causes: tuple[Cause, ...]
    is_serving: bool
    idle: Finding | None
    """Finding of every condition about pods, when there are to be none."""
    is_silent: bool
    """Whether clients are sent to the gateway, and it does not answer us: who knows."""

    @classmethod
    def from_situation(cls, situation: Situation) -> Blockers:
        """Find the causes of a situation."""
        is_silent = situation.runs and situation.answer is None and situation.is_gateway_in_service
        return cls(found.all_causes(situation), is_serving(situation), _idle(situation), is_silent)

    @property
    def status(self) -> ConditionStatus:
        """Status of a condition that only the gateway could make true."""
        return UNKNOWN if self.is_silent and self.broken is None else FALSE

    @property
    def broken(self) -> Cause | None:
        """The first thing that failed."""
        return next((cause for cause in self.causes if cause.level is Level.BROKEN), None)

    def finding(self, causes: Iterable[Cause] | None = None, *, status: ConditionStatus = FALSE) -> Finding:
        """Return the worst of these causes, or of all, when there are none of these, as a finding."""
        cause = found.first(tuple(causes or ())) or found.first(self.causes)
        if cause is None:
            return Finding(status, Reason.STARTING, "The group is not serving yet.")
        return Finding(status, cause.reason, cause.message, f"{cause.subject}: " if cause.trouble.is_vague else "")


def findings(situation: Situation, blockers: Blockers) -> dict[ConditionType, Finding]:
    """Return all conditions but NUMAPinned, Degraded and Progressing."""
    return {
        ConditionType.READY: _ready(situation, blockers),
        ConditionType.ACCEPTED: _accepted(situation),
        ConditionType.SCHEDULED: blockers.idle or _scheduled(situation, blockers),
        ConditionType.MODEL_READY: blockers.idle or _model_ready(situation, blockers),
        ConditionType.GROUP_FORMED: blockers.idle or _group_formed(situation, blockers),
        ConditionType.GATEWAY_READY: blockers.idle or _gateway_ready(situation, blockers),
        ConditionType.SUSPENDED: _suspended(situation),
    }


def degraded(situation: Situation, blockers: Blockers) -> Finding:
    """Return whether something is broken that was asked for. Deadlines come later, from Progressing."""
    if situation.plan.refusal:
        return Finding(TRUE, situation.plan.refusal_reason, _refusal(situation))
    failure = worst_failure(situation.outcome.failures)
    if failure is not None:
        return failed_write(failure, TRUE)
    if blockers.broken is not None:
        return blockers.finding([blockers.broken], status=TRUE)
    if blockers.is_silent:
        return blockers.finding(status=UNKNOWN)
    return Finding(FALSE, Reason.AS_EXPECTED, "Nothing is broken.")


def worst_failure(failures: Iterable[WriteFailure]) -> WriteFailure | None:
    """Return the first write that the API server will refuse again, None if there is none."""
    return next((item for item in failures if item.kind is not FailureKind.TRANSIENT), None)


def failed_write(failure: WriteFailure, status: ConditionStatus) -> Finding:
    """Return a failed write as a finding."""
    said = steady(failure.message)
    message = f"{failure.ref.kind} {failure.ref.name} could not be written: {said}"
    return Finding(status, _REASONS_OF_FAILURES[failure.kind], bounded(message))


def _refusal(situation: Situation) -> str:
    return bounded("; ".join(situation.plan.refusal))


def _idle(situation: Situation) -> Finding | None:
    """Return the finding of all conditions about pods when there are to be none."""
    if situation.basis is None:
        if situation.plan.refusal:
            return Finding(FALSE, situation.plan.refusal_reason, _refusal(situation))
        return Finding(FALSE, Reason.STARTING, "Nothing is in force yet.")
    if situation.basis.runs:
        return None
    spec = situation.basis.spec
    if spec.suspend or spec.replicas > 0:
        return Finding(FALSE, Reason.SUSPENDED, "spec.suspend is true.")
    return Finding(FALSE, Reason.SCALED_TO_ZERO, "spec.replicas is 0.")


def _ready(situation: Situation, blockers: Blockers) -> Finding:
    if blockers.idle:
        return blockers.idle
    if blockers.is_serving:
        return Finding(
            TRUE, Reason.SERVING, f"{counted(_world_size(situation), 'rank')} in one epoch, requests served."
        )
    failure = worst_failure(situation.outcome.failures)
    if failure is not None and _lacks_pods(situation):
        return failed_write(failure, FALSE)
    return blockers.finding(status=blockers.status)


def _lacks_pods(situation: Situation) -> bool:
    """Return whether a failed write may be the reason why pods are missing."""
    names = set(situation.rank_pods)
    return situation.gateway_pod is None or not names >= {pod.name for pod in situation.expected}


def _accepted(situation: Situation) -> Finding:
    if situation.plan.refusal:
        return Finding(FALSE, situation.plan.refusal_reason, _refusal(situation))
    failure = worst_failure(situation.outcome.failures)
    if failure is not None:
        return failed_write(failure, FALSE)
    if situation.outcome.failures and not _was_accepted(situation):
        return failed_write(situation.outcome.failures[0], UNKNOWN)
    return Finding(TRUE, Reason.ACCEPTED, "The spec is in force.")


def _was_accepted(situation: Situation) -> bool:
    """Return whether this very spec was in force before: what failed now is only a repair."""
    before: Condition | None = stored_conditions(situation.stored).get(ConditionType.ACCEPTED)
    return before is not None and before.status is TRUE and before.observed_generation == situation.generation


def _suspended(situation: Situation) -> Finding:
    if situation.basis is None or situation.runs:
        return Finding(FALSE, Reason.NOT_SUSPENDED, "Pods are wanted.")
    idle = _idle(situation)
    assert idle is not None
    left = len(situation.observed.pods)
    if left:
        return Finding(FALSE, Reason.STOPPING, f"{idle.message} Pods are ending.")
    return Finding(TRUE, idle.reason, idle.message)


def _scheduled(situation: Situation, blockers: Blockers) -> Finding:
    unbound = {pod.subject() for pod in situation.expected if not _has_node(situation, pod.name)}
    causes = [cause for cause in blockers.causes if cause.subject in unbound]
    gateway = situation.gateway_pod
    if gateway is None or not node_of(gateway):
        causes += [cause for cause in blockers.causes if cause.subject.startswith(GATEWAY)]
    elif not unbound:
        return Finding(TRUE, Reason.SCHEDULED, "Every pod has a node.")
    return blockers.finding(causes)


def _has_node(situation: Situation, name: str) -> bool:
    pod = situation.rank_pods.get(name)
    return pod is not None and bool(node_of(pod))


def _model_ready(situation: Situation, blockers: Blockers) -> Finding:
    if situation.answer is not None and all(situation.has_loaded(pod) for pod in situation.expected):
        return Finding(TRUE, Reason.LOADED, "Every rank has its weights.")
    about_model = [cause for cause in blockers.causes if cause.reason in MODEL_REASONS]
    return blockers.finding(about_model, status=blockers.status)


def _group_formed(situation: Situation, blockers: Blockers) -> Finding:
    if is_formed(situation):
        return Finding(TRUE, Reason.FORMED, "All ranks are in one epoch.")
    return blockers.finding(status=blockers.status)


def _gateway_ready(situation: Situation, blockers: Blockers) -> Finding:
    if situation.answer is not None and situation.answer.serving and situation.is_gateway_in_service:
        return Finding(TRUE, Reason.SERVING, "The front door is open.")
    own = [cause for cause in blockers.causes if cause.subject.startswith(GATEWAY)]
    worst = found.first(tuple(own))
    # A gateway that only waits for its group has nothing of its own to tell.
    own = [] if worst is not None and worst.level is Level.UNREADY else own
    return blockers.finding(own, status=blockers.status)


def _world_size(situation: Situation) -> int:
    return situation.basis.spec.world_size if situation.basis else 0
