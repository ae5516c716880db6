"""Experts, counted and moved while the group serves nobody.

What is moved where is `hetero_placement`'s to say, from how often each expert was chosen since the last time and from
the cost model that the placement was decided by. Here it is carried out, one layer after another, each by a command of
its own: a rank needs room for one layer's new experts at most, and a request that comes meanwhile waits for one layer
at most, for then the rest is left for the next time. After each layer the group stands on a whole plan, which the
planner knows: the next epoch, and the next gateway, go on with it.

Only one verb runs at a time; `GroupVerbs` sees to that.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence

from hetero_api.sharding import ShardPlan
from hetero_api.v1 import admin_pb2, ranks_pb2
from hetero_gateway.engine.core import EngineCore
from hetero_gateway.group.decision import Placement
from hetero_gateway.group.planner import Planner
from hetero_placement.expert_placement import (
    ExpertCosts,
    ExpertCounts,
    ExpertMoves,
    counted_tokens,
    expected_step_s,
    place_experts,
)
from hetero_placement.steps import Workload

logger = logging.getLogger(__name__)

Command = Callable[[ranks_pb2.GroupCommand], Awaitable[Sequence[ranks_pb2.CommandReport]]]
"""Has every rank do it, inside a hold. Raises CommandFailed, GroupLost."""


class ExpertMover:
    """See the module. `on_moved` is told how many experts changed ranks, whenever some did."""

    def __init__(self, planner: Planner, *, core: EngineCore, on_moved: Callable[[int], None]) -> None:
        self._planner = planner
        self._core = core
        self._on_moved = on_moved

    async def place(self, command: Command, *, require_idle: Callable[[], None]) -> admin_pb2.PlaceExpertsResponse:
        """Count, and move what shortens the step. Stops early when requests come. `require_idle` raises WrongState."""
        async with self._core.hold():
            require_idle()
            reports = await command(ranks_pb2.GroupCommand(count_experts=ranks_pb2.CountExperts()))
        counts = sum_counts(reports)
        placement = self._planner.placement
        assert placement is not None, "ranks that compute have a plan"
        # On a thread: a large model takes a second, and requests may come.
        costs, moves = await asyncio.to_thread(_decide, placement, counts)
        moved, plan = await self._move(moves, placement.plan, command)
        answer = admin_pb2.PlaceExpertsResponse(
            moved_experts=moved,
            counted_tokens=counted_tokens(counts, experts_per_token=costs.experts_per_token),
            step_s_before=moves.step_s_before,
            step_s_after=expected_step_s(plan, counts, costs),
        )
        logger.info(
            "experts: %d moved of %d that should; by %d tokens, a decode step takes %.3f ms instead of %.3f",
            moved, moves.num_moved, answer.counted_tokens, 1e3 * answer.step_s_after, 1e3 * answer.step_s_before,
        )  # fmt: skip
        return answer

    async def _move(self, moves: ExpertMoves, plan: ShardPlan, command: Command) -> tuple[int, ShardPlan]:
        """How many experts changed ranks, and the plan that stands then."""
        moved = 0
        try:
            for move in moves.moves:
                async with self._core.hold():
                    if not self._core.is_idle:
                        break
                    wanted = move.applied_to(plan)
                    order = ranks_pb2.PlaceExperts(shard_plan=wanted.to_proto())
                    await command(ranks_pb2.GroupCommand(place_experts=order))
                    self._planner.replace(wanted)
                plan, moved = wanted, moved + move.num_moved
        finally:
            if moved:
                self._on_moved(moved)
        return moved, plan


def sum_counts(reports: Iterable[ranks_pb2.CommandReport]) -> dict[int, list[int]]:
    """Layer → tokens that chose each expert, over all ranks: each tells of those that it holds."""
    counts: dict[int, list[int]] = {}
    for report in reports:
        for told in report.expert_counts:
            known = counts.get(told.layer, [0] * len(told.tokens))
            counts[told.layer] = [a + b for a, b in zip(known, told.tokens, strict=True)]
    return counts


def _decide(placement: Placement, counts: ExpertCounts) -> tuple[ExpertCosts, ExpertMoves]:
    """For the workload that the placement was chosen for."""
    settings = placement.settings
    workload = Workload.from_spec(settings.spec.placement.workload)
    costs = ExpertCosts.of(
        placement.cost_model,
        placement.plan,
        rows=min(workload.concurrency, settings.max_num_seqs),
        context=workload.decode_context,
    )
    return costs, place_experts(placement.plan, counts, costs)
