"""Which cores each rank of this pod gets, of those that the container may use.

A container without exclusive CPUs sees all of its node, and so does every other pod there. So that pods of one pool
which share a node do not all take its first cores, each plans for as many pods as can have what this one would have
alone, as all of them do alike, and takes the part that its ordinal says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hetero_api.host.cores import CoreDemand, CorePlan, plan_cores
from hetero_api.host.topology import LogicalCore, NumaNode
from hetero_api.spec import NumaPolicy


def plan_pod_cores(
    available: Sequence[LogicalCore],
    *,
    pool: str,
    ranks: int,
    threads: int,
    ordinal: int,
    policy: NumaPolicy,
    nodes: Mapping[int, NumaNode] | None = None,
    near: Sequence[int | None] = (),
    memory_bytes: int = 0,
    field: str = "cpu.coresPerRank",
) -> CorePlan:
    """One grant a rank; warnings and problems as `plan_cores` has them. `threads` is CPUs a rank.

    The others are `plan_cores`'s and `CoreDemand`'s; `near` has a node for each rank of the pod, or is empty.
    """

    def plan(pods: int) -> CorePlan:
        demand = CoreDemand(
            path=f"spec.pools[{pool}]",
            ranks=pods * ranks,
            cores_per_rank=threads,
            policy=policy,
            near=tuple(near) * pods,
            memory_bytes=memory_bytes,
            field=field,
        )
        return plan_cores(available, [demand], nodes=nodes)

    def has_room(pods: int) -> bool:
        together = plan(pods)
        return together.binds_all and together.grants[0][0].num_threads == alone.grants[0][0].num_threads

    alone = plan(1)
    if not alone.binds_all:
        return alone
    room, too_many = 1, len(available) // ranks + 1
    while too_many - room > 1:
        middle = (room + too_many) // 2
        room, too_many = (middle, too_many) if has_room(middle) else (room, middle)
    place = ordinal % room
    (grants,) = plan(room).grants
    return CorePlan((grants[place * ranks : (place + 1) * ranks],), (), ())
