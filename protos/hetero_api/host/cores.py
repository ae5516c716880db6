"""Which cores each CPU rank gets.

A rank gets cores of one NUMA node, and one hardware thread of each physical core before any second one; no
two ranks share a core. Where that cannot be had, the pool's numa.policy decides: Required refuses,
BestEffort goes on unbound with a warning, None was never bound. Ranks that have to share cores are better
left to the kernel's scheduler than pinned on top of one another.

Pure: what the machine has is read by `read_cpu_set` and passed in.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hetero_api.cpu_list import parse_cpu_list
from hetero_api.spec import NumaPolicy

SYSFS: Path = Path("/sys/devices/system")


@dataclass(frozen=True, slots=True)
class LogicalCore:
    """One hardware thread: its number, its NUMA node, and the lowest-numbered sibling on its physical core."""

    number: int
    node: int
    physical: int


@dataclass(frozen=True, slots=True)
class CoreDemand:
    """What one pool asks for."""

    path: str  # e.g. "spec.pools[0]"
    ranks: int
    cores_per_rank: int
    policy: NumaPolicy


@dataclass(frozen=True, slots=True)
class CoreGrant:
    """What one rank gets: cores to bind to (empty: not bound) and how many threads to run."""

    cores: tuple[int, ...]
    num_threads: int


@dataclass(frozen=True, slots=True)
class CorePlan:
    """Grants a pool, a rank; warnings and refusals are one `path: what` each."""

    grants: tuple[tuple[CoreGrant, ...], ...]
    warnings: tuple[str, ...]
    problems: tuple[str, ...]


def plan_cores(available: Sequence[LogicalCore], demands: Sequence[CoreDemand]) -> CorePlan:
    """Deal the available cores out to the pools, in order; strict pools choose first."""
    free = list(available)
    turns = _turns(available)
    grants: dict[int, tuple[CoreGrant, ...]] = {}
    warnings: list[str] = []
    problems: list[str] = []
    order = sorted(range(len(demands)), key=lambda index: demands[index].policy != NumaPolicy.REQUIRED)
    for index in order:
        demand = demands[index]
        unbound = CoreGrant((), min(demand.cores_per_rank, max(1, len(available))))
        grants[index] = (unbound,) * demand.ranks
        if demand.policy == NumaPolicy.NONE:
            continue
        taken = _take(free, demand, turns=turns)
        if taken is not None:
            grants[index] = tuple(CoreGrant(cores, len(cores)) for cores in taken)
            free = [core for core in free if core.number not in {n for cores in taken for n in cores}]
        elif demand.policy == NumaPolicy.REQUIRED:
            problems.append(_refusal(demand, free))
        else:
            warnings.append(_warning(demand, free))
    return CorePlan(tuple(grants[i] for i in range(len(demands))), tuple(warnings), tuple(problems))


def read_cpu_set(allowed: Iterable[int] | None = None, *, sysfs: Path = SYSFS) -> tuple[LogicalCore, ...]:
    """The cores that this process may use, ascending, with their place in the machine."""
    numbers = sorted(os.sched_getaffinity(0) if allowed is None else allowed)
    nodes = _nodes(sysfs)
    return tuple(LogicalCore(n, nodes.get(n, 0), _physical(n, sysfs)) for n in numbers)


def _take(free: Sequence[LogicalCore], demand: CoreDemand, *, turns: Mapping[int, int]) -> list[tuple[int, ...]] | None:
    """Cores for every rank of the pool, None when they cannot all have theirs."""
    left, taken = list(free), []
    for _ in range(demand.ranks):
        cores = _take_one(left, demand.cores_per_rank, turns=turns)
        if cores is None:
            return None
        taken.append(cores)
        left = [core for core in left if core.number not in cores]
    return taken


def _take_one(free: Sequence[LogicalCore], count: int, *, turns: Mapping[int, int]) -> tuple[int, ...] | None:
    """`count` cores of one node; whole physical cores on any node go before second threads on the first."""
    order = sorted(free, key=lambda core: (turns[core.number], core.number))
    nodes = [[core for core in order if core.node == node] for node in sorted({core.node for core in free})]
    fitting = [cores[:count] for cores in nodes if len(cores) >= count]
    if not fitting:
        return None
    best = min(fitting, key=lambda cores: turns[cores[-1].number])
    return tuple(sorted(core.number for core in best))


def _turns(cores: Sequence[LogicalCore]) -> dict[int, int]:
    """For each core, how many threads of its physical core come before it: 0 for a first thread."""
    seen: Counter[int] = Counter()
    turns = {}
    for core in sorted(cores, key=lambda core: core.number):
        turns[core.number] = seen[core.physical]
        seen[core.physical] += 1
    return turns


def _shortage(demand: CoreDemand, free: Sequence[LogicalCore]) -> str:
    needed = demand.ranks * demand.cores_per_rank
    per_node = {node: sum(core.node == node for core in free) for node in sorted({c.node for c in free})}
    nodes = ", ".join(f"node {node}: {count}" for node, count in per_node.items()) or "none"
    return (
        f"{demand.path}.cpu.coresPerRank: {demand.ranks} x {demand.cores_per_rank} = {needed} cores, each rank's on "
        f"one NUMA node, are not free here (free: {nodes})"
    )


def _refusal(demand: CoreDemand, free: Sequence[LogicalCore]) -> str:
    return f"{_shortage(demand, free)}; numa.policy Required needs them: lower coresPerRank or ranks"


def _warning(demand: CoreDemand, free: Sequence[LogicalCore]) -> str:
    return f"{_shortage(demand, free)}; its ranks are not bound and may share cores"


def _nodes(sysfs: Path) -> dict[int, int]:
    nodes: dict[int, int] = {}
    for folder in sorted((sysfs / "node").glob("node[0-9]*")):
        for number in parse_cpu_list(_read(folder / "cpulist")):
            nodes[number] = int(folder.name.removeprefix("node"))
    return nodes


def _physical(number: int, sysfs: Path) -> int:
    siblings = parse_cpu_list(_read(sysfs / "cpu" / f"cpu{number}" / "topology" / "thread_siblings_list"))
    return min(siblings, default=number)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except OSError:  # Containers may hide sysfs; then every thread counts as a core of node 0.
        return ""
