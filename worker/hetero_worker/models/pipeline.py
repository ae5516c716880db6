"""How hidden states move through a pipeline's stages on one rank.

All ranks work off the same list, micro-batch by micro-batch and stage by stage within it, and each does what of it is
its own: receive, compute, send. The list is one order for everybody and a link has room for several tensors, so no
two ranks can wait for each other; a rank in several stages (uneven shares) only overlaps less. The receipt for the
next micro-batch is posted before the present one is computed, hence arrives meanwhile.

A rank that does not hold a stage does not see its states: what it has of them then has no meaning. One that helps a
stage's leader does its part of each layer at that place of the list (lending.py).
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
"""Runs a stage's layers over the micro-batch's rows of the residual stream, in place; or helps with them."""


@dataclass(frozen=True, slots=True)
class _Visit:
    """A stage that this rank holds, or helps with: a helper has no arrivals and departures."""

    stage: Stage
    arrival: Link | None
    """Where its states come from; None: the rank has them from the stage before, or from the embedding."""
    departure: Link | None
    """Where this rank sends them afterwards."""


class Pipeline:
    """One rank's way through the stages of a plan."""

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
        """Take all rows of `hidden` [tokens, hidden] through the stages, in place."""
        if not self._visits:
            return
        parts = [hidden[batch.begin : batch.end] for batch in batches]
        first = self._visits[0].arrival
        coming = [_post(parts[0], first, exchange)]
        for batch, part, following in zip(batches, parts, [*parts[1:], None], strict=True):
            coming.append(_post(following, first, exchange))
            self._take_through(batch, part, coming.pop(0), compute=compute, exchange=exchange)

    def deliver(self, rows: torch.Tensor, *, exchange: Exchange) -> None:
        """`rows` of the last stage's states reach, in place, the ranks of the output head that do not hold them."""
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
    """The receipt of a micro-batch's states in the rows that they belong to."""
    return None if part is None or link is None else exchange.receive(part, link)
