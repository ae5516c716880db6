"""The best plan that splits every layer alike, for given roles of the ranks.

Who may hold heads, columns and rows is given; how many each gets is searched for. The halves of a layer and the output
head are components with costs of their own, since the ranks meet after each.

Experts are dealt whole, or in slices, as an `ExpertLayout` says. In the mixed layout ranks get as many experts as if
all were whole; those of the CPU ranks together are then cut, by these numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache, cached_property, partial
from typing import Final

from hetero_api.sharding import ShardPlan
from hetero_placement.cost_model import CostModel, WidePlace
from hetero_placement.memory_model import MemoryModel, UnitBytes
from hetero_placement.search import EXHAUSTIVE, Component, Deal, Room, best_deals
from hetero_placement.shard_plans import UNIT, in_units, largest_remainder, plan_within_layers, units_of
from hetero_placement.steps import Repeated, Step

SINGLE: Final = 3
"""Up to so many ranks each is dealt to by itself; beyond, ranks that are alike share evenly."""


class ExpertLayout(Enum):
    """Way to deal experts, with its name for a person."""

    WHOLE = "whole experts"
    SLICES = "experts in slices"
    MIXED = "experts whole on GPU ranks, in slices on CPU ranks"

    @classmethod
    def of(cls, plan: ShardPlan) -> ExpertLayout:
        """Return the layout of a plan's experts; of a plan without any, WHOLE."""
        layers = [layer for shard in plan.ranks for layer in shard.layers if layer.experts.size]
        if not any(layer.expert_columns.size for layer in layers):
            return cls.WHOLE
        return cls.SLICES if all(layer.expert_columns.size for layer in layers) else cls.MIXED


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
    expert_columns: tuple[int, ...] | None = None
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
        layout: ExpertLayout = ExpertLayout.WHOLE,
    ) -> None:
        self._layout = layout
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
        if deals is None:
            return None
        counts = {"experts": [0] * self._world, **self._counts_of(deals)}
        if self._layout is not ExpertLayout.MIXED:
            return plan_within_layers(self._config, **counts)
        cut = self._cut_on_hosts(counts["experts"])
        plan = plan_within_layers(self._config, **{**counts, **cut}) if cut else None
        return None if plan is None or self._memory.problem(plan) else plan

    def _counts_of(self, deals: Sequence[Deal]) -> dict[str, Sequence[int]]:
        config = self._config
        totals = {
            "columns": (config.intermediate_size, UNIT),
            "rows": (config.vocab_size, UNIT),
            "expert_columns": (config.expert_columns, config.expert_unit),
        }
        counts: dict[str, Sequence[int]] = {}
        for name, deal in zip(self._names, deals, strict=True):
            each = self._spread(deal, from_the_end=name not in ("heads", "rows"))
            total, unit = totals.get(name, (0, 0))
            counts[name] = in_units(total, each, unit) if unit else each
        given = {name: getattr(self._fixed, name) for name in self._makers if name not in counts}
        return counts | given

    def _cut_on_hosts(self, experts: Sequence[int]) -> dict[str, Sequence[int]]:
        """Return counts of whole experts, on GPU ranks only, and of columns of the others; {} if that is impossible."""
        config, ranks = self._config, self._model.hardware.ranks
        whole = [count if rank.is_gpu else 0 for count, rank in zip(experts, ranks, strict=True)]
        others = [count - kept for count, kept in zip(experts, whole, strict=True)]
        if not any(whole) or sum(map(bool, others)) < 2:
            return {}
        units = largest_remainder(units_of(config.expert_columns, config.expert_unit), others)
        if any(count and not columns for count, columns in zip(others, units, strict=True)):
            return {}
        return {"experts": whole, "expert_columns": in_units(config.expert_columns, units, config.expert_unit)}

    @property
    def _fixed_experts(self) -> dict[str, tuple[int, ...] | None]:
        """Counts of experts that are fixed, in this layout's units, by the units' name."""
        if self._layout is ExpertLayout.SLICES:
            return {"expert_columns": self._fixed.expert_columns}
        return {"experts": self._fixed.experts}

    @property
    def _world(self) -> int:
        return len(self._model.hardware.ranks)

    @property
    def _makers(self) -> dict[str, Callable[[], Component]]:
        makers: dict[str, Callable[[], Component]] = {"heads": self._heads, "rows": self._rows}
        makers["columns"] = partial(self._wide, experts=False)
        if self._layout is ExpertLayout.SLICES:
            makers["expert_columns"] = self._slices
        elif self._config.experts is not None:
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
        place = WidePlace(roles.holders, helpers=len(roles.helpers), experts=experts)

        def times(rank: int, count: float) -> tuple[float, ...]:
            return tuple(model.wide_part_s(rank, count, step, place) for step, _ in self._steps)

        return self._component(
            config.num_experts if experts else dense_units,
            allowed=(*roles.holders, *roles.helpers),
            needed=roles.busy if experts == (config.experts is not None) else (),
            times=times,
            weights=tuple(repeats * num_layers for _, repeats in self._steps),
            unit_bytes=lambda rank: self._units(rank).expert if experts else UNIT * self._units(rank).column,
            first_bytes=lambda rank: self._first_bytes(rank, "experts" if experts else "columns"),
            slowest=self._expected_s if experts and self._expects_chance else None,
        )

    @property
    def _expects_chance(self) -> bool:
        """True if deals of whole experts are compared by what chance makes of them; of many ranks their means are."""
        return self._layout is ExpertLayout.WHOLE and sum(map(len, self.slots)) <= SINGLE

    def _expected_s(self, deal: Deal) -> tuple[float, ...]:
        """Return the seconds of a layer's half of whole experts, by kind of step."""
        numbers, none = self._spread(deal, from_the_end=True), [0] * self._world
        holders = self._roles.holders
        return tuple(self._model.experts_half_s(holders, numbers, none, step) for step, _ in self._steps)

    def _slices(self) -> Component:
        """Return the component of columns of all experts."""
        config, model, roles, unit = self._config, self._model, self._roles, self._config.expert_unit
        place = WidePlace(roles.holders, helpers=len(roles.helpers), experts=True)

        def times(rank: int, count: float) -> tuple[float, ...]:
            number = config.num_experts
            units = number * min(1.0, count * unit / config.expert_columns)
            return tuple(model.wide_part_s(rank, units, step, place, sliced=number) for step, _ in self._steps)

        return self._component(
            units_of(config.expert_columns, unit),
            allowed=(*roles.holders, *roles.helpers),
            needed=roles.busy,
            times=times,
            weights=tuple(repeats * len(config.expert_layers) for _, repeats in self._steps),
            unit_bytes=lambda rank: unit * self._units(rank).expert_column,
            first_bytes=lambda rank: self._first_bytes(rank, "expert_columns"),
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
        slowest: Callable[[Deal], tuple[float, ...]] | None = None,
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
            slowest=slowest,
        )

    def _units(self, rank: int) -> UnitBytes:
        return self._memory.units(rank)

    def _first_bytes(self, rank: int, kind: str) -> float:
        """Return the bytes that a rank needs once it owns units of this kind, beside these."""
        return self._memory.first_bytes(rank, kind, holds_heads=rank in self._roles.holders)

    def _room_of(self, rank: int) -> float:
        unit, fixed = self._units(rank), self._fixed
        needed = self._memory.fixed_bytes(rank, holds_heads=rank in self._roles.holders)
        each = (
            (fixed.heads, unit.head),
            (fixed.columns, unit.column),
            (self._fixed_experts.get("experts"), unit.expert),
            (self._fixed_experts.get("expert_columns"), unit.expert_column),
            (fixed.rows, unit.row),
        )
        needed += sum(counts[rank] * unit_bytes for counts, unit_bytes in each if counts is not None)
        for kind, counts in {"columns": fixed.columns, **self._fixed_experts}.items():
            needed += self._first_bytes(rank, kind) if counts is not None and counts[rank] else 0.0
        return self._memory.hardware.ranks[rank].memory_bytes - needed
