"""Finds how many units each slot should get: exactly where there are few ways, else step by step.

A *slot* is a set of ranks that are alike and share evenly, usually a single one. A *component* is one thing to deal:
KV heads, MLP columns, experts, vocabulary rows. Each has a cost of its own; what couples them is memory. So the best of
each component is looked for first. Only if these together do not fit are they traded against each other.

Step by step means: from several starts, move units from one slot to another, many at first and then one, as long as
that helps. Among equal costs fewer owners win, then the more even deal.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import permutations, product
from typing import Final

Deal = tuple[int, ...]
"""Units of each slot."""

EXHAUSTIVE: Final = 20_000
"""Deals of all components together that are all looked at, where memory binds."""
_ALONE: Final = 500
"""Deals of a component that are looked at when memory does not bind: more would take longer and find the same."""
_GREEDY_STEPS: Final = 256
SAME: Final = 1e-9
"""Relative difference of costs that counts as none."""


@dataclass(frozen=True)
class Component:
    """One thing to deal among slots."""

    units: int
    sizes: Deal
    """Ranks of each slot."""
    least: Deal
    """Units that each slot gets at least."""
    most: Deal
    """And at most; 0 for one that may own nothing of it."""
    times: Callable[[int, float], tuple[float, ...]]
    """(slot, units of one of its ranks) → seconds of that rank, one for each kind of step. Never falling in units."""
    weights: tuple[float, ...]
    """How often each kind of step is made."""
    unit_bytes: tuple[float, ...]
    """Bytes of a unit, by slot."""
    first_bytes: tuple[float, ...]
    """Bytes that the first unit takes more than the others, by slot."""
    slowest: Callable[[Deal], tuple[float, ...]] | None = None
    """Seconds of the slowest rank, by kind of step, where that is expected to be more than the largest of `times`."""

    def per_rank(self, slot: int, units: int) -> int:
        """Return the largest share of a rank in the slot."""
        return -(-units // self.sizes[slot])

    def cost(self, deal: Deal) -> float:
        """Seconds: in each kind of step the slowest rank counts."""
        parts = [self.slot_times(slot, units) for slot, units in enumerate(deal) if units]
        if not parts:
            return 0.0
        slowest = map(max, zip(*parts, strict=True)) if self.slowest is None else self.slowest(deal)
        return sum((weight * seconds for weight, seconds in zip(self.weights, slowest, strict=True)), 0.0)

    def slot_times(self, slot: int, units: int) -> tuple[float, ...]:
        """Return the seconds of the slot's slowest rank, by kind of step."""
        return self.times(slot, self.per_rank(slot, units))

    def bytes_of(self, deal: Deal) -> tuple[float, ...]:
        """Return the bytes that the rank with the largest share needs, by slot."""
        slots = zip(deal, self.sizes, self.unit_bytes, self.first_bytes, strict=True)
        return tuple(-(-units // size) * each + (first if units else 0.0) for units, size, each, first in slots)

    @property
    def possible(self) -> bool:
        """True if some deal keeps all bounds."""
        return sum(self.least) <= self.units <= sum(self.most)

    def count(self) -> int:
        """Deals there are, bounds aside."""
        open_slots = sum(most > 0 for most in self.most)
        free = self.units - sum(self.least)
        return math.comb(free + open_slots - 1, open_slots - 1) if open_slots else int(free == 0)

    def deals(self) -> Iterator[Deal]:
        """All of them."""
        return every_deal(self.units, self.least, self.most)


Room = tuple[float, ...]
"""Memory for units on one rank of each slot, bytes."""


def excess(room: Room, components: Sequence[Component], deals: Sequence[Deal]) -> float:
    """Return the bytes by which the ranks that have most are over."""
    return _excess_of(room, [component.bytes_of(deal) for component, deal in zip(components, deals, strict=True)])


def _excess_of(room: Room, used: Sequence[tuple[float, ...]]) -> float:
    """Return the excess from each component's bytes by slot."""
    over = 0.0
    for has, *parts in zip(room, *used, strict=True):
        needs = sum(parts)
        if needs > has and needs:
            over += needs - has
    return over


def best_deals(components: Sequence[Component], room: Room, *, exhaustive: int = EXHAUSTIVE) -> list[Deal] | None:
    """Find a deal of each component with the least sum of costs; None if none was found that fits."""
    if not all(component.possible for component in components):
        return None
    alone = [_best_alone(component, exhaustive) for component in components]
    if not excess(room, components, alone):
        return alone
    if math.prod(component.count() for component in components) <= exhaustive:
        return _best_of_all(components, room)
    return _traded(components, room, alone)


def greedy(component: Component, key: Callable[[int, int], float]) -> Deal | None:
    """Deal some units after others to the slot whose `key(slot, units)` is least after it; None if bounds forbid.

    Many units go several at a time: moves by one follow.
    """
    deal = list(component.least)
    left = component.units - sum(deal)
    grain = 1 + left // _GREEDY_STEPS
    heap = [(key(slot, units + 1), slot) for slot, units in enumerate(deal) if units < component.most[slot]]
    heapq.heapify(heap)
    while left and heap:
        _, slot = heapq.heappop(heap)
        taken = min(grain, left, component.most[slot] - deal[slot])
        deal[slot] += taken
        left -= taken
        if deal[slot] < component.most[slot]:
            heapq.heappush(heap, (key(slot, min(deal[slot] + grain, component.most[slot])), slot))
    return None if left else tuple(deal)


def _best_alone(component: Component, exhaustive: int) -> Deal:
    """Memory aside."""
    if component.count() <= min(exhaustive, _ALONE):
        return _least(component, component.deals())
    starts = [deal for deal in _starts(component) if deal is not None]
    return _least(component, [_descend_one(component, start) for start in starts])


def _least(component: Component, deals: Iterator[Deal] | Sequence[Deal]) -> Deal:
    best: tuple[float, tuple[float, ...]] | None = None
    chosen: Deal | None = None
    for deal in deals:
        cost = component.cost(deal)
        if best is None or cost < best[0] * (1 - SAME):
            best, chosen = (cost, _evenness(component, deal)), deal
        elif cost <= best[0] * (1 + SAME) and (even := _evenness(component, deal)) < best[1]:
            best, chosen = (min(cost, best[0]), even), deal
    assert chosen is not None  # a component that is possible has a deal
    return chosen


def _evenness(component: Component, deal: Deal) -> tuple[float, ...]:
    """Fewer owners, then more even, then more to lower slots."""
    owners = sum(1 for units in deal if units)
    squares = sum(units * units / size for units, size in zip(deal, component.sizes, strict=True))
    return (owners, squares, *(-units for units in deal))


def _starts(component: Component) -> Iterator[Deal | None]:
    """Best for each kind of step alone, and for all of them if one rank were the slowest in all."""
    kinds = range(len(component.weights))
    for weights in (*(tuple(float(i == j) for j in kinds) for i in kinds), component.weights):
        yield greedy(component, _weighted(component, weights))


def _weighted(component: Component, weights: Sequence[float]) -> Callable[[int, int], float]:
    def key(slot: int, units: int) -> float:
        return sum(w * t for w, t in zip(weights, component.slot_times(slot, units), strict=True))

    return key


def _filling(component: Component, room: Room) -> Callable[[int, int], float]:
    """Return a function from slot and units to the part of the slot's memory that they would take."""

    def key(slot: int, units: int) -> float:
        return component.per_rank(slot, units) * component.unit_bytes[slot] / max(room[slot], 1.0)

    return key


def _moves(deal: Deal, component: Component, amount: int) -> Iterator[Deal]:
    """All deals that `amount` units less in one slot and more in another give, within bounds."""
    for source, target in permutations(range(len(deal)), 2):
        if deal[source] - amount >= component.least[source] and deal[target] + amount <= component.most[target]:
            yield moved(deal, source, target, amount)


def _descend_one(component: Component, deal: Deal) -> Deal:
    cost = cache(component.cost)
    for amount in _amounts(component.units):
        while True:
            better = min(_moves(deal, component, amount), key=cost, default=deal)
            if cost(better) >= cost(deal) * (1 - SAME):
                break
            deal = better
    return deal


def _amounts(units: int) -> list[int]:
    """Powers of two, falling to 1."""
    return [1 << bit for bit in range(max(0, units.bit_length() - 2), -1, -1)]


def _best_of_all(components: Sequence[Component], room: Room) -> list[Deal] | None:
    """Every combination; the cheapest that fits."""
    by_cost = [sorted((c.cost(deal), _evenness(c, deal), deal) for deal in c.deals()) for c in components]
    best: tuple[float, list[Deal]] | None = None
    for chosen in product(*by_cost):
        cost = sum(entry[0] for entry in chosen)
        if best is not None and cost >= best[0] * (1 - SAME):
            continue
        deals = [entry[2] for entry in chosen]
        if not excess(room, components, deals):
            best = cost, deals
    return best[1] if best is not None else None


def _traded(components: Sequence[Component], room: Room, alone: Sequence[Deal]) -> list[Deal] | None:
    """From mixtures of the best without memory and deals by memory: to one that fits, and on by trades."""
    by_room = [
        greedy(component, _filling(component, room)) or best for component, best in zip(components, alone, strict=True)
    ]
    starts = [list(start) for start in product(*(dict.fromkeys(pair) for pair in zip(alone, by_room, strict=True)))]
    judge = _Judge(components, room)
    found = [_descend_all(components, judge, start) for start in starts]
    fitting = [deals for deals in found if not judge(deals)[0]]
    return min(fitting, key=judge) if fitting else None


class _Judge:
    """Excess and cost of deals, remembered by component: most candidates differ in one or two of them."""

    def __init__(self, components: Sequence[Component], room: Room) -> None:
        self._costs = [cache(component.cost) for component in components]
        self._bytes = [cache(component.bytes_of) for component in components]
        self._room = room

    def __call__(self, deals: Sequence[Deal]) -> tuple[float, float]:
        over = _excess_of(self._room, [of(deal) for of, deal in zip(self._bytes, deals, strict=True)])
        return over, sum([cost(deal) for cost, deal in zip(self._costs, deals, strict=True)])


def _descend_all(components: Sequence[Component], judge: _Judge, deals: list[Deal]) -> list[Deal]:
    """Move units of one component, or of two in opposite directions, while that helps: less excess, then time."""
    best = judge(deals)
    for amount in _amounts(max(component.units for component in components)):
        improved = True
        while improved:
            improved = False
            for candidate in _neighbours(components, deals, amount):
                found = judge(candidate)
                if found[0] < best[0] - 0.5 or (found[0] <= best[0] and found[1] < best[1] * (1 - SAME)):
                    deals, best, improved = candidate, found, True
                    break
    return deals


def _neighbours(components: Sequence[Component], deals: list[Deal], amount: int) -> Iterator[list[Deal]]:
    for i, component in enumerate(components):
        for changed in _moves(deals[i], component, amount):
            first = [*deals[:i], changed, *deals[i + 1 :]]
            yield first
            yield from _in_return(components, first, i, [a - b for a, b in zip(deals[i], changed, strict=True)])


def _in_return(components: Sequence[Component], deals: list[Deal], i: int, lost: Sequence[int]) -> Iterator[list[Deal]]:
    """Yield deals in which another component uses the room that component `i` made, unit for unit."""
    source = next(slot for slot, units in enumerate(lost) if units > 0)
    target = next(slot for slot, units in enumerate(lost) if units < 0)
    freed = lost[source] * components[i].unit_bytes[source]
    for j, other in enumerate(components):
        if j == i or not other.unit_bytes[source]:
            continue
        most = min(deals[j][target] - other.least[target], other.most[source] - deals[j][source])
        enough = freed / other.unit_bytes[source]
        for amount in {1, min(math.floor(enough), most), min(math.ceil(enough), most)}:
            if not 0 < amount <= most:
                continue
            yield [*deals[:j], moved(deals[j], target, source, amount), *deals[j + 1 :]]


def moved(deal: Sequence[int], source: int, target: int, amount: int) -> Deal:
    """Return the deal with `amount` units moved from one slot to another."""
    changed = list(deal)
    changed[source] -= amount
    changed[target] += amount
    return tuple(changed)


def every_deal(units: int, least: Sequence[int], most: Sequence[int]) -> Iterator[Deal]:
    """Yield all deals of the units that give each slot from its `least` to its `most`."""
    if len(least) == 1:
        if least[0] <= units <= most[0]:
            yield (units,)
        return
    rest_least, rest_most = sum(least[1:]), sum(most[1:])
    for first in range(max(least[0], units - rest_most), min(most[0], units - rest_least) + 1):
        for rest in every_deal(units - first, least[1:], most[1:]):
            yield (first, *rest)
