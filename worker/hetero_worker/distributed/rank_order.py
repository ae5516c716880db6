"""Sums among GPU ranks in rank order: a DeviceGroup whose bits do not depend on where an element lies in a tensor.

A backend's own all-reduce cuts a tensor into pieces by its size and adds up each in another order of ranks, so that a
row's sum depends on what other rows there are. Here every rank gets all tensors and adds them up by itself, in fp32 and
ascending rank order, rounded once: as the host's exchanges do.

n ranks, b bytes: (n-1) · b over each rank's link and n · b of its memory, where the backend's way takes 2 · b · (n-1)/n
and nothing. Of two ranks there is one order only; they have no need of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch

from hetero_worker.distributed.device_group import DeviceGroup
from hetero_worker.distributed.exchange import sum_in_order
from hetero_worker.distributed.routes import Ranks

_ORDERED_ANYHOW: Final = 2
"""Ranks: x + y is y + x, and both are rounded once."""


class RankOrderGroup:
    """Another group's ranks and ways, but for sums."""

    def __init__(self, group: DeviceGroup) -> None:
        self._group = group

    @property
    def ranks(self) -> Ranks:
        return self._group.ranks

    def all_reduce(self, tensor: torch.Tensor) -> None:
        sum_in_order(self._group.all_gather(tensor), tensor)

    def reduce(self, tensor: torch.Tensor, root: int) -> None:  # noqa: ARG002
        """Everywhere: the gathered tensors are there anyhow."""
        self.all_reduce(tensor)

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        self._group.broadcast(tensor, source)

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return self._group.all_gather(tensor)

    def abort(self) -> None:
        self._group.abort()

    def close(self) -> None:
        self._group.close()


def in_rank_order(groups: Mapping[Ranks, DeviceGroup]) -> dict[Ranks, DeviceGroup]:
    """The groups, those of more than two ranks adding up in rank order."""
    return {ranks: group if len(ranks) <= _ORDERED_ANYHOW else RankOrderGroup(group) for ranks, group in groups.items()}
