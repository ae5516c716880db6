"""Pipeline: moves hidden states through the stages of a plan, on one rank.

All ranks follow the same list, micro-batch by micro-batch and stage by stage within each, and do their own part of it:
receive, compute, send. The order is the same for all ranks and a link has room for several tensors, so no two ranks
wait for each other. A rank in several stages (uneven shares) only overlaps less. The receive for the next micro-batch
is posted before the current one is computed, so it completes meanwhile.

A rank that does not hold a stage does not see its states; its own copy is meaningless there. A helper of a stage's
leader does its part of each layer at that place of the list (`lending`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from hetero_api.sharding import ShardPlan, Stage
from hetero_worker.distributed.exchange import Exchange, PendingTensor
from hetero_worker.distributed.routes import Link, hops
from hetero_worker.models.micro_batches import MicroBatch

Compute = Callable[[MicroBatch, Stage, torch.Tensor], None]
"""Runs a stage's layers over the micro-batch's rows of the residual stream in place, or helps with them."""


@dataclass(frozen=True, slots=True)
class _Visit:
    """A stage that this rank holds or helps with; a helper has no arrival and no departure."""

    stage: Stage
    arrival: Link | None
    """Link that brings the states; None: the rank has them from the previous stage or the embedding."""
    departure: Link | None
    """Link over which this rank sends them on; None: it does not."""


class Pipeline:
    """One rank's path through the stages of a plan."""

    def __init__(self, plan: ShardPlan, *, rank: int) -> None:
        self._rank = rank
        stages = plan.stages()
        *between, self._to_head = hops(plan)
        self._visits = [
            _Visit(stage, self._if_receiver(arrival), self._if_source(departure))
            for stage, arrival, departure in zip(stages, [None, *between], [*between, None], strict=True)
            if rank in stage.ranks
        ]
        self.num_stages = len(stages)

    def run(self, hidden: torch.Tensor, batches: Sequence[MicroBatch], compute: Compute, *, exchange: Exchange) -> None:
        """Take all rows of `hidden` [tokens, hidden] through the stages in place."""
        if not self._visits:
            return
        parts = [hidden[batch.begin : batch.end] for batch in batches]
        first = self._visits[0].arrival
        coming = [_post(parts[0], first, exchange)]
        for batch, part, following in zip(batches, parts, [*parts[1:], None], strict=True):
            coming.append(_post(following, first, exchange))
            self._take_through(batch, part, coming.pop(0), compute=compute, exchange=exchange)

    def deliver(self, rows: torch.Tensor, *, exchange: Exchange) -> None:
        """Send `rows` of the last stage's states, in place, to the ranks of the output head that do not hold them."""
        if (link := self._if_source(self._to_head)) is not None:
            exchange.send(rows, link)
        if (link := self._if_receiver(self._to_head)) is not None:
            exchange.receive(rows, link).wait()

    def _take_through(
        self,
        batch: MicroBatch,
        part: torch.Tensor,
        pending: PendingTensor | None,
        *,
        compute: Compute,
        exchange: Exchange,
    ) -> None:
        for visit in self._visits:
            if visit is not self._visits[0]:
                pending = _post(part, visit.arrival, exchange)
            if pending is not None:
                pending.wait()
            compute(batch, visit.stage, part)
            if visit.departure is not None:
                exchange.send(part, visit.departure)

    def _if_receiver(self, link: Link | None) -> Link | None:
        return link if link is not None and self._rank in link.receivers else None

    def _if_source(self, link: Link | None) -> Link | None:
        return link if link is not None and self._rank == link.source else None


def _post(part: torch.Tensor | None, link: Link | None, exchange: Exchange) -> PendingTensor | None:
    """Post the receive of a micro-batch's states into their rows."""
    return None if part is None or link is None else exchange.receive(part, link)
