"""Deals physical cores out to ranks, node by node: the arithmetic behind `cores.plan_cores`.

A rank takes whole physical cores of one NUMA node and computes with one thread on each; their other threads are not
dealt to anybody, since two ranks on one core would fight over its units. Within a node a rank's cores are taken in turn
from all its third-level caches: on machines of many chiplets each has a link of its own to memory, and what a rank does
most is to read memory.

Two ways to choose among nodes that have room:
- SPREAD: the node with the fewest ranks, so that each has as much of a node's memory bandwidth as there is; among
  equals one that keeps a core for communication, then the nearest to those that already have ranks, which makes
  exchanges short.
- PACK: the node with the least room that is enough, so that large demands find whole nodes.
Before either comes what a rank is to be near to, e.g. its GPU.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Final

from hetero_api.host.topology import UNKNOWN_NODE, LogicalCore, NumaNode

UNLIMITED_BYTES: Final = 1 << 62
"""Memory of a node that does not tell."""


class Strategy(Enum):
    """How a node is chosen; see the module."""

    SPREAD = auto()
    PACK = auto()


@dataclass(frozen=True, slots=True)
class PhysicalCore:
    """One core's hardware threads that may be used, ascending."""

    node: int
    cache: int
    cpus: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RankNeed:
    """Cores that one rank needs of a node. `cpus` is its entitlement, counted in hardware threads."""

    threads: int
    cpus: int
    memory_bytes: int
    near: int | None
    strict: bool
    """Whether the node must be known, and have the memory."""


@dataclass(frozen=True, slots=True)
class NodeRoom:
    """Free cores of one node. `cpus_left` also counts CPUs that ranks are entitled to and do not compute on."""

    node: NumaNode
    free: tuple[PhysicalCore, ...]
    cpus_left: int
    memory_left: int
    ranks: int = 0

    @classmethod
    def whole(cls, node: NumaNode, cores: Sequence[PhysicalCore]) -> NodeRoom:
        """Return the room of a node that nobody uses yet."""
        memory = UNLIMITED_BYTES if node.memory_bytes is None else node.memory_bytes
        return cls(node, tuple(cores), sum(len(core.cpus) for core in cores), memory)

    @property
    def number(self) -> int:
        """Number of the node."""
        return self.node.number

    def has_room(self, need: RankNeed) -> bool:
        """Whether a rank can have its cores here, and if it is strict its memory too."""
        enough_cores = len(self.free) >= need.threads and self.cpus_left >= need.cpus
        return enough_cores and not (need.strict and self.lacks_memory(need))

    def lacks_memory(self, need: RankNeed) -> bool:
        """Whether a rank's memory could not all lie here; of an unknown node nobody knows."""
        return self.number == UNKNOWN_NODE or self.memory_left < max(1, need.memory_bytes)

    def without(self, taken: Sequence[PhysicalCore], need: RankNeed) -> NodeRoom:
        """After a rank took these."""
        return replace(
            self,
            free=tuple(core for core in self.free if core not in taken),
            cpus_left=self.cpus_left - max(need.cpus, sum(len(core.cpus) for core in taken)),
            memory_left=self.memory_left - need.memory_bytes,
            ranks=self.ranks + 1,
        )


Rooms = dict[int, NodeRoom]
"""By node."""


def rooms_of(available: Iterable[LogicalCore], nodes: Mapping[int, NumaNode]) -> Rooms:
    """All that may be used, undealt. A node that `nodes` lacks tells nothing of its memory and distances."""
    threads: dict[int, list[LogicalCore]] = defaultdict(list)
    for core in sorted(available, key=lambda core: core.number):
        threads[core.physical].append(core)
    cores: dict[int, list[PhysicalCore]] = defaultdict(list)
    for first, *others in threads.values():
        cpus = (first.number, *(other.number for other in others))
        cores[first.node].append(PhysicalCore(first.node, first.cache, cpus))
    return {n: NodeRoom.whole(nodes.get(n) or NumaNode(n, None, None), cores[n]) for n in sorted(cores)}


def deal(
    rooms: Rooms, needs: Iterable[RankNeed], strategy: Strategy
) -> tuple[Rooms, list[tuple[PhysicalCore, ...]]] | None:
    """Cores for every rank in turn, and what is left; None when one of them cannot have its own."""
    rooms, hands = dict(rooms), []
    for need in needs:
        fitting = [room for room in rooms.values() if room.has_room(need)]
        if not fitting:
            return None
        used = [room.node for room in rooms.values() if room.ranks]
        room = min(fitting, key=lambda room: _rank_of(room, need, used, strategy))
        hand = _take_in_turn(room.free, need.threads)
        rooms[room.number] = room.without(hand, need)
        hands.append(hand)
    return rooms, hands


def _rank_of(room: NodeRoom, need: RankNeed, used: Sequence[NumaNode], strategy: Strategy) -> tuple[int, ...]:
    """Lowest is best; see the module."""
    first = (int(room.lacks_memory(need)), 0 if need.near is None else room.node.distance(need.near))
    if strategy is Strategy.PACK:
        return (*first, len(room.free), room.number)
    leaves_none = len(room.free) == need.threads
    far = sum(room.node.distance(other.number) for other in used)
    return (*first, room.ranks, int(leaves_none), far, room.number)


def _take_in_turn(free: Sequence[PhysicalCore], count: int) -> tuple[PhysicalCore, ...]:
    """`count` cores, each from the cache that has most left; ascending."""
    left: dict[int, list[PhysicalCore]] = defaultdict(list)
    for core in reversed(free):
        left[core.cache].append(core)
    taken = [max(left.items(), key=lambda group: (len(group[1]), -group[0]))[1].pop() for _ in range(count)]
    return tuple(sorted(taken, key=lambda core: core.cpus))
