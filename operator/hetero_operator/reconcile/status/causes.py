"""Causes that block the group, named by rank, pod and node.

The worst comes first (reasons.Level); among equals the first in rank order, then the gateway, then the group as a
whole. So the report names the one rank that crashed, not the three that wait for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from hetero_api.group_state import GroupState
from hetero_api.spec import HeteroInferenceSpec
from hetero_operator.reconcile import budget
from hetero_operator.reconcile.model import GatewayReport, Object
from hetero_operator.reconcile.names import GATEWAY_CONTAINER
from hetero_operator.reconcile.status.containers import Surroundings, Warnings, creation_warning
from hetero_operator.reconcile.status.pods import ExpectedPod, container_status, is_up, node_loss, node_of, pod_trouble
from hetero_operator.reconcile.status.reasons import OF_GATEWAY, Level, Reason, Trouble, absent, broken
from hetero_operator.reconcile.status.situation import Situation, computes, is_complete, is_serving
from hetero_operator.reconcile.status.text import bounded, steady

GATEWAY: Final = "gateway"
GROUP: Final = "group"
_DRAINING: Final = absent(Reason.DRAINING, "the gateway finishes what it has, and takes no more")
_TROUBLES_BY_STATE: Final = {
    GroupState.DRAINING: _DRAINING,
    GroupState.CLOSED: _DRAINING,
    GroupState.ASLEEP: absent(
        Reason.ASLEEP, "sleeps, as an administrator asked: it has given up memory and refuses requests"
    ),
    GroupState.FORMING: Trouble(Level.APART, Reason.FORMING, "ranks meet"),
    GroupState.LOADING: Trouble(Level.APART, Reason.LOADING_MODEL, "ranks load the model and warm up"),
}


@dataclass(frozen=True, slots=True)
class Cause:
    """A trouble and what it is the trouble of."""

    subject: str
    trouble: Trouble

    @property
    def level(self) -> Level:
        """Severity of its trouble."""
        return self.trouble.level

    @property
    def reason(self) -> Reason:
        """Its reason."""
        return self.trouble.reason

    @property
    def message(self) -> str:
        """Its message, which begins with the subject."""
        return bounded(f"{self.subject}: {self.trouble.words}")


def first(causes: tuple[Cause, ...]) -> Cause | None:
    """Return the worst cause, the first of equals, None if there is none."""
    return min(causes, key=lambda cause: cause.level, default=None)


def all_causes(situation: Situation) -> tuple[Cause, ...]:
    """Return every trouble, in the module's order. There may be some while the group serves."""
    if situation.basis is None or not situation.basis.runs:
        return ()
    causes = [
        *_budget_causes(situation, situation.basis.spec),
        *(cause for pod in situation.expected if (cause := _rank_cause(situation, pod)) is not None),
        *_gateway_causes(situation),
    ]
    if situation.answer is not None:
        causes += _group_causes(situation, situation.answer, situation.basis.spec)
    return tuple(causes)


def rank_trouble(situation: Situation, expected: ExpectedPod) -> Trouble | None:
    """Return why a rank's pod is not ready, None when its kubelet calls it ready."""
    pod = situation.rank_pods.get(expected.name)
    if pod is None:
        return _missing_rank(situation, expected)
    if situation.is_outdated(pod):
        return absent(Reason.ROLLING_OUT, "is of an earlier spec")
    return _pod_trouble(situation, pod, main=expected.container, is_joined=situation.has_joined(expected))


def _budget_causes(situation: Situation, spec: HeteroInferenceSpec) -> Iterator[Cause]:
    """Yield a budget that is used up, while ranks wait or still break."""
    restarts, recovery = situation.restarts, spec.recovery
    troubles = (rank_trouble(situation, pod) for pod in situation.expected)
    again = restarts.next_attempt_time
    is_used_up = budget.is_exhausted(restarts, spec) and not is_serving(situation)
    # An attempt that is under way, and did not fail yet, is reported like any start.
    if not is_used_up or not (again or any(item is not None and item.level is Level.BROKEN for item in troubles)):
        return
    words = (
        f"ranks restarted more than spec.recovery.maxRestarts ({recovery.max_restarts}) times within "
        f"{recovery.window_seconds} s"
    )
    attempt = f"; they are started again at {again}" if again else ""
    last = f"; the last was {restarts.last_reason}" if restarts.last_reason else ""
    yield Cause(GROUP, broken(Reason.RESTART_BUDGET_EXHAUSTED, f"{words}{attempt}{last}"))


def _rank_cause(situation: Situation, expected: ExpectedPod) -> Cause | None:
    pod = situation.rank_pods.get(expected.name)
    trouble = rank_trouble(situation, expected)
    if trouble is None or trouble.level is Level.UNREADY:
        trouble = _membership_trouble(situation, expected) or trouble
    if trouble is None or (trouble.level is Level.UNREADY and computes(situation, expected)):
        return None
    return Cause(expected.subject(node_of(pod) if pod else ""), trouble)


def _membership_trouble(situation: Situation, expected: ExpectedPod) -> Trouble | None:
    """Return the gateway's report about the ranks of a pod that runs."""
    if situation.answer is None or situation.answer.state is GroupState.ABORTED:
        # An aborted group tells for itself whom it waits for.
        return None
    if not situation.has_joined(expected):
        words = "runs, and has not joined the gateway yet"
        return Trouble(Level.APART, Reason.WAITING_FOR_RANKS, words + _refusal(situation.answer))
    if situation.answer.state is GroupState.LOADING and not situation.has_loaded(expected):
        return Trouble(Level.APART, Reason.LOADING_MODEL, "has not loaded its part of the model yet")
    return None


def _refusal(answer: GatewayReport) -> str:
    """Return why the gateway refused a rank, which it knows by its address only."""
    _, refused, why = answer.group.reason.partition(" was refused: ")
    return f"; the gateway refused one: {steady(why)}" if refused else ""


def _missing_rank(situation: Situation, expected: ExpectedPod) -> Trouble:
    workload = situation.statefulset(expected.rank_set)
    if workload is not None:
        said = creation_warning(_warnings(situation, workload))
        if said:
            return broken(Reason.POD_CREATION_FAILED, f"cannot be created: {said}")
    return absent(Reason.STARTING, "its pod is not there yet")


def _gateway_causes(situation: Situation) -> Iterator[Cause]:
    pod = situation.gateway_pod
    if pod is None:
        yield Cause(GATEWAY, _missing_gateway(situation))
        return
    node = node_of(pod)
    name = pod["metadata"]["name"]
    subject = f"{GATEWAY} (pod {name}, node {node})" if node else f"{GATEWAY} (pod {name})"
    if situation.is_outdated(pod):
        yield Cause(subject, absent(Reason.ROLLING_OUT, "is of an earlier spec"))
        return
    trouble = _pod_trouble(situation, pod, main=GATEWAY_CONTAINER, is_joined=situation.answer is not None)
    if trouble is not None:
        reason = OF_GATEWAY.get(trouble.reason, trouble.reason)
        yield Cause(subject, Trouble(trouble.level, reason, trouble.words, trouble.is_vague))
    if situation.answer is None and is_up(pod, GATEWAY_CONTAINER):
        yield Cause(subject, _silent_gateway(situation, pod))


def _silent_gateway(situation: Situation, pod: Object) -> Trouble:
    """Return the trouble of a gateway that runs and does not answer; before its startup probe that is expected."""
    said = steady(situation.probe_error)
    if said and container_status(pod, GATEWAY_CONTAINER).get("started"):
        return Trouble(Level.APART, Reason.GATEWAY_UNREACHABLE, f"does not answer: {said}")
    return absent(Reason.STARTING, "runs, and does not answer yet")


def _missing_gateway(situation: Situation) -> Trouble:
    workload = situation.deployment()
    conditions = ((workload or {}).get("status") or {}).get("conditions") or ()
    failure: dict[str, Any] = next(
        (item for item in conditions if item.get("type") == "ReplicaFailure" and item.get("status") == "True"), {}
    )
    if failure:
        return broken(Reason.POD_CREATION_FAILED, f"cannot be created: {steady(str(failure.get('message') or ''))}")
    return absent(Reason.STARTING, "its pod is not there yet")


def _group_causes(situation: Situation, answer: GatewayReport, spec: HeteroInferenceSpec) -> Iterator[Cause]:
    trouble = _group_trouble(answer, spec.recovery.step_timeout_seconds)
    if trouble is not None:
        yield Cause(GROUP, trouble)
    elif not (answer.serving and answer.takes_requests and is_complete(situation, answer.group.ranks)):
        yield Cause(GROUP, Trouble(Level.UNREADY, Reason.FORMING, "is not serving yet"))


def _group_trouble(answer: GatewayReport, step_timeout_s: int) -> Trouble | None:
    said = steady(answer.group.reason)
    if answer.group.failed:
        return broken(Reason.GROUP_FAILED, said or "failed for good")
    if answer.group.stalled_s > step_timeout_s:
        return broken(
            Reason.RANK_HUNG, f"a step is out for longer than spec.recovery.stepTimeoutSeconds ({step_timeout_s} s)"
        )
    if answer.state is GroupState.ABORTED:
        return broken(_reason_of_abort(said), said or "the last epoch ended")
    if answer.state is GroupState.NEW:
        # Its ranks tell more where they can.
        return Trouble(Level.UNREADY, Reason.WAITING_FOR_RANKS, said or "waits for ranks")
    return None if answer.takes_requests else _TROUBLES_BY_STATE.get(answer.state)


def _reason_of_abort(said: str) -> Reason:
    """Return the reason of an abort: the gateway names the field whose time ran out."""
    if "rendezvousTimeoutSeconds" in said:
        return Reason.RENDEZVOUS_TIMEOUT
    return Reason.RANK_HUNG if "stepTimeoutSeconds" in said else Reason.EPOCH_ENDED


def _pod_trouble(situation: Situation, pod: Object, *, main: str, is_joined: bool) -> Trouble | None:
    observed = situation.observed
    around = Surroundings(observed.now, _warnings(situation, pod), is_joined)
    return pod_trouble(pod, around, main=main, loss=node_loss(node_of(pod), observed.nodes))


def _warnings(situation: Situation, item: Object) -> Warnings:
    return situation.observed.pod_events.get(item["metadata"]["uid"], ())
