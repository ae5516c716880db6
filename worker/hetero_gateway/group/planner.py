"""Planner: who owns what, decided once for a group and then kept.

The plan is decided when every rank of the first epoch has its place and has told how fast it is. From then on it
holds, so that weights stay where they are. What ranks hold already decides before anything else:

- Ranks that hold weights under this group's key, and agree on the plan, are right, also against what this gateway
  remembers: a gateway that comes back takes over a group as it finds it, and a rank that was started anew takes the
  place that it has in the others' plan.
- Where they disagree, or hold nothing, what this gateway decided before counts.
- Where it decided nothing, the solver is asked, with what the ranks measured.

The key names what a plan was made from. Two gateways with one key would be free to choose different plans, and may
take over each other's; a plan of another key is worth nothing. One asyncio loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from hetero_api.errors import PlanError
from hetero_api.sharding import ShardPlan
from hetero_api.v1 import ranks_pb2
from hetero_gateway.group.decision import PlacedRanks, Placement, decide_placement
from hetero_gateway.group.placement import check_plan
from hetero_gateway.group.settings import GroupSettings

logger = logging.getLogger(__name__)

Decide = Callable[[GroupSettings, PlacedRanks, ShardPlan | None], Placement]
"""Decides, or judges the plan that it is given. Raises PlanError. Called on a thread of its own."""


class Planner:
    """See the module."""

    def __init__(self, settings: GroupSettings, *, decide: Decide = decide_placement) -> None:
        self._settings = settings
        self._decide = decide
        self._placement: Placement | None = None

    @property
    def placement(self) -> Placement | None:
        """What holds; None until it was decided."""
        return self._placement

    @property
    def plan(self) -> ShardPlan | None:
        """Who owns what; None until it was decided."""
        return self._placement.plan if self._placement is not None else None

    @property
    def needs_times(self) -> bool:
        """Whether the exchange has to be measured for the next `settle`."""
        return self._placement is None

    async def settle(self, ranks: PlacedRanks) -> Placement:
        """The placement of an epoch whose ranks have all formed. Raises PlanError."""
        held = held_plan(self._settings, ranks.hellos)
        if self._placement is None:
            self._placement = await asyncio.to_thread(self._decide, self._settings, ranks, held)
            logger.info("placement: %s", self._placement.reason)
        elif held is not None and held != self._placement.plan:
            logger.info("placement: the ranks hold another plan than this gateway's; theirs counts")
            self._placement = self._placement.with_plan(held)
        return self._placement

    def replace(self, plan: ShardPlan) -> None:
        """The ranks have changed over to another plan of the same key. Raises PlanError before one was decided."""
        if self._placement is None:
            raise PlanError("no plan was decided that could be replaced")
        self._placement = self._placement.with_plan(plan)


def held_plan(settings: GroupSettings, hellos: Sequence[ranks_pb2.Hello]) -> ShardPlan | None:
    """What all ranks that hold weights of this group agree on, if it is a plan of its model and their places."""
    held = [(rank, hello.held) for rank, hello in enumerate(hellos) if hello.HasField("held")]
    ours = [(rank, shard) for rank, shard in held if shard.plan_key == settings.plan_key]
    plans = {shard.shard_plan.SerializeToString(deterministic=True) for _, shard in ours}
    if len(plans) != 1 or any(shard.rank != rank for rank, shard in ours):
        return None
    plan = ShardPlan.from_proto(ours[0][1].shard_plan)
    try:
        check_plan(plan, settings.config, world_size=len(hellos))
    except PlanError as error:
        logger.warning("the plan that the ranks hold is none of this model: %s", error)
        return None
    return plan
