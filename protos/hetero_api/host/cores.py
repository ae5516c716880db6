"""Which cores each rank gets.

What always holds:
- A rank gets cores of one NUMA node and computes with one thread a physical core; no two ranks share a core.
- CPUs are counted as Kubernetes does, in hardware threads: where not every rank can have as many physical cores as CPUs
  were asked for, ranks get the CPUs as threads of fewer cores and compute with one thread on each of these.
- Communication (the gateway's stream, heartbeats, Gloo) gets CPUs that no rank computes on, where there are any.
  Nothing of what was asked for is taken away for it. Its CPUs are, the first that there are: those of idle cores of
  the rank's node; second threads of the rank's own cores; those of idle cores of the nearest node. So a rank that
  asks for one core less than its node has leaves one to communication.
- Where a pool cannot have its cores, numa.policy decides: Required refuses, BestEffort goes on unbound with a warning,
  None was never bound. Ranks that have to share cores are better left to the kernel's scheduler than pinned on top
  of one another. Required is also refused on nodes that lack the memory, or that the kernel does not name.
- Ranks are spread over the nodes (`core_deal`), unless pools would get less that way than by filling nodes up.

Pure: what the machine has is read by `topology` and passed in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hetero_api.host.core_deal import PhysicalCore, RankNeed, Rooms, Strategy, deal, rooms_of
from hetero_api.host.topology import UNKNOWN_NODE, LogicalCore, NumaNode, NumaPolicy

_GIB = 2**30


@dataclass(frozen=True, slots=True)
class CoreDemand:
    """Cores that one pool asks for."""

    path: str  # e.g. "spec.pools[0]"
    ranks: int
    cores_per_rank: int
    policy: NumaPolicy
    near: tuple[int | None, ...] = ()
    """For each rank the node that it should be near to, e.g. its GPU's; None, or none at all: wherever."""
    memory_bytes: int = 0
    """Memory of a rank; 0: unknown. Required wants all of it on the node of the cores."""
    field: str = "cpu.coresPerRank"
    """Where the demand stands below `path`."""


@dataclass(frozen=True, slots=True)
class CoreGrant:
    """Cores that one rank gets: CPUs to compute on (empty: not bound) and how many threads to run."""

    cores: tuple[int, ...]
    num_threads: int
    communication: tuple[int, ...] = ()
    """CPUs for its other threads, which no rank computes on; empty: there are none, or it is not bound."""


@dataclass(frozen=True, slots=True)
class CorePlan:
    """Grants a pool, a rank; warnings and refusals are one `path: what` each."""

    grants: tuple[tuple[CoreGrant, ...], ...]
    warnings: tuple[str, ...]
    problems: tuple[str, ...]

    @property
    def binds_all(self) -> bool:
        """Whether every rank of every pool got cores."""
        return all(grant.cores for grants in self.grants for grant in grants)


@dataclass(slots=True)
class _Deal:
    """One try, with one strategy: what pools got, and what was free when one got nothing."""

    rooms: Rooms
    hands: dict[int, list[tuple[PhysicalCore, ...]]] = field(default_factory=dict)
    left: dict[int, Rooms] = field(default_factory=dict)


def plan_cores(
    available: Sequence[LogicalCore], demands: Sequence[CoreDemand], *, nodes: Mapping[int, NumaNode] | None = None
) -> CorePlan:
    """Deal the available cores out to the pools; strict pools choose first. `nodes` tells distances and memory."""
    rooms = rooms_of(available, nodes or {})
    tries = [_deal_with(strategy, rooms, demands) for strategy in Strategy]
    best = min(tries, key=lambda one: _shortfall(one, demands))
    unbound = max(1, len(available))
    grants = [
        _grants(demand, best.hands.get(index), available, nodes or {}, _computing(best), unbound)
        for index, demand in enumerate(demands)
    ]
    return CorePlan(tuple(grants), tuple(_warnings(best, demands)), tuple(_problems(best, demands)))


def _deal_with(strategy: Strategy, rooms: Rooms, demands: Sequence[CoreDemand]) -> _Deal:
    result = _Deal(rooms)
    for index in sorted(range(len(demands)), key=lambda index: _turn(demands[index], strategy)):
        demand = demands[index]
        if demand.policy == NumaPolicy.NONE:
            continue
        dealt = _deal_pool(result.rooms, demand, strategy)
        if dealt is None:
            result.left[index] = result.rooms
        else:
            result.rooms, result.hands[index] = dealt
    return result


def _turn(demand: CoreDemand, strategy: Strategy) -> tuple[bool, int]:
    """Sorting is stable: pools that are alike in this go in the order of the resource."""
    return demand.policy != NumaPolicy.REQUIRED, -demand.cores_per_rank if strategy is Strategy.PACK else 0


def _deal_pool(
    rooms: Rooms, demand: CoreDemand, strategy: Strategy
) -> tuple[Rooms, list[tuple[PhysicalCore, ...]]] | None:
    """With as many threads a rank, alike for all of them, as there are cores for."""
    whole = deal(rooms, _needs(demand, demand.cores_per_rank), strategy)
    if whole is not None:
        return whole
    cores = sum(len(room.free) for room in rooms.values())
    low, high, best = 1, min(demand.cores_per_rank - 1, cores // demand.ranks), None
    while low <= high:
        middle = (low + high) // 2
        if (dealt := deal(rooms, _needs(demand, middle), strategy)) is None:
            high = middle - 1
        else:
            low, best = middle + 1, dealt
    return best


def _needs(demand: CoreDemand, threads: int) -> list[RankNeed]:
    near = demand.near or (None,) * demand.ranks
    strict = demand.policy == NumaPolicy.REQUIRED
    return [RankNeed(threads, demand.cores_per_rank, demand.memory_bytes, node, strict) for node in near]


def _shortfall(one: _Deal, demands: Sequence[CoreDemand]) -> tuple[int, int, int]:
    """Refusals weigh more than warnings, and these more than threads that ranks have fewer than they asked for."""
    refused = sum(demands[index].policy == NumaPolicy.REQUIRED for index in one.left)
    fewer = sum(demands[index].cores_per_rank - len(hand) for index, hands in one.hands.items() for hand in hands)
    return refused, len(one.left), fewer


def _computing(one: _Deal) -> frozenset[int]:
    """Return the physical cores that compute, each by its first thread."""
    return frozenset(core.cpus[0] for hands in one.hands.values() for hand in hands for core in hand)


def _grants(
    demand: CoreDemand,
    hands: Sequence[Sequence[PhysicalCore]] | None,
    available: Sequence[LogicalCore],
    nodes: Mapping[int, NumaNode],
    computing: frozenset[int],
    most_threads: int,
) -> tuple[CoreGrant, ...]:
    if hands is None:
        return (CoreGrant((), min(demand.cores_per_rank, most_threads)),) * demand.ranks
    idle = _idle_cpus(available, computing)
    return tuple(
        CoreGrant(tuple(core.cpus[0] for core in hand), len(hand), _communication(hand, idle, nodes)) for hand in hands
    )


def _idle_cpus(available: Sequence[LogicalCore], computing: frozenset[int]) -> dict[int, tuple[int, ...]]:
    """By node, the CPUs of cores that nobody computes on."""
    busy = {core.physical for core in available if core.number in computing}
    idle: dict[int, tuple[int, ...]] = {}
    for core in sorted(available, key=lambda core: core.number):
        if core.physical not in busy:
            idle[core.node] = (*idle.get(core.node, ()), core.number)
    return idle


def _communication(
    hand: Sequence[PhysicalCore], idle: Mapping[int, tuple[int, ...]], nodes: Mapping[int, NumaNode]
) -> tuple[int, ...]:
    """See the module."""
    own = nodes.get(hand[0].node) or NumaNode(hand[0].node, None, None)
    second_threads = tuple(sorted(cpu for core in hand for cpu in core.cpus[1:]))
    if own.number in idle or second_threads:
        return idle.get(own.number) or second_threads
    nearest = min(idle, key=lambda node: (own.distance(node), node), default=None)
    return () if nearest is None else idle[nearest]


def _problems(one: _Deal, demands: Sequence[CoreDemand]) -> list[str]:
    return [
        f"{_shortage(demand, one.left[index])}; numa.policy Required needs them: lower coresPerRank or ranks"
        for index, demand in enumerate(demands)
        if index in one.left and demand.policy == NumaPolicy.REQUIRED
    ]


def _warnings(one: _Deal, demands: Sequence[CoreDemand]) -> list[str]:
    warnings = []
    for index, demand in enumerate(demands):
        if index in one.left and demand.policy != NumaPolicy.REQUIRED:
            warnings.append(f"{_shortage(demand, one.left[index])}; its ranks are not bound and may share cores")
        elif index in one.hands and len(one.hands[index][0]) < demand.cores_per_rank:
            warnings.append(_fewer_threads(demand, len(one.hands[index][0])))
    return warnings


def _fewer_threads(demand: CoreDemand, threads: int) -> str:
    return (
        f"{demand.path}.{demand.field}: {demand.cores_per_rank} CPUs are threads of fewer physical cores here; "
        f"each rank computes with {threads}, one a core"
    )


def _shortage(demand: CoreDemand, rooms: Rooms) -> str:
    needed = demand.ranks * demand.cores_per_rank
    free = ", ".join(_describe(room.number, room.cpus_left, room.memory_left, demand) for room in rooms.values())
    memory = f" with {demand.memory_bytes / _GIB:.1f} GiB" if demand.memory_bytes else ""
    return (
        f"{demand.path}.{demand.field}: {demand.ranks} x {demand.cores_per_rank} = {needed} cores, each rank's on "
        f"one NUMA node{memory}, are not free here (free: {free or 'none'})"
    )


def _describe(node: int, cpus: int, memory_bytes: int, demand: CoreDemand) -> str:
    name = "unknown node" if node == UNKNOWN_NODE else f"node {node}"
    if not demand.memory_bytes and memory_bytes:
        return f"{name}: {cpus}"
    return f"{name}: {cpus} with {max(0, memory_bytes) / _GIB:.1f} GiB"
