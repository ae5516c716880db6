"""ShmExchange: ranks of one host exchange through shared memory, in rounds and over links, by the native library.

native_exchange.c explains how a round works. One thread makes all calls; only `abort` and `close` may come from
another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from hetero_worker.distributed.native_ends import Late, NativeExchange, NativeRounds
from hetero_worker.distributed.native_exchange import LINK_DEPTH, MAX_SEATS, ffi
from hetero_worker.distributed.shm_links import LinkReceiver, LinkSource
from hetero_worker.distributed.shm_rank import ShmRank
from hetero_worker.distributed.shm_segment import RoundsLayout, ShmSegment
from hetero_worker.errors import ExchangeError
from hetero_worker.memory.streams import HostPins

AREA_BYTES: Final = 512 * 1024
"""Bytes of an area: the most that one round or message carries."""


class ShmRounds(NativeRounds):
    """One rank's end of a group's or subgroup's rounds."""

    def __init__(self, rank: ShmRank, layout: RoundsLayout) -> None:
        self._segment_rank = rank
        self._counters = layout.counters
        state = ffi.new(
            "hx_group *",
            {
                "rank": rank.state,
                "size": len(layout.ranks),
                "own": layout.ranks.index(rank.rank),
                "ranks": layout.ranks,
                "counters": [8 * word for word in layout.counters],
                "areas": layout.areas,
            },
        )
        library = rank.library
        super().__init__(rank, state, layout.ranks, share=library.hx_share, gather=library.hx_gather)

    def _late(self) -> Late:
        """Return the ranks whose counters have not reached the round that this rank last published."""
        current, counters = self._state.round, dict(zip(self._ranks, self._counters, strict=True))
        ranks = tuple(r for r in self._late_ranks() if self._segment_rank.counter(counters[r]) < current)
        return Late(ranks, f"reach round {current}")

    def _at(self) -> int:
        return int(self._state.round)


class ShmExchange(NativeExchange):
    """HostExchange over a ShmSegment, which it closes; see the module. Raises ExchangeError for more than 64 ranks."""

    def __init__(self, segment: ShmSegment, *, timeout_s: float, library: Any) -> None:
        if segment.layout.world_size > MAX_SEATS:
            raise ExchangeError(f"ranks of one host are {MAX_SEATS} at most, not {segment.layout.world_size}")
        self._segment = segment
        self.shared_path = segment.path
        self._state = state = ShmRank(segment, library, timeout_s=timeout_s)
        rank, links = segment.rank, segment.layout.links()
        self.sources = {at.link: LinkSource(state, at) for at in links if rank == at.link.source}
        """Links that this rank sends over, with its ends."""
        self.receivers = {at.link: LinkReceiver(state, at) for at in links if rank in at.link.receivers}
        """Links that this rank receives over, with its ends."""
        rounds = {at.ranks: ShmRounds(state, at) for at in segment.layout.rounds() if rank in at.ranks}
        super().__init__(state, rounds, sources=self.sources, receivers=self.receivers)
        self.link_bytes = LINK_DEPTH * segment.layout.area_bytes

    def pin(self, pins: HostPins) -> str:
        """Let a device copy from and to the segment until `close`. Return why it cannot; empty if it can."""
        return self._segment.pin(pins)

    def while_waiting(self, action: Callable[[], None]) -> None:
        """Have `action` called each time that this rank has waited for long, until `close`."""
        self._state.while_waiting = action
