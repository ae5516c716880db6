"""Routes: the subgroups and links that a shard plan needs beside the rounds of the whole group.

There are three kinds:

* the ranks that hold a stage's residual stream sum in a *subgroup*, and so do the ranks that hold the embedding
  together with the first stage's holders, or all stages' if layers have inputs of their own;
* between stages hidden states travel over a *hop*: a link from the leader of one stage to those holders of the next
  that do not have them yet, at last to the ranks of the output head;
* a stage's leader *lends* its helpers the hidden states of each layer over one link, and each helper *returns* its
  partial sum over a link of its own.

Every rank derives the same routes from the same plan, so all make the same process groups in the same order. GPU ranks
([0, num_gpu_ranks)) of a subgroup sum on their devices, and only the first of them meets the CPU ranks on the host. A
link between GPU ranks is the devices', too. A plan with one stage that all ranks hold needs no routes: everything is a
round of the group.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from hetero_api.errors import PlanError
from hetero_api.sharding import ShardPlan, Stage

Ranks = tuple[int, ...]
"""Ascending."""


@dataclass(frozen=True, slots=True)
class Link:
    """One-way path between ranks; tensors arrive in order."""

    number: int
    """Number among the plan's links: two hops between the same ranks are two links."""
    source: int
    receivers: Ranks
    """Ascending, without the source; at least one."""

    @property
    def ranks(self) -> Ranks:
        """Source and receivers, ascending."""
        return tuple(sorted((self.source, *self.receivers)))


@dataclass(frozen=True, slots=True)
class Routes:
    """Subgroups and links of an exchange, beside the rounds of the whole group."""

    subgroups: tuple[Ranks, ...] = ()
    """Each has two ranks at least, and never all."""
    links: tuple[Link, ...] = ()

    def beside(self, other: Routes) -> Routes:
        """Return these routes with another plan's, which has subgroups only. Raises PlanError if it has links."""
        if other.links:
            raise PlanError("a plan beside another must not need links: give each rank KV heads, or one rank all of it")
        return Routes(tuple(dict.fromkeys((*self.subgroups, *other.subgroups))), self.links)


NO_ROUTES: Final = Routes()


@dataclass(frozen=True, slots=True)
class HelperLinks:
    """Links between a stage's leader and its helpers."""

    lend: Link
    """From the leader to all helpers."""
    returns: tuple[Link, ...]
    """From each helper to the leader, in rank order."""


def routes_of(plan: ShardPlan, num_gpu_ranks: int = 0, *, inputs_everywhere: bool = False) -> Routes:
    """Return all subgroups and links of the host that a decoder with this plan uses.

    `inputs_everywhere`: all stages need embeddings, as for `input_ranks`.
    """
    groups = (host_part(ranks, num_gpu_ranks) for ranks in _sum_groups(plan, inputs_everywhere))
    useful = (ranks for ranks in groups if 1 < len(ranks) < plan.world_size)
    links = tuple(link for link in _links(plan) if not is_device_link(link, num_gpu_ranks))
    return Routes(tuple(dict.fromkeys(useful)), links)


def device_routes_of(plan: ShardPlan, num_gpu_ranks: int, *, inputs_everywhere: bool = False) -> Routes:
    """Return all subgroups and links of GPU ranks' devices; the subgroup of all GPU ranks is included if it is used.

    `inputs_everywhere`: as for `routes_of`.
    """
    groups = (device_part(ranks, num_gpu_ranks) for ranks in _sum_groups(plan, inputs_everywhere))
    links = tuple(link for link in _links(plan) if is_device_link(link, num_gpu_ranks))
    return Routes(tuple(dict.fromkeys(ranks for ranks in groups if len(ranks) > 1)), links)


def host_part(ranks: Ranks, num_gpu_ranks: int) -> Ranks:
    """Return the ranks of a subgroup that meet on the host: its first GPU rank and its CPU ranks."""
    return (*device_part(ranks, num_gpu_ranks)[:1], *(rank for rank in ranks if rank >= num_gpu_ranks))


def device_part(ranks: Ranks, num_gpu_ranks: int) -> Ranks:
    """Return a subgroup's GPU ranks."""
    return tuple(rank for rank in ranks if rank < num_gpu_ranks)


def is_device_link(link: Link, num_gpu_ranks: int) -> bool:
    """Return True if the link connects GPU ranks only."""
    return link.ranks[-1] < num_gpu_ranks


def input_ranks(plan: ShardPlan, *, inputs_everywhere: bool = False) -> Ranks:
    """Return the ranks that sum embeddings: those that hold rows, and the first stage's holders, which need the sum.

    `inputs_everywhere`: the holders of all stages need it.
    """
    needing = plan.stages() if inputs_everywhere else plan.stages()[:1]
    return tuple(sorted({*plan.embedding_owners(), *(rank for stage in needing for rank in stage.holders)}))


def hops(plan: ShardPlan) -> list[Link | None]:
    """Return the link from each stage to the next, or to the output head; None where all have the states."""
    ranks: list[Sequence[int]] = [*(stage.holders for stage in plan.stages()), plan.head_owners()]
    return [_hop(k, here, there) for k, (here, there) in enumerate(itertools.pairwise(ranks))]


def helper_links(plan: ShardPlan) -> list[HelperLinks | None]:
    """Return each stage's links; None if nobody helps. Stages with the same leader and helpers share their links."""
    stages = plan.stages()
    numbers = itertools.count(len(stages))
    made: dict[tuple[int, Ranks], HelperLinks] = {}
    for stage in stages:
        if stage.helpers and (stage.leader, stage.helpers) not in made:
            made[stage.leader, stage.helpers] = _helper_links(stage, numbers)
    return [made.get((stage.leader, stage.helpers)) for stage in stages]


def _sum_groups(plan: ShardPlan, inputs_everywhere: bool) -> list[Ranks]:
    return [input_ranks(plan, inputs_everywhere=inputs_everywhere), *(stage.holders for stage in plan.stages())]


def _links(plan: ShardPlan) -> list[Link]:
    """Return hops, then helpers' links, by their numbers."""
    lanes = [links for links in dict.fromkeys(helper_links(plan)) if links is not None]
    between = [link for link in hops(plan) if link is not None]
    return [*between, *(link for lane in lanes for link in (lane.lend, *lane.returns))]


def _hop(number: int, here: Sequence[int], there: Iterable[int]) -> Link | None:
    receivers = tuple(rank for rank in there if rank not in here)
    return Link(number, here[0], receivers) if receivers else None


def _helper_links(stage: Stage, numbers: Iterable[int]) -> HelperLinks:
    number = iter(numbers)
    lend = Link(next(number), stage.leader, stage.helpers)
    return HelperLinks(lend, tuple(Link(next(number), helper, (stage.leader,)) for helper in stage.helpers))
