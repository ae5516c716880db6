"""ShmExchange: ranks of one host exchange through shared memory, in rounds and over links.

By the native library where all ranks have it; else in Python (shm_rounds, shm_links, shm_words), some times slower.
There are no fences in Python: that path relies on stores becoming visible in program order, which x86-64 promises
(total store order) and other machines do not; those are refused. Ranks must agree on which of the two it is.

All is called from one thread; only `abort` and `close` may come from another.
"""

from __future__ import annotations

import platform
import threading
from collections.abc import Callable, Sequence
from typing import Final, Protocol

import torch

from hetero_worker.distributed.exchange import LocalExchange, PendingTensor, SendsAtOnce, SumExchange
from hetero_worker.distributed.link_areas import LinkAreas
from hetero_worker.distributed.routes import Link
from hetero_worker.distributed.shm_links import LinkReceiver, LinkSource
from hetero_worker.distributed.shm_native import NativeRank
from hetero_worker.distributed.shm_native_links import NativeReceiver, NativeSource
from hetero_worker.distributed.shm_native_rounds import NativeRounds
from hetero_worker.distributed.shm_rounds import ShmRounds
from hetero_worker.distributed.shm_segment import LINK_DEPTH, LinkLayout, RoundsLayout, ShmSegment
from hetero_worker.distributed.shm_words import SharedWords
from hetero_worker.distributed.traffic import Traffic, TrafficCounter
from hetero_worker.errors import ExchangeError
from hetero_worker.native.library import MAX_SEATS, NativeLibrary
from hetero_worker.platforms.host_pins import HostPins

AREA_BYTES: Final = 512 * 1024
_ORDERED_MACHINES: Final = frozenset({"x86_64", "AMD64"})


def unsupported_reason(machine: str | None = None) -> str | None:
    """Why this machine cannot use ShmExchange without the native library; None when it can."""
    machine = machine or platform.machine()
    if machine in _ORDERED_MACHINES:
        return None
    return f"shared-memory exchange needs the native library or the store order of x86-64; this machine is {machine}"


class _Rounds(SumExchange, Protocol):
    def broadcast(self, tensor: torch.Tensor, source: int) -> None: ...

    def all_gather(self, tensor: torch.Tensor, counts: Sequence[int]) -> list[torch.Tensor]: ...


class _Source(Protocol):
    def send(self, tensor: torch.Tensor) -> None: ...


class _Receiver(Protocol):
    def post(self, out: torch.Tensor) -> PendingTensor: ...


class _Way(Protocol):
    """One of the two ways to use a segment."""

    @property
    def traffic(self) -> Traffic: ...

    def rounds(self, layout: RoundsLayout) -> _Rounds: ...

    def source(self, layout: LinkLayout) -> _Source: ...

    def receiver(self, layout: LinkLayout) -> _Receiver: ...

    def abort(self) -> None: ...

    def close(self) -> None: ...


class ShmExchange(SendsAtOnce):
    """HostExchange over a ShmSegment, which it closes; see the module.

    Without a library it is the Python way. Raises ExchangeError where neither serves: on a machine without store order,
    for more than 64 ranks.
    """

    def __init__(
        self, segment: ShmSegment, *, timeout_s: float, library: NativeLibrary | None, machine: str | None = None
    ) -> None:
        if segment.layout.world_size > MAX_SEATS:
            raise ExchangeError(f"ranks of one host are {MAX_SEATS} at most, not {segment.layout.world_size}")
        if library is None and (reason := unsupported_reason(machine)):
            raise ExchangeError(reason)
        self._segment = segment
        self._rank = rank = segment.rank
        self._way: _Way = (
            _NativeWay(segment, library, timeout_s) if library is not None else _PythonWay(segment, timeout_s)
        )
        rounds = [layout for layout in segment.layout.rounds() if rank in layout.ranks]
        self._groups = {layout.ranks: self._way.rounds(layout) for layout in rounds}
        self._world = self._groups[tuple(range(segment.layout.world_size))]
        links = segment.layout.links()
        self._sources = {at.link: self._way.source(at) for at in links if rank == at.link.source}
        self._receivers = {at.link: self._way.receiver(at) for at in links if rank in at.link.receivers}
        self._lock = threading.Lock()
        self._closed = False

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def world_size(self) -> int:
        return self._world.world_size

    @property
    def link_bytes(self) -> int:
        return LINK_DEPTH * self._segment.layout.area_bytes

    @property
    def traffic(self) -> Traffic:
        return self._way.traffic

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

    def native_source(self, link: Link) -> NativeSource | None:
        """The end that this rank sends by; None where the library does not."""
        source = self._sources[link]
        return source if isinstance(source, NativeSource) else None

    def native_receiver(self, link: Link) -> NativeReceiver | None:
        """The end that this rank receives by; None where the library does not."""
        receiver = self._receivers[link]
        return receiver if isinstance(receiver, NativeReceiver) else None

    def open_areas(self, pins: HostPins) -> LinkAreas:
        """Let a device use the areas of this rank's links, until `close`. Only the native library does."""
        if not isinstance(self._way, _NativeWay):
            return LinkAreas("the native exchange is not used")
        if problem := self._segment.pin(pins):
            return LinkAreas(f"the shared segment cannot be pinned: {problem}")
        return self._way.areas

    def abort(self) -> None:
        """End it for all: every rank's blocked or later call raises ExchangeAborted. Once closed this does nothing."""
        with self._lock:
            if not self._closed:
                self._way.abort()

    def close(self) -> None:
        """Leave the segment: later calls raise, and a rank that still waits for this one learns that it is gone."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._way.close()
                self._segment.leave()


class _NativeWay:
    def __init__(self, segment: ShmSegment, library: NativeLibrary, timeout_s: float) -> None:
        self._rank = NativeRank(segment, library, timeout_s=timeout_s)
        self.abort = self._rank.abort
        self.close = self._rank.close
        self._sources: dict[Link, NativeSource] = {}
        self._receivers: dict[Link, NativeReceiver] = {}

    @property
    def areas(self) -> LinkAreas:
        return LinkAreas("", self._sources, self._receivers, self._set_while_waiting)

    def _set_while_waiting(self, action: Callable[[], None]) -> None:
        self._rank.while_waiting = action

    @property
    def traffic(self) -> Traffic:
        return self._rank.traffic

    def rounds(self, layout: RoundsLayout) -> NativeRounds:
        return NativeRounds(self._rank, layout)

    def source(self, layout: LinkLayout) -> NativeSource:
        return self._sources.setdefault(layout.link, NativeSource(self._rank, layout))

    def receiver(self, layout: LinkLayout) -> NativeReceiver:
        return self._receivers.setdefault(layout.link, NativeReceiver(self._rank, layout))


class _PythonWay:
    def __init__(self, segment: ShmSegment, timeout_s: float) -> None:
        self._segment = segment
        self._words = SharedWords(segment, timeout_s=timeout_s)
        self._counter = TrafficCounter()
        self._ends: list[ShmRounds | LinkSource | LinkReceiver] = []

    @property
    def traffic(self) -> Traffic:
        return self._counter.total()

    def rounds(self, layout: RoundsLayout) -> ShmRounds:
        made = ShmRounds(self._segment, layout, words=self._words, counter=self._counter)
        self._ends.append(made)
        return made

    def source(self, layout: LinkLayout) -> LinkSource:
        made = LinkSource(self._segment, layout, self._words, self._counter)
        self._ends.append(made)
        return made

    def receiver(self, layout: LinkLayout) -> LinkReceiver:
        made = LinkReceiver(self._segment, layout, self._words)
        self._ends.append(made)
        return made

    def abort(self) -> None:
        self._words.abort()

    def close(self) -> None:
        self._words.close()
        for end in self._ends:
            end.forget()
