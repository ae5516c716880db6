"""When to look again: at the next time at which time alone changes something, and often while something is awaited."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from typing import Final

from hetero_api.status import Condition, ConditionType
from hetero_operator.reconcile import budget, lost_nodes
from hetero_operator.reconcile.ownership import is_leaving
from hetero_operator.reconcile.status import progress
from hetero_operator.reconcile.status.findings import TRUE, Blockers
from hetero_operator.reconcile.status.nodes import NodeLoss, node_loss
from hetero_operator.reconcile.status.pods import is_ready, node_of
from hetero_operator.reconcile.status.situation import Situation
from hetero_operator.reconcile.status.text import parsed_time

SHORTEST_POLL_S: Final = 2.0
LONGEST_POLL_S: Final = 10.0
IDLE_POLL_S: Final = 30.0
PATIENCE: Final = timedelta(minutes=30)
"""After this time without a change a look every IDLE_POLL_S is enough."""
_GROWTH: Final = 0.1
"""Share of the time waited so far that the next wait lasts."""
_SLACK_S: Final = 0.5
"""Look a little after the moment, not a little before."""


def look_again_s(situation: Situation, blockers: Blockers, conditions: Mapping[str, Condition]) -> float | None:
    """Seconds; None: nothing is awaited."""
    now = situation.observed.now
    waits = [(moment - now).total_seconds() + _SLACK_S for moment in _moments(situation, conditions) if moment > now]
    if _awaits(situation, blockers):
        waits.append(_poll_s(situation, conditions))
    return max(_SLACK_S, min(waits)) if waits else None


def _awaits(situation: Situation, blockers: Blockers) -> bool:
    """Whether something may change that nobody tells us of: what a gateway says, and how nodes are.

    Everything else is watched, so a group that waits for capacity costs nothing, however many there are.
    """
    if blockers.idle is not None:
        return situation.basis is not None and bool(situation.observed.pods)
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
    candidates = [lost_nodes.next_deletion(situation.observed, basis.spec)]
    candidates += [loss.certain_at for loss in _losses(situation)]
    candidates.append(budget.next_change(situation.restarts, basis.spec))
    if conditions[ConditionType.PROGRESSING].status is TRUE and basis.runs:
        candidates.append(progress.deadline(situation, conditions))
    if situation.answer is not None and situation.answer.stalled_s > 0:
        left_s = basis.spec.recovery.step_timeout_seconds - situation.answer.stalled_s
        candidates.append(situation.observed.now + timedelta(seconds=left_s))
    yield from (moment for moment in candidates if moment is not None)


def _losses(situation: Situation) -> Iterator[NodeLoss]:
    """Nodes of pods that do not say that they are ready."""
    for node in sorted(set(map(node_of, situation.observed.pods))):
        loss = node_loss(node, situation.observed.nodes)
        if loss is not None:
            yield loss
