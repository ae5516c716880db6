"""ShmExchange: ranks of one host exchange through shared memory, in rounds and over links, by the native library.

One thread makes all calls; only `abort` and `close` may come from another.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

from hetero_worker.distributed.exchange import LocalExchange, PendingTensor, SendsAtOnce, SumExchange, Traffic
from hetero_worker.distributed.native_exchange import LINK_DEPTH, MAX_SEATS
from hetero_worker.distributed.routes import Link
from hetero_worker.distributed.shm_links import LinkReceiver, LinkSource
from hetero_worker.distributed.shm_rank import ShmRank
from hetero_worker.distributed.shm_rounds import ShmRounds
from hetero_worker.distributed.shm_segment import ShmSegment
from hetero_worker.errors import ExchangeError
from hetero_worker.platforms.host_pins import HostPins

AREA_BYTES: Final = 512 * 1024


class ShmExchange(SendsAtOnce):
    """HostExchange over a ShmSegment, which it closes; see the module. Raises ExchangeError for more than 64 ranks."""

    def __init__(self, segment: ShmSegment, *, timeout_s: float, library: Any) -> None:
        if segment.layout.world_size > MAX_SEATS:
            raise ExchangeError(f"ranks of one host are {MAX_SEATS} at most, not {segment.layout.world_size}")
        self._segment = segment
        self._state = state = ShmRank(segment, library, timeout_s=timeout_s)
        rank, links = segment.rank, segment.layout.links()
        rounds = [layout for layout in segment.layout.rounds() if rank in layout.ranks]
        self._groups = {layout.ranks: ShmRounds(state, layout) for layout in rounds}
        self._world = self._groups[tuple(range(segment.layout.world_size))]
        self._sources = {at.link: LinkSource(state, at) for at in links if rank == at.link.source}
        self._receivers = {at.link: LinkReceiver(state, at) for at in links if rank in at.link.receivers}
        self._lock = threading.Lock()
        self._closed = False

    @property
    def rank(self) -> int:
        return self._segment.rank

    @property
    def world_size(self) -> int:
        return self._world.world_size

    @property
    def link_bytes(self) -> int:
        return LINK_DEPTH * self._segment.layout.area_bytes

    @property
    def traffic(self) -> Traffic:
        return self._state.traffic

    def all_reduce(self, tensor: torch.Tensor, contributors: Sequence[int]) -> None:
        self._world.all_reduce(tensor, contributors)

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        self._world.broadcast(tensor, source)

    def all_gather(self, tensor: torch.Tensor, counts: Sequence[int]) -> list[torch.Tensor]:
        return self._world.all_gather(tensor, counts)

    def among(self, ranks: tuple[int, ...]) -> SumExchange:
        return LocalExchange() if ranks == (self.rank,) else self._groups[ranks]

    def send(self, tensor: torch.Tensor, link: Link) -> None:
        self._sources[link].send(tensor)

    def receive(self, out: torch.Tensor, link: Link) -> PendingTensor:
        return self._receivers[link].post(out)

    @property
    def sources(self) -> Mapping[Link, LinkSource]:
        """Return the links that this rank sends over, with its ends."""
        return self._sources

    @property
    def receivers(self) -> Mapping[Link, LinkReceiver]:
        """Return the links that this rank receives over, with its ends."""
        return self._receivers

    def pin(self, pins: HostPins) -> str:
        """Let a device copy from and to the segment until `close`. Return why it cannot; empty if it can."""
        return self._segment.pin(pins)

    def while_waiting(self, action: Callable[[], None]) -> None:
        """Have `action` called each time that this rank has waited for long, until `close`."""
        self._state.while_waiting = action

    def abort(self) -> None:
        """End it for all: every rank's blocked or later call raises ExchangeAborted. Once closed this does nothing."""
        with self._lock:
            if not self._closed:
                self._state.abort()

    def close(self) -> None:
        """Leave the segment: later calls raise, and a rank that still waits for this one learns that it is gone."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._state.close()
                self._segment.leave()
