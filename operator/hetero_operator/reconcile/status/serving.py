"""What can be said to serve: the whole group, and each rank.

A gateway says it in this very look, of ranks that it talks to in one epoch. Kubelets probe every few seconds, so they
are asked only about what no gateway speaks of.
"""

from __future__ import annotations

from hetero_api.group_state import GroupState
from hetero_operator.reconcile.model import ObservedRank
from hetero_operator.reconcile.names import RANK_CONTAINER
from hetero_operator.reconcile.status.expected import ExpectedPod
from hetero_operator.reconcile.status.pods import is_ready, is_up
from hetero_operator.reconcile.status.situation import FORMED_STATES, Situation


def is_serving(situation: Situation) -> bool:
    """Whether requests are served, as far as can be seen: the gateway says so of every rank, and all pods run."""
    answer, basis = situation.answer, situation.basis
    if answer is None or basis is None or not situation.runs or not situation.is_gateway_in_service:
        return False
    if not (answer.state is GroupState.READY and answer.serving and not answer.failed and is_formed(situation)):
        return False
    pods = [situation.rank_pods.get(pod.name) for pod in situation.expected]
    all_run = all(pod is not None and is_up(pod, RANK_CONTAINER) and not situation.is_outdated(pod) for pod in pods)
    return all_run and answer.stalled_s <= basis.spec.recovery.step_timeout_seconds


def is_formed(situation: Situation) -> bool:
    """Whether the gateway says that all expected ranks are in one epoch."""
    answer = situation.answer
    if answer is None or answer.state not in FORMED_STATES or not is_complete(situation, answer.ranks):
        return False
    return all(situation.has_joined(pod) for pod in situation.expected)


def is_rank_ready(situation: Situation, expected: ExpectedPod) -> bool:
    """Whether a pod's ranks are ready: by the gateway's word, which is this look's; without it by the last probe."""
    pod = situation.rank_pods.get(expected.name)
    if pod is None or situation.is_outdated(pod):
        return False
    if situation.answer is None:
        return is_ready(pod)
    return situation.has_joined(expected) and (computes(situation, expected) or is_ready(pod))


def computes(situation: Situation, expected: ExpectedPod) -> bool:
    """Whether a pod's ranks run and are of a group that is ready: nobody waits for them, whatever was probed last."""
    pod, answer = situation.rank_pods.get(expected.name), situation.answer
    if pod is None or answer is None or answer.state is not GroupState.READY:
        return False
    return is_up(pod, RANK_CONTAINER) and situation.has_joined(expected)


def is_complete(situation: Situation, ranks: tuple[ObservedRank, ...]) -> bool:
    """Whether the gateway speaks of exactly the ranks that we expect."""
    return len(ranks) == sum(pod.num_ranks for pod in situation.expected)
