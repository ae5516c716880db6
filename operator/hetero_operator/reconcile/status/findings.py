"""The conditions but Progressing, as this look finds them, without their times.

NUMAPinned tells of the binding that CPU ranks read back from their kernels.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from hetero_api.contract import LEAST_LOCAL_MEMORY_PERCENT
from hetero_api.host.topology import NumaPolicy
from hetero_api.spec_pools import PoolSpec, PoolType
from hetero_api.status import Condition, ConditionStatus, ConditionType
from hetero_api.v1.admin_pb2 import RankStatus
from hetero_operator.reconcile.exposure import exposure, is_asked_for
from hetero_operator.reconcile.model import FailureKind, WriteFailure
from hetero_operator.reconcile.status import causes as found
from hetero_operator.reconcile.status.causes import GATEWAY, Cause
from hetero_operator.reconcile.status.pods import ExpectedPod, node_of, status_of
from hetero_operator.reconcile.status.reasons import MODEL_REASONS, Level, Reason
from hetero_operator.reconcile.status.situation import Situation, is_formed, is_serving
from hetero_operator.reconcile.status.text import bounded, steady, stored_conditions

TRUE: Final = ConditionStatus.TRUE
FALSE: Final = ConditionStatus.FALSE
UNKNOWN: Final = ConditionStatus.UNKNOWN

_REASONS_OF_FAILURES: Final = {
    FailureKind.FOREIGN: Reason.NAME_CONFLICT,
    FailureKind.INVALID: Reason.APPLY_REJECTED,
    FailureKind.FORBIDDEN: Reason.APPLY_FORBIDDEN,
    FailureKind.TRANSIENT: Reason.API_UNAVAILABLE,
}
_GUARANTEED: Final = "Guaranteed"


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
    """Return all conditions but Degraded and Progressing."""
    return {
        ConditionType.READY: _ready(situation, blockers),
        ConditionType.ACCEPTED: _accepted(situation),
        ConditionType.SCHEDULED: blockers.idle or _scheduled(situation, blockers),
        ConditionType.MODEL_READY: blockers.idle or _model_ready(situation, blockers),
        ConditionType.GROUP_FORMED: blockers.idle or _group_formed(situation, blockers),
        ConditionType.GATEWAY_READY: blockers.idle or _gateway_ready(situation, blockers),
        ConditionType.SUSPENDED: _suspended(situation),
        ConditionType.EXPOSED: _exposed(situation),
        ConditionType.NUMA_PINNED: _numa_pinned(situation, blockers),
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
        ranks = sum(pod.num_ranks for pod in situation.expected)
        number = "1 rank" if ranks == 1 else f"{ranks} ranks"
        return Finding(TRUE, Reason.SERVING, f"{number} in one epoch, requests served.")
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
    if situation.live_pods:
        return Finding(FALSE, Reason.STOPPING, f"{idle.message} Pods are ending.")
    return Finding(TRUE, idle.reason, idle.message)


def _exposed(situation: Situation) -> Finding:
    """Return whether strangers reach the gateway of the spec in force without showing anything."""
    if situation.basis is None:
        return _idle(situation) or Finding(FALSE, Reason.NOT_EXPOSED, "Nothing is in force yet.")
    spec = situation.basis.spec
    why = exposure(spec, situation.names, situation.inventory)
    if not why:
        how = "Clients show a key or a certificate" if spec.gateway.asks_for_proof else "Clients are of this namespace"
        return Finding(FALSE, Reason.NOT_EXPOSED, f"{how}.")
    if is_asked_for(spec):
        return Finding(TRUE, Reason.EXPOSED_AS_ASKED, f"{why}, and spec.gateway.auth.mode is None.")
    return Finding(TRUE, Reason.EXPOSED, f"{why}, and the gateway asks for nothing. Set spec.gateway.auth.")


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


def _numa_pinned(situation: Situation, blockers: Blockers) -> Finding:
    """Return the condition NUMAPinned, about the first rank that falls short, in rank order."""
    if situation.basis is None or blockers.idle is not None:
        return blockers.idle or blockers.finding()
    pools = [pool for pool in situation.basis.spec.pools_in_rank_order if pool.type == PoolType.CPU]
    if not pools:
        return Finding(TRUE, Reason.NO_CPU_RANKS, "No rank computes on a CPU.")
    unbound = [pool for pool in pools if pool.cpu_or_default.numa.policy is NumaPolicy.NONE]
    if unbound:
        return Finding(FALSE, Reason.NOT_REQUESTED, f"numa.policy of {_names(unbound)} is None.")
    return _of_ranks(situation, blockers, {pool.name for pool in pools})


def is_pinned(rank: RankStatus) -> bool:
    """Return whether a rank proved that its cores, and its memory as far as is known, are of one node."""
    return rank.joined and rank.place.device.pinned and _spans_one_node(rank) and _is_local(rank)


def local_memory_percent(rank: RankStatus) -> int | None:
    """Return the share of a rank's memory on the NUMA nodes of its cores, None when that is not known."""
    return rank.local_memory_percent if rank.HasField("local_memory_percent") else None


def _of_ranks(situation: Situation, blockers: Blockers, pools: set[str]) -> Finding:
    if situation.answer is None:
        return blockers.finding(status=UNKNOWN)
    pods = [pod for pod in situation.expected if pod.pool in pools]
    reported = [(pod, rank) for pod in pods for rank in situation.reported(pod)]
    for pod, rank in reported:
        shortcoming = _shortcoming(rank)
        if shortcoming is not None:
            reason, words = shortcoming
            return Finding(FALSE, reason, bounded(f"{_subject(situation, pod, rank)}: {words}"))
    if not all(situation.has_loaded(pod) for pod in pods):
        return blockers.finding(status=UNKNOWN)
    for pod, rank in reported:
        if local_memory_percent(rank) is None:
            words = "is bound, and its kernel does not tell where its memory lies"
            return Finding(UNKNOWN, Reason.NOT_PROVEN, f"{_subject(situation, pod, rank)}: {words}")
    return _proven(situation, pods, reported)


def _shortcoming(rank: RankStatus) -> tuple[Reason, str] | None:
    """Return the reason and message for a rank that joined and is not pinned."""
    if not rank.joined:
        return None
    if not rank.place.device.pinned:
        return Reason.NOT_PINNED, steady(rank.pin_message) or "is not bound to cores and memory of one NUMA node"
    if not _spans_one_node(rank):
        nodes = ", ".join(map(str, rank.place.device.numa_nodes)) or "none that the kernel tells"
        return Reason.NOT_PINNED, f"its cores are of NUMA nodes {nodes}, not of one"
    if not _is_local(rank):
        return Reason.MEMORY_NOT_LOCAL, f"{rank.local_memory_percent} % of its memory lies on the node of its cores"
    return None


def _spans_one_node(rank: RankStatus) -> bool:
    return len(rank.place.device.numa_nodes) == 1


def _is_local(rank: RankStatus) -> bool:
    return not rank.HasField("local_memory_percent") or rank.local_memory_percent >= LEAST_LOCAL_MEMORY_PERCENT


def _proven(situation: Situation, pods: list[ExpectedPod], reported: list[tuple[ExpectedPod, RankStatus]]) -> Finding:
    """Bound and proven: whether the kubelet keeps others off the cores, too."""
    found = "Cores and memory of every CPU rank are of one NUMA node"
    named = {pool.name: pool for pool in situation.basis.spec.pools} if situation.basis else {}
    burstable = [named[name] for name in sorted(set(_pools_of_shared_pods(situation, pods))) if name in named]
    if burstable:
        return Finding(
            TRUE, Reason.NOT_GUARANTEED,
            f"{found}, but pods of {_names(burstable)} are not of the class Guaranteed: the kubelet may let other pods "
            "use their cores. Set cpu.memoryPerRank.",
        )  # fmt: skip
    for pod, rank in reported:
        asked = named[pod.pool].cores_per_rank * named[pod.pool].ranks_per_pod
        allowed = rank.place.device.allowed_cpus
        if allowed > asked:
            return Finding(
                TRUE, Reason.NOT_GUARANTEED,
                bounded(
                    f"{found}, but other pods may use the cores: {_subject(situation, pod, rank)} asked for "
                    f"{asked} CPUs and may run on {allowed}. Run the kubelet's CPU manager with policy static."
                ),
            )  # fmt: skip
    return Finding(TRUE, Reason.PINNED, f"{found}.")


def _pools_of_shared_pods(situation: Situation, pods: list[ExpectedPod]) -> Iterator[str]:
    for expected in pods:
        pod = situation.rank_pods.get(expected.name)
        if pod is not None and status_of(pod).get("qosClass", _GUARANTEED) != _GUARANTEED:
            yield expected.pool


def _subject(situation: Situation, expected: ExpectedPod, rank: RankStatus) -> str:
    pod = situation.rank_pods.get(expected.name)
    one = replace(expected, first_rank=rank.place.rank, num_ranks=1)
    return one.subject(node_of(pod) if pod else "")


def _names(pools: list[PoolSpec]) -> str:
    names = ", ".join(pool.name for pool in pools)
    return f"pool {names}" if len(pools) == 1 else f"pools {names}"
