"""Links through shared memory, without the native library: a ring of areas that one rank writes and others read.

The source writes message n into area n mod LINK_DEPTH once every receiver has taken message n - LINK_DEPTH, then
raises its counter to n; a receiver waits for that, copies the message out and raises its own. So the source runs
ahead of the receivers by up to LINK_DEPTH messages and nobody waits for more than it needs. A tensor longer than an
area is several messages; an empty one is none.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator

import torch

from hetero_worker.distributed.exchange import Arrived, PendingTensor
from hetero_worker.distributed.shm_peers import Late
from hetero_worker.distributed.shm_pending import OUT_OF_TURN, PendingMessages
from hetero_worker.distributed.shm_segment import LINK_DEPTH, LinkLayout, ShmSegment
from hetero_worker.distributed.shm_words import SharedWords
from hetero_worker.distributed.traffic import TrafficCounter


class _LinkEnd:
    """What both ends have: the areas, cut to a tensor's slices."""

    def __init__(self, segment: ShmSegment, layout: LinkLayout, words: SharedWords) -> None:
        self._layout = layout
        self._words = words
        self._area_bytes = segment.layout.area_bytes
        self._memory: mmap.mmap | None = segment.memory

    def forget(self) -> None:
        """Let go of the memory; nothing may be called afterwards but what finds the words closed."""
        self._memory = None

    def _slices(self, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
        """What goes into an area at a time."""
        flat = tensor.view(-1)
        step = self._area_bytes // flat.element_size()
        return (flat[begin : begin + step] for begin in range(0, flat.numel(), step))

    def _area(self, number: int, like: torch.Tensor) -> torch.Tensor:
        offset = self._layout.areas[number % LINK_DEPTH]
        return torch.frombuffer(self._memory, dtype=like.dtype, count=like.numel(), offset=offset)


class LinkSource(_LinkEnd):
    """The sending end."""

    def __init__(self, segment: ShmSegment, layout: LinkLayout, words: SharedWords, counter: TrafficCounter) -> None:
        super().__init__(segment, layout, words)
        self._counter = counter
        self._sent = 0

    def send(self, tensor: torch.Tensor) -> None:
        self._words.check_open()
        for part in self._slices(tensor):
            number = self._sent + 1
            self._words.await_all(self._layout.taken, number - LINK_DEPTH, self._late)
            self._area(number, part).copy_(part)
            self._words[self._layout.sent] = self._sent = number
        if tensor.numel():
            self._counter.count_message(tensor.nbytes)

    def _late(self, number: int) -> Late:
        taken = zip(self._layout.link.receivers, self._layout.taken, strict=True)
        return Late(tuple(rank for rank, word in taken if self._words[word] < number), "take what was sent to them")


class LinkReceiver(_LinkEnd):
    """A receiving end."""

    def __init__(self, segment: ShmSegment, layout: LinkLayout, words: SharedWords) -> None:
        super().__init__(segment, layout, words)
        self._own_word = layout.taken[layout.link.receivers.index(segment.rank)]
        self._posted = 0
        self._taken = 0

    def post(self, out: torch.Tensor) -> PendingTensor:
        self._words.check_open()
        first = self._posted + 1
        self._posted += -(-out.nbytes // self._area_bytes)
        return Arrived(out) if first > self._posted else PendingMessages(self, out, first)

    def take(self, out: torch.Tensor, first: int) -> None:
        """Copy the messages from `first` on into `out`."""
        self._words.check_open()
        if self._taken != first - 1:
            raise ValueError(OUT_OF_TURN)
        for number, part in enumerate(self._slices(out), first):
            self._words.await_all((self._layout.sent,), number, self._late)
            part.copy_(self._area(number, part))
            self._words[self._own_word] = self._taken = number

    def _late(self, number: int) -> Late:
        is_late = self._words[self._layout.sent] < number
        return Late((self._layout.link.source,) if is_late else (), "send")
