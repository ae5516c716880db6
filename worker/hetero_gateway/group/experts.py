"""Experts, counted and moved: as many as it takes while the group serves nobody, in pairs while it serves.

`hetero_placement` decides which expert moves where, from how often each expert was chosen since the last time and from
the cost model that the placement was decided by. This module carries it out, one layer after another, each by a command
of its own. So a rank needs room for one layer's new experts at most, and a request that comes meanwhile waits for one
layer at most: the rest is left for the next time. After each layer the group stands on a whole plan, which its
placement knows: the next epoch, and the next gateway, go on with it.

A group that is never idle exchanges the pair of experts of a layer that helps most. Ranks read the two beside steps,
and go over between two steps when all have read: requests wait for the time between two steps, twice or a few times.

Only one admin RPC runs at a time; `AdminRpcs` sees to that. One asyncio loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NoReturn

from hetero_api.sharding import ShardPlan
from hetero_api.v1 import admin_pb2, ranks_pb2
from hetero_gateway.engine.core import EngineCore
from hetero_gateway.engine.errors import GroupLost
from hetero_gateway.group.errors import WrongState
from hetero_gateway.group.placement import GroupPlacement, Placement
from hetero_gateway.group.settings import GroupSettings
from hetero_placement.expert_placement import (
    ExpertCosts,
    ExpertCounts,
    ExpertMoves,
    LayerMove,
    counted_tokens,
    expected_step_s,
    place_experts,
)

logger = logging.getLogger(__name__)

MOST_SWAPS: Final = 8
"""Pairs of experts, each of a layer, that are exchanged between two counts while requests run."""
_READING_POLL_S: Final = 0.2

Command = Callable[[ranks_pb2.GroupCommand], Awaitable[Sequence[ranks_pb2.CommandReport]]]
"""Has every rank carry out a command, inside a hold. Raises CommandFailed, GroupLost."""


class ExpertMover:
    """Counts experts and moves them. `on_moved` gets the number of experts that changed ranks, if any did."""

    def __init__(self, placement: GroupPlacement, *, core: EngineCore, on_moved: Callable[[int], None]) -> None:
        self._placement = placement
        self._core = core
        self._on_moved = on_moved

    async def place(self, command: Command, *, require_idle: Callable[[], None]) -> admin_pb2.PlaceExpertsResponse:
        """Count, and move experts where that shortens the step. Stops early when requests come.

        `require_idle` raises WrongState.
        """
        async with self._core.hold():
            require_idle()
            reports = await command(ranks_pb2.GroupCommand(count_experts=ranks_pb2.CountExperts()))
        counts = merge_counts(reports)
        placement = self._placement.current
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

    async def swap(self, command: Command) -> int:
        """Count, and exchange pairs of experts while requests run; return how many experts changed ranks."""
        async with self._core.hold():
            reports = await command(ranks_pb2.GroupCommand(count_experts=ranks_pb2.CountExperts()))
        placement = self._placement.current
        assert placement is not None, "ranks that compute have a plan"
        _, moves = await asyncio.to_thread(_decide, placement, merge_counts(reports), most_pairs=1)
        plan, moved = placement.plan, 0
        try:
            for move in moves.moves[:MOST_SWAPS]:
                plan = await self._swap(move, plan, command)
                moved += move.num_moved
        finally:
            if moved:
                self._on_moved(moved)
                logger.info("experts: %d moved while requests ran, of %d that should", moved, moves.num_moved)
        return moved

    async def _swap(self, move: LayerMove, plan: ShardPlan, command: Command) -> ShardPlan:
        """Have all ranks read what a move asks for, then go over to it; return the plan that stands then."""
        wanted = move.applied_to(plan)
        order = ranks_pb2.PlaceExperts(shard_plan=wanted.to_proto(), ahead=True)
        while True:
            async with self._core.hold():
                reports = await command(ranks_pb2.GroupCommand(place_experts=order))
            if not any(report.is_reading for report in reports):
                break
            await asyncio.sleep(_READING_POLL_S)
        async with self._core.hold():
            order.ahead = False
            await command(ranks_pb2.GroupCommand(place_experts=order))
            self._placement.replace_plan(wanted)
        return wanted

    async def _move(self, moves: ExpertMoves, plan: ShardPlan, command: Command) -> tuple[int, ShardPlan]:
        """Carry out moves; return how many experts changed ranks, and the plan that stands then."""
        moved = 0
        try:
            for move in moves.moves:
                async with self._core.hold():
                    if not self._core.is_idle:
                        break
                    wanted = move.applied_to(plan)
                    order = ranks_pb2.PlaceExperts(shard_plan=wanted.to_proto())
                    await command(ranks_pb2.GroupCommand(place_experts=order))
                    self._placement.replace_plan(wanted)
                plan, moved = wanted, moved + move.num_moved
        finally:
            if moved:
                self._on_moved(moved)
        return moved, plan


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


def _decide(
    placement: Placement, counts: ExpertCounts, *, most_pairs: int | None = None
) -> tuple[ExpertCosts, ExpertMoves]:
    """Decide moves for the workload that the placement was chosen for."""
    settings = placement.settings
    workload = settings.spec.placement.workload
    costs = ExpertCosts.of(
        placement.cost_model,
        placement.plan,
        rows=min(workload.concurrency, settings.spec.engine.max_num_seqs),
        context=workload.decode_context,
    )
    return costs, place_experts(placement.plan, counts, costs, most_pairs=most_pairs)


@dataclass(frozen=True, slots=True)
class RebalancePolicy:
    """Conditions for looking whether experts should move.

    `idle_s`: seconds without a request. `min_tokens`: prompt and output tokens computed since the last time, at least.
    `interval_s`: seconds since the last time, at least. `serving_s`: seconds from one look at a group that serves to
    the next.
    """

    idle_s: float = 10.0
    min_tokens: int = 10_000
    interval_s: float = 300.0
    serving_s: float = 60.0


def wants_rebalancing(settings: GroupSettings) -> bool:
    """Return whether the model has experts and the resource wants them to be moved without being asked.

    In batch-invariant mode it does not: sums of experts would be added up in another order.
    """
    spec = settings.spec
    return settings.config.experts is not None and spec.placement.rebalance_experts and not spec.engine.batch_invariant


class ExpertRebalancer:
    """Moves experts without being asked.

    It does so only after enough tokens were computed since the last time for their counts to mean something: after the
    group has been idle for a while, and not often, for files are read; or while it serves, a few pairs at a time.
    `place_experts` and `swap_experts` are the administrator's calls, which are refused when the group does something
    else.
    """

    def __init__(
        self,
        place_experts: Callable[[], Awaitable[object]],
        swap_experts: Callable[[], Awaitable[object]],
        *,
        core: EngineCore,
        policy: RebalancePolicy = RebalancePolicy(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._place_experts = place_experts
        self._swap_experts = swap_experts
        self._core = core
        self._policy = policy
        self._clock = clock
        self._last_tokens = 0
        self._last_s = -policy.interval_s

    async def run(self) -> None:
        """Watch and move until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch_idleness())
            tasks.create_task(self._watch_serving())

    async def _watch_idleness(self) -> NoReturn:
        while True:
            await self._core.wait_idle()
            before = self._computed_tokens
            await asyncio.sleep(self._policy.idle_s)
            is_idle = self._core.is_idle and self._computed_tokens == before
            if is_idle and self._is_counted and self._clock() - self._last_s >= self._policy.interval_s:
                self._last_s = self._clock()
                await self._rebalance(self._place_experts)

    async def _watch_serving(self) -> NoReturn:
        while True:
            await asyncio.sleep(self._policy.serving_s)
            if not self._core.is_idle and self._is_counted:
                await self._rebalance(self._swap_experts)

    @property
    def _computed_tokens(self) -> int:
        stats = self._core.stats()
        return stats.prompt_tokens + stats.generated_tokens

    @property
    def _is_counted(self) -> bool:
        return self._computed_tokens - self._last_tokens >= self._policy.min_tokens

    async def _rebalance(self, move: Callable[[], Awaitable[object]]) -> None:
        self._last_tokens = self._computed_tokens
        try:
            await move()
        except (WrongState, GroupLost) as error:
            logger.info("experts stay where they are for now: %s", error)
