"""ShmExchange: ranks of one host exchange through shared memory, in rounds and over links, by the native library.

One thread makes all calls; only `abort` and `close` may come from another.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Final

import torch

from hetero_worker.distributed.exchange import LocalExchange, PendingTensor, SendsAtOnce, SumExchange
from hetero_worker.distributed.link_areas import LinkAreas
from hetero_worker.distributed.routes import Link
from hetero_worker.distributed.shm_native import NativeRank
from hetero_worker.distributed.shm_native_links import NativeReceiver, NativeSource
from hetero_worker.distributed.shm_native_rounds import NativeRounds
from hetero_worker.distributed.shm_segment import LINK_DEPTH, ShmSegment
from hetero_worker.distributed.traffic import Traffic
from hetero_worker.errors import ExchangeError
from hetero_worker.native.library import MAX_SEATS, NativeLibrary
from hetero_worker.platforms.host_pins import HostPins

AREA_BYTES: Final = 512 * 1024


class ShmExchange(SendsAtOnce):
    """HostExchange over a ShmSegment, which it closes; see the module. Raises ExchangeError for more than 64 ranks."""

    def __init__(self, segment: ShmSegment, *, timeout_s: float, library: NativeLibrary) -> None:
        if segment.layout.world_size > MAX_SEATS:
            raise ExchangeError(f"ranks of one host are {MAX_SEATS} at most, not {segment.layout.world_size}")
        self._segment = segment
        self._native = native = NativeRank(segment, library, timeout_s=timeout_s)
        rank, links = segment.rank, segment.layout.links()
        rounds = [layout for layout in segment.layout.rounds() if rank in layout.ranks]
        self._groups = {layout.ranks: NativeRounds(native, layout) for layout in rounds}
        self._world = self._groups[tuple(range(segment.layout.world_size))]
        self._sources = {at.link: NativeSource(native, at) for at in links if rank == at.link.source}
        self._receivers = {at.link: NativeReceiver(native, at) for at in links if rank in at.link.receivers}
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
        return self._native.traffic

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

    def native_source(self, link: Link) -> NativeSource:
        """Return the end that this rank sends by."""
        return self._sources[link]

    def native_receiver(self, link: Link) -> NativeReceiver:
        """Return the end that this rank receives by."""
        return self._receivers[link]

    def open_areas(self, pins: HostPins) -> LinkAreas:
        """Let a device use the areas of this rank's links until `close`."""
        if problem := self._segment.pin(pins):
            return LinkAreas(f"the shared segment cannot be pinned: {problem}")
        return LinkAreas("", self._sources, self._receivers, self._native.set_while_waiting)

    def abort(self) -> None:
        """End it for all: every rank's blocked or later call raises ExchangeAborted. Once closed this does nothing."""
        with self._lock:
            if not self._closed:
                self._native.abort()

    def close(self) -> None:
        """Leave the segment: later calls raise, and a rank that still waits for this one learns that it is gone."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._native.close()
                self._segment.leave()
