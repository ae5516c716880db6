"""Both ends of a link through shared memory. native_exchange.c explains how a link works.

A tensor longer than an area takes several messages; an empty one takes none. `send` and `post` copy. A device writes
and reads the areas itself (staging.py): the source by `reserve` and `publish`, a receiver by `post_bytes`,
`await_areas` and `give_back`.
"""

from __future__ import annotations

from functools import partial
from typing import Final

import torch

from hetero_worker.distributed.exchange import Arrived, PendingTensor
from hetero_worker.distributed.native_exchange import LINK_DEPTH, ffi
from hetero_worker.distributed.shm_rank import Late, NativeCall, ShmEnd, ShmRank, data_address
from hetero_worker.distributed.shm_segment import LinkLayout

_HELD_MESSAGES: Final = LINK_DEPTH // 2
"""Messages that a receiver may read before it gives them back: the source has as many to go on with."""
_OUT_OF_TURN: Final = "tensors of one link must be waited for in the order in which they were posted"


class _LinkEnd(ShmEnd):
    """State and areas that both ends have."""

    def __init__(self, rank: ShmRank, layout: LinkLayout) -> None:
        link = layout.link
        self._layout = layout
        self._area_bytes = rank.segment.layout.area_bytes
        state = ffi.new(
            "hx_link *",
            {
                "rank": rank.state,
                "source": link.source,
                "size": len(link.receivers),
                "own": link.receivers.index(rank.segment.rank) if rank.segment.rank in link.receivers else 0,
                "receivers": link.receivers,
                "sent": 8 * layout.sent,
                "taken": [8 * word for word in layout.taken],
                "areas": layout.areas,
            },
        )
        super().__init__(rank, state)

    def _at(self) -> int:
        return int(self._state.number)

    def _num_messages(self, num_bytes: int) -> int:
        return -(-num_bytes // self._area_bytes)

    def _pieces(self, first: int, num_bytes: int) -> list[torch.Tensor]:
        """Return the areas, uint8, of this many bytes that begin with message `first`."""
        numbers = range(first, first + self._num_messages(num_bytes))
        return [self._area(number)[: num_bytes - self._area_bytes * i] for i, number in enumerate(numbers)]

    def _area(self, number: int) -> torch.Tensor:
        memory, offset = self._rank.segment.memory, self._layout.areas[number % LINK_DEPTH]
        return torch.frombuffer(memory, dtype=torch.uint8, count=self._area_bytes, offset=offset)


class LinkSource(_LinkEnd):
    """The sending end."""

    def __init__(self, rank: ShmRank, layout: LinkLayout) -> None:
        super().__init__(rank, layout)
        self._reserved = 0
        """Messages that have been sent or are about to be."""

    def send(self, tensor: torch.Tensor) -> None:
        """Send, as Exchange.send."""
        self._rank.check_open()
        if tensor.numel():
            self._call(self._rank.library.hx_send, data_address(tensor), tensor.nbytes)

    def send_call(self, tensor: torch.Tensor) -> NativeCall:
        """Return `send` of a tensor that is not empty as a call for native code. The caller keeps its memory."""
        return self._native_call(self._rank.library.hx_send, data_address(tensor), tensor.nbytes)

    def reserve(self, num_bytes: int) -> list[torch.Tensor] | None:
        """Return areas, uint8, where the link's next tensor may be written now; None if there is no room.

        Each `reserve` is followed by its `publish`, or without room by its `send`, in the same order.
        """
        self._rank.check_open()
        first = max(self._reserved, self._at()) + 1
        self._reserved = first + self._num_messages(num_bytes) - 1
        has_room = self._rank.library.hx_free(self._state, self._reserved)
        return self._pieces(first, num_bytes) if has_room else None

    def publish(self, num_bytes: int) -> None:
        """Let receivers read the tensor, which has been written. Raises as Exchange does."""
        self._call(self._rank.library.hx_pass, num_bytes)

    def _late(self) -> Late:
        needed = self._at() + 1 - LINK_DEPTH
        taken = zip(self._layout.link.receivers, self._layout.taken, strict=True)
        ranks = tuple(rank for rank, word in taken if self._rank.counter(word) < needed)
        return Late(ranks, "take what was sent to them")


class LinkReceiver(_LinkEnd):
    """A receiving end."""

    def __init__(self, rank: ShmRank, layout: LinkLayout) -> None:
        super().__init__(rank, layout)
        self._posted = 0

    def post(self, out: torch.Tensor) -> PendingTensor:
        """Post a receipt, as Exchange.receive."""
        first = self.post_bytes(out.nbytes)
        return _Receipt(self, out, first) if out.nbytes else Arrived(out)

    def receive_call(self, out: torch.Tensor) -> NativeCall:
        """Return a receipt and its wait as a call for native code; `out` is not empty.

        Nothing else is posted meanwhile. The caller keeps the memory of `out`.
        """
        return self._native_call(self._rank.library.hx_receive, data_address(out), out.nbytes)

    def take(self, out: torch.Tensor, first: int) -> None:
        """Copy the messages from number `first` on into `out`. Raises ValueError when it is not their turn."""
        self._check_turn(first)
        self._call(self._rank.library.hx_receive, data_address(out), out.nbytes)

    @property
    def batch_bytes(self) -> int:
        """Most bytes that may be held before they are given back."""
        return _HELD_MESSAGES * self._area_bytes

    def post_bytes(self, num_bytes: int) -> int:
        """Post the receipt of the link's next tensor and return the number of its first message.

        Calls of native code may have taken messages that were not posted.
        """
        self._rank.check_open()
        first = max(self._posted, self._at()) + 1
        self._posted = first + self._num_messages(num_bytes) - 1
        return first

    def await_areas(self, first: int, begin: int, num_bytes: int) -> list[torch.Tensor]:
        """Return the areas, uint8, of a part of the tensor of message `first`, once it is there.

        The part is `num_bytes` long, up to batch_bytes, and begins at byte `begin`, a multiple of batch_bytes. The part
        before must have been given back. Raises as Exchange does, and ValueError when it is not the tensor's turn.
        """
        number = first + self._num_messages(begin)
        self._check_turn(number)
        arrived, last = self._rank.library.hx_arrived, self._at() + self._num_messages(num_bytes)
        if code := arrived(self._state, num_bytes):
            again = partial(arrived, self._state, num_bytes)
            self._rank.finish(code, again, late=lambda: self._late_until(last), at=self._sent)
        return self._pieces(number, num_bytes)

    def give_back(self, num_bytes: int) -> None:
        """Let the source overwrite this many bytes, which have been read. No effect once the exchange has ended."""
        self._rank.library.hx_pass(self._state, num_bytes)

    def _check_turn(self, number: int) -> None:
        self._rank.check_open()
        if self._at() != number - 1:
            raise ValueError(_OUT_OF_TURN)

    def _sent(self) -> int:
        return self._rank.counter(self._layout.sent)

    def _late(self) -> Late:
        return self._late_until(self._at() + 1)

    def _late_until(self, number: int) -> Late:
        return Late((self._layout.link.source,) if self._sent() < number else (), "send")


class _Receipt:
    """PendingTensor of a posted tensor whose first message is `first`."""

    def __init__(self, receiver: LinkReceiver, out: torch.Tensor, first: int) -> None:
        self._receiver = receiver
        self._out = out
        self._first = first
        self._done = False

    def wait(self) -> torch.Tensor:
        if not self._done:
            self._receiver.take(self._out, self._first)
            self._done = True
        return self._out
