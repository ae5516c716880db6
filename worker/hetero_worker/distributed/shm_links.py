"""Both ends of a link through shared memory. native_exchange.c explains how a link works.

A tensor longer than an area takes several messages; an empty one takes none. `send` and `post` copy. A device writes
and reads the areas itself (staging.py): the source by `reserve` and `publish`, a receiver by `post_bytes`,
`await_areas` and `give_back`.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import torch

from hetero_worker.distributed.native_ends import Late, NativeReceiver, NativeSource
from hetero_worker.distributed.native_exchange import LINK_DEPTH, ffi
from hetero_worker.distributed.shm_rank import ShmRank
from hetero_worker.distributed.shm_segment import LinkLayout

_HELD_MESSAGES: Final = LINK_DEPTH // 2
"""Messages that a receiver may read before it gives them back: the source has as many to go on with."""


class _Areas:
    """Areas of a link, which both ends have."""

    def __init__(self, rank: ShmRank, layout: LinkLayout) -> None:
        self._rank = rank
        self._layout = layout
        self.area_bytes = rank.segment.layout.area_bytes

    def state(self) -> Any:
        """Return a new struct in C of this rank's end."""
        link, rank = self._layout.link, self._rank
        return ffi.new(
            "hx_link *",
            {
                "rank": rank.state,
                "source": link.source,
                "size": len(link.receivers),
                "own": link.receivers.index(rank.rank) if rank.rank in link.receivers else 0,
                "receivers": link.receivers,
                "sent": 8 * self._layout.sent,
                "taken": [8 * word for word in self._layout.taken],
                "areas": self._layout.areas,
            },
        )

    def num_messages(self, num_bytes: int) -> int:
        """Return how many areas a tensor of this many bytes takes."""
        return -(-num_bytes // self.area_bytes)

    def pieces(self, first: int, num_bytes: int) -> list[torch.Tensor]:
        """Return the areas, uint8, of this many bytes that begin with message `first`."""
        numbers = range(first, first + self.num_messages(num_bytes))
        return [self._area(number)[: num_bytes - self.area_bytes * i] for i, number in enumerate(numbers)]

    def _area(self, number: int) -> torch.Tensor:
        memory, offset = self._rank.segment.memory, self._layout.areas[number % LINK_DEPTH]
        return torch.frombuffer(memory, dtype=torch.uint8, count=self.area_bytes, offset=offset)


class LinkSource(NativeSource):
    """The sending end."""

    def __init__(self, rank: ShmRank, layout: LinkLayout) -> None:
        self._areas = _Areas(rank, layout)
        super().__init__(rank, self._areas.state(), send=rank.library.hx_send)
        self._layout = layout
        self._segment_rank = rank
        self._reserved = 0
        """Messages that have been sent or are about to be."""

    def reserve(self, num_bytes: int) -> list[torch.Tensor] | None:
        """Return areas, uint8, where the link's next tensor may be written now; None if there is no room.

        Each `reserve` is followed by its `publish`, or without room by its `send`, in the same order.
        """
        self._rank.check_open()
        first = max(self._reserved, self._at()) + 1
        self._reserved = first + self._areas.num_messages(num_bytes) - 1
        has_room = self._rank.library.hx_free(self._state, self._reserved)
        return self._areas.pieces(first, num_bytes) if has_room else None

    def publish(self, num_bytes: int) -> None:
        """Let receivers read the tensor, which has been written. Raises as Exchange does."""
        self._call(self._rank.library.hx_pass, num_bytes)

    def _late(self) -> Late:
        needed = self._at() + 1 - LINK_DEPTH
        taken = zip(self._layout.link.receivers, self._layout.taken, strict=True)
        ranks = tuple(rank for rank, word in taken if self._segment_rank.counter(word) < needed)
        return Late(ranks, "take what was sent to them")

    def _at(self) -> int:
        return int(self._state.number)


class LinkReceiver(NativeReceiver):
    """A receiving end."""

    def __init__(self, rank: ShmRank, layout: LinkLayout) -> None:
        self._areas = _Areas(rank, layout)
        super().__init__(rank, self._areas.state(), receive=rank.library.hx_receive)
        self._layout = layout
        self._segment_rank = rank

    @property
    def batch_bytes(self) -> int:
        """Most bytes that may be held before they are given back."""
        return _HELD_MESSAGES * self._areas.area_bytes

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
        return self._areas.pieces(number, num_bytes)

    def give_back(self, num_bytes: int) -> None:
        """Let the source overwrite this many bytes, which have been read. No effect once the exchange has ended."""
        self._rank.library.hx_pass(self._state, num_bytes)

    def _sent(self) -> int:
        return self._segment_rank.counter(self._layout.sent)

    def _late(self) -> Late:
        return self._late_until(self._at() + 1)

    def _late_until(self, number: int) -> Late:
        return Late((self._layout.link.source,) if self._sent() < number else (), "send")

    def _at(self) -> int:
        return int(self._state.number)

    def _num_messages(self, num_bytes: int) -> int:
        return self._areas.num_messages(num_bytes)
