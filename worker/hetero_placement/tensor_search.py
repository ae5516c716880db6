"""The best plan that splits every layer alike, for given roles of the ranks.

Who may hold heads, columns and rows is given; how many each gets is searched for. The halves of a layer and the output
head are components with costs of their own, since the ranks meet after each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Final

from hetero_api.sharding import ShardPlan
from hetero_placement.cost_model import CostModel, WidePlace
from hetero_placement.memory_model import MemoryModel, UnitBytes
from hetero_placement.search import EXHAUSTIVE, Component, Deal, Room, best_deals
from hetero_placement.shard_plans import UNIT, in_units, plan_within_layers, units_of
from hetero_placement.steps import Repeated, Step

SINGLE: Final = 3
"""Up to so many ranks each is dealt to by itself; beyond, ranks that are alike share evenly."""


@dataclass(frozen=True, slots=True)
class Roles:
    """Parts that ranks may own, in rank order."""

    holders: tuple[int, ...]
    """Each gets one KV head at least."""
    helpers: tuple[int, ...] = ()
    """May own columns or experts, beside the holders."""
    vocabulary: tuple[int, ...] = ()
    """May own vocabulary rows."""
    busy: frozenset[int] = frozenset()
    """Helpers that must own columns or experts."""
    rows: frozenset[int] = frozenset()
    """Ranks that must own vocabulary rows."""


@dataclass(frozen=True, slots=True)
class FixedCounts:
    """Counts that the spec's shares fix, in rank order; None: to be solved."""

    heads: tuple[int, ...] | None = None
    columns: tuple[int, ...] | None = None
    experts: tuple[int, ...] | None = None
    rows: tuple[int, ...] | None = None


NOTHING_FIXED: Final = FixedCounts()


class TensorSearch:
    """The search for given roles, over one model, group and workload: slots and components made of the roles."""

    def __init__(
        self,
        model: CostModel,
        memory: MemoryModel,
        steps: Sequence[Repeated],
        roles: Roles,
        fixed: FixedCounts = NOTHING_FIXED,
    ) -> None:
        self._model = model
        self._memory = memory
        self._steps = steps
        self._roles = roles
        self._fixed = fixed
        self._config = model.config
        self.slots = self._make_slots()
        self._names = [name for name in self._makers if getattr(fixed, name) is None]
        self.components = [self._makers[name]() for name in self._names]

    @cached_property
    def room(self) -> Room:
        """Memory of one rank of each slot, beside what is fixed."""
        return tuple(min(self._room_of(rank) for rank in slot) for slot in self.slots)

    def plan(self, *, exhaustive: int = EXHAUSTIVE) -> ShardPlan | None:
        """Return the plan whose predicted time is least; None if none fits."""
        if not all(component.possible for component in self.components):
            return None
        deals = best_deals(self.components, self.room, exhaustive=exhaustive)
        return self._plan_of(deals) if deals is not None else None

    def _plan_of(self, deals: Sequence[Deal]) -> ShardPlan:
        counts = {
            name: self._spread(deal, from_the_end=name in ("columns", "experts"))
            for name, deal in zip(self._names, deals, strict=True)
        }
        units = {"columns": self._config.intermediate_size, "rows": self._config.vocab_size}
        solved = {name: in_units(units[name], each) if name in units else each for name, each in counts.items()}
        given = {name: getattr(self._fixed, name) for name in self._makers if name not in counts}
        return plan_within_layers(self._config, **{"experts": [0] * self._world, **solved, **given})

    @property
    def _world(self) -> int:
        return len(self._model.hardware.ranks)

    @property
    def _makers(self) -> dict[str, Callable[[], Component]]:
        makers: dict[str, Callable[[], Component]] = {"heads": self._heads, "rows": self._rows}
        makers["columns"] = partial(self._wide, experts=False)
        if self._config.experts is not None:
            makers["experts"] = partial(self._wide, experts=True)
        return makers

    def _make_slots(self) -> tuple[tuple[int, ...], ...]:
        roles = self._roles
        owners = sorted({*roles.holders, *roles.helpers, *roles.vocabulary})
        if len(owners) <= SINGLE or self._fixed != NOTHING_FIXED:
            return tuple((rank,) for rank in owners)
        slots: dict[tuple[object, ...], list[int]] = {}
        for number, alike in enumerate(self._model.hardware.classes()):
            for rank in alike:
                parts = (roles.holders, roles.helpers, roles.vocabulary, roles.busy, roles.rows)
                if rank in owners:
                    slots.setdefault((number, *(rank in part for part in parts)), []).append(rank)
        return tuple(map(tuple, slots.values()))

    def _spread(self, deal: Deal, *, from_the_end: bool) -> list[int]:
        """Each slot's units over its ranks; what is left over after an even deal goes to its first or last ranks."""
        counts = [0] * self._world
        for slot, units in zip(self.slots, deal, strict=True):
            each, over = divmod(units, len(slot))
            ranks = slot[::-1] if from_the_end else slot
            for position, rank in enumerate(ranks):
                counts[rank] = each + (position < over)
        return counts

    def _heads(self) -> Component:
        windows = Counter(self._config.windows)
        kinds = [(r.step, window, r.times * count) for r in self._steps for window, count in windows.items()]
        config, ranks = self._config, self._model.ranks
        # Columns of shared experts, in the mean layer, that go with a head.
        columns = config.shared_columns * len(config.expert_layers) / (config.num_layers * config.num_kv_heads * UNIT)

        def times(rank: int, units: float) -> tuple[float, ...]:
            costs = ranks[rank]
            return tuple(
                costs.attention(step, window).of(units) + costs.mlp(step.rows).of(columns * units)
                for step, window, _ in kinds
            )

        return self._component(
            config.num_kv_heads,
            allowed=self._roles.holders,
            needed=self._roles.holders,
            times=times,
            weights=tuple(weight for *_, weight in kinds),
            unit_bytes=lambda rank: self._units(rank).head,
        )

    def _wide(self, *, experts: bool) -> Component:
        """Return the component of MLP columns or of experts."""
        config, model, roles = self._config, self._model, self._roles
        wide = sum(config.dense_columns.values()) / config.intermediate_size
        num_layers = len(config.expert_layers) if experts else wide
        dense_units = units_of(config.intermediate_size) if num_layers else 0
        place = WidePlace(roles.holders, lends=bool(roles.helpers), experts=experts)

        def times(rank: int, count: float) -> tuple[float, ...]:
            return tuple(model.wide_part_s(rank, count, step, place) for step, _ in self._steps)

        return self._component(
            config.num_experts if experts else dense_units,
            allowed=(*roles.holders, *roles.helpers),
            needed=roles.busy if experts == (config.experts is not None) else (),
            times=times,
            weights=tuple(repeats * num_layers for _, repeats in self._steps),
            unit_bytes=lambda rank: self._units(rank).expert if experts else UNIT * self._units(rank).column,
            first_bytes=lambda rank: self._first_bytes(rank, experts=experts),
        )

    def _rows(self) -> Component:
        drawing = [(step, times) for step, times in self._steps if step.draws] or [(Step(), 0.0)]
        return self._component(
            units_of(self._config.vocab_size),
            allowed=self._roles.vocabulary,
            needed=self._roles.rows,
            times=lambda rank, units: tuple(self._model.head_part_s(rank, units, step) for step, _ in drawing),
            weights=tuple(times for _, times in drawing),
            unit_bytes=lambda rank: UNIT * self._units(rank).row,
        )

    def _component(
        self,
        units: int,
        *,
        allowed: Sequence[int],
        needed: Sequence[int] | frozenset[int],
        times: Callable[[int, float], tuple[float, ...]],
        weights: tuple[float, ...],
        unit_bytes: Callable[[int], float],
        first_bytes: Callable[[int], float] = lambda _: 0.0,
    ) -> Component:
        return Component(
            units=units,
            sizes=tuple(map(len, self.slots)),
            least=tuple(len(slot) if slot[0] in needed else 0 for slot in self.slots),
            most=tuple(units if slot[0] in allowed else 0 for slot in self.slots),
            times=cache(lambda slot, count: times(self.slots[slot][0], count)),
            weights=weights,
            unit_bytes=tuple(unit_bytes(slot[0]) for slot in self.slots),
            first_bytes=tuple(first_bytes(slot[0]) for slot in self.slots),
        )

    def _units(self, rank: int) -> UnitBytes:
        return self._memory.units(rank)

    def _first_bytes(self, rank: int, *, experts: bool) -> float:
        """Return the bytes that a rank needs once it owns MLP columns, or experts, beside these."""
        holds_heads = rank in self._roles.holders
        return self._memory.first_bytes(rank, holds_heads=holds_heads, columns=not experts, experts=experts)

    def _room_of(self, rank: int) -> float:
        unit, fixed = self._units(rank), self._fixed
        needed = self._memory.fixed_bytes(rank, holds_heads=rank in self._roles.holders)
        each = (
            (fixed.heads, unit.head),
            (fixed.columns, unit.column),
            (fixed.experts, unit.expert),
            (fixed.rows, unit.row),
        )
        needed += sum(counts[rank] * unit_bytes for counts, unit_bytes in each if counts is not None)
        for counts, experts in ((fixed.columns, False), (fixed.experts, True)):
            needed += self._first_bytes(rank, experts=experts) if counts is not None and counts[rank] else 0.0
        return self._model.hardware.ranks[rank].memory_bytes - needed
