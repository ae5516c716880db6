"""Who exchanges with whom, beside the rounds of the whole group: read from the shard plan.

A pipeline's stage sums among its own ranks, in a *subgroup*; between stages hidden states travel over a *link*, from
the first rank of one stage to those of the next that do not have them yet. Every rank derives the same routes from
the same plan, so all can make the same process groups in the same order. A plan with one stage that all ranks work
on has no routes: everything is a round of the group.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from hetero_api.sharding import ShardPlan


@dataclass(frozen=True, slots=True)
class Link:
    """A one-way path; what is sent arrives in order."""

    number: int
    """Which hop of the pipeline it serves: two hops between the same ranks are two links."""
    source: int
    receivers: tuple[int, ...]
    """Ascending, without the source; at least one."""


@dataclass(frozen=True, slots=True)
class Routes:
    """What an exchange has to be able to do beside rounds of the whole group."""

    subgroups: tuple[tuple[int, ...], ...] = ()
    """Ranks, ascending; two at least, and never all."""
    links: tuple[Link, ...] = ()


NO_ROUTES: Final = Routes()


def routes_of(plan: ShardPlan) -> Routes:
    """All subgroups and links that a decoder with this plan uses."""
    groups = [input_ranks(plan), *(stage.ranks for stage in plan.stages())]
    useful = (ranks for ranks in groups if 1 < len(ranks) < plan.world_size)
    return Routes(tuple(dict.fromkeys(useful)), tuple(link for link in hops(plan) if link is not None))


def input_ranks(plan: ShardPlan) -> tuple[int, ...]:
    """Ranks among which embeddings are summed: those that hold rows, and the first stage, which needs the sums."""
    return tuple(sorted({*plan.embedding_owners(), *plan.stages()[0].ranks}))


def hops(plan: ShardPlan) -> list[Link | None]:
    """Entry k leads from stage k to the next one, the last to the output head; None where all have the states."""
    ranks: list[Sequence[int]] = [*(stage.ranks for stage in plan.stages()), plan.head_owners()]
    return [_hop(k, here, there) for k, (here, there) in enumerate(itertools.pairwise(ranks))]


def _hop(number: int, here: Sequence[int], there: Iterable[int]) -> Link | None:
    receivers = tuple(rank for rank in there if rank not in here)
    return Link(number, here[0], receivers) if receivers else None
