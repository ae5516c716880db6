"""Which rank should hold which expert, by how often each was chosen.

A decode step waits, layer by layer, for the rank that takes longest with the experts that its tokens chose. So a
layer's experts are dealt such that the longest expected time is shortest: experts that are chosen often go to ranks
that are fast with them, and equal ranks get equal work. How many experts of a layer a rank holds does not change, for
its memory is planned; so experts only ever change places, in pairs. Experts in slices count as held by one rank more,
which takes as long as the slowest of those that have the slices.

An expert costs what it takes to go through its weights once, whenever at least one of a step's tokens chose it: decode
is bound by memory. With a share p of all tokens choosing it and b tokens in a step, that is 1 - (1 - p)^b of the steps.
Tokens of a step are taken as independent of one another. What else a step takes does not depend on who holds what: the
cost model tells it, and what an expert takes, for tokens that are routed evenly.

What always holds: the result follows from the arguments alone; nothing moves without a gain worth it; and from what
`place_experts` gave, with the same counts, nothing moves any more. Counts of one time differ from those of the next:
`faded_counts` adds them up such that only what lasts moves experts. Pure arithmetic, O(ranks · experts · log experts) a
pair exchanged.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from hetero_api.sharding import ShardPlan
from hetero_placement.cost_model import CostModel, WidePlace
from hetero_placement.part_costs import active_share
from hetero_placement.steps import Step, decode_step

MIN_GAIN: Final = 0.02
"""Part of a step that moving experts must save, and part of a layer's experts' time that changing that layer must."""
_MIN_PAIR_GAIN: Final = 0.005
"""Part of the slower rank's time that exchanging one pair must save: two experts have to be read for it."""

FADING_TOKENS: Final = 500_000
"""Tokens that are counted while older counts lose half their weight."""

ExpertCounts = Mapping[int, Sequence[float]]
"""Layer → how many tokens chose each of its experts, by the experts' numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertCosts:
    """Times of a decode step's experts."""

    active_s: tuple[float, ...]
    """Seconds that each rank takes for an expert that some token chose, in rank order."""
    fixed_s: tuple[float, ...] = ()
    """Seconds that each rank takes for a layer of experts whatever is chosen: router, ways to and from its leader."""
    rest_s: float
    """Seconds of the step beside experts."""
    rows: int
    """Sequences that decode at a time."""
    experts_per_token: int
    sliced_s: float = 0.0
    """Seconds that the slowest rank takes for a slice of an expert that some token chose."""
    sliced_fixed_s: float = 0.0
    """Seconds that the slowest rank with slices takes for a layer whatever is chosen."""

    @classmethod
    def of(cls, model: CostModel, plan: ShardPlan, *, rows: int, context: float) -> ExpertCosts:
        """Where `rows` sequences decode that each attend to `context` tokens. The model must have experts."""
        experts = model.config.experts
        assert experts is not None, "only a model of experts has costs of experts"
        step = decode_step(rows, context)
        active = active_share(experts.per_token / experts.number, rows)
        units_s = [rank.experts(rows).unit_s for rank in model.ranks]
        active_s = tuple(unit_s / active for unit_s in units_s)
        fixed_s = tuple(_fixed_s(model, plan, rank, step) for rank in range(plan.world_size))
        parts = [_sliced_part(model, plan, rank) for rank in range(plan.world_size)]
        costs = cls(
            active_s=active_s,
            fixed_s=fixed_s,
            sliced_s=max(each_s * part for each_s, part in zip(active_s, parts, strict=True)),
            sliced_fixed_s=max(each_s * bool(part) for each_s, part in zip(fixed_s, parts, strict=True)),
            rest_s=0.0,
            rows=rows,
            experts_per_token=experts.per_token,
        )
        evenly = dict.fromkeys(model.config.expert_layers, [1] * experts.number)
        rest_s = model.step_s(plan, step) - expected_step_s(plan, evenly, costs)
        return replace(costs, rest_s=max(0.0, rest_s))


@dataclass(frozen=True, slots=True)
class LayerMove:
    """Another order of one layer's experts, by exchanges of two of them."""

    layer: int
    orders: tuple[tuple[int, ...], ...]
    """Order after each exchange, as ShardPlan.expert_orders has it."""
    num_moved: int
    """Experts that another rank holds in the end."""

    def applied_to(self, plan: ShardPlan, *, exchange: int = -1) -> ShardPlan:
        """Return the plan with this layer's order after an exchange, by default the last, and nothing else changed."""
        orders = list(plan.expert_orders or ((),) * plan.num_layers)
        orders[self.layer] = self.orders[exchange]
        return replace(plan, expert_orders=tuple(orders))


@dataclass(frozen=True, slots=True)
class ExpertMoves:
    """Changes layer by layer, and the gain they promise. Without moves, the predictions are equal."""

    moves: tuple[LayerMove, ...]
    """The layer that gains most first: whoever has to stop half-way has got the best of it."""
    step_s_before: float
    step_s_after: float

    @property
    def num_moved(self) -> int:
        """Number of experts that change their rank."""
        return sum(move.num_moved for move in self.moves)

    def plans_from(self, plan: ShardPlan) -> Iterator[ShardPlan]:
        """Yield the plan after each exchange of two experts, the first of every layer before the second of any."""
        for exchange in range(max((len(move.orders) for move in self.moves), default=0)):
            for move in self.moves:
                if exchange < len(move.orders):
                    plan = move.applied_to(plan, exchange=exchange)
                    yield plan


def place_experts(
    plan: ShardPlan, counts: ExpertCounts, costs: ExpertCosts, *, min_gain: float = MIN_GAIN
) -> ExpertMoves:
    """Find moves that shorten the decode step expected under these counts; none if they save too little.

    Layers that are not counted, or that no token went through, stay as they are. Ties go to the expert of the lower
    number and the lower rank.
    """
    before_s = expected_step_s(plan, counts, costs)
    found = [change for layer, chosen in sorted(counts.items()) for change in _improved(plan, layer, chosen, costs)]
    worthwhile = [change for change in found if change.saved_s >= min_gain * change.before_s]
    saved_s = sum(change.saved_s for change in worthwhile)
    if not worthwhile or saved_s < min_gain * before_s:
        return ExpertMoves((), before_s, before_s)
    worthwhile.sort(key=lambda change: -change.saved_s)
    return ExpertMoves(tuple(change.move for change in worthwhile), before_s, before_s - saved_s)


def expected_step_s(plan: ShardPlan, counts: ExpertCounts, costs: ExpertCosts) -> float:
    """Seconds of a decode step under these counts, as this plan has it."""
    return costs.rest_s + sum(max(_deal(plan, layer, chosen, costs).times_s) for layer, chosen in counts.items())


def counted_tokens(counts: ExpertCounts, *, experts_per_token: int) -> int:
    """Tokens that went through the layer that most went through."""
    return int(max((sum(chosen) for chosen in counts.values()), default=0)) // experts_per_token


def faded_counts(before: ExpertCounts, new: ExpertCounts, *, experts_per_token: int) -> ExpertCounts:
    """Return new counts and, beside them, those of before with less weight: half of it after FADING_TOKENS more tokens.

    Texts that alternate then look alike, and experts stay; what lasts wins after about as many tokens.
    """
    weight = 0.5 ** (counted_tokens(new, experts_per_token=experts_per_token) / FADING_TOKENS)
    return {
        layer: [old * weight + chosen for old, chosen in zip(before.get(layer, [0.0] * len(own)), own, strict=True)]
        for layer, own in new.items()
    }


class _Expert(NamedTuple):
    """Ordered by how often it is active in a step, then by number."""

    activity: float
    number: int


class _Deal:
    """Who holds which experts of one layer; changed in place by exchanges."""

    def __init__(self, held: Sequence[Sequence[_Expert]], costs: ExpertCosts) -> None:
        self.held = [sorted(experts) for experts in held]
        self.active_s = (*costs.active_s, costs.sliced_s)
        self._fixed_s = (*(costs.fixed_s or (0.0,) * len(costs.active_s)), costs.sliced_fixed_s)
        self.times_s = [self._time_s(rank) for rank in range(len(held))]

    def exchange(self, pair: _Pair) -> None:
        given = self.held[pair.slow].pop(pair.given)
        taken = self.held[pair.other].pop(pair.taken)
        for rank, expert in ((pair.slow, taken), (pair.other, given)):
            self.held[rank] = sorted([*self.held[rank], expert])
            self.times_s[rank] = self._time_s(rank)

    def _time_s(self, rank: int) -> float:
        """Return the expected seconds of the rank; 0 where it holds nothing."""
        active = sum(expert.activity for expert in self.held[rank])
        return self._fixed_s[rank] + self.active_s[rank] * active if self.held[rank] else 0.0


class _Pair(NamedTuple):
    """An exchange of two experts, by their places in what two ranks hold. Ordered by what it leads to."""

    peak_s: float
    """The longer of the two ranks' times, then."""
    other: int
    slow: int
    given: int
    taken: int


class _Change(NamedTuple):
    move: LayerMove
    before_s: float
    saved_s: float


def _deal(plan: ShardPlan, layer: int, chosen: Sequence[float], costs: ExpertCosts) -> _Deal:
    activity = _activities(chosen, costs)
    return _Deal([[_Expert(activity[number], number) for number in numbers] for numbers in _held(plan, layer)], costs)


def _held(plan: ShardPlan, layer: int) -> list[tuple[int, ...]]:
    """Return the numbers of each rank's whole experts, and behind them those of experts in slices."""
    sliced = [bool(shard.layers[layer].expert_columns.size) for shard in plan.ranks]
    whole = [() if is_sliced else plan.experts_of(rank, layer) for rank, is_sliced in enumerate(sliced)]
    return [*whole, plan.sliced_experts(layer)]


def _sliced_part(model: CostModel, plan: ShardPlan, rank: int) -> float:
    """Return the part that the rank has of each expert in slices, in the first layer that has some; 0: it has none."""
    columns = (plan.ranks[rank].layers[layer].expert_columns.size for layer in model.config.expert_layers)
    return next((size / model.config.expert_columns for size in columns if size), 0.0)


def _fixed_s(model: CostModel, plan: ShardPlan, rank: int, step: Step) -> float:
    """As in the first layer that the rank holds experts of."""
    for layer in model.config.expert_layers:
        if number := plan.ranks[rank].layers[layer].experts.size:
            units = number * (_sliced_part(model, plan, rank) or 1.0)
            holders = plan.attention_owners(layer)
            helpers = len(plan.layer_owners(layer)) - len(holders)
            whole_s = model.wide_part_s(rank, units, step, WidePlace(holders, helpers=helpers, experts=True))
            return max(0.0, whole_s - units * model.ranks[rank].experts(step.rows).unit_s)
    return 0.0


def _activities(chosen: Sequence[float], costs: ExpertCosts) -> list[float]:
    """Part of the decode steps in which some token chooses the expert, for each."""
    tokens = sum(chosen) / costs.experts_per_token
    if not tokens:
        return [0.0] * len(chosen)
    return [1 - (1 - min(1.0, count / tokens)) ** costs.rows for count in chosen]


def _improved(plan: ShardPlan, layer: int, chosen: Sequence[float], costs: ExpertCosts) -> Iterator[_Change]:
    """Yield the layer dealt better, if exchanges of experts improve it."""
    deal = _deal(plan, layer, chosen, costs)
    before_s = max(deal.times_s)
    orders = []
    while (pair := _best_pair(deal)) is not None:
        deal.exchange(pair)
        # Ranks own consecutive positions, in rank order; those of experts in slices are the last.
        orders.append(tuple(number for experts in deal.held for number in sorted(expert.number for expert in experts)))
    held = [sorted(expert.number for expert in experts) for experts in deal.held]
    num_moved = sum(len(set(now) - set(then)) for now, then in zip(held, _held(plan, layer), strict=True))
    if num_moved:
        move = LayerMove(layer, tuple(orders), num_moved)
        yield _Change(move, before_s, before_s - max(deal.times_s))


def _best_pair(deal: _Deal) -> _Pair | None:
    """Return the exchange that helps the slowest rank most; None if none is worth it.

    With every exchange the ranks' times, sorted from the longest, become less in lexicographic order: so it ends.
    """
    slow = max(range(len(deal.times_s)), key=lambda rank: (deal.times_s[rank], -rank))
    slow_s = deal.times_s[slow]
    best = min(_pairs(deal, slow), default=None) if slow_s else None
    return best if best is not None and slow_s - best.peak_s >= _MIN_PAIR_GAIN * slow_s else None


def _pairs(deal: _Deal, slow: int) -> Iterator[_Pair]:
    """For each expert of the slow rank and each other rank, the partners that come nearest to levelling the two."""
    for other, partners in enumerate(deal.held):
        costs_s = deal.active_s[slow] + deal.active_s[other]
        if other == slow or not partners or not costs_s:
            continue
        wanted = (deal.times_s[slow] - deal.times_s[other]) / costs_s
        for given, expert in enumerate(deal.held[slow]):
            place = bisect_left(partners, (expert.activity - wanted,))
            for taken in range(max(0, place - 1), min(place + 1, len(partners))):
                moved = expert.activity - partners[taken].activity
                slow_s = deal.times_s[slow] - deal.active_s[slow] * moved
                other_s = deal.times_s[other] + deal.active_s[other] * moved
                yield _Pair(max(slow_s, other_s), other, slow, given, taken)
