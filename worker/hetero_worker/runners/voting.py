"""A vote of the whole group on changes that are made only if every rank can make them."""

from __future__ import annotations

import torch

from hetero_worker.distributed.exchange import Exchange


def all_can(exchange: Exchange, can: bool) -> bool:
    """Return whether every rank of the group can. One round of all ranks. Raises ExchangeError."""
    if exchange.world_size == 1:
        return can
    votes = exchange.all_gather(torch.tensor([can], dtype=torch.int64), [1] * exchange.world_size)
    return all(bool(vote.item()) for vote in votes)
