"""ShmExchange: ranks of one host exchange through shared memory, in rounds (shm_rounds) and over links (shm_links).

There are no fences in Python. The algorithms rely on stores becoming visible in program order, which x86-64
promises (total store order) and other machines do not; the constructor refuses those. Areas stay below the size
from which libc's memcpy uses non-temporal stores.

All is called from one thread; only `abort` and `close` may come from another.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from typing import Final

import torch

from hetero_worker.distributed.exchange import LocalExchange, PendingTensor, SumExchange
from hetero_worker.distributed.routes import Link
from hetero_worker.distributed.shm_links import LinkReceiver, LinkSource
from hetero_worker.distributed.shm_rounds import ShmRounds
from hetero_worker.distributed.shm_segment import ShmSegment
from hetero_worker.distributed.shm_words import SharedWords
from hetero_worker.errors import ExchangeError

AREA_BYTES: Final = 512 * 1024
SUPPORTED_MACHINES: Final = frozenset({"x86_64", "AMD64"})


def unsupported_reason(machine: str | None = None) -> str | None:
    """Why this machine cannot use ShmExchange; None when it can."""
    machine = machine or platform.machine()
    if machine in SUPPORTED_MACHINES:
        return None
    return f"shared-memory exchange needs the store order of x86-64; this machine is {machine}"


class ShmExchange:
    """HostExchange over a ShmSegment; see the module. Raises ExchangeError on a machine without store order."""

    def __init__(self, segment: ShmSegment, *, rank: int, timeout_s: float, machine: str | None = None) -> None:
        if reason := unsupported_reason(machine):
            raise ExchangeError(reason)
        self._rank = rank
        self._words = words = SharedWords(segment, timeout_s=timeout_s)
        rounds = [layout for layout in segment.layout.rounds() if rank in layout.ranks]
        self._groups = {layout.ranks: ShmRounds(segment, layout, rank=rank, words=words) for layout in rounds}
        self._world = self._groups[tuple(range(segment.layout.world_size))]
        links = segment.layout.links()
        self._sources = {at.link: LinkSource(segment, at, words) for at in links if rank == at.link.source}
        self._receivers = {
            at.link: LinkReceiver(segment, at, words, rank=rank) for at in links if rank in at.link.receivers
        }

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def world_size(self) -> int:
        return self._world.world_size

    def all_reduce(self, tensor: torch.Tensor, contributors: Sequence[int]) -> None:
        self._world.all_reduce(tensor, contributors)

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        self._world.broadcast(tensor, source)

    def all_gather(self, tensor: torch.Tensor, counts: Sequence[int]) -> list[torch.Tensor]:
        return self._world.all_gather(tensor, counts)

    def among(self, ranks: tuple[int, ...]) -> SumExchange:
        return LocalExchange() if ranks == (self._rank,) else self._groups[ranks]

    def send(self, tensor: torch.Tensor, link: Link) -> None:
        self._sources[link].send(tensor)

    def receive(self, out: torch.Tensor, link: Link) -> PendingTensor:
        return self._receivers[link].post(out)

    def abort(self) -> None:
        """Set the segment's abort word: every rank's blocked or later call raises ExchangeAborted."""
        self._words.abort()

    def close(self) -> None:
        self._words.close()
        for rounds in self._groups.values():
            rounds.forget()
        for end in (*self._sources.values(), *self._receivers.values()):
            end.forget()
