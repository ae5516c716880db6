"""TcpExchange: ranks exchange over TCP, in rounds and over links, by the native library.

native_tcp.c explains how a round works. Nothing is left to be sent when a call returns: the kernel has it. So a link
takes in what the kernel's buffers hold, and as much as its receiver's ring does whenever that rank waits for anything.

One thread makes all calls; only `abort` and `close` may come from another. Connections are shut by these, and closed
when nothing can use them any more.
"""

from __future__ import annotations

import mmap
import os
import secrets
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from hetero_worker.distributed.native_ends import (
    Late,
    NativeExchange,
    NativeRank,
    NativeReceiver,
    NativeRounds,
    NativeSource,
)
from hetero_worker.distributed.native_exchange import ABORTED, LINK_DEPTH, MAX_LANES, MAX_SEATS, ffi
from hetero_worker.distributed.rendezvous import Agreement, GroupRequest, StoreListener, Wait
from hetero_worker.distributed.routes import Link, Ranks, Routes
from hetero_worker.distributed.tcp.connecting import (
    CONTROL,
    SECRET_BYTES,
    Door,
    Wire,
    group_purpose,
    groups_of,
    link_purpose,
    wires_of,
)
from hetero_worker.errors import ExchangeAborted, ExchangeError

RING_BYTES: Final = 128 * 1024
"""Bytes of a contributor's message that may wait for the others'. They stay in the second-level cache."""
SPLIT_BYTES: Final = 256 * 1024
"""Messages of this length go over all lanes of a pair of ranks."""
_PART_OF_TIMEOUT: Final = 0.5
"""Share of the group's timeout that connecting may take: the ranks still have to agree on how it ended."""


class TcpRank(NativeRank):
    """State of one rank, and its connections, by file descriptor, which it owns."""

    def __init__(
        self, wires: Mapping[Wire, int], *, rank: int, world_size: int, ring_bytes: int, library: Any, timeout_s: float
    ) -> None:
        self.wires = wires
        weakref.finalize(self, _close_all, tuple(wires.values())).atexit = False
        self.kept: list[object] = []
        """Memory that its struct points at."""
        self._others = ffi.new("int32_t[]", [fd for wire, fd in wires.items() if wire.purpose != CONTROL])
        fields = {
            "rank": rank,
            "world_size": world_size,
            "controls": [wires.get(Wire(peer, CONTROL), -1) for peer in range(world_size)],
            "wires": self._others,
            "num_wires": len(self._others),
            "ring_bytes": ring_bytes,
            "split_bytes": SPLIT_BYTES,
        }
        super().__init__(ffi.new("hx_tcp_rank *", fields), rank=rank, library=library, timeout_s=timeout_s)

    def abort(self) -> None:
        """End the exchange for all ranks. From any thread; never blocks."""
        self.library.hx_tcp_end(self.state, ABORTED)

    def close(self) -> None:
        """End the exchange for this rank. From any thread; others that wait for it learn that it left."""
        super().close()
        self.library.hx_tcp_leave(self.state)

    def _end_word(self) -> int:
        return int(self.state.word)


class TcpRounds(NativeRounds):
    """One rank's end of a group's or subgroup's rounds."""

    def __init__(self, rank: TcpRank, ranks: Ranks, *, purpose: int) -> None:
        lanes = [[rank.wires.get(Wire(peer, purpose, lane), -1) for peer in ranks] for lane in range(MAX_LANES)]
        self._rings = _Memory(MAX_LANES * len(ranks) * rank.state.ring_bytes)
        fields = {
            "rank": rank.state,
            "size": len(ranks),
            "own": ranks.index(rank.rank),
            "ranks": ranks,
            "num_lanes": MAX_LANES,
            "wires": lanes,
            "rings": self._rings.pointer,
        }
        library = rank.library
        state = ffi.new("hx_tcp_group *", fields)
        super().__init__(rank, state, ranks, share=library.hx_tcp_share, gather=library.hx_tcp_gather)

    def _late(self) -> Late:
        return Late(self._late_ranks(), f"reach round {self._state.round}")

    def _at(self) -> int:
        return int(self._state.moved)


class TcpSource(NativeSource):
    """The sending end of a link."""

    def __init__(self, rank: TcpRank, link: Link, *, purpose: int) -> None:
        self._receivers = link.receivers
        fields = {
            "rank": rank.state,
            "source": link.source,
            "size": len(link.receivers),
            "receivers": link.receivers,
            "wires": [rank.wires[Wire(peer, purpose)] for peer in link.receivers],
        }
        super().__init__(rank, ffi.new("hx_tcp_link *", fields), send=rank.library.hx_tcp_send)

    def _late(self) -> Late:
        late = (rank for number, rank in enumerate(self._receivers) if self._state.late >> number & 1)
        return Late(tuple(late), "take what was sent to them")

    def _at(self) -> int:
        return int(self._state.moved)


class TcpReceiver(NativeReceiver):
    """A receiving end of a link."""

    def __init__(self, rank: TcpRank, link: Link, *, purpose: int, ring_bytes: int) -> None:
        self._source = link.source
        self._ring = _Memory(ring_bytes)
        fields = {
            "rank": rank.state,
            "next": rank.state.incoming,
            "source": link.source,
            "size": 1,
            "receivers": [rank.rank],
            "wires": [rank.wires[Wire(link.source, purpose)]],
            "ring": self._ring.pointer,
            "ring_bytes": ring_bytes,
        }
        super().__init__(rank, ffi.new("hx_tcp_link *", fields), receive=rank.library.hx_tcp_receive)
        rank.state.incoming = self._state
        rank.kept += [self._state, self._ring]

    def _late(self) -> Late:
        return Late((self._source,) if self._state.late else (), "send")

    def _at(self) -> int:
        return int(self._state.moved)

    def _num_messages(self, num_bytes: int) -> int:
        return int(num_bytes > 0)


class TcpExchange(NativeExchange):
    """HostExchange over connections to all other ranks, which it owns; see the module."""

    def __init__(
        self,
        wires: Mapping[Wire, int],
        routes: Routes,
        *,
        rank: int,
        world_size: int,
        timeout_s: float,
        area_bytes: int,
        library: Any,
        ring_bytes: int = RING_BYTES,
    ) -> None:
        """`wires`: file descriptors of `wires_of`. `area_bytes`: a link's ring holds LINK_DEPTH times as many."""
        self._state = state = TcpRank(
            wires, rank=rank, world_size=world_size, ring_bytes=ring_bytes, library=library, timeout_s=timeout_s
        )
        self.link_bytes = LINK_DEPTH * area_bytes
        rounds = {
            ranks: TcpRounds(state, ranks, purpose=group_purpose(number))
            for number, ranks in enumerate(groups_of(world_size, routes))
            if rank in ranks
        }
        links = {link: link_purpose(index, routes) for index, link in enumerate(routes.links)}
        sources = {link: TcpSource(state, link, purpose=p) for link, p in links.items() if rank == link.source}
        receivers = {
            link: TcpReceiver(state, link, purpose=purpose, ring_bytes=self.link_bytes)
            for link, purpose in links.items()
            if rank in link.receivers
        }
        super().__init__(state, rounds, sources=sources, receivers=receivers)


def connect(
    request: GroupRequest, routes: Routes, agreement: Agreement, library: Any
) -> tuple[TcpExchange | None, str]:
    """Return an exchange for these routes, or why the ranks cannot connect, the same on every rank.

    Collective over all ranks. Raises ExchangeAborted, and ExchangeError if the ranks cannot agree.
    """
    if request.world_size > MAX_SEATS:
        return None, f"ranks that connect by the native library are {MAX_SEATS} at most, not {request.world_size}"
    listener = StoreListener(request.host)
    try:
        address, problem = _open(listener)
        if problem := agreement.problem(problem):
            return None, problem
        said = [text.split() for text in agreement.texts(f"{address} {secrets.token_hex(SECRET_BYTES)}")]
        wait = Wait(_PART_OF_TIMEOUT * request.timeout_s, lambda: agreement.is_aborted)
        door = Door(request.rank, request.host, request.epoch, bytes.fromhex(said[0][1]), wait)
        wires, problem = _enter(door, listener, wires_of(request.rank, request.world_size, routes), said)
    finally:
        listener.close()
    try:
        problem = agreement.problem(problem)
    except BaseException:
        _close_all(wires.values())
        raise
    if problem:
        _close_all(wires.values())
        return None, problem
    exchange = TcpExchange(
        wires, routes, rank=request.rank, world_size=request.world_size, timeout_s=request.timeout_s,
        area_bytes=request.area_bytes, library=library,
    )  # fmt: skip
    return exchange, ""


def _open(listener: StoreListener) -> tuple[str, str]:
    """Return the listener's address, or why there is none."""
    try:
        return listener.open(), ""
    except ExchangeError as error:
        return "", str(error)


def _enter(
    door: Door, listener: StoreListener, wires: Sequence[Wire], said: Sequence[Sequence[str]]
) -> tuple[dict[Wire, int], str]:
    """Return the connections, or why there are none. Raises ExchangeAborted."""
    try:
        return door.connect(listener, wires, [address for address, _ in said]), ""
    except ExchangeAborted:
        raise
    except (ExchangeError, OSError) as error:
        return {}, str(error)


class _Memory:
    """Zeroed memory that takes up room once it is used."""

    def __init__(self, num_bytes: int) -> None:
        self._map = mmap.mmap(-1, num_bytes)
        self.pointer = ffi.from_buffer("uint8_t[]", self._map, require_writable=True)
        """Its first byte, for C."""


def _close_all(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
