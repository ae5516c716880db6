"""The status of several replicas: of each by itself, and of the whole.

The whole is ready when every replica that is asked for serves, whichever spec it has; which one that is, conditions
tell by the generation that they observed. A message about one replica begins with its ordinal. Places and speeds of the
whole are those of replica 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from hetero_api.status import Condition, ConditionStatus, ConditionType, GroupStatus, PoolStatus, RestartsStatus
from hetero_operator.reconcile.replicas import Course, Judged
from hetero_operator.reconcile.status.figures import figures
from hetero_operator.reconcile.status.findings import FALSE, TRUE, UNKNOWN, Blockers, Finding
from hetero_operator.reconcile.status.reasons import Level, Reason
from hetero_operator.reconcile.status.situation import Situation
from hetero_operator.reconcile.status.text import bounded

MAX_GROUP_MESSAGE_LENGTH: Final = 256
_OF_PODS: Final = (
    ConditionType.READY, ConditionType.SCHEDULED, ConditionType.MODEL_READY, ConditionType.GROUP_FORMED,
    ConditionType.GATEWAY_READY, ConditionType.NUMA_PINNED,
)  # fmt: skip
_SHARED: Final = (ConditionType.ACCEPTED, ConditionType.EXPOSED, ConditionType.ROUTER_READY)
_UNSCHEDULABLE: Final = frozenset({Reason.RANK_UNSCHEDULABLE, Reason.GATEWAY_UNSCHEDULABLE})
_OF_A_GROUP: Final = (*_OF_PODS, ConditionType.PROGRESSING, ConditionType.DEGRADED)


@dataclass(frozen=True, slots=True)
class Part:
    """One replica, reported by itself."""

    judged: Judged
    situation: Situation
    blockers: Blockers
    conditions: Mapping[str, Condition]

    @property
    def ordinal(self) -> int:
        """Its ordinal."""
        return self.judged.view.ordinal

    @property
    def awaits_nodes(self) -> bool:
        """Whether no node fits its new pods yet, and it is not late: an autoscaler may be adding one."""
        broken = {cause.reason for cause in self.blockers.causes if cause.level is Level.BROKEN}
        is_patient = self.conditions[ConditionType.PROGRESSING].status is TRUE
        return self.judged.course is Course.WANTED and is_patient and bool(broken) and broken <= _UNSCHEDULABLE

    @property
    def has_pods(self) -> bool:
        """Whether pods of it exist."""
        return bool(self.situation.live_pods)

    def finding(self, kind: ConditionType) -> Finding:
        """Return one of its conditions as a finding of the whole."""
        found = self.conditions[kind]
        is_idle = self.blockers.idle is not None
        message = found.message if is_idle else f"replica {self.ordinal}: {found.message}"
        return Finding(found.status, found.reason, bounded(message))


def whole_findings(parts: Sequence[Part]) -> dict[ConditionType, Finding]:
    """Return all conditions of the whole; `parts` are all replicas by ordinal, replica 0 at least."""
    asked = [part for part in parts if part.judged.is_asked_for]
    staying = [part for part in parts if part.judged.course is not Course.LEAVING]
    shared = {kind: _as_is(parts[0], kind) for kind in _SHARED}
    return {
        **{kind: _common(kind, asked) for kind in _OF_PODS},
        **shared,
        ConditionType.READY: _ready(asked),
        ConditionType.SUSPENDED: _suspended(parts),
        ConditionType.PROGRESSING: _progressing(parts, asked, staying),
        ConditionType.DEGRADED: _degraded(asked, staying),
    }


def is_rolling_out(parts: Sequence[Part]) -> bool:
    """Return whether a replica that is asked for waits for the spec as written."""
    return any(part.judged.course in (Course.KEPT, Course.DRAINING) for part in parts)


def whole_figures(parts: Sequence[Part]) -> dict[str, Any]:
    """Return the fields of HeteroInferenceStatus but its conditions."""
    asked = [part for part in parts if part.judged.is_asked_for]
    staying = [part for part in parts if part.judged.course is not Course.LEAVING]
    by_part = {part.ordinal: figures(part.situation, is_serving=part.blockers.is_serving) for part in staying}
    first = by_part[0]
    ready, size = (sum(by_part[part.ordinal].get(key, 0) for part in asked) for key in ("ready_ranks", "world_size"))
    return {
        **first,
        "replicas": sum(part.has_pods for part in parts),
        "ready_replicas": sum(part.blockers.is_serving for part in staying),
        "updated_replicas": sum(part.judged.is_updated for part in asked),
        "ready_ranks": ready,
        "world_size": size,
        "ranks": f"{ready}/{size}",
        "pools": _pools([by_part[part.ordinal].get("pools", []) for part in asked]),
        "restarts": _restarts([part.situation.restarts for part in staying]),
        "groups": [_group(part, by_part[part.ordinal]) for part in staying],
    }


def _as_is(part: Part, kind: ConditionType) -> Finding:
    found = part.conditions[kind]
    return Finding(found.status, found.reason, found.message)


def _common(kind: ConditionType, asked: Sequence[Part]) -> Finding:
    """Return what is true of all, else the first replica's finding that is not."""
    for status in (FALSE, UNKNOWN):
        for part in asked:
            if part.conditions[kind].status is status:
                return part.finding(kind)
    return _as_is(asked[0], kind)


def _ready(asked: Sequence[Part]) -> Finding:
    found = _common(ConditionType.READY, asked)
    serving = sum(part.blockers.is_serving for part in asked)
    if found.status is ConditionStatus.TRUE:
        return Finding(TRUE, Reason.SERVING, f"{serving} of {len(asked)} replicas serve requests.")
    if any(part.blockers.idle is not None for part in asked):
        return found
    return Finding(found.status, found.reason, bounded(f"{serving} of {len(asked)} replicas serve; {found.message}"))


def _suspended(parts: Sequence[Part]) -> Finding:
    found = _as_is(parts[0], ConditionType.SUSPENDED)
    if found.status is TRUE and any(part.has_pods for part in parts):
        return Finding(FALSE, Reason.STOPPING, f"{found.message} Pods are ending.")
    return found


def _stopped_at(asked: Sequence[Part], staying: Sequence[Part]) -> Part | None:
    """Return the replica that has the spec as written and is broken, while others wait for that spec."""
    if not is_rolling_out(asked):
        return None
    updated = (part for part in staying if part.judged.course is Course.WANTED and not part.awaits_nodes)
    return next((part for part in updated if part.conditions[ConditionType.DEGRADED].status is TRUE), None)


def _degraded(asked: Sequence[Part], staying: Sequence[Part]) -> Finding:
    kind, stopped = ConditionType.DEGRADED, _stopped_at(asked, staying)
    if stopped is not None:
        return _stop(stopped, TRUE, stopped.conditions[kind].reason)
    is_under_way = is_rolling_out(asked)
    judged = [part for part in staying if not (is_under_way and part.awaits_nodes)]
    for status in (TRUE, UNKNOWN):
        for part in judged:
            if part.conditions[kind].status is status:
                return part.finding(kind)
    return _as_is(judged[0], kind)


def _stop(stopped: Part, status: ConditionStatus, reason: str) -> Finding:
    said = stopped.finding(ConditionType.DEGRADED).message
    advice = "To go back, apply the earlier spec."
    return Finding(status, reason, bounded(f"The roll-out stopped at {said} {advice}"))


def _progressing(parts: Sequence[Part], asked: Sequence[Part], staying: Sequence[Part]) -> Finding:
    kind, stopped = ConditionType.PROGRESSING, _stopped_at(asked, staying)
    if parts[0].situation.plan.refusal:
        return _as_is(parts[0], kind)
    if stopped is not None:
        return _stop(stopped, FALSE, Reason.ROLLOUT_STOPPED)
    if is_rolling_out(asked):
        updated = sum(part.judged.is_updated for part in asked)
        return Finding(TRUE, Reason.ROLLING_OUT, f"{updated} of {len(asked)} replicas have the spec as written.")
    for part in staying:
        if part.conditions[kind].status is TRUE:
            return part.finding(kind)
    if len(staying) < len(parts):
        return Finding(TRUE, Reason.STOPPING, "Replicas that are not asked for are ending.")
    late = (part for part in staying if part.conditions[kind].reason != Reason.COMPLETE)
    return next((part.finding(kind) for part in late), _as_is(parts[0], kind))


def _pools(by_part: Sequence[Sequence[PoolStatus]]) -> list[PoolStatus]:
    """Return the sums over replicas, pool by pool."""
    counted = ("desired", "scheduled", "ready", "pinned")
    pools: dict[str, PoolStatus] = {}
    for pool in (pool for part in by_part for pool in part):
        known = pools.get(pool.name)
        sums = {key: getattr(known, key) + getattr(pool, key) for key in counted} if known else {}
        pools[pool.name] = pool.model_copy(update=sums)
    return list(pools.values())


def _restarts(accounts: Sequence[RestartsStatus]) -> RestartsStatus:
    """Return the restarts of all replicas together, with the last of them."""
    last = max(accounts, key=lambda account: account.last_time or "")
    starts, attempts = (
        sorted(time for account in accounts if (time := getattr(account, key)))
        for key in ("window_start", "next_attempt_time")
    )
    update: dict[str, Any] = {
        "count": sum(account.count for account in accounts),
        "attempts": sum(account.attempts for account in accounts),
        "window_start": starts[0] if starts else None,
        "next_attempt_time": attempts[0] if attempts else None,
        "seen": [],
    }
    return last.model_copy(update=update)


def _group(part: Part, found: Mapping[str, Any]) -> GroupStatus:
    kept = ("revision", "gateway_revision", "epoch", "ranks", "ready_ranks", "placement", "restarts")
    fields = {key: found[key] for key in kept if key in found}
    if "placement" in fields:
        fields["placement"] = fields["placement"].model_copy(update={"options": [], "reason": ""})
    conditions = [part.conditions[kind] for kind in _OF_A_GROUP]
    return GroupStatus(
        ordinal=part.ordinal,
        updated=part.judged.is_updated,
        reason=part.conditions[ConditionType.READY].reason,
        conditions=[
            item.model_copy(update={"message": bounded(item.message, MAX_GROUP_MESSAGE_LENGTH)}) for item in conditions
        ],
        **fields,
    )
