"""Both ends of a link, by the native library. What a link is, see native/exchange.c.

They are also the ends of those who fill and read the areas themselves (link_areas.py).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, Final

import torch

from hetero_worker.distributed.exchange import Arrived, PendingTensor
from hetero_worker.distributed.shm_native import NativeCall, NativeRank, address_of
from hetero_worker.distributed.shm_peers import Late
from hetero_worker.distributed.shm_pending import OUT_OF_TURN, PendingMessages
from hetero_worker.distributed.shm_segment import LINK_DEPTH, LinkLayout
from hetero_worker.native.compute_library import CallOp, Kind, Op
from hetero_worker.native.library import LinkState

_HELD_MESSAGES: Final = LINK_DEPTH // 2
"""That a receiver may read before it gives them back: the source has as many to go on with."""


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

    def _num_messages(self, num_bytes: int) -> int:
        return -(-num_bytes // self._rank.segment.layout.area_bytes)

    def _pieces(self, first: int, num_bytes: int) -> list[torch.Tensor]:
        """Where so many bytes lie that begin with message `first`."""
        size = self._rank.segment.layout.area_bytes
        numbers = range(first, first + self._num_messages(num_bytes))
        return [self._area(number)[: num_bytes - size * i] for i, number in enumerate(numbers)]

    def _area(self, number: int) -> torch.Tensor:
        segment, offset = self._rank.segment, self._layout.areas[number % LINK_DEPTH]
        return torch.frombuffer(segment.memory, dtype=torch.uint8, count=segment.layout.area_bytes, offset=offset)

    def _call_of(self, call: Any, tensor: torch.Tensor, late: Callable[[], Late]) -> NativeCall:
        """One of the library's calls for a tensor that is not empty."""
        arguments = self._address, address_of(tensor), tensor.nbytes
        link, data, num_bytes = arguments  # a number goes where a pointer may: both are a word
        function = ctypes.cast(call, ctypes.c_void_p)
        op = CallOp(op=Op(Kind.CALL, 1), function=function, first=link, second=data, third=num_bytes)

        def finish(code: int) -> None:
            self._rank.finish(code, lambda: int(call(*arguments)), late=late, at=self._at)

        return NativeCall(op, finish, (self,))

    def _pass_on(self, num_bytes: int) -> int:
        return int(self._rank.library.pass_on(self._address, num_bytes))


class NativeSource(_NativeEnd):
    """The sending end."""

    def __init__(self, rank: NativeRank, layout: LinkLayout) -> None:
        super().__init__(rank, layout)
        self._begun = 0
        """Messages that have been sent or are about to be."""

    def begin(self, num_bytes: int) -> list[torch.Tensor] | None:
        self._rank.check_open()
        first = max(self._begun, self._at()) + 1
        self._begun = first + self._num_messages(num_bytes) - 1
        has_room = self._rank.library.free(self._address, self._begun)
        return self._pieces(first, num_bytes) if has_room else None

    def publish(self, num_bytes: int) -> None:
        if code := self._pass_on(num_bytes):
            self._rank.finish(code, lambda: self._pass_on(num_bytes), late=self._late, at=self._at)

    def send(self, tensor: torch.Tensor) -> None:
        self._rank.check_open()
        if not tensor.numel():
            return
        call, arguments = self._rank.library.send, (self._address, address_of(tensor), tensor.nbytes)
        if code := call(*arguments):
            self._rank.finish(code, lambda: int(call(*arguments)), late=self._late, at=self._at)

    def send_call(self, tensor: torch.Tensor) -> NativeCall:
        """What `send` does with a tensor that is not empty, for native code. The memory is the caller's to keep."""
        return self._call_of(self._rank.library.send, tensor, self._late)

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
        first = self._post(out.nbytes)
        return Arrived(out) if first > self._posted else PendingMessages(self, out, first)

    def receive_call(self, out: torch.Tensor) -> NativeCall:
        """What it is to post a tensor that is not empty and wait for it, for native code. Nothing else is posted
        meanwhile. The memory is the caller's to keep."""
        return self._call_of(self._rank.library.receive, out, self._late)

    @property
    def batch_bytes(self) -> int:
        return _HELD_MESSAGES * self._rank.segment.layout.area_bytes

    def post_bytes(self, num_bytes: int) -> int:
        return self._post(num_bytes)

    def arrived(self, first: int, begin: int, num_bytes: int) -> list[torch.Tensor]:
        self._rank.check_open()
        number = first + self._num_messages(begin)
        if self._state.number != number - 1:
            raise ValueError(OUT_OF_TURN)
        call, arguments = self._rank.library.arrived, (self._address, num_bytes)
        if code := call(*arguments):
            last = self._at() + self._num_messages(num_bytes)
            self._rank.finish(code, lambda: int(call(*arguments)), late=lambda: self._late_until(last), at=self._sent)
        return self._pieces(number, num_bytes)

    def give_back(self, num_bytes: int) -> None:
        self._pass_on(num_bytes)

    def take(self, out: torch.Tensor, first: int) -> None:
        self._rank.check_open()
        if self._state.number != first - 1:
            raise ValueError(OUT_OF_TURN)
        call, arguments = self._rank.library.receive, (self._address, address_of(out), out.nbytes)
        if code := call(*arguments):
            self._rank.finish(code, lambda: int(call(*arguments)), late=self._late, at=self._at)

    def _post(self, num_bytes: int) -> int:
        """The first message of so many bytes. Calls of native code may have taken some that were not posted."""
        self._rank.check_open()
        first = max(self._posted, self._at()) + 1
        self._posted = first + self._num_messages(num_bytes) - 1
        return first

    def _sent(self) -> int:
        return self._rank[self._layout.sent]

    def _late(self) -> Late:
        return self._late_until(self._at() + 1)

    def _late_until(self, number: int) -> Late:
        return Late((self._layout.link.source,) if self._sent() < number else (), "send")
