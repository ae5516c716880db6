"""ShmExchange: ranks of one host exchange through shared memory, in rounds and over links, by the native library.

native_exchange.c explains how a round works. One thread makes all calls; only `abort` and `close` may come from
another."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any, Final

import torch

from hetero_worker.distributed.exchange import (
    GroupedExchange,
    PendingTensor,
    Traffic,
    check_contributors,
    check_counts,
    check_summable,
)
from hetero_worker.distributed.native_exchange import LINK_DEPTH, MAX_SEATS, ffi
from hetero_worker.distributed.routes import Link
from hetero_worker.distributed.shm_links import LinkReceiver, LinkSource
from hetero_worker.distributed.shm_rank import Late, NativeCall, ShmEnd, ShmRank, data_address
from hetero_worker.distributed.shm_segment import RoundsLayout, ShmSegment
from hetero_worker.errors import ExchangeError
from hetero_worker.memory.streams import HostPins

AREA_BYTES: Final = 512 * 1024
"""Bytes of an area: the most that one round or message carries."""
_MAX_ROUTES: Final = 1024
_DTYPES: Final = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class ShmRounds(ShmEnd):
    """One rank's end of a group's or subgroup's rounds. Ranks are named by their number in the whole group."""

    def __init__(self, rank: ShmRank, layout: RoundsLayout) -> None:
        self._layout = layout
        state = ffi.new(
            "hx_group *",
            {
                "rank": rank.state,
                "size": len(layout.ranks),
                "own": layout.ranks.index(rank.segment.rank),
                "ranks": layout.ranks,
                "counters": [8 * word for word in layout.counters],
                "areas": layout.areas,
            },
        )
        super().__init__(rank, state)
        self._routes: dict[tuple[object, ...], Any] = {}
        self._gatherings: dict[tuple[object, ...], Any] = {}
        self.world_size = len(layout.ranks)

    def all_reduce(self, tensor: torch.Tensor, contributors: Sequence[int]) -> None:
        """Sum in place, as SumExchange.all_reduce."""
        if tensor.dtype not in _DTYPES:
            check_summable(tensor)
        self._share(tensor, tuple(contributors))

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Replace the tensor by the source's, as Exchange.broadcast."""
        self._share(tensor, (source,))

    def all_gather(self, tensor: torch.Tensor, counts: Sequence[int]) -> list[torch.Tensor]:
        """Return every rank's tensor, as Exchange.all_gather. Raises ValueError if `counts` do not fit."""
        check_counts(tensor, counts, rank=self._rank.segment.rank, ranks=self._layout.ranks)
        gathering = self._gathering(tensor.element_size(), tuple(counts))
        out = torch.empty(sum(counts), dtype=tensor.dtype)
        self._call(self._rank.library.hx_gather, gathering, data_address(tensor), data_address(out))
        bounds = pairwise(accumulate(counts, initial=0))
        return [out[begin:end] for begin, end in bounds]

    def all_reduce_call(self, tensor: torch.Tensor, contributors: Sequence[int]) -> NativeCall:
        """Return `all_reduce` of this tensor as a call for native code. The caller keeps the tensor's memory."""
        check_summable(tensor)
        route = self._route(tensor, tuple(contributors))
        return self._native_call(self._rank.library.hx_share, route, data_address(tensor))

    def _share(self, tensor: torch.Tensor, contributors: tuple[int, ...]) -> None:
        self._call(self._rank.library.hx_share, self._route(tensor, contributors), data_address(tensor))

    def _route(self, tensor: torch.Tensor, contributors: tuple[int, ...]) -> Any:
        key = (tensor.shape, tensor.dtype, contributors)
        return self._routes.get(key) or self._make_route(key, tensor, contributors)

    def _make_route(self, key: tuple[object, ...], tensor: torch.Tensor, contributors: tuple[int, ...]) -> Any:
        """Return the hx_route of tensors of this shape and type, and remember it by its key."""
        ranks = self._layout.ranks
        check_contributors(contributors, ranks)
        mask = sum(1 << ranks.index(rank) for rank in set(contributors))
        if len(self._routes) >= _MAX_ROUTES:
            self._routes.clear()
        fields = {"bytes": tensor.nbytes, "dtype": _DTYPES.get(tensor.dtype, 0), "contributors": mask}
        route = self._routes[key] = ffi.new("hx_route *", fields)
        return route

    def _gathering(self, element_bytes: int, counts: tuple[int, ...]) -> Any:
        key = (element_bytes, counts)
        if key not in self._gatherings:
            if len(self._gatherings) >= _MAX_ROUTES:
                self._gatherings.clear()
            sizes = [count * element_bytes for count in counts]
            self._gatherings[key] = ffi.new("hx_gathering *", {"bytes": sizes, "longest": max(sizes)})
        return self._gatherings[key]

    def _late(self) -> Late:
        """Return the ranks whose counters have not reached the round that this rank last published."""
        seats = [seat for seat in range(self.world_size) if self._state.late >> seat & 1]
        counters, current = self._layout.counters, self._state.round
        ranks = tuple(self._layout.ranks[s] for s in seats if self._rank.counter(counters[s]) < current)
        return Late(ranks, f"reach round {current}")

    def _at(self) -> int:
        return int(self._state.round)


class ShmExchange(GroupedExchange):
    """HostExchange over a ShmSegment, which it closes; see the module. Raises ExchangeError for more than 64 ranks."""

    def __init__(self, segment: ShmSegment, *, timeout_s: float, library: Any) -> None:
        if segment.layout.world_size > MAX_SEATS:
            raise ExchangeError(f"ranks of one host are {MAX_SEATS} at most, not {segment.layout.world_size}")
        self._segment = segment
        self._state = state = ShmRank(segment, library, timeout_s=timeout_s)
        rank, links = segment.rank, segment.layout.links()
        rounds = [layout for layout in segment.layout.rounds() if rank in layout.ranks]
        super().__init__(rank, {layout.ranks: ShmRounds(state, layout) for layout in rounds})
        self.link_bytes = LINK_DEPTH * segment.layout.area_bytes
        self.sources = {at.link: LinkSource(state, at) for at in links if rank == at.link.source}
        """Links that this rank sends over, with its ends."""
        self.receivers = {at.link: LinkReceiver(state, at) for at in links if rank in at.link.receivers}
        """Links that this rank receives over, with its ends."""
        self._lock = threading.Lock()
        self._closed = False

    @property
    def traffic(self) -> Traffic:
        """Amount that this rank has moved."""
        return self._state.traffic

    def send(self, tensor: torch.Tensor, link: Link) -> None:
        """Send over a link, as Exchange.send."""
        self.sources[link].send(tensor)

    def receive(self, out: torch.Tensor, link: Link) -> PendingTensor:
        """Post a receipt, as Exchange.receive."""
        return self.receivers[link].post(out)

    def pin(self, pins: HostPins) -> str:
        """Let a device copy from and to the segment until `close`. Return why it cannot; empty if it can."""
        return self._segment.pin(pins)

    def while_waiting(self, action: Callable[[], None]) -> None:
        """Have `action` called each time that this rank has waited for long, until `close`."""
        self._state.while_waiting = action

    def abort(self) -> None:
        """End the exchange for all ranks: blocked and later calls raise ExchangeAborted. No effect once closed."""
        with self._lock:
            if not self._closed:
                self._state.abort()

    def close(self) -> None:
        """Leave the segment: later calls raise, and a rank that still waits for this one learns that it left."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._state.close()
                self._segment.leave()
