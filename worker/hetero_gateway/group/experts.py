"""Experts, counted and moved to the ranks that are fastest with them, while requests run or not.

`hetero_placement` decides which experts change places, from how often each was chosen and from the cost model that the
placement was decided by. This module carries it out, one pair at a time. All ranks read beside steps, each an expert at
most, for which it keeps memory. When all have read, one command has them go over: it takes its turn among the steps, so
that no step has to wait for its answer, and sequences keep their caches. It is a plan of its own with a step id, so all
ranks go over between the same two steps, and they vote, so all do or none does.

After each pair the group stands on a whole plan, which its placement knows: the next epoch, and the next gateway, go on
with it. A rank that is lost meanwhile ends the epoch, and the next one loads the plan that stands here, or the one that
all others have gone over to.

Counts fade as tokens come (`faded_counts`), so that texts which alternate do not move experts back and forth.

Only one admin RPC runs at a time; `AdminRpcs` sees to that. One asyncio loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Final, NamedTuple, NoReturn

from hetero_api.sharding import ShardPlan
from hetero_api.v1 import admin_pb2, ranks_pb2
from hetero_gateway.engine.core import EngineCore
from hetero_gateway.engine.errors import GroupLost
from hetero_gateway.group.errors import WrongState
from hetero_gateway.group.executor import CommandAnswer
from hetero_gateway.group.placement import GroupPlacement, Placement
from hetero_gateway.group.settings import GroupSettings
from hetero_placement.expert_placement import (
    ExpertCosts,
    ExpertCounts,
    ExpertMoves,
    counted_tokens,
    expected_step_s,
    faded_counts,
    place_experts,
)

logger = logging.getLogger(__name__)

MOST_SWAPS: Final = 8
"""Pairs of experts that change places between two looks at a group that serves: reading takes from its steps."""
_MOST_IDLE_SWAPS: Final = 64
"""Pairs that change places in one call while no requests run: another call may wait for it."""
_FIRST_LOOK_S: Final = 0.02
"""Time after which ranks are asked whether they have read; it doubles with each look ..."""
_LAST_LOOK_S: Final = 0.2
"""... up to this."""

Command = Callable[[ranks_pb2.GroupCommand], Awaitable[CommandAnswer]]
"""Has every rank carry out a command in its turn. Raises CommandFailed, GroupLost."""


class ExpertSwap(NamedTuple):
    """Record of two experts that changed places."""

    read_bytes: int
    """Weights that ranks read for it, all together."""
    pause_s: float
    """Longest time that a command took between two steps: to read, or to go over."""


class ExpertMover:
    """Counts experts and moves them. `observe` gets what each pair took that changed places."""

    def __init__(self, placement: GroupPlacement, *, observe: Callable[[ExpertSwap], None]) -> None:
        self._placement = placement
        self._observe = observe
        self._counts: ExpertCounts = {}
        """Counts of before, faded."""

    async def place(self, command: Command, *, most_swaps: int | None = None) -> admin_pb2.PlaceExpertsResponse:
        """Count, and have pairs of experts change places where that shortens the step, so many at most."""
        answer = await command(ranks_pb2.GroupCommand(count_experts=ranks_pb2.CountExperts()))
        placement, counted = self._placement.current, merge_counts(answer.reports)
        assert placement is not None, "ranks that compute have a plan"
        assert placement.settings.config.experts is not None, "AdminRpcs has looked"
        per_token = placement.settings.config.experts.per_token
        counts = self._counts = faded_counts(self._counts, counted, experts_per_token=per_token)
        # On a thread: a large model takes a second, and requests run.
        costs, moves = await asyncio.to_thread(_decide, placement, counts)
        plan, num_swaps = placement.plan, 0
        for wanted in islice(moves.plans_from(plan), most_swaps):
            self._observe(await self._swap(wanted, command))
            plan, num_swaps = wanted, num_swaps + 1
        told = admin_pb2.PlaceExpertsResponse(
            moved_experts=2 * num_swaps,
            counted_tokens=counted_tokens(counted, experts_per_token=per_token),
            step_s_before=moves.step_s_before,
            step_s_after=expected_step_s(plan, counts, costs),
        )
        logger.info(
            "experts: %d moved of %d that should; by %d tokens, a decode step takes %.3f ms instead of %.3f",
            told.moved_experts, moves.num_moved, told.counted_tokens, 1e3 * told.step_s_after, 1e3 * told.step_s_before,
        )  # fmt: skip
        return told

    async def _swap(self, wanted: ShardPlan, command: Command) -> ExpertSwap:
        """Have all ranks read what a plan wants that differs by two experts, and go over to it."""
        order = ranks_pb2.PlaceExperts(shard_plan=wanted.to_proto(), ahead=True)
        look_s = _FIRST_LOOK_S
        answer = await command(_placing(order))
        pause_s = answer.seconds
        while any(report.is_reading for report in answer.reports):
            await asyncio.sleep(look_s)
            look_s = min(2 * look_s, _LAST_LOOK_S)
            answer = await command(_placing(order))
            pause_s = max(pause_s, answer.seconds)
        order.ahead = False
        answer = await command(_placing(order))
        self._placement.replace_plan(wanted)
        read_bytes = sum(report.read_bytes for report in answer.reports)
        return ExpertSwap(read_bytes, pause_s=max(pause_s, answer.seconds))


def merge_counts(reports: Iterable[ranks_pb2.CommandReport]) -> dict[int, list[int]]:
    """Return, by layer, how many tokens chose each expert.

    A rank reports the experts that it holds, and ranks with slices of one expert report the same number.
    """
    counts: dict[int, list[int]] = {}
    for report in reports:
        for layer in report.expert_counts:
            known = counts.get(layer.layer, [0] * len(layer.tokens))
            counts[layer.layer] = [max(pair) for pair in zip(known, layer.tokens, strict=True)]
    return counts


def _placing(order: ranks_pb2.PlaceExperts) -> ranks_pb2.GroupCommand:
    return ranks_pb2.GroupCommand(place_experts=order)


def _decide(placement: Placement, counts: ExpertCounts) -> tuple[ExpertCosts, ExpertMoves]:
    """Decide moves for the workload that the placement was chosen for."""
    settings = placement.settings
    workload = settings.spec.placement.workload
    costs = ExpertCosts.of(
        placement.cost_model,
        placement.plan,
        rows=min(workload.concurrency, settings.spec.engine.max_num_seqs),
        context=workload.decode_context,
    )
    return costs, place_experts(placement.plan, counts, costs)


@dataclass(frozen=True, slots=True)
class RebalancePolicy:
    """Conditions for moving experts without being asked.

    `interval_s`: seconds from one look to the next. `min_tokens`: prompt and output tokens computed since experts were
    last counted, at least.
    """

    interval_s: float = 60.0
    min_tokens: int = 10_000


def wants_rebalancing(settings: GroupSettings) -> bool:
    """Return whether the model has experts and the resource wants them to be moved without being asked.

    In batch-invariant mode it does not: sums of experts would be added up in another order. Adapters of experts lie
    where their experts were when they were loaded.
    """
    spec = settings.spec
    stay = spec.engine.batch_invariant or spec.engine.adapters.experts
    return settings.config.experts is not None and spec.placement.rebalance_experts and not stay


class ExpertRebalancer:
    """Moves experts without being asked, only after enough tokens were computed for their counts to mean something.

    `place_experts` is the administrator's call, of so many pairs at most; it is refused when the group does something
    else.
    """

    def __init__(
        self,
        place_experts: Callable[[int], Awaitable[admin_pb2.PlaceExpertsResponse]],
        *,
        core: EngineCore,
        policy: RebalancePolicy = RebalancePolicy(),
    ) -> None:
        self._place_experts = place_experts
        self._core = core
        self._policy = policy

    async def run(self) -> NoReturn:
        """Watch and move until cancelled."""
        counted = 0
        while True:
            await asyncio.sleep(self._policy.interval_s)
            stats = self._core.stats()
            computed = stats.prompt_tokens + stats.generated_tokens
            if computed - counted < self._policy.min_tokens:
                continue
            counted = computed
            try:
                await self._move()
            except (WrongState, GroupLost) as error:
                logger.info("experts stay where they are for now: %s", error)

    async def _move(self) -> None:
        """Move a few experts; all that should move, unless requests come, if none runs."""
        await self._place_experts(MOST_SWAPS)
        while self._core.is_idle and (await self._place_experts(_MOST_IDLE_SWAPS)).moved_experts:
            pass
