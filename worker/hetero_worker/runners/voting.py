"""A vote of the whole group: what is done only if every rank can do it."""

from __future__ import annotations

import torch

from hetero_worker.distributed.exchange import Exchange


def all_can(exchange: Exchange, can: bool) -> bool:
    """Whether every rank of the group says that it can. One round, of all ranks. Raises as the exchange does."""
    if exchange.world_size == 1:
        return can
    votes = exchange.all_gather(torch.tensor([can], dtype=torch.int64), [1] * exchange.world_size)
    return all(bool(vote.item()) for vote in votes)
