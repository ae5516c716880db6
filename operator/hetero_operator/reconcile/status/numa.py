"""The condition NUMAPinned: the binding that CPU ranks read back from their kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from hetero_api.contract import LEAST_LOCAL_MEMORY_PERCENT
from hetero_api.spec import NumaPolicy, PoolSpec, PoolType
from hetero_api.v1.admin_pb2 import RankStatus
from hetero_operator.reconcile.status.findings import FALSE, TRUE, UNKNOWN, Blockers, Finding
from hetero_operator.reconcile.status.pods import ExpectedPod, node_of, status_of
from hetero_operator.reconcile.status.reasons import Reason
from hetero_operator.reconcile.status.situation import Situation
from hetero_operator.reconcile.status.text import bounded, steady

_GUARANTEED: Final = "Guaranteed"


def numa_pinned(situation: Situation, blockers: Blockers) -> Finding:
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
    told = [(pod, rank) for pod in pods for rank in situation.told(pod)]
    for pod, rank in told:
        shortcoming = _shortcoming(rank)
        if shortcoming is not None:
            reason, words = shortcoming
            return Finding(FALSE, reason, bounded(f"{_subject(situation, pod, rank)}: {words}"))
    if not all(situation.has_loaded(pod) for pod in pods):
        return blockers.finding(status=UNKNOWN)
    for pod, rank in told:
        if local_memory_percent(rank) is None:
            words = "is bound, and its kernel does not tell where its memory lies"
            return Finding(UNKNOWN, Reason.NOT_PROVEN, f"{_subject(situation, pod, rank)}: {words}")
    return _proven(situation, pods, told)


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


def _proven(situation: Situation, pods: list[ExpectedPod], told: list[tuple[ExpectedPod, RankStatus]]) -> Finding:
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
    for pod, rank in told:
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
    one = ExpectedPod(expected.name, expected.pool, rank.place.rank, 1)
    return one.subject(node_of(pod) if pod else "")


def _names(pools: list[PoolSpec]) -> str:
    names = ", ".join(pool.name for pool in pools)
    return f"pool {names}" if len(pools) == 1 else f"pools {names}"
