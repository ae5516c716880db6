"""GlooExchange: the exchange for any network, and the reference that ShmExchange is tested against.

Rounds are those of gloo_rounds, links those of gloo_links; each subgroup and link has a process group of its own.
One thread calls; any thread may abort.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
import torch.distributed as dist

from hetero_worker.distributed.exchange import (
    LocalExchange,
    PendingTensor,
    SendsAtOnce,
    SumExchange,
    Traffic,
    TrafficCounter,
)
from hetero_worker.distributed.gloo_links import GlooLink
from hetero_worker.distributed.gloo_rounds import GlooRounds, GlooWaits
from hetero_worker.distributed.routes import Link

LINK_BYTES: Final = 32 * 1024**2
"""Links are bounded by the number of tensors that are on their way; this bounds what their copies take."""


@dataclass(frozen=True, slots=True)
class GlooGroups:
    """Process groups by the ranks that meet in them; the first is of all. A rank uses those that it is in."""

    rounds: Mapping[tuple[int, ...], dist.ProcessGroup]
    links: Mapping[Link, dist.ProcessGroup]


class GlooExchange(SendsAtOnce):
    """HostExchange over Gloo process groups; see the module."""

    link_bytes = LINK_BYTES

    def __init__(self, groups: GlooGroups, *, rank: int, timeout_s: float) -> None:
        self._rank = rank
        self._waits = waits = GlooWaits(timeout_s=timeout_s)
        self._counter = counter = TrafficCounter()
        self._groups = {
            ranks: GlooRounds(group, ranks, rank=rank, waits=waits, counter=counter)
            for ranks, group in groups.rounds.items()
            if rank in ranks
        }
        self._world = self._groups[next(iter(groups.rounds))]
        self._links = {
            link: GlooLink(group, link, waits=waits, counter=counter)
            for link, group in groups.links.items()
            if rank in (link.source, *link.receivers)
        }

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def world_size(self) -> int:
        return self._world.world_size

    @property
    def traffic(self) -> Traffic:
        return self._counter.total()

    def all_reduce(self, tensor: torch.Tensor, contributors: Sequence[int]) -> None:
        self._world.all_reduce(tensor, contributors)

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        self._world.broadcast(tensor, source)

    def all_gather(self, tensor: torch.Tensor, counts: Sequence[int]) -> list[torch.Tensor]:
        return self._world.all_gather(tensor, counts)

    def among(self, ranks: tuple[int, ...]) -> SumExchange:
        return LocalExchange() if ranks == (self._rank,) else self._groups[ranks]

    def send(self, tensor: torch.Tensor, link: Link) -> None:
        self._links[link].send(tensor)

    def receive(self, out: torch.Tensor, link: Link) -> PendingTensor:
        return self._links[link].receive(out)

    def abort(self) -> None:
        self._waits.abort()

    def close(self) -> None:
        self._waits.abort()
