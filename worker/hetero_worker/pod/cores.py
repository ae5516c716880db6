"""Which cores each rank of this pod gets, of those that the container may use.

Kubernetes counts hardware threads as CPUs. A pod that was given both threads of its physical cores has fewer cores
than it asked for CPUs, and its ranks one thread for each core: two on one core would fight over it.

A container without exclusive CPUs sees all of its node, and so does every other pod there. So that pods of one pool
which share a node do not all take its first cores, each begins where its ordinal says, as far as the node goes.
"""

from __future__ import annotations

from collections.abc import Sequence

from hetero_api.host.cores import CoreDemand, CorePlan, LogicalCore, plan_cores
from hetero_api.spec import NumaPolicy


def plan_pod_cores(
    available: Sequence[LogicalCore], *, pool: str, ranks: int, threads: int, ordinal: int, policy: NumaPolicy
) -> CorePlan:
    """One grant a rank; warnings and problems as `plan_cores` has them. `threads` is CPUs a rank."""
    physical = list({core.physical: core for core in reversed(available)}.values())[::-1]
    if len(available) >= ranks * threads > len(physical):
        threads = max(1, len(physical) // ranks)

    def plan(pods: int) -> CorePlan:
        demand = CoreDemand(path=f"spec.pools[{pool}]", ranks=pods * ranks, cores_per_rank=threads, policy=policy)
        return plan_cores(physical, [demand])

    room = 0
    while room <= ordinal and not _falls_short(plan(room + 1)):
        room += 1
    if not room:
        return plan(1)
    place = ordinal % room
    (grants,) = plan(place + 1).grants
    return CorePlan((grants[place * ranks :],), (), ())


def _falls_short(plan: CorePlan) -> bool:
    return bool(plan.warnings or plan.problems)
