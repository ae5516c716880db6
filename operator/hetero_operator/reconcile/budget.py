"""The budget of restarts: how often ranks restarted, and pools that have to wait before they try again.

The kubelet restarts containers and StatefulSets replace pods; the operator counts. It knows what it counted by
`status.restarts.seen`: of each pod its uid and how often its containers for ranks had restarted. A pod that is seen for
the first time counts nothing, nor does anything that the operator itself brought about: a roll-out, a suspension, a
wait. Nor does a pod that was deleted or evicted, as when its node is drained: only one that failed by itself.

Beyond `maxRestarts` within the window the budget is used up. Containers that crash in place are left to the kubelet and
its back-off all the same: their pods and logs stay. But pods that fail as a whole, e.g. by a TopologyAffinityError, are
replaced by a StatefulSet at once, again and again: a pool of such pods gets none until the next attempt, and attempts
come in gaps that double from 30 s to an hour.

The window begins with its first restart. Once used up, a budget is whole again after a window without a restart. A new
revision (and with it restartedAt) and a suspension start over.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from hetero_api.contract import LABEL_POOL, LABEL_REVISION
from hetero_api.spec import HeteroInferenceSpec, RecoverySpec
from hetero_api.status import RestartsStatus, SeenRestarts
from hetero_operator.reconcile.inventory import STATEFUL_SET, Inventory, is_leaving, label_of
from hetero_operator.reconcile.model import Object, Observed
from hetero_operator.reconcile.names import Names
from hetero_operator.reconcile.rank_sets import rank_sets
from hetero_operator.reconcile.status.pods import (
    ExpectedPod,
    container_status,
    end_trouble,
    expected_pods,
    failed_by_itself,
    has_ended,
    latest_ending,
    rank_pods,
    status_of,
)
from hetero_operator.reconcile.status.text import parsed_time, stored_status, timestamp

FIRST_GAP_S: Final = 30
LONGEST_GAP_S: Final = 3600


def held_pools(observed: Observed, spec: HeteroInferenceSpec, inventory: Inventory, *, revision: str) -> frozenset[str]:
    """Return the sets of rank pods that get none before the next attempt; no set that only waits for something."""
    runs = spec.replicas > 0 and not spec.suspend
    restarts = account(observed, spec, inventory, revision=revision, runs=runs)
    next_attempt = parsed_time(restarts.next_attempt_time)
    if next_attempt is None or next_attempt <= observed.now:
        return frozenset()
    seen = {item.pod: item for item in stored_status(observed.resource).restarts.seen}
    failing = _failing_pools(_pods_of(observed, revision), seen, _failed_pods_of(observed, revision))
    return _without_pods(observed, spec, inventory) | failing


def account(
    observed: Observed, spec: HeteroInferenceSpec, inventory: Inventory, *, revision: str, runs: bool
) -> RestartsStatus:
    """Return the restarts as of this look. `revision` and `runs` are those of the ranks that should be there."""
    stored = stored_status(observed.resource)
    if not runs:
        return RestartsStatus()
    pods, failed_pods = _pods_of(observed, revision), _failed_pods_of(observed, revision)
    waiting = _without_pods(observed, spec, inventory)
    is_new = stored.revision != revision
    before = RestartsStatus() if is_new else _renewed(stored.restarts, spec.recovery, observed.now, waiting=waiting)
    expected = expected_pods(Names.of(observed), spec)
    seen = {item.pod: item for item in before.seen}
    by_pod = _by_pod(expected)
    news = [
        item
        for name, members in by_pod.items()
        if (item := _restart(members, pods.get(name), seen.get(name), failed=failed_pods.get(name))) is not None
    ]
    after = before.model_copy(update={"seen": _seen(by_pod, pods, seen, waiting=waiting)})
    counted = _explained(_counted(after, news, observed.now) if news else after, expected, pods)
    is_too_much = is_exhausted(counted, spec) and counted.next_attempt_time is None
    # A pool may wait already by a plan of this very look, which no report has shown yet.
    if not is_too_much or not (waiting or _failing_pools(pods, seen, failed_pods)):
        return counted
    return _postponed(counted, observed.now)


def is_exhausted(restarts: RestartsStatus, spec: HeteroInferenceSpec) -> bool:
    """Return whether there were more restarts than allowed, and no window without one since."""
    return restarts.count > spec.recovery.max_restarts


def next_change(restarts: RestartsStatus, spec: HeteroInferenceSpec) -> datetime | None:
    """Return when time alone changes the account, None if it does not."""
    return parsed_time(restarts.next_attempt_time) or _end_of_window(restarts, spec.recovery)


@dataclass(frozen=True, slots=True)
class _Restart:
    """Restarts of one pod's ranks since the last look."""

    rank: int
    count: int
    reason: str
    time: str


def _by_pod(expected: Iterable[ExpectedPod]) -> dict[str, list[ExpectedPod]]:
    """Return what is expected of each pod, by its name: several containers of the one pod of all ranks."""
    found: dict[str, list[ExpectedPod]] = {}
    for item in expected:
        found.setdefault(item.name, []).append(item)
    return found


def _restart(
    members: Sequence[ExpectedPod], pod: Object | None, before: SeenRestarts | None, *, failed: Object | None
) -> _Restart | None:
    """Return the restarts of one pod since `before`, with the reason of the container that ended last.

    `failed` is the pod that it replaced, if that had failed by itself.
    """
    if pod is None or before is None:
        return None
    count = _container_restarts(pod, members)
    is_same = before.uid == pod["metadata"]["uid"]
    more = count - before.count if is_same else count + (failed is not None)
    if more <= 0:
        return None
    last = max(members, key=lambda item: _ended_at(pod, item))
    ending = latest_ending(pod, last.container)
    if has_ended(pod):
        words = end_trouble(pod, last.container).words
    elif ending is not None:
        words = str(ending)
    else:
        words = end_trouble(failed, last.container).words if failed is not None else "its container was restarted"
    return _Restart(
        rank=last.first_rank, count=more, reason=f"{last.subject()}: {words}", time=ending.finished_at if ending else ""
    )


def _ended_at(pod: Object, expected: ExpectedPod) -> str:
    """Return when a container ended last, as text that sorts by time; "" when it never did."""
    ending = latest_ending(pod, expected.container)
    return ending.finished_at if ending is not None else ""


def _container_restarts(pod: Object, members: Iterable[ExpectedPod]) -> int:
    return sum(int(container_status(pod, item.container).get("restartCount", 0)) for item in members)


def _seen(
    by_pod: Mapping[str, Sequence[ExpectedPod]],
    pods: Mapping[str, Object],
    seen: Mapping[str, SeenRestarts],
    *,
    waiting: Collection[str],
) -> list[SeenRestarts]:
    """Return the pods that the count includes from now on; none of sets that wait, whose pods we replace."""
    entries = []
    for name, members in by_pod.items():
        if members[0].rank_set in waiting:
            continue
        pod, before = pods.get(name), seen.get(name)
        if pod is None or (before is None and is_leaving(pod)):
            entries += [before] if before else []
        else:
            count = _container_restarts(pod, members)
            entries.append(SeenRestarts(pod=name, uid=pod["metadata"]["uid"], count=count))
    return entries


def _renewed(
    restarts: RestartsStatus, recovery: RecoverySpec, now: datetime, *, waiting: Collection[str]
) -> RestartsStatus:
    """Return the account before this look's restarts.

    An attempt has begun once no pool waits; a window that is over is forgotten.
    """
    attempt = parsed_time(restarts.next_attempt_time)
    if attempt is not None:
        if now < attempt or waiting:
            return restarts
        restarts = restarts.model_copy(update={"window_start": timestamp(attempt), "next_attempt_time": None})
    end = _end_of_window(restarts, recovery)
    if end is not None and now >= end:
        return restarts.model_copy(update={"count": 0, "window_start": None, "attempts": 0})
    return restarts


def _end_of_window(restarts: RestartsStatus, recovery: RecoverySpec) -> datetime | None:
    """Return when the count is forgotten, None while there is none."""
    begin, last = parsed_time(restarts.window_start), parsed_time(restarts.last_time)
    if begin is None:
        return None
    if restarts.count > recovery.max_restarts and last is not None:
        begin = max(begin, last)
    return begin + timedelta(seconds=recovery.window_seconds)


def _counted(restarts: RestartsStatus, news: Collection[_Restart], now: datetime) -> RestartsStatus:
    last = min(news, key=lambda item: item.rank)
    update = {
        "count": restarts.count + sum(item.count for item in news),
        "window_start": restarts.window_start or timestamp(now),
        "last_rank": last.rank,
        "last_reason": last.reason,
        "last_time": last.time or timestamp(now),
    }
    return restarts.model_copy(update=update)


def _explained(
    restarts: RestartsStatus, expected: Collection[ExpectedPod], pods: Mapping[str, Object]
) -> RestartsStatus:
    """Return the account with the message of a failed pod, while that exists: its controller soon replaces it."""
    failed = next((item for item in expected if item.name in pods and failed_by_itself(pods[item.name])), None)
    if failed is None or not restarts.count:
        return restarts
    words = end_trouble(pods[failed.name], failed.container).words
    update = {"last_rank": failed.first_rank, "last_reason": f"{failed.subject()}: {words}"}
    return restarts.model_copy(update=update)


def _postponed(restarts: RestartsStatus, now: datetime) -> RestartsStatus:
    """Return the account with the next attempt put off, for longer than the last one was."""
    attempts = restarts.attempts + 1
    next_attempt = timestamp(now + timedelta(seconds=gap_s(attempts)))
    return restarts.model_copy(update={"attempts": attempts, "next_attempt_time": next_attempt})


def gap_s(attempts: int) -> int:
    """Return seconds of wait before an attempt; the first is 1."""
    # Beyond a few attempts the power only grows what the cap cuts off.
    doublings = min(attempts - 1, 16)
    return min(LONGEST_GAP_S, FIRST_GAP_S << doublings)


def _without_pods(observed: Observed, spec: HeteroInferenceSpec, inventory: Inventory) -> frozenset[str]:
    """Return the sets of rank pods whose StatefulSet asks for none."""
    names = Names.of(observed)
    workloads = {
        ranks.name: inventory.named(STATEFUL_SET, names.rank_set(ranks.name), group="apps") for ranks in rank_sets(spec)
    }
    return frozenset(name for name, item in workloads.items() if item is not None and item["spec"]["replicas"] == 0)


def _pods_of(observed: Observed, revision: str) -> dict[str, Object]:
    """Return the rank pods of a revision by name."""
    return {name: pod for name, pod in rank_pods(observed).items() if label_of(pod, LABEL_REVISION) == revision}


def _failed_pods_of(observed: Observed, revision: str) -> dict[str, Object]:
    """Return the pods of a revision that had failed by themselves and are gone, by name."""
    found = {pod["metadata"]["name"]: pod for pod in observed.failed_pods if failed_by_itself(pod)}
    return {name: pod for name, pod in found.items() if label_of(pod, LABEL_REVISION) == revision}


def _failing_pools(
    pods: Mapping[str, Object], seen: Mapping[str, SeenRestarts], failed: Collection[str]
) -> frozenset[str]:
    """Return the sets whose pods fail as a whole and are replaced at once; `seen` is from the last look.

    A StatefulSet's controller replaces a pod within milliseconds, so the failed one is seldom visible: `failed` names
    those that are gone. A pod that is Pending since the last look waits for a node, an image or a volume, and would
    lose its turn.
    """
    new = {name for name, pod in pods.items() if name in seen and seen[name].uid != pod["metadata"]["uid"]}
    failing = {name for name, pod in pods.items() if failed_by_itself(pod) or (name in new and name in failed)}
    waiting = {name for name, pod in pods.items() if name not in new and status_of(pod).get("phase") == "Pending"}
    set_of = {name: label_of(pod, LABEL_POOL) for name, pod in pods.items()}
    return frozenset(set_of[name] for name in failing) - {set_of[name] for name in waiting}
