"""Both ends of a link, by the native library. What a link is, see native/exchange.c."""

from __future__ import annotations

import ctypes

import torch

from hetero_worker.distributed.exchange import Arrived, PendingTensor
from hetero_worker.distributed.shm_native import NativeRank, address_of
from hetero_worker.distributed.shm_peers import Late
from hetero_worker.distributed.shm_pending import OUT_OF_TURN, PendingMessages
from hetero_worker.distributed.shm_segment import LINK_DEPTH, LinkLayout
from hetero_worker.native.library import LinkState


class _NativeEnd:
    """What both ends have."""

    def __init__(self, rank: NativeRank, layout: LinkLayout) -> None:
        receivers = layout.link.receivers
        self._rank = rank
        self._layout = layout
        self._state = LinkState(
            rank=rank.address, source=layout.link.source, size=len(receivers), sent=8 * layout.sent,
            own=receivers.index(rank.segment.rank) if rank.segment.rank in receivers else 0,
        )  # fmt: skip
        self._state.receivers[: len(receivers)] = receivers
        self._state.taken[: len(receivers)] = [8 * word for word in layout.taken]
        self._state.areas[:] = layout.areas
        self._address = ctypes.addressof(self._state)

    def _at(self) -> int:
        return int(self._state.number)


class NativeSource(_NativeEnd):
    """The sending end."""

    def send(self, tensor: torch.Tensor) -> None:
        self._rank.check_open()
        if not tensor.numel():
            return
        call, arguments = self._rank.library.send, (self._address, address_of(tensor), tensor.nbytes)
        if code := call(*arguments):
            self._rank.finish(code, lambda: int(call(*arguments)), late=self._late, at=self._at)

    def _late(self) -> Late:
        needed = self._state.number + 1 - LINK_DEPTH
        taken = zip(self._layout.link.receivers, self._layout.taken, strict=True)
        return Late(tuple(rank for rank, word in taken if self._rank[word] < needed), "take what was sent to them")


class NativeReceiver(_NativeEnd):
    """A receiving end."""

    def __init__(self, rank: NativeRank, layout: LinkLayout) -> None:
        super().__init__(rank, layout)
        self._posted = 0

    def post(self, out: torch.Tensor) -> PendingTensor:
        self._rank.check_open()
        first = self._posted + 1
        self._posted += -(-out.nbytes // self._rank.segment.layout.area_bytes)
        return Arrived(out) if first > self._posted else PendingMessages(self, out, first)

    def take(self, out: torch.Tensor, first: int) -> None:
        self._rank.check_open()
        if self._state.number != first - 1:
            raise ValueError(OUT_OF_TURN)
        call, arguments = self._rank.library.receive, (self._address, address_of(out), out.nbytes)
        if code := call(*arguments):
            self._rank.finish(code, lambda: int(call(*arguments)), late=self._late, at=self._at)

    def _late(self) -> Late:
        is_late = self._rank[self._layout.sent] <= self._state.number
        return Late((self._layout.link.source,) if is_late else (), "send")
